"""How many functions of ours a reader passes from a step of the loop to the attention of a decode pass."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import verl
from verl.trainer.loop import RLLoop

MOST = 12
PACKAGE = str(Path(verl.__file__).parent)
STEP = RLLoop.step.__code__


def functions_from_step() -> list[str]:
    """The functions of `verl` on the stack, from `RLLoop.step` to the caller; those of other packages between them do
    not count."""
    names: list[str] = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            names.append(frame.f_code.co_qualname)
            if frame.f_code is STEP:
                return names[::-1]
        frame = frame.f_back
    return []


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
def test_few_functions_lie_between_a_step_and_the_attention_of_a_decode_pass(watch, monkeypatch, on_device):
    from verl.rollout.native import engine, ops
    from verl.rollout.native.cpu_runner import PagedAttention

    deepest: list[str] = []

    def recorded(function: Any) -> Any:
        def attend(*args: Any, **kwargs: Any) -> Any:
            names = functions_from_step()
            if len(names) > len(deepest):
                deepest[:] = [*names, function.__qualname__]
            return function(*args, **kwargs)

        return attend

    monkeypatch.setattr(engine, "verify", lambda *args: None)  # a run of its own, before the first step
    monkeypatch.setattr(engine.NativeRollout, "_uses_device", lambda engine, model: on_device)
    monkeypatch.setattr(PagedAttention, "attend", recorded(PagedAttention.attend))
    monkeypatch.setattr(ops.TorchOps, "decode_attention", recorded(ops.TorchOps.decode_attention))
    watch("trainer.total_training_steps=1")
    assert deepest[0] == "RLLoop.step"
    assert len(deepest) <= MOST, "\n".join(deepest)
