"""What a config would do, before any weights are loaded: the texts of `--check` and `verl plan`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from verl.config.capabilities import strategy_spec
from verl.config.checks import unavailable
from verl.config.keys import get, put
from verl.config.machine import machine_errors
from verl.config.methods import skips_zero_advantage, zero_advantage_counts
from verl.config.model_path import text_config
from verl.config.parallelism import ROLLOUT, bubble_share, engine_size, offload_section
from verl.config.plan import BatchPlan, RunPlan, text_table
from verl.config.plan_time import measured_rates, step_time
from verl.config.run_checks import layout_errors, model_layout_errors, size_keys, teacher_model_errors
from verl.config.schema import AnyConfig, GenerationConfig, OfflineConfig, PPOConfig
from verl.config.sections.trainer import POOL_ASYNC_MODES
from verl.config.sizes import gib
from verl.config.unused_keys import unused_keys
from verl.errors import ConfigError

USABLE = 0.9  # share of a device that is usable; fragmentation and the driver take the rest
_FILE_TYPES = (".parquet", ".json", ".jsonl", ".csv")


def warnings(plan: RunPlan) -> list[str]:
    """What the run would lack on this machine, what has no effect, and what does not fit."""
    lines = unavailable(plan.config) + unused_keys(plan.config) + plan.absent + _absent_files(plan.config)
    lines += model_layout_errors(plan) + idle_stage_warnings(plan)
    if plan.size_problem:
        return [*lines, f"memory is not estimated: {plan.size_problem}"]
    verdict = plan.disk()
    return lines + memory_warnings(plan) + [line for line in (verdict.error, verdict.warning) if line]


def memory_warnings(plan: RunPlan) -> list[str]:
    """A line for each model that is not in the estimate, and for each phase that does not fit, with the keys that would
    help and by how much."""
    device, memory = plan.device, plan.memory
    absent = [role for role in plan.roles if plan.sizes[role.name] is None]
    lines = [f"the {role.name} is not in the estimate: '{role.model.path}' is not here" for role in absent]
    if device.memory is None or memory is None:
        return lines
    for number, phase in enumerate(memory.phases):
        if phase.total <= device.memory * USABLE:
            continue
        savings = []
        for name, value in _remedies(plan):
            changed = deepcopy(plan.config)
            put(changed, name, value)
            other = RunPlan(changed, device, sizes=plan.sizes).memory
            saved = phase.total - (phase.total if other is None else other.phases[number].total)
            if saved > 0:
                savings.append((saved, f"{name}={value} (-{gib(saved)})"))
        best = "; ".join(text for _, text in sorted(savings, reverse=True)[:4])
        lines.append(
            f"'{phase.name}' needs about {gib(phase.total)} of {gib(device.memory)} ({device.name}). "
            + (f"What would help: {best}" if best else "It needs a smaller model or a larger device")
        )
    cache = memory.phases[0].parts.get("KV cache")
    if cache is not None and cache < min(memory.sequence_bytes, memory.cache_bytes):
        lines.append(
            f"'generate' has no memory for the KV cache of one sequence besides the weights: raise "
            f"{ROLLOUT}.gpu_memory_utilization, or shorten data.max_response_length"
        )
    return lines


def _absent_files(config: PPOConfig | OfflineConfig) -> list[str]:
    """Files the config names and this machine lacks."""
    lines = []
    for key in ("data.train_files", "data.val_files"):
        for name in get(config, key):
            local = name.startswith((".", "/")) or Path(name).suffix in _FILE_TYPES
            if local and not Path(name).exists():
                lines.append(f"'{key}': there is no file or folder '{name}'")
    return lines


def _remedies(plan: RunPlan) -> Iterator[tuple[str, Any]]:
    """Keys, with values, that can lower the memory of a phase and are not set so yet."""
    config = plan.config
    if isinstance(config, PPOConfig):
        trained = [role for role in plan.roles if hasattr(role.section, "optim")]
        models = [role.model_key for role in trained]
        roles = [role.key for role in (*trained, *(role for role in plan.roles if role not in trained))]
        micros = [f"{role.key}.ppo_micro_batch_size_per_gpu" for role in trained]
    else:
        models, roles, micros = ["model"], ["model"], ["data.micro_batch_size_per_gpu"]
    specs = {role.model_key: strategy_spec(role.section.strategy) for role in reversed(plan.roles)}
    for model in models:
        if not get(config, model).enable_gradient_checkpointing:
            yield f"{model}.enable_gradient_checkpointing", True
        if get(config, model).lora_rank == 0 and specs[model].full_shards:
            yield f"{model}.lora_rank", 16
    for micro in micros:
        if (get(config, micro) or 1) > 1:
            yield micro, 1
    yield from finer_layouts(plan)
    if plan.device.kind != "cuda":
        return
    for role in roles:
        section, offloads = offload_section(get(config, role))
        for offload in ("param_offload", "optimizer_offload"):
            if not getattr(offloads, offload):
                yield f"{role}.{section}.{offload}", True
    if isinstance(config, PPOConfig) and config.actor_rollout_ref.rollout.gpu_memory_utilization > 0.2:
        half = config.actor_rollout_ref.rollout.gpu_memory_utilization / 2
        yield f"{ROLLOUT}.gpu_memory_utilization", round(half, 2)
    yield "trainer.n_gpus_per_node", 2 * config.trainer.n_gpus_per_node


def render(plan: RunPlan, lines: list[str] | None = None) -> str:
    """The plan as text, with its warnings or with others."""
    lines = warnings(plan) if lines is None else lines
    device, batches = plan.device, plan.batches()
    tables = {"batches": batches.rows(), "layout": layout_table(plan)}
    if isinstance(plan.config, PPOConfig):
        tables["batches"] += _zero_advantage_rows(plan.config)
        tables["generation ahead of training"] = async_rows(plan.config, batches)
    if plan.memory is not None:
        limit = f", {gib(device.memory)} per rank" if device.memory is not None else ""
        tables[f"memory on {device.name}{limit} (activations are estimates)"] = _memory_rows(plan)
        tables["time of a step (an estimate)"] = time_rows(plan)
    blocks = [text_table(title, rows) for title, rows in tables.items() if rows]
    blocks.append("\n".join(f"warning: {line}" for line in lines) or "no warnings")
    return "\n\n".join(blocks)


def _zero_advantage_rows(config: PPOConfig) -> list[tuple[str, str, str]]:
    """Whether rows with advantage zero are computed, and why."""
    if config.own_loop or config.trainer.val_only:
        return []
    if skips_zero_advantage(config):
        return [("rows with advantage zero", "left out", "of the policy's update, but for a sample")]
    off = "actor_rollout_ref.actor.skip_zero_advantage is False"
    return [("rows with advantage zero", "computed", zero_advantage_counts(config) or off)]


def _memory_rows(plan: RunPlan) -> list[tuple[str, str, str]]:
    lines: list[tuple[str, str, str]] = []
    memory = plan.memory
    assert memory is not None
    for role in memory.roles:
        trained = "" if role.trained in (0, role.parameters) else f", {role.trained:,} of them trained"
        lines.append((f"{role.role}: weights", gib(role.weights), f"{role.parameters:,} parameters{trained}"))
        if role.trained:
            copies = "moments and a float32 copy" if role.master_copy else "moments"
            lines.append((f"{role.role}: gradients", gib(role.gradients), "summed in float32"))
            lines.append((f"{role.role}: optimiser", gib(role.optimiser), copies))
            phase = next(phase for phase in memory.phases if phase.name == f"update {role.role}")
            batches = plan.batches(role.role)
            remark = f"{gib(1000 * role.activations_per_token)} per 1,000 tokens"
            if batches.largest_micro_batch is None:
                remark += (
                    f"; of one sequence ({batches.sequence_tokens:,}), the engine finds how many more fit"
                )
            lines.append((f"{role.role}: activations", gib(phase.parts["activations"]), remark))
    if memory.cache_tokens:
        cache, running = memory.phases[0].parts["KV cache"], memory.running
        fit = min(cache // memory.sequence_bytes, running) if memory.sequence_bytes else running
        held = f"all {running:,} sequences that an engine generates at a time, at their longest"
        if fit < running:
            held = f"{fit:,} sequences at their longest at a time; the other {running - fit:,} wait for their turn"
        lines.append(("KV cache", gib(cache), held))
    for phase in memory.phases:
        parts = " + ".join(f"{name} {gib(size)}" for name, size in phase.parts.items() if size)
        lines.append((f"peak, {phase.name}", gib(phase.total), parts))
    return lines


def time_rows(plan: RunPlan) -> list[tuple[str, str, str]]:
    """Seconds of a step by phases, from measured rates; empty where the run is on CPUs."""
    if plan.device.kind != "cuda" or not isinstance(plan.config, PPOConfig):
        return []
    found, rates = step_time(plan), measured_rates()
    if isinstance(found, str):
        return [("a step", "unknown", found)]
    lines = [
        (name, seconds_text(seconds), f"{speed:,.0f} tokens/s per GPU")
        for name, (seconds, speed) in found.phases.items()
    ]
    low, high = map(seconds_text, found.bounds)
    longest = f"{plan.config.data.max_prompt_length:,} + {plan.config.data.max_response_length:,} tokens"
    of = f"on {rates['device']}s, every sequence of {longest}; shorter responses take less in proportion"
    lines.append(("a step", seconds_text(found.total), f"{low} to {high} {of}"))
    if plan.world_size > 1:
        lines.append(("", "", "rates are of one GPU: communication between GPUs is not counted"))
    if found.extrapolated:
        lines.append(
            ("", "", "the model is larger than those measured: rates are taken to fall with its size")
        )
    return lines


def seconds_text(seconds: float) -> str:
    number, unit = (seconds, "s") if seconds < 100 else (seconds / 60, "min")
    return f"{number:.1f} {unit}" if number < 10 else f"{number:,.0f} {unit}"


def fits(plan: RunPlan) -> bool:
    """Whether the ranks can be split so, and every phase fits on a rank."""
    if layout_errors(plan) or model_layout_errors(plan) or plan.memory is None or plan.device.memory is None:
        return False
    memory, usable = plan.memory, plan.device.memory * USABLE
    cache = memory.phases[0].parts.get("KV cache", memory.cache_bytes)
    return cache >= min(memory.sequence_bytes, memory.cache_bytes) and all(
        phase.total <= usable for phase in memory.phases
    )


def smallest_fit(plan: RunPlan, per_node: int, most: int = 1024) -> int:
    """The fewest GPUs of this kind that the config fits on with its other keys as they are; 0 where no number up to
    `most` is enough."""
    counts = [2**power for power in range(per_node.bit_length()) if 2**power < per_node]
    counts += [per_node * nodes for nodes in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)]
    for count in (count for count in counts if count <= most):
        changed = deepcopy(plan.config)
        changed.trainer.nnodes, changed.trainer.n_gpus_per_node = -(-count // per_node), min(count, per_node)
        if fits(RunPlan(changed, plan.device, sizes=plan.sizes)):
            return count
    return 0


def check_text(config: AnyConfig, plan: RunPlan | None = None) -> str:
    """The answer to `--check`; a layout that the model cannot have is an error."""
    if isinstance(config, (PPOConfig, OfflineConfig)):
        plan = plan or RunPlan(config)
        errors = model_layout_errors(plan)
        if isinstance(config, PPOConfig):
            errors += teacher_model_errors(config)
        if errors:
            raise ConfigError("\n".join(errors))
        return render(plan)
    lines = unused_keys(config)
    if isinstance(config, GenerationConfig):
        lines += machine_errors(config)
    return "\n".join(["every key is valid", *(f"warning: {line}" for line in lines)])


def layout_table(plan: RunPlan) -> list[tuple[str, str, str]]:
    """How the ranks split each role's model, where they do."""
    specs = [strategy_spec(role.section.strategy) for role in plan.roles]
    if plan.world_size == 1 and all(spec.full_shards for spec in specs):
        return []
    lines = []
    for role, spec in zip(plan.roles, specs, strict=True):
        layout, micro = role.layout, plan.batches(role.name).micro_batches
        if spec.full_shards:
            degrees = f"DP {layout.dp}" + (f", Ulysses {layout.cp}" if layout.cp > 1 else "")
        else:
            degrees = f"TP {layout.tp}, PP {layout.pp}, CP {layout.cp}, DP {layout.dp}"
            degrees += f", EP {layout.ep}" if layout.ep > 1 else ""
        lines.append((role.name, f"{layout.world_size} ranks", f"{role.section.strategy}: {degrees}"))
        if layout.pp == 1:
            continue
        layers = text_config(role.model.path, role.model.override_config).get("num_hidden_layers")
        if isinstance(layers, int):
            lines.append((f"{role.name}: layers per stage", str(-(-layers // layout.pp)), f"of {layers}"))
        waits = "each stage waits while the first and the last ones pass"
        if micro is not None:
            turns, share = micro + layout.pp - 1, 100 * bubble_share(layout.pp, micro)
            waits = f"each stage waits {layout.pp - 1} of {turns} turns: {share:.1f} %"
        shown = "measured" if micro is None else f"{micro:,}"
        lines.append((f"{role.name}: micro-batches per stage", shown, waits))
    return lines


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
            f"'{role.key}.{size_keys(role, 'pp')[0]}' is {stages}, but a rank has {micro} micro-batches: each stage "
            f"waits {100 * bubble_share(stages, micro):.0f} % of a pass. What would help: {fix}"
        )
    return lines


def finer_layouts(plan: RunPlan) -> Iterator[tuple[str, int]]:
    """Parallel sizes, with twice their value, that the ranks and the models allow."""
    for role in plan.roles:
        for name in (key for degree in ("tp", "pp", "cp") for key in size_keys(role, degree)[:1]):
            changed = deepcopy(plan.config)
            key, value = f"{role.key}.{name}", 2 * get(role.section, name)
            put(changed, key, value)
            other = RunPlan(changed)
            if not layout_errors(other) and not model_layout_errors(other):
                yield key, value


def async_rows(config: PPOConfig, batches: BatchPlan) -> list[tuple[str, str, str]]:
    """The lines of the plan; empty for synchronous training."""
    own, rollout = config.trainer.async_training, config.actor_rollout_ref.rollout
    if own.mode == "off" or config.trainer.val_only:
        return []
    staleness = own.staleness or 0
    where = "the trainer's processes, before each update"
    if own.mode in POOL_ASYNC_MODES:
        engines = rollout.nnodes * rollout.n_gpus_per_node // engine_size(config)
        where = f"{engines} separate {'process' if engines == 1 else 'processes'}, during updates"
    most = (staleness + 1) * batches.prompts
    how = f"at most, those in training included: {batches.prompts:,} x {staleness + 1}"
    if own.mode == "carry_over":
        most = math.ceil(batches.prompts * (1 + own.over_sampling))
        how = f"at most: {batches.prompts:,} x {1 + own.over_sampling:g}"
    lines = [
        ("mode", own.mode, f"generated by {where}"),
        ("prompts in progress", f"{most:,}", how),
        ("oldest weights", f"{staleness:,}", "steps behind those trained, when a response starts"),
    ]
    if batches.optimiser_steps > 1:
        remark = "per step: the ratio in the loss also covers these updates, besides the age"
        lines.append(("optimiser steps", f"{batches.optimiser_steps:,}", remark))
    return lines
