"""Values of TRL's arguments that are not the value of their key as they stand.

A converter gets the arguments, the key of a name (`trl_names.json`) and the value, and returns the keys to set.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from verl.config import schema
from verl.config.keys import trl_names
from verl.config.methods import POLICY_LOSS, builtin_names

if TYPE_CHECKING:
    from verl.config.trl_arguments import TrainingArguments

log = logging.getLogger(__name__)

_ACTOR = "actor_rollout_ref.actor"

_AGGREGATION = {
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
}
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "float32"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "int8"),
}
_CORRECTIONS = {"token_truncate": "token", "sequence_truncate": "sequence"}


def plain(value: Any) -> Any:
    """The text of transformers' enums."""
    return getattr(value, "value", value)


def _choice(known: Mapping[Any, Any], name: str) -> Callable[[TrainingArguments, str, Any], dict[str, Any]]:
    """Look the value up; None of the table: nothing to set."""

    def convert(args: TrainingArguments, key: str, value: Any) -> dict[str, Any]:
        value = plain(value)
        if value not in known:
            raise args.refuse(name, value, f"it must be one of {', '.join(map(repr, known))}")
        return {} if known[value] is None else {key: known[value]}

    return convert


def steps(name: str, value: Any, updates: int) -> int:
    """Steps of ours, of which each has several of TRL's where a generation is trained on several times."""
    if updates > 1:
        log.info(
            "%s=%s optimiser steps are %d steps of %d each", name, value, math.ceil(value / updates), updates
        )
    return math.ceil(value / updates)


def _kl(args: TrainingArguments, key: str, value: Any) -> dict[str, Any]:
    """The weight of the KL; 0 needs no reference."""
    if args.kind is not schema.PPOConfig:
        return {key: value}
    switch = f"{_ACTOR}.use_kl_loss" if args.kl_in_loss else "algorithm.use_kl_in_reward"
    weight = f"{_ACTOR}.kl_loss_coef" if args.kl_in_loss else "algorithm.kl_ctrl.kl_coef"
    return {switch: True, weight: value} if value > 0 else {switch: False}


def _betas(args: TrainingArguments, key: str, _: Any) -> dict[str, Any]:
    return {key: [args.default("adam_beta1", 0.9), args.default("adam_beta2", 0.999)]}


def _dtype(args: TrainingArguments, key: str, _: Any) -> dict[str, Any]:
    return {key: "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"}


def _loss(args: TrainingArguments, key: str, value: Any) -> dict[str, Any]:
    if args.kind is not schema.PPOConfig:
        names = [value] if isinstance(value, str) else list(value)
        if len(names) != 1:
            raise args.refuse("loss_type", value, "one preference loss at a time")
        return {"algorithm.loss": {"sigmoid": "dpo"}.get(names[0], names[0])}
    if value not in _AGGREGATION:
        raise args.refuse(
            "loss_type", value, f"it must be one of {', '.join(_AGGREGATION)}; see docs/algorithms.md"
        )
    sequence = args.importance_sampling_level == "sequence" and "loss_type" not in args.given
    mode = {f"{_ACTOR}.policy_loss.loss_mode": value} if value in builtin_names(POLICY_LOSS) else {}
    return {f"{_ACTOR}.loss_agg_mode": "seq-mean-token-mean" if sequence else _AGGREGATION[value], **mode}


def _schedule_options(args: TrainingArguments, key: str, value: Mapping[str, Any]) -> dict[str, Any]:
    rate = value.get("min_lr_rate", 0.0)
    if "min_lr" in value:
        rate = value["min_lr"] / args.learning_rate
    if unknown := value.keys() - {"min_lr", "min_lr_rate"}:
        raise args.refuse("lr_scheduler_kwargs", dict(value), f"{sorted(unknown)[0]} is not available")
    return {key: rate}


def _model_options(args: TrainingArguments, key: str, value: Mapping[str, Any]) -> dict[str, Any]:
    section, rest = key.rpartition(".")[0], dict(value)
    values: dict[str, Any] = {}
    for name in ("dtype", "torch_dtype"):
        if (dtype := rest.pop(name, None)) is not None:
            values[f"{section}.dtype"] = str(dtype).removeprefix("torch.")
    if "trust_remote_code" in rest:
        values[f"{section}.trust_remote_code"] = rest.pop("trust_remote_code")
    rest.pop("attn_implementation", None)  # training has its own
    for name in ("revision", "device_map", "quantization_config", "load_in_4bit", "load_in_8bit"):
        if rest.pop(name, None) is not None:
            raise args.refuse(
                "model_init_kwargs", dict(value), f"{name} is not available: give the model's folder"
            )
    return {**values, **({key: rest} if rest else {})}


def _reference_updates(args: TrainingArguments, key: str, _: Any) -> dict[str, Any]:
    return {key: args.default("ref_model_sync_steps", 512)} if args.sync_ref_model else {}


def _loggers(args: TrainingArguments, key: str, value: Any) -> dict[str, Any]:
    names = [value] if isinstance(value, str) else list(value)
    return {key: ["console", *(name for name in names if name not in ("none", "all"))]}


def _correction(args: TrainingArguments, key: str, _: Any) -> dict[str, Any]:
    if args.vllm_importance_sampling_correction is False:
        return {}
    mode = args.default("vllm_importance_sampling_mode", "token_truncate")
    if mode not in _CORRECTIONS:
        raise args.refuse(
            "vllm_importance_sampling_mode", mode,
            f"it must be one of {', '.join(_CORRECTIONS)}; for masks see algorithm.rollout_correction.rollout_rs",
        )  # fmt: skip
    caps = (args.vllm_importance_sampling_cap, args.vllm_importance_sampling_clip_max)
    cap = next((each for each in caps if each is not None), None)
    section = key.rpartition(".")[0]
    return {
        f"{section}.rollout_is": _CORRECTIONS[mode],
        **({} if cap is None else {f"{section}.rollout_is_threshold": cap}),
    }


def _vllm_mode(args: TrainingArguments, key: str, value: Any) -> dict[str, Any]:
    if value != "colocate":
        raise args.refuse("vllm_mode", value, "vLLM runs on the trainer's GPUs; see docs/vllm-and-sglang.md")
    return {}


def _warmup(args: TrainingArguments, key: str, value: Any) -> dict[str, Any]:
    if 0 < value < 1:  # transformers takes a share here, too
        return {key.replace("lr_warmup_steps", "lr_warmup_steps_ratio"): value}
    return {key: int(value)} if value else {}


def _offload(args: TrainingArguments, key: str, value: Any) -> dict[str, Any]:
    words = value.split() if isinstance(value, str) else [str(plain(each)) for each in value or ()]
    return {key.replace("strategy", "fsdp_config.param_offload"): True} if "offload" in words else {}


def _refused_fsdp(args: TrainingArguments, key: str, value: Any) -> dict[str, Any]:
    if value:
        raise args.refuse("fsdp_config", value, f"give its settings as overrides={{'{key}': ...}}")
    return {}


def _objectives(args: TrainingArguments, key: str, value: Any) -> dict[str, Any]:
    if value != "sum_then_normalize":
        keys = "overrides={'algorithm.adv_estimator': 'gdpo', 'algorithm.gdpo_reward_keys': [names of the functions]}"
        raise args.refuse("multi_objective_aggregation", value, f"give {keys}")
    return {}


def _best(args: TrainingArguments, key: str, value: str) -> dict[str, Any]:
    table = {} if args.kind is schema.PPOConfig else trl_names()["metrics"]
    name = table.get(f"eval_{value.removeprefix('eval_')}", [value])[0]
    if not name.startswith("val"):
        reason = "validation has no such number; in RL give e.g. val-core/SOURCE/reward/mean@1, else e.g. eval_loss"
        raise args.refuse("metric_for_best_model", value, reason)
    return {key: name}


CONVERTERS: dict[str, Callable[[TrainingArguments, str, Any], dict[str, Any]]] = {
    "adam_beta1": _betas,
    "adam_beta2": _betas,
    "beta": _kl,
    "bf16": _dtype,
    "fp16": _dtype,
    "fsdp": _offload,
    "fsdp_config": _refused_fsdp,
    "greater_is_better": lambda args, key, value: {key: "max" if value else "min"},
    "importance_sampling_level": _choice({"token": None, "sequence": "gspo"}, "importance_sampling_level"),
    "kl_coef": _kl,
    "log_completions": lambda args, key, value: (
        {key: args.default("num_completions_to_print", 8)} if value else {}
    ),
    "loss_type": _loss,
    "lr_scheduler_kwargs": _schedule_options,
    "lr_scheduler_type": _choice(_SCHEDULES, "lr_scheduler_type"),
    "metric_for_best_model": _best,
    "model_init_kwargs": _model_options,
    "multi_objective_aggregation": _objectives,
    "num_completions_to_print": lambda args, key, value: {key: value} if args.log_completions else {},
    "optim": _choice(_OPTIMIZERS, "optim"),
    "ref_model_sync_steps": _reference_updates,
    "report_to": _loggers,
    "reward_model_path": lambda args, key, value: {key: value, "reward.reward_model.enable": True},
    "save_only_model": lambda args, key, value: {key: ["model", "hf_model"]} if value else {},
    "scale_rewards": _choice({True: True, "group": True, False: False, "none": False}, "scale_rewards"),
    "sync_ref_model": _reference_updates,
    "top_k": lambda args, key, value: {key: value or -1},
    "truncation_mode": _choice({"keep_start": "right", "keep_end": "left"}, "truncation_mode"),
    "use_cpu": lambda args, key, value: {key: "cpu"} if value else {},
    "use_vllm": lambda args, key, value: {key: "vllm"} if value else {},
    "vllm_importance_sampling_cap": _correction,
    "vllm_importance_sampling_clip_max": _correction,
    "vllm_importance_sampling_clip_min": _correction,
    "vllm_importance_sampling_correction": _correction,
    "vllm_importance_sampling_mode": _correction,
    "vllm_mode": _vllm_mode,
    "vllm_model_impl": _choice(
        {"vllm": None, "transformers": {"model_impl": "transformers"}}, "vllm_model_impl"
    ),
    "warmup_steps": _warmup,
}
