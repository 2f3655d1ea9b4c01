"""The Triton kernels equal their torch references (in Triton's interpreter, which needs a process of its own)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_equal_their_references() -> None:
    pytest.importorskip("triton")
    script = Path(__file__).with_name("kernel_checks.py")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert len(lines) > 60, done.stderr
    assert done.returncode == 0, "\n".join(line for line in lines if not line.startswith("ok"))
