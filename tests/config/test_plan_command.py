"""`verl plan`: what `--check` says, for GPUs that are not here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from verl.config import plan_cli
from verl.errors import ConfigError, ModelError

BIG = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
       "intermediate_size": 18944, "vocab_size": 152064}  # fmt: skip
GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"]


def plan(model: Path, gpus: int, memory: int, *overrides: str) -> int:
    parser = argparse.ArgumentParser()
    plan_cli.add_arguments(parser)
    given = ["--model", str(model), "--gpus", str(gpus), "--gpu-memory", str(memory)]
    return plan_cli.run(parser.parse_args([*given, *overrides]))


def test_a_run_that_fits(model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model_folder(**BIG), 16, 141, *GRPO) == 0
    text = capsys.readouterr().out
    assert "on 16 ranks" in text and "peak, update actor" in text and "no warnings" in text


def test_a_run_that_does_not_fit_is_told_what_would_help(
    model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(model_folder(**BIG), 1, 80, *GRPO) == 1
    text = capsys.readouterr().out
    assert "warning: 'update actor' needs about" in text and "actor_rollout_ref.model.lora_rank=16" in text
    assert plan(model_folder(**BIG), 1, 80, *GRPO, "actor_rollout_ref.model.lora_rank=16") == 0


def test_arguments_that_cannot_be_planned_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--gpus 12 is not a whole number of nodes"):
        plan(tmp_path, 12, 80)
    with pytest.raises(ConfigError, match="--gpus is 0"):
        plan(tmp_path, 0, 80)
    with pytest.raises(ModelError, match="no model folder"):
        plan(tmp_path / "no", 1, 80)
