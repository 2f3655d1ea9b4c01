"""Ending when validation no longer improves, with the best checkpoint kept."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from verl.config.load import load_config, load_ppo_config, load_sft_config
from verl.config.schema import DPOConfig
from verl.errors import ConfigError
from verl.trainer import offline_loop, sft_trainer
from verl.trainer.offline_loop import EarlyStop


@pytest.fixture
def keys(tiny_model_dir: Path, tmp_path: Path) -> Any:
    """Two steps an epoch. The validation rows contradict the training rows, so learning makes them less likely."""
    rows = [{"prompt": f"repeat {digit}", "response": str(digit)} for digit in range(8)]
    wrong = [{"prompt": row["prompt"], "response": "zz"} for row in rows]
    for name, listed in (("train", rows), ("val", wrong)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))

    def make(*more: str, folder: str = "run") -> list[str]:
        return [
            f"model.path={tiny_model_dir}",
            f"data.train_files={tmp_path}/train.jsonl",
            f"data.val_files={tmp_path}/val.jsonl",
            "data.train_batch_size=4",
            "data.max_length=32",
            "optim.lr=1e-2",
            "trainer.total_epochs=20",
            "trainer.test_freq=2",
            f"trainer.default_local_dir={tmp_path / folder}",
            "trainer.device=cpu",
            "trainer.logger=[]",
            *more,
        ]

    return make


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Without times, and without findings: the validation at a stop is one more to judge by."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    others = ("timing_", "perf/", "findings")
    return [{k: v for k, v in line.items() if not k.startswith(others)} for line in lines]


def saved(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("global_step_")) for path in folder.glob("global_step_*")}


def test_the_run_ends_and_the_best_checkpoint_is_kept_and_named(
    keys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        result = sft_trainer.run(load_sft_config(keys("trainer.early_stop_patience=3")))
    losses = {line["step"]: line["val/loss"] for line in metrics(result.folder) if "val/loss" in line}
    best = min(losses, key=lambda step: losses[step])
    assert list(losses) == list(range(2, best + 7, 2)) and result.steps == best + 6 < 40
    assert saved(result.folder) == {best, result.steps}
    assert f"ended early after step {result.steps}: val/loss has not improved in 3 validations" in caplog.text
    assert f"at step {best}" in caplog.text and f"global_step_{best} (val/loss" in caplog.text


@pytest.mark.slow
def test_a_run_that_ended_early_goes_on_only_with_more_patience(
    keys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ended = sft_trainer.run(load_sft_config(keys("trainer.early_stop_patience=1")))
    before = metrics(ended.folder)
    with caplog.at_level(logging.INFO):
        again = sft_trainer.run(load_sft_config(keys("trainer.early_stop_patience=1")))
    assert again.steps == ended.steps and metrics(ended.folder) == before
    assert "ended early" in caplog.text and "larger trainer.early_stop_patience" in caplog.text
    longer = sft_trainer.run(load_sft_config(keys("trainer.early_stop_patience=2")))
    assert longer.steps == ended.steps + 2


@pytest.mark.slow
def test_the_count_survives_an_interruption(keys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between two validations: the one made at the stop is not counted."""
    options = ("trainer.early_stop_patience=2", "trainer.save_freq=1")
    whole = sft_trainer.run(load_sft_config(keys(*options, folder="whole")))
    step = offline_loop.OfflineLoop.step

    def stops(loop: Any, batch: Any) -> dict[str, float]:
        if loop.step_number == whole.steps - 1:
            loop.request_stop()
        return step(loop, batch)

    with monkeypatch.context() as patch:
        patch.setattr(offline_loop.OfflineLoop, "step", stops)
        cut = sft_trainer.run(load_sft_config(keys(*options, folder="cut")))
    assert cut.steps == whole.steps - 1 and "val/loss" in cut.metrics
    resumed = sft_trainer.run(load_sft_config(keys(*options, folder="cut")))
    assert resumed.steps == whole.steps
    assert metrics(resumed.folder)[-1] == metrics(whole.folder)[-1]


@pytest.mark.slow
def test_without_patience_the_run_goes_to_its_end(keys: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        options = ("trainer.total_epochs=4", "trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=1")
        result = sft_trainer.run(load_sft_config(keys(*options)))
    losses = {line["step"]: line["val/loss"] for line in metrics(result.folder) if "val/loss" in line}
    best = min(losses, key=lambda step: losses[step])
    assert result.steps == 8 and saved(result.folder) == {best, 8} and best < 8
    assert (
        "ended early" not in caplog.text
        and f"best checkpoint: {result.folder}/global_step_{best}" in caplog.text
    )


def test_a_metric_that_validation_does_not_have_is_refused(keys: Any) -> None:
    options = keys("trainer.early_stop_patience=1", "trainer.keep_best=val/accuracy")
    with pytest.raises(
        ConfigError, match=r"keep_best=val/accuracy.*does not measure.*val/loss, val/perplexity"
    ):
        sft_trainer.run(load_sft_config(options))


# -- keys


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("data.val_files=[]", "'trainer.early_stop_patience' is 3; it needs data.val_files"),
        ("trainer.test_freq=-1", "'trainer.early_stop_patience' is 3; it needs trainer.test_freq"),
        ("trainer.keep_best=null", "it needs trainer.keep_best"),
        ("trainer.early_stop_patience=0", "must be at least 1"),
    ],
)
def test_keys_that_do_not_go_together(keys: Any, change: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_sft_config(keys("trainer.early_stop_patience=3", change))


def test_not_a_key_of_reinforcement_learning() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'trainer\.early_stop_patience'"):
        load_ppo_config(["trainer.early_stop_patience=3"])


@pytest.mark.parametrize(
    ("changes", "best", "mode", "keep"),
    [
        ([], "val/loss", "min", None),
        (["data.val_files=[]"], None, "max", None),
        (["trainer.test_freq=-1"], None, "max", None),
        (["trainer.save_freq=3"], None, "max", None),
        (["trainer.save_freq=4"], "val/loss", "min", None),
        (["trainer.save_freq=3", "trainer.early_stop_patience=2"], "val/loss", "min", None),
        (["trainer.early_stop_patience=2"], "val/loss", "min", 1),
        (["trainer.early_stop_patience=2", "trainer.max_actor_ckpt_to_keep=5"], "val/loss", "min", 5),
        (["trainer.keep_best=val/perplexity"], "val/perplexity", "min", None),
        (["trainer.keep_best=val/accuracy"], "val/accuracy", "max", None),
        (["trainer.keep_best=val/accuracy", "trainer.keep_best_mode=min"], "val/accuracy", "min", None),
    ],
)
def test_defaults(keys: Any, changes: list[str], best: str | None, mode: str, keep: int | None) -> None:
    trainer = load_sft_config(keys(*changes)).trainer
    assert (trainer.keep_best, trainer.keep_best_mode, trainer.max_actor_ckpt_to_keep) == (best, mode, keep)


def test_preference_training_has_the_same_defaults(keys: Any) -> None:
    trainer = load_config(DPOConfig, keys("trainer.early_stop_patience=2")).trainer
    assert (trainer.keep_best, trainer.keep_best_mode, trainer.early_stop_patience) == ("val/loss", "min", 2)


# -- counting


def run_through(values: list[float], **settings: Any) -> EarlyStop:
    stop = EarlyStop(**{"metric": "val/loss", "mode": "min", "patience": 2, **settings})
    for step, value in enumerate(values, 1):
        stop.add(step, {"val/loss": value}, stop.improves({"val/loss": value}))
    return stop


@pytest.mark.parametrize(
    ("values", "mode", "best_step", "waited"),
    [
        ([3.0, 2.0, 1.0], "min", 3, 0),
        ([3.0, 2.0, 1.0], "max", 1, 2),
        ([1.0, 2.0, 0.5, 0.6], "min", 3, 1),
        ([1.0, 1.0], "min", 1, 1),
        ([1.0, float("nan"), 2.0], "min", 1, 2),
        ([float("nan"), 2.0], "min", 2, 0),
    ],
)
def test_what_counts(values: list[float], mode: str, best_step: int, waited: int) -> None:
    stop = run_through(values, mode=mode)
    assert (stop.best_step, stop.waited, stop.reached) == (best_step, waited, waited >= 2)
    assert not run_through(values, mode=mode, patience=None).reached


def test_state() -> None:
    stop, fresh = run_through([2.0, 1.0, 3.0]), run_through([])
    fresh.load_state_dict(stop.state_dict())
    assert fresh == stop
    other = run_through([], metric="val/accuracy")
    other.load_state_dict(stop.state_dict())
    assert other.waited == 0 and other.best is None
    nothing = run_through([float("nan")])
    fresh.load_state_dict(nothing.state_dict())
    assert (fresh.best, fresh.waited) == (None, 1)
