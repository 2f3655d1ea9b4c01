"""Training commands on two processes of torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import verl

PATIENCE_S = 600.0


def start(
    module: str, words: list[str], log: Path, plugins: Path | None = None, *options: str
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    found = [str(Path(verl.__file__).parents[1]), *([str(plugins)] if plugins else [])]
    environment["PYTHONPATH"] = os.pathsep.join([*found, environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *options]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, "-m", module, *words], env=environment, stdout=output, stderr=subprocess.STDOUT
        )


def finish(process: subprocess.Popen[bytes], log: Path) -> tuple[int, str]:
    try:
        code = process.wait(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"it does not end: {log.read_text()[-3000:]}")
    finally:
        process.kill()
        process.wait()
    return code, log.read_text()
