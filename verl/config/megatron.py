"""What strategy=megatron declares: its layout, what it lacks, and what it needs of a model. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from verl.config.capabilities import StrategySpec, declare_strategy
from verl.config.parallelism import divisors
from verl.config.roles import ModelRole
from verl.config.run_checks import indivisible
from verl.config.schema import OfflineConfig, PPOConfig

# `model_type` of the architectures that can be built from Megatron's layers.
MEGATRON_MODELS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")
_TP, _PP, _CP, _EP = (
    f"megatron.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model")
)
_ULYSSES = "ulysses_sequence_parallel_size"


def _layout(role: Any) -> dict[str, int]:
    sizes = role.megatron
    return {
        "tp": sizes.tensor_model_parallel_size,
        "pp": sizes.pipeline_model_parallel_size,
        "cp": sizes.context_parallel_size * role.ulysses_sequence_parallel_size,
        "ep": sizes.expert_model_parallel_size,
    }


def _checks(config: PPOConfig | OfflineConfig, role: ModelRole) -> Iterator[str]:
    """Settings the megatron strategy does not have."""
    key, sizes, model = role.key, role.section.megatron, role.model
    if sizes.sequence_parallel:
        yield (
            f"'{key}.megatron.sequence_parallel' is True; norms are computed on every tensor-parallel rank here. Set "
            f"it to False; for long sequences raise {key}.{_CP}, which splits all activations"
        )
    fsdp = f"or {key}.strategy=fsdp, which has it"
    if model.lora_rank:
        yield (
            f"'{role.model_key}.lora_rank' is {model.lora_rank}, but strategy=megatron trains all weights; set it to "
            f"0, {fsdp}"
        )
    if role.name in ("ref", "teacher"):
        return
    if role.section.use_torch_compile:
        yield f"'{key}.use_torch_compile' is True, but strategy=megatron does not compile; set it to False, {fsdp}"
    optim, name = (
        (config.optim, "optim") if isinstance(config, OfflineConfig) else (role.section.optim, f"{key}.optim")
    )
    if optim.name != "adamw":
        yield f"'{name}.name' is {optim.name}, but strategy=megatron has AdamW; set it to adamw, {fsdp}"
    if optim.moments != "float32":
        yield (
            f"'{name}.moments' is {optim.moments}; strategy=megatron splits float32 moments over data-parallel ranks. "
            f"Set it to float32, {fsdp}"
        )
    if optim.stochastic_rounding:
        yield (
            f"'{name}.stochastic_rounding' is True; strategy=megatron keeps float32 masters, split over data-parallel "
            f"ranks. Set it to False, {fsdp}"
        )


def _fits(role: ModelRole, model: Mapping[str, Any]) -> Iterator[str]:
    key, layout, kind = role.key, role.layout, model.get("model_type")
    if kind not in MEGATRON_MODELS:
        yield (
            f"'{key}.strategy' is megatron, which has no layers for the model type {kind} of {role.model_key}.path. "
            f"Those it has: {', '.join(MEGATRON_MODELS)}; for others set {key}.strategy=fsdp"
        )
        return
    if model.get("quantization_config"):
        yield (
            f"'{role.model_key}.path' has quantised weights, which strategy=megatron cannot read; give the "
            f"unquantised model, or set {key}.strategy=fsdp"
        )
    yield from _head_errors(role, model)
    layers, experts = model.get("num_hidden_layers"), _experts(model)
    if isinstance(layers, int) and layers % layout.pp:
        yield indivisible(f"{key}.{_PP}", layout.pp, layers, "layers")
    if not experts:
        if layout.ep > 1:
            yield f"'{key}.{_EP}' is {layout.ep}, but the model ({kind}) has no experts; set it to 1"
        return
    if experts % layout.ep:
        yield indivisible(f"{key}.{_EP}", layout.ep, experts, "experts")


def _head_errors(role: ModelRole, model: Mapping[str, Any]) -> Iterator[str]:
    layout, heads = role.layout, model.get("num_attention_heads")
    if not isinstance(heads, int):
        return
    kv_heads, width = model.get("num_key_value_heads") or heads, model.get("intermediate_size") or heads
    for count, what in (
        (heads, "attention heads"), (kv_heads, "key-value heads"), (width, "columns of the MLP (intermediate_size)"),
    ):  # fmt: skip
        if count % layout.tp:
            fit = math.gcd(heads, kv_heads, width)
            yield indivisible(f"{role.key}.{_TP}", layout.tp, count, what, divisors(fit))
            return
    per_rank = heads // layout.tp
    if per_rank % layout.cp:
        section = role.section
        key = _CP if section.megatron.context_parallel_size > 1 else _ULYSSES
        what = f"attention heads of each tensor-parallel rank ({heads} / {layout.tp})"
        if section.megatron.context_parallel_size > 1 < section.ulysses_sequence_parallel_size:
            key = f"{_CP} x {_ULYSSES}"
        yield indivisible(f"{role.key}.{key}", layout.cp, per_rank, what)


def _experts(model: Mapping[str, Any]) -> int:
    found = model.get("num_local_experts") or model.get("num_experts")
    return found if isinstance(found, int) else 0


declare_strategy(
    "megatron",
    StrategySpec(
        section="megatron",
        layout=_layout,
        sizes={"tp": (_TP,), "pp": (_PP,), "cp": (_CP, _ULYSSES), "ep": (_EP,)},
        checks=_checks,
        fits=_fits,
        full_shards=False,
        package="megatron-core",
        module="megatron.core",
    ),
)
