"""What became of a run: running, finished, stopped, crashed or killed, told from its folder alone.

What always holds: looking never disturbs the run (its lock is asked about, not taken), and a state that cannot be
told for certain is called by what is certain.
"""

from __future__ import annotations

import fcntl
import math
import os
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl.json_input import open_regular
from verl.observe.console import validation_summary
from verl.observe.view_files import Run, changed, checkpoint_steps, health_rows


@dataclass(frozen=True)
class State:
    """A word for what became of the run, and a sentence about it."""

    word: str
    """waiting, running, finished, stopped, crashed or killed."""
    text: str

    @property
    def over(self) -> bool:
        return self.word in ("finished", "stopped", "crashed", "killed")


def state_of(run: Run) -> State:
    """What became of the run."""
    step, total = last_step(run), total_steps(run)
    holder = lock_holder(run.path)
    quiet_s = time.time() - changed(run.path)
    if holder is not None:
        late = (
            "; that is long for its steps: it may hang" if too_quiet(quiet_s, seconds_per_step(run)) else ""
        )
        return State("running", f"running ({holder}); last wrote {duration(quiet_s)} ago{late}")
    crash = read_crash(run.path)
    checkpoints = checkpoint_steps(run.path)
    again = (
        f"the same command goes on from step {checkpoints[-1]}"
        if checkpoints
        else "there is no checkpoint to go on from"
    )
    if crash is not None:
        return State("crashed", f"crashed: {crash[0]}")
    if step is None:
        return State("waiting", "no step has finished, and no process is at work on it")
    if finished(run):
        return State("finished", f"finished after step {step}")
    if checkpoints and checkpoints[-1] == step:
        of = f" of {total}" if total else ""
        return State("stopped", f"stopped at step {step}{of}, with a checkpoint; {again}")
    elsewhere = last_holder_elsewhere(run.path)
    if elsewhere and not too_quiet(quiet_s, seconds_per_step(run)):
        # Its lock cannot be seen from here on every filesystem.
        return State("running", f"probably running ({elsewhere}); last wrote {duration(quiet_s)} ago")
    return State(
        "killed", f"ended without a word after step {step} (killed, or the machine stopped); {again}"
    )


def finished(run: Run) -> bool:
    """Whether all steps the config asks for are done."""
    step, total = last_step(run), total_steps(run)
    if step is None:
        return False
    if run.get("trainer.val_only"):
        return True
    if total is not None:
        return step >= total
    epochs, epoch = run.get("trainer.total_epochs"), run.log.last().get("training/epoch")
    return isinstance(epochs, int) and isinstance(epoch, (int, float)) and epoch >= epochs


def last_step(run: Run) -> int | None:
    return run.log.last().get("step")


def total_steps(run: Run) -> int | None:
    """Where the config says it; a run counted in epochs does not."""
    total = run.get("trainer.total_training_steps")
    return total if isinstance(total, int) and total > 0 else None


def read_crash(path: Path, name: str = "crash.txt") -> tuple[str, str] | None:
    """(cause, what to do) of `crash.txt`; None where there is none."""
    try:
        with open_regular(path / name) as file:
            text = file.read(200_000).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return None
    parts = text.split("\n\n")
    fix = next((part for part in parts[1:3] if part.startswith("What to do: ")), "")
    return parts[0].strip() or f"{name} is empty", fix.removeprefix("What to do: ")


def lock_holder(path: Path) -> str | None:
    """Who is at work in the folder, as its lock says; None when nobody is."""
    from verl.observe.run_folder import _held

    # Within the process that holds it a record lock cannot be asked about, and closing the file would drop it.
    if (os.getpid(), str(path.resolve())) in _held:
        return f"process {os.getpid()}, this one"
    try:
        descriptor = os.open(path / ".lock", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not _is_locked(descriptor):
            return None
        return os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "an unknown process"
    finally:
        os.close(descriptor)


def last_holder_elsewhere(path: Path) -> str:
    """Who held the folder last, when that was on another machine."""
    try:
        with open_regular(path / ".lock") as file:
            holder = file.read(200).decode("utf-8", errors="replace").strip()
    except (OSError, ValueError):
        return ""
    return holder if holder and holder.rpartition(" on ")[2] != socket.gethostname() else ""


def too_quiet(seconds: float, each: float | None) -> bool:
    """Whether a run that is well would have written in that time."""
    return seconds > max(600.0, 10 * (each or 60.0))


def _is_locked(descriptor: int) -> bool:
    """Ask the kernel; where its answer's form is not known, trying to share the lock answers as well."""
    try:
        if sys.platform == "linux":
            question = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, question)
            return bool(struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK)
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False  # a filesystem without locks says nothing


# -- numbers about the run ----------------------------------------------------------------------------------------


def ago(when: float, now: float | None = None) -> str:
    """`3 min ago`."""
    if not when:
        return "never"
    return f"{duration((time.time() if now is None else now) - when)} ago"


def duration(seconds: float) -> str:
    """In the largest unit that reads well."""
    seconds = max(0.0, seconds)
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def seconds_per_step(run: Run, window: int = 20) -> float | None:
    """Of the newest steps, with the validations and checkpoints among them."""
    rows = [row for row in run.log.rows[-window:] if isinstance(row.get("timing_s/step"), (int, float))]
    if not rows:
        return None
    parts = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")
    spent = sum(
        value for row in rows for name in parts if math.isfinite(value := float(row.get(name) or 0.0))
    )
    return spent / len(rows)


def validations(run: Run) -> list[tuple[int, float]]:
    """(step, score): the mean over the core metrics; the loss where a run is fine-tuning."""
    if run.log.points("val/loss"):
        return run.log.points("val/loss")
    scores: dict[int, dict[str, float]] = {}
    for name in run.log.series:
        if name.startswith("val-core/"):
            for step, value in run.log.points(name):
                scores.setdefault(step, {})[name] = value
    found = [(step, validation_summary(values)) for step, values in sorted(scores.items())]
    return [(step, value) for step, value in found if value is not None]


# -- health -------------------------------------------------------------------------------------------------------


@dataclass
class Notice:
    """What a health rule had to say, the last time it spoke, and when it did."""

    line: str
    first: int
    last: int
    times: int = 1
    recent: bool = False
    """Whether it spoke so lately that it would not have been repeated since."""

    @property
    def when(self) -> str:
        if not self.last:
            return "at start"
        if self.times == 1:
            return f"step {self.last}"
        return f"steps {self.first}-{self.last}, {self.times} times"


def notices(run: Run) -> list[Notice]:
    """What the health rules said while the run ran, as its health.jsonl has it; what is recent first."""
    from verl.observe.health import QUIET_STEPS, HealthMonitor

    if run.is_sft or not run.config:
        return []
    found = {line: Notice(line, 0, 0, recent=True) for line in HealthMonitor(_settings(run)).at_start()}
    newest = last_step(run) or 0
    for step, rule, line in health_rows(run):
        before = found.get(rule)
        first, times = (before.first, before.times + 1) if before else (step, 1)
        found[rule] = Notice(line, first, step, times, newest - step < QUIET_STEPS)
    return sorted(found.values(), key=lambda notice: (not notice.recent, -notice.last))


def _settings(run: Run) -> Any:
    from verl.observe.health import HealthSettings

    try:
        return HealthSettings.from_config(_attributes(run.config))
    except (AttributeError, TypeError):
        return HealthSettings()  # an older run: its start is not judged


def _attributes(value: Any) -> Any:
    if isinstance(value, dict):
        return SimpleNamespace(**{str(name): _attributes(each) for name, each in value.items()})
    return value
