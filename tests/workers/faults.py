"""Writes plugin modules that make a rank fail in a chosen phase; every rank imports them by trainer.plugins."""

from __future__ import annotations

import os
from pathlib import Path

ACTIONS = {
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "hang": "time.sleep(100_000)",
    "slow": "time.sleep(1.5)",
    "raise": "raise KeyError('the reason')",
    "segfault": "import ctypes; ctypes.string_at(0)",
}

PLUGIN = """
import os, signal, time
from pathlib import Path
from verl.workers.rank import RankWorker

def _install(call, rank, nth, once):
    original = getattr(RankWorker, "do_" + call)
    seen = 0
    def planned(self, *args, **kwargs):
        nonlocal seen
        seen += 1
        if self.rank == rank and nth in (None, seen) and not (once and Path(once).exists()):
            if once:
                Path(once).touch()
            {action}
        return original(self, *args, **kwargs)
    setattr(RankWorker, "do_" + call, planned)

_install({call!r}, {rank}, {nth}, {once!r})
"""


def write(
    folder: Path, call: str, action: str, *, rank: int = 1, nth: int | None = 1, once: Path | None = None
) -> str:
    """The module's name. With `once` the fault happens a single time over all starts of a run."""
    name = f"fault_{call}_{action}_{os.getpid()}_{len(list(folder.glob('fault_*')))}"
    text = PLUGIN.format(action=ACTIONS[action], call=call, rank=rank, nth=nth, once=str(once or ""))
    (folder / f"{name}.py").write_text(text)
    return name


def rank_processes() -> list[int]:
    """Ranks that are alive on this machine: Ray writes the actor's class into the process title."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"RankActor" in title:
                found.append(int(entry.name))
    return found
