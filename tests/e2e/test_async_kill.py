"""carry_over as a command that is killed again and again: what was generated ahead of training survives in checkpoints,
so that the run ends as if it had never been killed."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import read_metrics, untimed

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10
KILLS = 6


def lines(file: Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


def saving(run: Path) -> list[Path]:
    """Files of a checkpoint that is being written: in a hidden folder until it is complete."""
    folders = run.glob(".global_step_*")
    # os.walk, unlike rglob, takes a folder that is renamed while it is read
    return [Path(at, file) for folder in folders for at, _, files in os.walk(folder) for file in files]


def moments(run: Path, draws: random.Random) -> Callable[[], bool]:
    """An event after which the run is killed: so many steps later, before a step is logged, or while it is saved."""
    logged, trained = run / "metrics.jsonl", run / "rollouts"
    begun, wanted = lines(logged), draws.choice([1, 2])
    latest = run / "latest_checkpointed_iteration.txt"
    saved = latest.read_text() if latest.exists() else ""
    files = draws.randrange(1, 6)
    return draws.choice(
        [
            lambda: lines(logged) >= begun + wanted,
            lambda: any(int(file.stem) > begun for file in trained.glob("*.jsonl")),
            lambda: len(saving(run)) >= files or (latest.exists() and latest.read_text() != saved),
        ]
    )


def prompts(run: Path) -> Counter[str]:
    """How often each prompt was trained, one for each of its samples."""
    files = sorted((run / "rollouts").glob("*.jsonl"))
    assert len(files) == STEPS
    return Counter(json.loads(line)["uid"].split("#")[0] for file in files for line in file.open())


@pytest.mark.slow(seconds=30)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_that_is_killed_at_random_ends_like_an_uninterrupted_one(
    overrides: Any, digits_data: Path, tmp_path: Path, fork_server: Any, seed: int
) -> None:
    log = tmp_path / "log.txt"

    def start(folder: str) -> Any:
        arguments = overrides(
            "trainer.async_training.mode=carry_over",
            "trainer.async_training.over_sampling=1.5",
            "trainer.async_training.staleness=2",
            "algorithm.rollout_correction.bypass_mode=True",
            "data.train_batch_size=4",
            "data.max_response_length=48",
            "actor_rollout_ref.rollout.n=2",
            f"data.val_files={digits_data}/val.jsonl",
            "data.val_max_samples=8",
            "trainer.test_freq=3",
            f"trainer.save_freq={1 + seed}",
            f"trainer.total_training_steps={STEPS}",
            folder=folder,
        )
        environment = {"PYTHONPATH": str(ROOT)}
        return fork_server.start("verl.trainer.main_ppo", arguments, output=log, environment=environment)

    whole = start("whole")
    draws, run = random.Random(seed), tmp_path / "parts"
    process = None
    try:
        assert whole.wait(timeout=600) == 0, log.read_text()[-3000:]
        for _ in range(KILLS):
            process, happened = start("parts"), moments(run, draws)
            while process.poll() is None and not happened():
                time.sleep(0.002)
            time.sleep(draws.random() * 0.2)
            process.kill()
            code = process.wait(timeout=60)
            assert code in (-9, 0), log.read_text()[-3000:]
        process = start("parts")
        assert process.wait(timeout=600) == 0, log.read_text()[-3000:]
    finally:
        for each in (whole, process):
            if each is not None:
                each.kill()
    assert prompts(run) == prompts(tmp_path / "whole")
    assert set(prompts(run).values()) == {2}, "every prompt once"
    assert untimed(read_metrics(run)) == untimed(read_metrics(tmp_path / "whole"))
