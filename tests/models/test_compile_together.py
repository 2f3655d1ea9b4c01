"""Kernels compiled ahead: by several threads, without being run, and only those of the thread that asks."""

from __future__ import annotations

import os
import subprocess
import sys
from threading import Thread

import pytest

jit = pytest.importorskip("triton.runtime.jit")

COMPILE = """
import sys, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class NoDevice:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

driver.set_active(NoDevice())
from verl.models.kernels import compile_together
from verl.models.kernels.layers import gated

x = torch.ones(32, 64, dtype=torch.bfloat16, requires_grad=True)
work = lambda: gated(x, x).sum().backward()
print(compile_together("a test", work))
"""


def test_kernels_of_this_thread_are_compiled_and_not_run(monkeypatch):
    from verl.models.kernels import compile_together

    calls = []
    monkeypatch.setattr(
        jit.JITFunction, "run", lambda kernel, *args, grid, warmup: calls.append((args[0], warmup))
    )
    before = jit.JITFunction.run

    def launch(name):
        jit.JITFunction.run(None, name, grid=(1,), warmup=False)

    def work():
        launch("mine")
        other = Thread(target=launch, args=("another thread's",))
        other.start()
        other.join()

    assert compile_together("a test", work) == 0
    launch("afterwards")
    assert calls == [("mine", True), ("another thread's", False), ("afterwards", False)]
    assert jit.JITFunction.run is before


def test_work_that_fails_leaves_kernels_to_their_launch(monkeypatch):
    from verl.models.kernels import compile_together

    before = jit.JITFunction.run

    def fails():
        raise RuntimeError("no shared memory")

    assert compile_together("a test", fails) == 0
    assert jit.JITFunction.run is before


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    """Forward and backward kernel, for a device that is not there."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {**given, "TRITON_CACHE_DIR": str(tmp_path)}
    for expected in ("2", "0"):
        done = subprocess.run(
            [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected
