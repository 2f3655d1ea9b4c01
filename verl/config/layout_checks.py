"""What strategy=megatron and sequence parallelism need of a config and of the model: every refusal names the values
that work; and the lines of the plan about them. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from verl.config.batch_math import batch_plan
from verl.config.keys import get, put
from verl.config.known import MEGATRON_MODELS
from verl.config.model_path import text_config
from verl.config.parallelism import (
    bubble_share,
    closest,
    divisors,
    layout_of,
    world_size,
)
from verl.config.roles import ModelRole, model_roles
from verl.config.schema import OfflineConfig, PPOConfig

_TP, _PP, _CP, _EP = (
    f"megatron.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model")
)
_ULYSSES = "ulysses_sequence_parallel_size"


def layout_errors(config: PPOConfig | OfflineConfig) -> list[str]:
    """What is wrong whatever the model is."""
    lines: list[str] = []
    for role in model_roles(config):
        if role in _split_apart(config):
            lines += _world_errors(role, config)
        if role.layout.cp > 1 or role.section.strategy == "megatron":
            lines += _padding_errors(role)
        if role.section.strategy == "megatron":
            lines += _setting_errors(role, config)
    return list(dict.fromkeys(lines))  # the roles of one model would repeat what is said of it


def _split_apart(config: PPOConfig | OfflineConfig) -> list[ModelRole]:
    """The first role, and the others that do not split the same model in the same way: for those that do, the errors
    would be the same with other keys."""
    first, *others = model_roles(config)
    return [first, *(role for role in others if _split(role) != _split(first))]


def _split(role: ModelRole) -> tuple[Any, ...]:
    sizes = layout_of(role.section, 1)
    return role.section.strategy, sizes, role.model.path, role.model.override_config


def _world_errors(role: ModelRole, config: PPOConfig | OfflineConfig) -> list[str]:
    layout, world = role.layout, world_size(config)
    trainer = (
        f"trainer.nnodes={config.trainer.nnodes} x trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}"
    )
    if world % layout.model_ranks:
        return [
            f"'{role.key}': {_product(role)} = {layout.model_ranks} ranks for one copy of the model, which does not "
            f"divide the {world} of {trainer}. Products that work: {closest(divisors(world), layout.model_ranks)}; or "
            f"{layout.model_ranks} ranks, or a multiple of that"
        ]
    replicas = layout.dp * layout.cp
    if role.section.strategy == "megatron" and replicas % layout.ep:
        return [
            f"'{role.key}.{_EP}' is {layout.ep}, which does not divide the {replicas} ranks of a pipeline stage that "
            f"hold the same dense weights ({world} ranks / TP {layout.tp} / PP {layout.pp}). Values that work: "
            f"{closest(divisors(replicas), layout.ep)}"
        ]
    return []


def _product(role: ModelRole) -> str:
    """The factors of the ranks of one copy, by their keys."""
    section = role.section
    if section.strategy != "megatron":
        return f"{_ULYSSES} {section.ulysses_sequence_parallel_size}"
    factors = [
        (_TP, section.megatron.tensor_model_parallel_size),
        (_PP, section.megatron.pipeline_model_parallel_size),
        (_CP, section.megatron.context_parallel_size),
        (_ULYSSES, section.ulysses_sequence_parallel_size),
    ]
    return " x ".join(f"{key} {size}" for key, size in factors if size > 1)


def _padding_errors(role: ModelRole) -> list[str]:
    if role.model.use_remove_padding:
        return []
    why = "strategy=megatron" if role.section.strategy == "megatron" else _ULYSSES
    return [
        f"'{role.model_key}.use_remove_padding' is False, but {why} works on packed sequences; leave it out"
    ]


def _setting_errors(role: ModelRole, config: PPOConfig | OfflineConfig) -> Iterator[str]:
    """Settings the megatron strategy does not have."""
    key, sizes, model = role.key, role.section.megatron, role.model
    if sizes.sequence_parallel:
        yield (
            f"'{key}.megatron.sequence_parallel' is True; norms are computed on every tensor-parallel rank here. Set "
            f"it to False; for long sequences raise {key}.{_CP}, which splits all activations"
        )
    if sizes.virtual_pipeline_model_parallel_size is not None:
        yield (
            f"'{key}.megatron.virtual_pipeline_model_parallel_size' is {sizes.virtual_pipeline_model_parallel_size}; "
            "a stage has one block of layers here. Set it to null; smaller micro-batches shorten the bubble as well"
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


def model_layout_errors(config: PPOConfig | OfflineConfig) -> list[str]:
    """What does not fit the models of the config, as far as their config.json is here."""
    lines: list[str] = []
    for role in _split_apart(config):
        model = text_config(role.model.path, role.model.override_config)
        if model and world_size(config) % role.layout.model_ranks == 0:
            fits = _megatron_errors if role.section.strategy == "megatron" else _ulysses_errors
            lines += fits(role, model)
    return list(dict.fromkeys(lines))


def _ulysses_errors(role: ModelRole, model: Mapping[str, Any]) -> Iterator[str]:
    heads, cp = model.get("num_attention_heads"), role.layout.cp
    if isinstance(heads, int) and heads % cp:
        yield _indivisible(f"{role.key}.{_ULYSSES}", cp, heads, "attention heads")


def _megatron_errors(role: ModelRole, model: Mapping[str, Any]) -> Iterator[str]:
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
        yield _indivisible(f"{key}.{_PP}", layout.pp, layers, "layers")
    if not experts:
        if layout.ep > 1:
            yield f"'{key}.{_EP}' is {layout.ep}, but the model ({kind}) has no experts; set it to 1"
        return
    if layout.tp > 1:
        yield (
            f"'{key}.{_TP}' is {layout.tp}, but the model ({kind}) has experts, which are not split by matrices; set "
            f"it to 1 and split them by {key}.{_EP}, e.g. {closest(divisors(experts), layout.tp)}"
        )
    if experts % layout.ep:
        yield _indivisible(f"{key}.{_EP}", layout.ep, experts, "experts")


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
            yield _indivisible(f"{role.key}.{_TP}", layout.tp, count, what, divisors(fit))
            return
    per_rank = heads // layout.tp
    if per_rank % layout.cp:
        section = role.section
        key = _CP if section.megatron.context_parallel_size > 1 else _ULYSSES
        what = f"attention heads of each tensor-parallel rank ({heads} / {layout.tp})"
        if section.megatron.context_parallel_size > 1 < section.ulysses_sequence_parallel_size:
            key = f"{_CP} x {_ULYSSES}"
        yield _indivisible(f"{role.key}.{key}", layout.cp, per_rank, what)


def _experts(model: Mapping[str, Any]) -> int:
    found = model.get("num_local_experts") or model.get("num_experts")
    return found if isinstance(found, int) else 0


def _indivisible(key: str, size: int, count: int, what: str, work: list[int] | None = None) -> str:
    return (
        f"'{key}' is {size}, which does not divide the model's {count} {what}. Values that work: "
        f"{closest(work or divisors(count), size)}"
    )


def layout_rows(config: PPOConfig | OfflineConfig) -> list[tuple[str, str, str]]:
    """The lines of the plan: how the ranks split each role's model."""
    lines = []
    for role in model_roles(config):
        layout, batches = role.layout, batch_plan(config, role=role.name)
        lines.append((role.name, f"{layout.world_size} ranks", _degrees(role)))
        if layout.pp == 1:
            continue
        layers = text_config(role.model.path, role.model.override_config).get("num_hidden_layers")
        if isinstance(layers, int):
            lines.append((f"{role.name}: layers per stage", str(-(-layers // layout.pp)), f"of {layers}"))
        micro, waits = batches.micro_batches, "each stage waits while the first and the last ones pass"
        if micro is not None:
            turns = micro + layout.pp - 1
            share = 100 * bubble_share(layout.pp, micro)
            waits = f"each stage waits {layout.pp - 1} of {turns} turns: {share:.1f} %"
        shown = "measured" if micro is None else f"{micro:,}"
        lines.append((f"{role.name}: micro-batches per stage", shown, waits))
    return lines


def _degrees(role: ModelRole) -> str:
    layout = role.layout
    if role.section.strategy != "megatron":
        ulysses = f", Ulysses {layout.cp}" if layout.cp > 1 else ""
        return f"{role.section.strategy}: DP {layout.dp}{ulysses}"
    experts = f", EP {layout.ep}" if layout.ep > 1 else ""
    return f"megatron: TP {layout.tp}, PP {layout.pp}, CP {layout.cp}, DP {layout.dp}{experts}"


def idle_stage_warnings(config: PPOConfig | OfflineConfig) -> list[str]:
    """A line for each role with fewer micro-batches than pipeline stages."""
    lines = []
    for role in model_roles(config):
        stages, batches = role.layout.pp, batch_plan(config, role=role.name)
        micro = batches.micro_batches
        if micro is None or micro >= stages:
            continue
        name = "data.micro_batch_size_per_gpu"
        if role.name != "model":
            name = f"{role.key}.{'ppo' if hasattr(role.section, 'optim') else 'log_prob'}_micro_batch_size_per_gpu"
        fix = f"{name}={batches.rank_sequences // stages}"
        if batches.rank_sequences < stages:
            fix = "a larger batch, or fewer stages"
        elif batches.micro_batch_tokens is not None:
            fix = "a smaller token budget"
        lines.append(
            f"'{role.key}.{_PP}' is {stages}, but a rank has {micro} micro-batches: each stage waits "
            f"{100 * bubble_share(stages, micro):.0f} % of a pass. What would help: {fix}"
        )
    return lines


def finer_layouts(config: PPOConfig | OfflineConfig) -> Iterator[tuple[str, int]]:
    """Parallel sizes, with twice their value, that the ranks and the models allow."""
    for role in model_roles(config):
        for name in (_TP, _PP, _CP) if role.section.strategy == "megatron" else (_ULYSSES,):
            changed = deepcopy(config)
            key, value = f"{role.key}.{name}", 2 * get(config, f"{role.key}.{name}")
            put(changed, key, value)
            if not layout_errors(changed) and not model_layout_errors(changed):
                yield key, value
