"""`verl plan`: what it proposes is accepted and fits by the same arithmetic that checks a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from verl import plan_cli
from verl.config.batch_math import batch_plan
from verl.config.load import load_ppo_config
from verl.config.machine import Device
from verl.config.memory import estimate
from verl.config.model_sizes import ModelSizes, sizes_of
from verl.config.plan import USABLE, Plan
from verl.errors import ConfigError, ModelError

GIB = 2**30
# hidden size, layers, heads, key-value heads, MLP width, tied output matrix
QWEN = {
    "0.5b": (896, 24, 14, 2, 4864, True),
    "1.5b": (1536, 28, 12, 2, 8960, True),
    "7b": (3584, 28, 28, 4, 18944, False),
    "72b": (8192, 80, 64, 8, 29568, False),
}


def qwen(size: str) -> ModelSizes:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    hidden, layers, heads, kv_heads, width, tied = QWEN[size]
    config = Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=width,
        vocab_size=151936 if tied else 152064,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        return sizes_of(AutoModelForCausalLM.from_config(config))


def arguments(*more: str, model: str = "m") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    plan_cli.add_arguments(parser)
    return parser.parse_args(["--model", model, *more])


def propose(size: str, gpus: int, memory: int, *more: str) -> tuple[dict[str, Any], Plan, bool]:
    return plan_cli.propose(arguments("--gpus", str(gpus), "--gpu-memory", str(memory), *more), qwen(size))


@pytest.mark.parametrize(
    ("size", "gpus", "memory", "more"),
    [
        ("0.5b", 1, 24, []),
        ("1.5b", 2, 80, ["--critic"]),
        ("7b", 8, 80, ["--reference"]),
        ("7b", 16, 80, ["--critic", "--reference"]),
    ],
)
def test_what_is_proposed_is_accepted_and_fits(size: str, gpus: int, memory: int, more: list[str]) -> None:
    keys, _, fits = propose(size, gpus, memory, *more)
    assert fits
    overrides = [f"{key}={value}" for key, value in keys.items()]
    config = load_ppo_config([*overrides, "data.train_files=x.jsonl", "actor_rollout_ref.model.path=m"])
    sizes, device = qwen(size), Device("cuda", "GPU", memory * GIB, min(gpus, 8))
    for phase in estimate(config, sizes, sizes if "--critic" in more else None, device).phases:
        assert phase.total <= USABLE * memory * GIB, phase
    assert batch_plan(config).ranks == gpus
    budget = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    assert budget is not None and budget >= 1024 + 2048


def test_less_memory_asks_for_settings_that_save_some() -> None:
    (large, _, _), (small, _, fits) = propose("7b", 8, 141), propose("7b", 8, 40)
    assert fits and {key for key, value in small.items() if value is True} > {
        key for key, value in large.items() if value is True
    }


def test_a_model_that_cannot_fit_is_said_to() -> None:
    _, result, fits = propose("72b", 1, 24)
    assert not fits and "nothing tried fits" in result.warnings[0]


def test_arguments_that_cannot_be_planned_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--gpus 12 is not a whole number of nodes"):
        plan_cli.run(arguments("--gpus", "12", "--gpu-memory", "80"))
    with pytest.raises(ConfigError, match="--gpus is 0"):
        plan_cli.run(arguments("--gpus", "0", "--gpu-memory", "80"))
    with pytest.raises(ModelError, match="no model folder"):
        plan_cli.run(arguments("--gpus", "1", "--gpu-memory", "80", model=str(tmp_path / "no")))


def test_the_command_prints_keys_and_memory(model_folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--gpus", "8", "--gpu-memory", "80"]
    assert plan_cli.run(arguments(*given, model=str(model_folder()))) == 0
    text = capsys.readouterr().out
    assert "trainer.n_gpus_per_node=8" in text and "peak, update actor" in text and "no warnings" in text
