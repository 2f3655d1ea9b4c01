"""`data.curriculum=pass_rate`: which prompts are drawn, what is remembered of them, and what resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_run import read_metrics, tiny_run, untimed
from verl.config.load import load_ppo_config
from verl.data.loader import Loader
from verl.data.proto import DataProto, object_column
from verl.data.rl_dataset import training_loader
from verl.errors import ConfigError
from verl.trainer.external_batches import rows_or_batches
from verl.trainer.main_ppo import main

BATCH, N = 6, 8
Rate = Callable[[int], float]


def thirds(row: int) -> float:
    """One third of the prompts is never answered, one always, one half of the time."""
    return (0.0, 1.0, 0.5)[row % 3]


@pytest.fixture
def make(tmp_path: Path, tiny_model_dir: Path, tiny_tokenizer: Any) -> Callable[..., Loader]:
    def loader(*keys: str, size: int = 60) -> Loader:
        file = tmp_path / f"{size}.jsonl"
        rows = [{"prompt": f"repeat {row % 10}", "reward_model": {"ground_truth": ""}} for row in range(size)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = [f"data.train_batch_size={BATCH}", "data.curriculum=pass_rate", f"data.train_files={file}"]
        config = load_ppo_config([*tiny_run(tiny_model_dir, tmp_path, *given), *keys])
        return training_loader(config.data, tiny_tokenizer)

    return loader


def answered(batch: DataProto, right: list[list[float]], **columns: Any) -> DataProto:
    """Scored responses to a batch of prompts, from the scores of each."""
    rows = batch.repeat(len(right[0]))
    rows.batch["token_level_scores"] = torch.tensor(right, dtype=torch.float32).view(-1, 1)
    empty = {"reward_extra": [{}] * len(rows), "reward_error": [None] * len(rows)}
    for name, values in {**empty, **columns}.items():
        rows.non_tensor_batch[name] = object_column(values)
    return rows


def steps(
    loader: Loader, count: int, rate: Rate = thirds, start: int = 0
) -> Iterator[tuple[list[int], dict[str, float]]]:
    """The rows of each step, and its metrics; responses are right by chance, the same in each step of a number."""

    def batches() -> Iterator[DataProto]:
        while True:
            yield from loader

    for step, batch in enumerate(islice(batches(), count), start):
        rows = batch.non_tensor_batch["index"].tolist()
        chance = np.random.default_rng(step)
        scored = answered(batch, [(chance.random(N) < rate(row)).astype(float).tolist() for row in rows])
        loader.scored(scored)
        yield rows, loader.update(scored)


def joined(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def drawn(*args: Any, **kwargs: Any) -> list[list[int]]:
    return [rows for rows, _ in steps(*args, **kwargs)]


def test_every_prompt_comes_once_before_the_window_chooses(make: Callable[..., Loader]) -> None:
    loader = make()
    batches = drawn(loader, 10)
    assert sorted(joined(batches)) == list(range(60))
    assert joined(batches) != list(range(60))  # shuffled
    assert loader.epoch == 1 and len(loader) == 10
    assert joined(drawn(make("data.shuffle=False"), 10)) == list(range(60))


def test_the_window_chooses_prompts_that_teach(make: Callable[..., Loader]) -> None:
    found = list(steps(make(), 60))
    first, later = found[:10], found[20:]
    assert np.mean([metrics["curriculum/signal"] for _, metrics in first]) < 0.45  # one third, and chance
    assert np.mean([metrics["curriculum/signal"] for _, metrics in later]) > 0.8
    assert np.mean([metrics["curriculum/window"] for _, metrics in later]) == pytest.approx(0.9, abs=0.01)
    assert all(metrics["curriculum/unseen"] == 1 for _, metrics in first)
    assert found[-1][1]["curriculum/prompts_seen"] == 1
    assert found[-1][1]["curriculum/prompts_in_window"] == pytest.approx(1 / 3, abs=0.05)
    assert all(len(set(rows)) == BATCH for rows, _ in found)
    # Those inside come equally often.
    times = np.bincount(joined(rows for rows, _ in later), minlength=60)[2::3]
    assert times.max() <= 1.5 * times.min() and times.min() > 5


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_no_prompt_outside_the_window_starves(make: Callable[..., Loader], share: float) -> None:
    batches = drawn(make(f"data.curriculum_outside={share}"), 200)
    wait = int(np.ceil(45 / (share * BATCH))) + 1  # at most 45 of 60 are outside
    for row in (0, 1, 3, 4):
        times = np.flatnonzero([row in batch for batch in batches])
        assert np.diff(times).max() <= wait, row
        assert len(times) >= 200 / wait


def test_a_prompt_that_becomes_answerable_comes_back_into_the_window(make: Callable[..., Loader]) -> None:
    def sudden(row: int) -> float:
        return 0.5 if row == 7 and len(batches) > 12 else float(row % 2)

    batches: list[list[int]] = []
    for rows, _ in steps(make("data.curriculum_outside=0.5"), 80, rate=sudden):
        batches.append(rows)
    since = next(step for step, rows in enumerate(batches) if step > 12 and 7 in rows)
    assert sum(7 in rows for rows in batches[since + 1 :]) > 0.9 * (len(batches) - since - 1)


def test_new_prompts_share_the_batch_with_known_ones(make: Callable[..., Loader]) -> None:
    keys = ("data.curriculum_unseen=0.25", "data.curriculum_outside=0")
    found = list(steps(make(*keys), 24, rate=lambda row: 0.5))
    shares = [metrics["curriculum/unseen"] for _, metrics in found]
    assert shares[0] == 1  # there is nothing else yet
    assert np.mean(shares[1:]) == pytest.approx(0.25, abs=0.02)
    assert {round(share * BATCH) for share in shares[1:]} == {1, 2}  # 1.5 of 6


def test_batches_are_full_where_no_prompt_is_inside(make: Callable[..., Loader]) -> None:
    found = list(steps(make(), 30, rate=lambda row: 0.0))
    assert sorted(joined(rows for rows, _ in found)) == sorted([*range(60)] * 3)
    assert [metrics["curriculum/signal"] for _, metrics in found] == [0] * 30


def test_the_rate_is_a_running_mean_of_acc_or_of_the_score(make: Callable[..., Loader]) -> None:
    loader = make("data.curriculum_weight=0.25", "data.shuffle=False", size=6)

    def rates(scores: list[float], **columns: Any) -> Any:
        batch = next(iter(loader))
        loader.scored(answered(batch, [scores] * BATCH, **columns))
        return loader.state_dict()["curriculum"]["rates"].tolist()

    assert rates([1.0, 0.0, 0.0, 0.0]) == [0.25] * 6
    assert rates([1.0, 1.0, 0.0, 0.0]) == [0.75 * 0.25 + 0.25 * 0.5] * 6
    before = rates([1.0, 1.0, 1.0, 1.0])
    right = [{"acc": value} for value in (True, 0, 0, 0)] * BATCH
    assert rates([5.0, -3.0, 0.0, 1.0], reward_extra=right) == [0.75 * rate + 0.25 * 0.25 for rate in before]
    before = rates([0.0, 0.0, 0.0, 0.0], reward_error=["failed"] * 4 * BATCH)
    batch = next(iter(loader))
    uids = [
        uid if row % 2 else f"{uid}#{row}"
        for row, uid in enumerate(np.repeat(batch.non_tensor_batch["uid"], 2))
    ]
    errors = [None if row % 2 else "failed" for row in range(2 * BATCH)]
    loader.scored(answered(batch, [[0.0, 1.0]] * BATCH, uid=uids, reward_error=errors))
    rated = loader.state_dict()["curriculum"]["rates"].tolist()
    assert rated == [0.75 * rate + 0.25 for rate in before]  # the failed half does not count


@pytest.mark.parametrize("before", [3, 10, 27])
def test_a_checkpoint_continues_with_the_same_prompts(make: Callable[..., Loader], before: int) -> None:
    keys = ("data.curriculum_unseen=0.5",)
    whole = list(steps(make(*keys), 40))
    first = make(*keys)
    assert list(steps(first, before)) == whole[:before]
    state = first.state_dict()
    drawn(first, 2, start=before)  # what happens afterwards does not change the state
    resumed = make(*keys)
    drawn(resumed, 5)
    resumed.load_state_dict(state)
    assert list(steps(resumed, 40 - before, start=before)) == whole[before:]


def test_a_checkpoint_without_rates_starts_with_every_prompt_new(
    make: Callable[..., Loader], caplog: pytest.LogCaptureFixture
) -> None:
    loader = make()
    drawn(loader, 12)
    plain = {name: value for name, value in loader.state_dict().items() if name != "curriculum"}
    loader.load_state_dict(plain)
    assert "without data.curriculum=pass_rate" in caplog.text
    assert sorted(joined(drawn(loader, 10))) == list(range(60))


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (["data.curriculum_window=[0.9,0.1]"], r"'data.curriculum_window' is \[0.9, 0.1\]"),
        (["data.curriculum_window=[0.5]"], r"must be the least and the largest rate"),
        (
            ["data.sampler.class_path=x.py", "data.sampler.class_name=X"],
            "'data.sampler.class_path' and 'data.curriculum=pass_rate' both choose prompts",
        ),
        (
            ["data.mixture=[{files: x.jsonl}]"],
            "'data.mixture' and 'data.curriculum=pass_rate' both choose prompts",
        ),
        (
            ["trainer.async_training.mode=carry_over"],
            "starts them before those are known; leave data.curriculum out",
        ),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    keys: list[str], error: str, tiny_model_dir: Path, digits_data: Path
) -> None:
    with pytest.raises(ConfigError, match=error):
        load_ppo_config(tiny_run(tiny_model_dir, digits_data, "data.curriculum=pass_rate", *keys))


def test_a_dataloader_that_makes_its_own_batches_is_refused(
    tiny_model_dir: Path, digits_data: Path, tiny_tokenizer: Any
) -> None:
    config = load_ppo_config(tiny_run(tiny_model_dir, digits_data, "data.curriculum=pass_rate"))
    with pytest.raises(ConfigError, match="a dataloader gives its own batches"):
        rows_or_batches([["repeat 1"], ["repeat 2"]], config.data, tiny_tokenizer)


REWARD = """
import os
import signal

calls = 0


def compute_score(solution_str):
    global calls
    calls += 1
    if calls == int(os.environ.get("KILLED_AT_CALL", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(solution_str) % 3 == 0)
"""


@pytest.mark.slow(seconds=15)
def test_a_killed_run_draws_the_prompts_of_one_that_was_not(
    tiny_model_dir: Path, tmp_path: Path, fork_server: Any
) -> None:
    rows = [{"prompt": f"repeat {row % 10}", "reward_model": {"ground_truth": ""}} for row in range(12)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "digits_reward.py").write_text(REWARD)
    keys = tiny_run(
        tiny_model_dir, tmp_path, "data.train_batch_size=3", "data.curriculum=pass_rate", "trainer.save_freq=1",
        "data.curriculum_unseen=0.5", "algorithm.filter_groups.enable=True", "trainer.total_training_steps=7",
    )  # fmt: skip
    assert main([*keys, f"trainer.default_local_dir={tmp_path}/whole"]) == 0
    killed = fork_server.start(
        "verl.trainer.main_ppo",
        [*keys, f"trainer.default_local_dir={tmp_path}/parts"],
        output=tmp_path / "printed.txt",
        environment={"KILLED_AT_CALL": "75", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    killed.wait()
    assert 1 <= len(read_metrics(tmp_path / "parts")) < 7, (tmp_path / "printed.txt").read_text()[-2000:]
    assert main([*keys, f"trainer.default_local_dir={tmp_path}/parts"]) == 0
    for folder in ("whole", "parts"):
        assert len(list((tmp_path / folder / "rollouts").glob("*.jsonl"))) == 7
    for step in range(1, 8):
        whole, parts = (
            (tmp_path / name / "rollouts" / f"{step}.jsonl").read_text() for name in ("whole", "parts")
        )
        assert whole == parts
    metrics = untimed(read_metrics(tmp_path / "whole"))
    assert untimed(read_metrics(tmp_path / "parts")) == metrics
    assert {"curriculum/signal", "curriculum/window"} <= set(metrics[0])
    assert (
        max(row["training/num_gen_batches"] for row in metrics) > 1
    )  # prompts that no step trained on count, too
