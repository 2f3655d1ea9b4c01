"""The demo's example files, made once for all test processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.running import ROOT


@pytest.fixture(scope="session")
def demo_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `verl demo --files` writes, or the folder of an earlier one: VERL_DEMO_FILES."""
    if "VERL_DEMO_FILES" in os.environ:
        return Path(os.environ["VERL_DEMO_FILES"]).resolve()
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # shared by the test processes
    folder = base / "demo-files"
    with (base / "demo-files.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "sft_model").exists():
            shutil.rmtree(folder, ignore_errors=True)  # what a test that ran out of time has left
            command = [sys.executable, "-m", "verl", "demo", "--files", str(folder)]
            subprocess.run(
                command,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                check=True,
                capture_output=True,
                text=True,
            )
    return folder
