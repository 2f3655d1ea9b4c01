"""A plugin (`trainer.plugins`) that writes what a run holds after each step, as a line of JSON, to the file SOAK_LOG:
memory, descriptors, threads and processes of the run with all that it started, and its files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil

from verl.trainer.loop import RLLoop

_step = RLLoop.step
GROWS_BY_DESIGN = {"rollouts", "validation"}
"""Folders of a run with files for each step."""


def held(run: Path) -> dict[str, int]:
    """What the run holds now."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    counted = {"resident_kb": 0, "descriptors": 0, "threads": 0, "processes": len(processes)}
    for process in processes:
        try:
            counted["resident_kb"] += process.memory_info().rss >> 10
            counted["descriptors"] += process.num_fds()
            counted["threads"] += process.num_threads()
        except psutil.Error:  # it has just ended
            counted["processes"] -= 1
    counted["temporary_files"] = sum(len(files) for _, _, files in os.walk(os.environ["TMPDIR"]))
    counted["shared_memory_files"] = len(list(Path("/dev/shm").glob(f"verl-*-{os.getpid():x}-*")))
    counted["run_files"] = sum(
        len(files) for at, _, files in os.walk(run) if not GROWS_BY_DESIGN & set(Path(at).parts)
    )
    return counted


def step(loop: RLLoop) -> dict[str, float]:
    metrics = _step(loop)
    run = Path(str(loop.cfg.trainer.default_local_dir))
    with open(os.environ["SOAK_LOG"], "a") as file:
        file.write(json.dumps(held(run)) + "\n")
    return metrics


setattr(RLLoop, "step", step)  # noqa: B010 - mypy takes no assignment to a method
