"""Writes plugin modules that make a process fail in a chosen phase, and finds the processes that are left.

Every rank and the controller import a plugin by trainer.plugins; what it plans happens in the ones it is meant for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from verl.observe.metrics import Timer

PPO = ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True", "critic.optim.lr=1e-3"]
CALLS = [
    "generate",
    "log_probs",
    "ref_log_probs",
    "values",
    "train_critic",
    "train_actor",
    "update_weights",
    "save",
]
"""Calls of a PPO step that a rank serves, in order."""
METHODS = {
    **dict.fromkeys(("log_probs", "ref_log_probs", "values"), "forward"),
    **dict.fromkeys(("train_actor", "train_critic"), "train"),
}
"""Those of them that are calls of one method for several roles."""
ACTIONS = {
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "kill the other": "os.kill(int(Path(note).read_text()), signal.SIGKILL)",
    "kill the node": "os.kill(os.getppid(), signal.SIGKILL); time.sleep(100_000)",
    "note": "Path(note).write_text(str(os.getpid()))",
    "hang": "time.sleep(100_000)",
    "raise": "raise KeyError('the reason')",
}

HEAD = """
import os, signal, time
from pathlib import Path

note, after, once, node = {note!r}, {after!r}, {once!r}, {node}

def due():
    if (after and not Path(after).exists()) or (once and Path(once).exists()) or (node and node != os.getppid()):
        return False
    if once:
        Path(once).touch()
    return True
"""

ON_A_RANK = """
from verl.workers.train_rank import TrainRank

def _install(phase, method, rank, nth):
    original = getattr(TrainRank, "do_" + method)
    seen = 0
    def planned(self, *args, **kwargs):
        nonlocal seen
        if self.watchdog.call == phase:
            seen += 1
            if rank in (None, self.rank) and nth in (None, seen) and due():
                {action}
        return original(self, *args, **kwargs)
    planned.__name__ = original.__name__  # by which the driver calls it
    setattr(TrainRank, "do_" + method, planned)

_install({phase!r}, {method!r}, {rank}, {nth})
"""

ON_THE_CONTROLLER = """
from contextlib import contextmanager
from verl.observe.metrics import Timer

original, seen = Timer.__call__, 0

@contextmanager
def planned(self, name):
    global seen
    with original(self, name):
        seen += name == {phase!r}
        if name == {phase!r} and seen == {nth} and due():
            {action}
        yield

Timer.__call__ = planned
"""


def write(
    folder: Path,
    phase: str,
    action: str,
    *,
    controller: bool = False,
    rank: int | None = 1,
    nth: int | None = 1,
    once: Path | None = None,
    after: Path | None = None,
    note: Path | None = None,
    node: int = 0,
) -> str:
    """The module's name.

    `phase` is a call to a rank, or a part of the step as the controller times it. `nth`: at which of these (None: at
    all). `once`: a single time over all starts of a run. `after`: not before this file exists. `note`: where a process
    number is written or read. `node`: only in a process of the raylet with this number.
    """
    name = f"fault_{phase}_{os.getpid()}_{len(list(folder.glob('fault_*')))}"
    head = HEAD.format(note=str(note or ""), after=str(after or ""), once=str(once or ""), node=node)
    body = ON_THE_CONTROLLER if controller else ON_A_RANK
    method = METHODS.get(phase, phase)
    text = head + body.format(action=ACTIONS[action], phase=phase, method=method, rank=rank, nth=nth)
    (folder / f"{name}.py").write_text(text)
    return name


@contextmanager
def before_phase(monkeypatch: Any, phase: str, action: Callable[[], None]) -> Iterator[None]:
    """In this process, the controller's: `action` happens the first time that `phase` begins."""
    original, happened = Timer.__call__, False

    @contextmanager
    def timed(self: Timer, name: str) -> Iterator[None]:
        nonlocal happened
        with original(self, name):
            if name == phase and not happened:
                happened = True
                action()
            yield

    with monkeypatch.context() as patch:
        patch.setattr(Timer, "__call__", timed)
        yield
    assert happened, phase


def rank_processes(session: str) -> list[int]:
    """Ranks that are alive in the Ray cluster with this session folder, whatever else runs on this machine."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title, log = (entry / "cmdline").read_bytes(), os.readlink(entry / "fd" / "2")
            except OSError:
                continue
            # Ray writes the actor's class into the process title and its output into the session's folder.
            if b"RankProcess" in title and log.startswith(session):
                found.append(int(entry.name))
    return found


def marked(mark: str) -> list[int]:
    """Living processes that were started with `mark` (NAME=value) in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and lives(int(entry.name)):
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if mark.encode() in environment:
                found.append(int(entry.name))
    return found


def lives(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(reached: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.2)
    return reached()


def extended(phases: Sequence[str], usual: Sequence[str]) -> list[Any]:
    """Parameters of which only the `usual` ones are tested with every change."""
    return [p if p in usual else pytest.param(p, marks=pytest.mark.extended) for p in phases]
