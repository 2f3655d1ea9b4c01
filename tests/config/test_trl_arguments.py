"""TRL's arguments in Python: every name of the table is a key of the right type, needs nothing, or is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from verl import DPOConfig, GRPOConfig, KTOConfig, PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from verl.config.keys import get, schema_keys, trl_names
from verl.config.load import from_dict
from verl.errors import ConfigError

KINDS: list[Any] = [GRPOConfig, RLOOConfig, PPOConfig, SFTConfig, DPOConfig, KTOConfig, RewardConfig]
SAMPLES: dict[str, Any] = {
    "adam_beta1": 0.8, "adam_beta2": 0.9, "bf16": True, "fp16": True, "fsdp": "full_shard offload", "fsdp_config": {},
    "generation_batch_size": 8, "greater_is_better": False, "importance_sampling_level": "sequence",
    "loss_type": "dapo", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "lr_scheduler_type": "cosine",
    "max_steps": 3, "metric_for_best_model": "val/loss", "model_init_kwargs": {"dtype": "float32"},
    "multi_objective_aggregation": "sum_then_normalize", "optim": "adamw_torch", "report_to": "none",
    "resume_from_checkpoint": "folder", "reward_weights": [1.0], "save_only_model": True, "scale_rewards": "group",
    "steps_per_generation": 1, "truncation_mode": "keep_end", "vllm_importance_sampling_mode": "token_truncate",
    "vllm_mode": "colocate", "vllm_model_impl": "transformers", "num_generations": 4, "output_dir": "folder",
    "use_cpu": True, "per_device_train_batch_size": 8, "num_mini_batches": 2, "total_episodes": 80, "max_length": 64,
    "ddp_timeout": 60, "project": "p", "run_name": "r", "reward_model_path": "folder", "chat_template_path": "t.jinja",
    "chat_template_kwargs": {"a": 1}, "kl_estimator": "k3", "step_separator": "\n\n",
}  # fmt: skip


def values_of(args: Any) -> dict[str, Any]:
    """The keys of the arguments, which are known and of their types."""
    values: dict[str, Any] = args.keys()
    from_dict(args.kind, values, checked=False, quiet=True)
    return values


def sample(kind: Any, name: str) -> Any:
    if name in SAMPLES:
        other = {
            (DPOConfig, "loss_type"): "ipo",
            (KTOConfig, "loss_type"): "kto",
            (SFTConfig, "metric_for_best_model"): "eval_loss",
        }
        return other.get((kind, name), SAMPLES[name])
    keys = schema_keys(kind.kind)
    (key, *_) = [keys[each] for each in trl_names()["keys"][name] if each in keys]
    if "bool" in str(key.type):
        return True
    return 0.5 if "float" in str(key.type) else 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_with_a_key_is_taken(kind: Any) -> None:
    keys = schema_keys(kind.kind)
    for name, ours in trl_names()["keys"].items():
        if not any(key in keys for key in ours):
            with pytest.raises(ConfigError, match=rf"unknown argument '{name}'|{name}=1\): not available"):
                kind(**{name: 1})
            continue
        args = kind(**{name: sample(kind, name)})
        values_of(args)
        assert getattr(args, name) == sample(kind, name)


def test_every_name_with_a_note_is_said_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    table = trl_names()
    for name, note in table["notes"].items():
        accepted = table["values"].get(name, ())
        if name in ("gradient_accumulation_steps", "eval_strategy", "save_strategy") or note.startswith(
            "in Python"
        ):
            continue
        if note.startswith("not available") or name in ("assistant_only_loss", "completion_only_loss"):
            with pytest.raises(ConfigError, match=name):
                GRPOConfig(**{name: "x"})
            GRPOConfig(**{name: accepted[0] if accepted else None})
        else:
            caplog.clear()
            GRPOConfig(**{name: "x"}).say_unused()
            assert f"{name} has no effect: {note}" in caplog.text, name
    assert table["values"].keys() <= table["notes"].keys() | table["offline"].keys()


@pytest.mark.parametrize("kind", [SFTConfig, DPOConfig, RewardConfig])
def test_names_of_other_commands_are_taken_where_they_ask_for_nothing(kind: Any) -> None:
    for name, reason in trl_names()["offline"].items():
        if kind is DPOConfig and name == "loss_type":
            continue
        accepted = trl_names()["values"].get(name, [False])[0]
        kind(**{name: accepted})
        with pytest.raises(ConfigError, match=f"{name}='x'.*{reason}"):
            kind(**{name: "x"})


@pytest.mark.parametrize(
    ("kind", "name", "key", "greater"),
    [
        (SFTConfig, "loss", "val/loss", False),
        (SFTConfig, "val/perplexity", "val/perplexity", False),
        (DPOConfig, "eval_rewards/accuracies", "val/accuracy", True),
        (GRPOConfig, "val-core/unknown/reward/mean@1", "val-core/unknown/reward/mean@1", True),
    ],
)
def test_the_best_model_is_that_of_a_number_of_validation(
    kind: Any, name: str, key: str, greater: bool
) -> None:
    args = kind(metric_for_best_model=name)
    values = values_of(args)
    assert values["trainer.keep_best"] == key and args.greater_is_better is greater
    assert values["trainer.keep_best_mode"] == ("max" if greater else "min")


def test_batches_count_prompts_and_steps_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    args = GRPOConfig(
        per_device_train_batch_size=8, gradient_accumulation_steps=2, steps_per_generation=4, num_generations=4,
        num_iterations=2, max_steps=9, save_steps=8, eval_steps=4,
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        values = args.keys(devices=2)
    assert values["data.train_batch_size"] == 8 * 2 * 4 // 4
    assert values["actor_rollout_ref.actor.ppo_mini_batch_size"] == 8 * 2 * 2 // 4
    steps = [values[f"trainer.{name}"] for name in ("total_training_steps", "save_freq", "test_freq")]
    assert steps == [3, 2, 1], "each has four optimiser steps"
    assert SFTConfig(per_device_train_batch_size=3, gradient_accumulation_steps=2).keys(devices=4)[
        "data.train_batch_size"
    ] == 24  # fmt: skip
    ppo = PPOConfig(per_device_train_batch_size=16, num_mini_batches=4, total_episodes=100).keys()
    assert ppo["data.train_batch_size"] == 16 and ppo["trainer.total_training_steps"] == 7
    assert ppo["actor_rollout_ref.actor.ppo_mini_batch_size"] == 4


@pytest.mark.parametrize(
    ("kind", "arguments", "key", "value"),
    [
        (GRPOConfig, {}, "actor.use_kl_loss", False),
        (GRPOConfig, {"beta": 0.1}, "actor.kl_loss_coef", 0.1),
        (GRPOConfig, {"loss_type": "grpo"}, "actor.loss_agg_mode", "seq-mean-token-mean"),
        (GRPOConfig, {"loss_type": "dr_grpo"}, "actor.loss_agg_mode", "seq-mean-token-sum-norm"),
        (GRPOConfig, {"loss_type": "cispo"}, "actor.policy_loss.loss_mode", "cispo"),
        (GRPOConfig, {"importance_sampling_level": "sequence"}, "actor.policy_loss.loss_mode", "gspo"),
        (GRPOConfig, {"adam_beta2": 0.95}, "actor.optim.betas", [0.9, 0.95]),
        (GRPOConfig, {"warmup_steps": 0.1}, "actor.optim.lr_warmup_steps_ratio", 0.1),
        (GRPOConfig, {"warmup_steps": 5}, "actor.optim.lr_warmup_steps", 5),
        (GRPOConfig, {"optim": "adamw_8bit"}, "actor.optim.moments", "int8"),
        (GRPOConfig, {"top_k": 0}, "rollout.top_k", -1),
        (GRPOConfig, {"bf16": False}, "model.dtype", "float32"),
        (GRPOConfig, {"model_init_kwargs": {"torch_dtype": "bfloat16"}}, "model.dtype", "bfloat16"),
        (
            GRPOConfig,
            {"learning_rate": 1e-4, "lr_scheduler_kwargs": {"min_lr": 1e-5}},
            "actor.optim.min_lr_ratio",
            0.1,
        ),
    ],
)
def test_values_are_converted(kind: Any, arguments: dict[str, Any], key: str, value: Any) -> None:
    args = kind(**arguments)
    config = from_dict(args.kind, values_of(args), checked=False, quiet=True)
    assert get(config, f"actor_rollout_ref.{key}") == (
        pytest.approx(value) if isinstance(value, float) else value
    )


@pytest.mark.parametrize(
    ("kind", "arguments", "says"),
    [
        (
            GRPOConfig,
            {"learning_rat": 1},
            r"GRPOConfig got an unknown argument 'learning_rat'; nearest: learning_rate",
        ),
        (SFTConfig, {"num_generations": 4}, r"SFTConfig has no such setting"),
        (GRPOConfig, {"num_generations": 3}, r"must divide the 8 completions"),
        (GRPOConfig, {"generation_batch_size": 8, "steps_per_generation": 1}, r"not both"),
        (GRPOConfig, {"loss_type": "luspo"}, r"one of grpo, dr_grpo"),
        (DPOConfig, {"loss_type": ["sigmoid", "sft"]}, r"one preference loss at a time"),
        (GRPOConfig, {"lr_scheduler_type": "polynomial"}, r"one of 'linear'"),
        (GRPOConfig, {"vllm_mode": "server"}, r"vLLM runs on the trainer's GPUs"),
        (GRPOConfig, {"scale_rewards": "batch"}, r"one of True, 'group'"),
        (SFTConfig, {"save_strategy": "best"}, r"no, steps or epoch"),
        (SFTConfig, {"model_init_kwargs": {"load_in_4bit": True}}, r"load_in_4bit is not available"),
        (GRPOConfig, {"metric_for_best_model": "eval_reward"}, r"in RL give e.g. val-core/SOURCE"),
        (SFTConfig, {"metric_for_best_model": "accuracy"}, r"else e.g. eval_loss"),
        (SFTConfig, {"completion_only_loss": False}, r"always done"),
        (GRPOConfig, {"ref_model_mixup_alpha": 0.6}, r"not mixed"),
    ],
)
def test_what_is_not_there_is_refused(kind: Any, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kind(**arguments)


def test_arguments_can_be_read() -> None:
    args = SFTConfig("runs/x", max_steps=5)
    assert (args.output_dir, args.max_steps, args.learning_rate, args.report_to) == ("runs/x", 5, 2e-5, None)
    assert args.to_dict()["seed"] == 42 and "max_steps=5" in repr(args)
    with pytest.raises(AttributeError, match="no argument 'nothing'"):
        _ = args.nothing
