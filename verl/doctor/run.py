"""Probes of a run folder: what became of the run, which checkpoints are whole, whether the next one has room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from verl.doctor.finding import Finding, size


def run_folder(path: str) -> Iterator[Finding]:
    """What became of the run, its checkpoints, and whether the next one has room."""
    from verl.observe.view_files import open_run
    from verl.observe.view_state import read_crash, state_of

    run = open_run(Path(path))
    state = state_of(run)
    crash = read_crash(run.path)
    if state.word == "crashed" and crash is not None:
        yield Finding("run", "warning", state.text, f"see {run.path / 'crash.txt'}", crash[1])
    else:
        serious = state.word in ("killed", "stopped")
        yield Finding("run", "warning" if serious else "ok", state.text)
    if run.log.damaged or run.config_problem:
        what = run.config_problem or f"{run.log.damaged} lines of metrics.jsonl cannot be read"
        yield Finding("run files", "warning", what, "someone else wrote to the folder, or the disk was full")
    yield from checkpoints(str(run.path))


def checkpoints(path: str) -> Iterator[Finding]:
    from verl.checkpoint.steps import list_steps, problems

    entries = list_steps(Path(path))
    if not entries:
        yield Finding(
            "checkpoints", "note", "none", "a run that is stopped now starts over", "trainer.save_freq=N"
        )
        return
    # Sizes and manifests: checksums would read everything, which `verl ckpt verify` does.
    bad = {entry.path.name: problems(entry, checksums=False) for entry in entries}
    whole = [entry for entry in entries if not bad[entry.path.name]]
    for name, found in bad.items():
        if found:
            yield Finding(
                "checkpoints",
                "warning",
                f"{name}: {found[0]}",
                "resuming passes it over",
                f"verl ckpt prune --damaged {path}",
            )
    if not whole:
        yield Finding(
            "checkpoints",
            "fatal",
            f"none of {len(entries)} is whole",
            "there is nothing to resume from",
            "trainer.resume_mode=disable starts over",
        )
        return
    newest = whole[0]
    held = newest.manifest.size if newest.manifest is not None else 0
    room = os.statvfs(path)
    yield judge_room(newest.path.name, len(whole), held, room.f_bavail * room.f_frsize)


def judge_room(name: str, count: int, held: int, free: int) -> Finding:
    """Whether another checkpoint of the same size fits on the disk."""
    seen = f"{count} whole, the newest {name} of {size(held)}; {size(free)} free on the disk"
    if free < 1.1 * held:
        return Finding(
            "checkpoints",
            "fatal",
            seen,
            "the next one does not fit",
            "verl ckpt prune --keep 1 RUN, or trainer.max_actor_ckpt_to_keep=1",
        )
    if free < 3 * held:
        return Finding(
            "checkpoints",
            "warning",
            seen,
            f"room for {int(free // max(held, 1))} more",
            "trainer.max_actor_ckpt_to_keep=2",
        )
    return Finding("checkpoints", "ok", seen)
