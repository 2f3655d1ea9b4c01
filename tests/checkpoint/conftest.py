"""The small training job, in this process and in processes of its own (tests are not a package: loaded by path)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
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
    """Calls of the training job in processes of their own."""

    def __init__(self, fork_server: Any) -> None:
        self._fork_server = fork_server
        self._processes: dict[int, Any] = {}

    def start(self, call: str, output: Path, **arguments: Any) -> int:
        """The process id of a new child."""
        process = self._fork_server.start(SCRIPT, [call, json.dumps(arguments)], output=output)
        self._processes[process.pid] = process
        return int(process.pid)

    def wait(self, pid: int, timeout: float = 500) -> int:
        """Its exit status, which is negative after a signal."""
        return int(self._processes[pid].wait(timeout))

    def start_ranks(self, call: str, work: Path, world_size: int, **arguments: Any) -> list[tuple[int, Path]]:
        """The process id and the output of each rank of a world."""
        store = str(work / f"store_{world_size}")
        outputs = [work / f"output_{world_size}_{rank}" for rank in range(world_size)]
        common = {"world_size": world_size, "store": store, **arguments}
        return [(self.start(call, each, rank=rank, **common), each) for rank, each in enumerate(outputs)]

    def texts_of(self, ranks: list[tuple[int, Path]]) -> list[str]:
        """What the ranks wrote, once all have succeeded."""
        for pid, output in ranks:
            assert self.wait(pid) == 0, output.read_text()
        return [output.read_text() for _, output in ranks]

    def has_ended(self, pid: int) -> bool:
        return self._processes[pid].poll() is not None


@pytest.fixture
def children(fork_server: Any) -> Children:
    return Children(fork_server)


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


@pytest.fixture(scope="session")
def build_architecture() -> Any:
    """Of a tiny model of any type that transformers knows."""
    path = Path(__file__).parents[1] / "rollout" / "tiny_architectures.py"
    spec = importlib.util.spec_from_file_location("checkpoint_tiny_architectures", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build_architecture
