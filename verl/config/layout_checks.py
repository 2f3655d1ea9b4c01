"""What splitting models over ranks needs of a config and of the models: every refusal names the values that work; and
the lines of the plan about it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from verl.config.capabilities import strategy_spec
from verl.config.keys import get, put
from verl.config.methods import POLICY_LOSS, builtin_names, needed_columns
from verl.config.model_path import text_config
from verl.config.parallelism import bubble_share, closest, divisors, layout_of
from verl.config.plan import RunPlan
from verl.config.roles import ModelRole
from verl.config.schema import PPOConfig

_ULYSSES = "ulysses_sequence_parallel_size"


def layout_errors(plan: RunPlan) -> list[str]:
    """What is wrong whatever the model is."""
    lines: list[str] = []
    for role in plan.roles:
        spec = strategy_spec(role.section.strategy)
        if role in _split_apart(plan):
            lines += _world_errors(role, plan)
        if (role.layout.cp > 1 or not spec.full_shards) and not role.model.use_remove_padding:
            why = _ULYSSES if spec.full_shards else f"strategy={role.section.strategy}"
            lines.append(
                f"'{role.model_key}.use_remove_padding' is False, but {why} works on packed sequences; leave it out"
            )
        lines += spec.checks(plan.config, role)
    return list(dict.fromkeys(lines))  # the roles of one model would repeat what is said of it


def _split_apart(plan: RunPlan) -> list[ModelRole]:
    """The first role, and the others that do not split the same model in the same way: for those that do, the errors
    would be the same with other keys."""
    first, *others = plan.roles
    return [first, *(role for role in others if _split(role) != _split(first))]


def _split(role: ModelRole) -> tuple[Any, ...]:
    sizes = layout_of(role.section, 1)
    return role.section.strategy, sizes, role.model.path, role.model.override_config


def _keys(role: ModelRole, *degrees: str) -> list[str]:
    """The keys of a role's degrees of parallelism, below its section."""
    sizes = strategy_spec(role.section.strategy).sizes
    return [key for degree in degrees for key in sizes.get(degree, ())]


def _world_errors(role: ModelRole, plan: RunPlan) -> list[str]:
    layout, world, trainer = role.layout, plan.world_size, plan.config.trainer
    if world % layout.model_ranks:
        given = [(key, get(role.section, key)) for key in _keys(role, "tp", "pp", "cp")]
        product = " x ".join(f"{key} {size}" for key, size in given if size > 1)
        return [
            f"'{role.key}': {product} = {layout.model_ranks} ranks for one copy of the model, which does not divide "
            f"the {world} of trainer.nnodes={trainer.nnodes} x trainer.n_gpus_per_node={trainer.n_gpus_per_node}. "
            f"Products that work: {closest(divisors(world), layout.model_ranks)}; or {layout.model_ranks} ranks, or a "
            "multiple of that"
        ]
    replicas = layout.dp * layout.cp
    if replicas % layout.ep:
        return [
            f"'{role.key}.{_keys(role, 'ep')[0]}' is {layout.ep}, which does not divide the {replicas} ranks of a "
            f"pipeline stage that hold the same dense weights ({world} ranks / TP {layout.tp} / PP {layout.pp}). "
            f"Values that work: {closest(divisors(replicas), layout.ep)}"
        ]
    return []


def model_layout_errors(plan: RunPlan) -> list[str]:
    """What does not fit the models of the config, as far as their config.json is here."""
    lines: list[str] = []
    for role in _split_apart(plan):
        model = text_config(role.model.path, role.model.override_config)
        if model and plan.world_size % role.layout.model_ranks == 0:
            fits = strategy_spec(role.section.strategy).fits or _ulysses_errors
            lines += fits(role, model)
    return list(dict.fromkeys(lines))


def _ulysses_errors(role: ModelRole, model: Mapping[str, Any]) -> Iterator[str]:
    heads, cp = model.get("num_attention_heads"), role.layout.cp
    if isinstance(heads, int) and heads % cp:
        yield indivisible(f"{role.key}.{_ULYSSES}", cp, heads, "attention heads")


def indivisible(key: str, size: int, count: int, what: str, work: list[int] | None = None) -> str:
    return (
        f"'{key}' is {size}, which does not divide the model's {count} {what}. Values that work: "
        f"{closest(work or divisors(count), size)}"
    )


def layout_rows(plan: RunPlan) -> list[tuple[str, str, str]]:
    """The lines of the plan: how the ranks split each role's model."""
    lines = []
    for role in plan.roles:
        layout, batches = role.layout, plan.batches(role.name)
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
    layout, strategy = role.layout, role.section.strategy
    if strategy_spec(strategy).full_shards:
        ulysses = f", Ulysses {layout.cp}" if layout.cp > 1 else ""
        return f"{strategy}: DP {layout.dp}{ulysses}"
    experts = f", EP {layout.ep}" if layout.ep > 1 else ""
    return f"{strategy}: TP {layout.tp}, PP {layout.pp}, CP {layout.cp}, DP {layout.dp}{experts}"


def idle_stage_warnings(plan: RunPlan) -> list[str]:
    """A line for each role with fewer micro-batches than pipeline stages."""
    lines = []
    for role in plan.roles:
        stages, batches = role.layout.pp, plan.batches(role.name)
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
            f"'{role.key}.{_keys(role, 'pp')[0]}' is {stages}, but a rank has {micro} micro-batches: each stage waits "
            f"{100 * bubble_share(stages, micro):.0f} % of a pass. What would help: {fix}"
        )
    return lines


def finer_layouts(plan: RunPlan) -> Iterator[tuple[str, int]]:
    """Parallel sizes, with twice their value, that the ranks and the models allow."""
    for role in plan.roles:
        for name in (key for degree in ("tp", "pp", "cp") for key in _keys(role, degree)[:1]):
            changed = deepcopy(plan.config)
            key, value = f"{role.key}.{name}", 2 * get(role.section, name)
            put(changed, key, value)
            other = RunPlan(changed)
            if not layout_errors(other) and not model_layout_errors(other):
                yield key, value


def reference_errors(plan: RunPlan) -> list[str]:
    """Of trainer.ref_update_freq."""
    config = plan.config
    assert isinstance(config, PPOConfig)
    every, policy = config.trainer.ref_update_freq, config.actor_rollout_ref
    if every < 1:
        return []
    key = "trainer.ref_update_freq"
    if "ref_log_prob" not in needed_columns(config):
        losses = " or ".join(builtin_names(POLICY_LOSS, lambda method: "ref_log_prob" in method.needs))
        return [
            f"'{key}' is {every}, but the run has no reference policy; set it to -1, or use one: "
            f"{POLICY_LOSS}={losses}, actor_rollout_ref.actor.use_kl_loss=True, algorithm.use_kl_in_reward=True"
        ]
    actor, ref = policy.actor, policy.ref
    spec = strategy_spec(actor.strategy)
    shards = ["fsdp_config.fsdp_size", "fsdp_config.offload_policy"] if spec.full_shards else []
    alike = all(get(actor, name) == get(ref, name) for name in ("strategy", *shards))
    if not spec.full_shards:
        alike = alike and layout_of(actor, plan.world_size) == layout_of(ref, plan.world_size)
    if alike or policy.model.lora_rank:  # adapters are copied within one engine
        return []
    keys = ", ".join(f"actor_rollout_ref.ref.{name}" for name in ("strategy", *(shards or [spec.section])))
    return [
        f"'{key}' is {every}: the reference takes over the policy's shards, so both must be split alike; set {keys} "
        "to what actor_rollout_ref.actor has"
    ]
