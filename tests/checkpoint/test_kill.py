"""A run that is killed again and again in the middle of saving ends where an uninterrupted one does."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from verl.checkpoint.manifest import read_manifest
from verl.checkpoint.steps import list_steps, problems
from verl.observe.jsonl import read_jsonl


def lines(output: Path) -> list[str]:
    return output.read_text().splitlines() if output.exists() else []


def wait_for_line(children: Any, pid: int, output: Path, start: str, count: int) -> None:
    while sum(line.startswith(start) for line in lines(output)) < count:
        assert not children.has_ended(pid), f"the run ended by itself: {lines(output)[-5:]}"
        time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("background", "kills"), [(False, 20), (True, 10)], ids=["foreground", "background"])
def test_killing_in_the_middle_of_saves_loses_nothing(
    children: Any, fast_folder: Path, background: bool, kills: int
) -> None:
    draw = random.Random(4)
    folder = fast_folder / "run"
    kills_in_save = unfinished = newest = attempts = 0
    duration = 0.1
    while kills_in_save < kills:
        attempts += 1
        assert attempts < 10 * kills
        output = fast_folder / f"output_{attempts}"
        pid = children.start("run", output, run_folder=str(folder), steps=100_000, background=background)
        wait_for_line(children, pid, output, "ready", 1)
        resumed = int(lines(output)[0].split()[1])
        assert resumed >= newest, f"saved up to {newest}, resumed from {resumed}"
        which = draw.choice([1, 1, 2])
        wait_for_line(children, pid, output, "saving", which)
        begun = time.monotonic()
        delay = draw.uniform(0, 1.3 * duration)
        while time.monotonic() - begun < delay:
            time.sleep(0.0005)
        os.kill(pid, signal.SIGKILL)
        assert children.wait(pid) == -signal.SIGKILL
        said = lines(output)
        assert all(line.split()[0] in ("ready", "saving", "saved") for line in said), said
        in_save = said[-1].startswith("saving") or background
        kills_in_save += in_save
        # Learn how long a save takes, so that kills fall all over it.
        duration *= 1.1 if in_save else 0.9
        done = [int(line.split()[1]) for line in said if line.startswith("saved")]
        if done:
            # In the background, the step before the last one said to be saved is sure to be complete.
            newest = max(newest, max(done) - (1 if background else 0))
        unfinished += any(folder.glob(".global_step_*"))
        for entry in list_steps(folder):
            assert problems(entry) == [], f"{entry.path.name} is visible but not whole"
    assert unfinished >= kills // 5, "the kills missed the writing"

    steps = max([newest, *(entry.step for entry in list_steps(folder))]) + 3
    for name, where in (("killed", folder), ("whole", fast_folder / "reference")):
        output = fast_folder / f"output_{name}"
        pid = children.start("run", output, run_folder=str(where), steps=steps, background=background)
        assert children.wait(pid, timeout=600) == 0, "\n".join(lines(output)[-20:])
    assert list(read_jsonl(folder / "metrics.jsonl")) == list(
        read_jsonl(fast_folder / "reference/metrics.jsonl")
    )
    found, expected = (
        read_manifest(where / f"global_step_{steps}") for where in (folder, fast_folder / "reference")
    )
    assert found.files == expected.files  # names, sizes and checksums
