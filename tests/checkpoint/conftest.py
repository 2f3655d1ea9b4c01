"""The small training job, in this process and in processes of its own (tests are not a package: loaded by path)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("training.py")


@pytest.fixture(scope="session")
def job() -> ModuleType:
    spec = importlib.util.spec_from_file_location("checkpoint_training_job", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Children:
    """Starts calls of the training job in forked processes and tells how they ended."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._server = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._serving = False
        self._started: list[int] = []
        self._ended: dict[int, int] = {}
        self._news = threading.Condition()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        with self._news:
            assert self._news.wait_for(lambda: self._serving, timeout=240), "the training job does not start"

    def _listen(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            word, *numbers = line.split()
            with self._news:
                if word == "serving":
                    self._serving = True
                elif word == "started":
                    self._started.append(int(numbers[0]))
                else:
                    self._ended[int(numbers[0])] = int(numbers[1])
                self._news.notify_all()

    def start(self, call: str, output: Path, **arguments: Any) -> int:
        """The process id of a new child."""
        assert self._server.stdin is not None
        count = len(self._started)
        self._server.stdin.write(json.dumps({"call": call, "output": str(output), **arguments}) + "\n")
        self._server.stdin.flush()
        with self._news:
            assert self._news.wait_for(lambda: len(self._started) > count, timeout=120)
        return self._started[-1]

    def wait(self, pid: int, timeout: float = 500) -> int:
        """The child's wait status; 0 when it ended well."""
        with self._news:
            assert self._news.wait_for(lambda: pid in self._ended, timeout=timeout), "a child hangs"
        return self._ended[pid]

    def has_ended(self, pid: int) -> bool:
        return pid in self._ended

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=240)


@pytest.fixture(scope="session")
def children() -> Iterator[Children]:
    served = Children()
    yield served
    served.close()


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: a killed process loses nothing that it gave to the kernel."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(dir=memory, prefix="verl-test-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
