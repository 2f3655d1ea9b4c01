"""`--check`: what a config would do on this machine, before any weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.config.async_checks import async_rows
from verl.config.batch_math import BatchPlan, batch_plan, text_table
from verl.config.batch_math import rows as batch_rows
from verl.config.checks import unavailable
from verl.config.disk import checkpoint_bytes, disk_verdict, free_bytes
from verl.config.keys import get, put
from verl.config.layout_checks import finer_layouts, idle_stage_warnings, layout_rows, model_layout_errors
from verl.config.machine import Device, local_device, machine_errors, missing_packages
from verl.config.parallelism import ROLLOUT, offload_section, world_size
from verl.config.roles import model_roles
from verl.config.schema import AnyConfig, GenerationConfig, OfflineConfig, PPOConfig
from verl.config.sizes import (
    Estimate,
    ModelSizes,
    estimate,
    gib,
    other_sizes,
    read_sizes,
)
from verl.config.teacher_checks import teacher_model_errors
from verl.config.unused_keys import unused_keys
from verl.errors import ConfigError, ModelError

USABLE = 0.9  # share of a device that is usable; fragmentation and the driver take the rest
_FILE_TYPES = (".parquet", ".json", ".jsonl", ".csv")


@dataclass
class Plan:
    """What would happen."""

    batches: BatchPlan
    device: Device
    ahead: list[tuple[str, str, str]] = field(default_factory=list)
    layout: list[tuple[str, str, str]] = field(default_factory=list)
    memory: Estimate | None = None
    warnings: list[str] = field(default_factory=list)


def plan(config: PPOConfig | OfflineConfig, device: Device | None = None) -> Plan:
    """The plan of a config on this machine's device, or on another."""
    device = device or local_device(config.trainer.device, config.trainer.n_gpus_per_node)
    model = config.actor_rollout_ref.model if isinstance(config, PPOConfig) else config.model
    result = Plan(batch_plan(config), device)
    if isinstance(config, PPOConfig):
        result.ahead = async_rows(config, result.batches)
    result.warnings += unavailable(config) + unused_keys(config) + _missing(config, device)
    add_layout(result, config)
    try:
        sizes = read_sizes(model.path, model.override_config)
        if sizes is None:
            raise ModelError(f"'{model.path}' is no folder and not in the Hugging Face cache")
        add_memory(result, config, sizes)
    except ModelError as error:
        result.warnings.append(f"memory is not estimated: {error}")
        return result
    free = free_bytes(config.trainer.default_local_dir)
    if free is not None:
        size = checkpoint_bytes(config, sizes, other_sizes(config), device.kind)
        found = disk_verdict(config, size, free)
        result.warnings += [line for line in (found.error, found.warning) if line]
    return result


def add_layout(result: Plan, config: PPOConfig | OfflineConfig) -> None:
    """How the ranks split each role's model, and warnings of what does not fit the model or leaves stages waiting."""
    result.warnings += model_layout_errors(config) + idle_stage_warnings(config)
    if world_size(config) > 1 or any(role.section.strategy == "megatron" for role in model_roles(config)):
        result.layout = layout_rows(config)


def add_memory(result: Plan, config: PPOConfig | OfflineConfig, sizes: ModelSizes) -> None:
    """Estimate the memory of each phase, and warn of those that do not fit."""
    others = other_sizes(config)
    for role in model_roles(config):
        if others.get(role.name, sizes) is None:
            result.warnings.append(f"the {role.name} is not in the estimate: '{role.model.path}' is not here")
    result.memory = estimate(config, sizes, others, result.device)
    result.warnings += _too_large(config, result.memory, sizes, others, result.device)


def _missing(config: PPOConfig | OfflineConfig, device: Device) -> list[str]:
    """GPUs, packages and files the config names and this machine lacks."""
    lines = machine_errors(config, device) + missing_packages(config)
    for key in ("data.train_files", "data.val_files"):
        for name in get(config, key):
            local = name.startswith((".", "/")) or Path(name).suffix in _FILE_TYPES
            if local and not Path(name).exists():
                lines.append(f"'{key}': there is no file or folder '{name}'")
    return lines


def _too_large(
    config: PPOConfig | OfflineConfig,
    memory: Estimate,
    sizes: ModelSizes,
    others: Mapping[str, ModelSizes | None],
    device: Device,
) -> list[str]:
    """A line for each phase that does not fit, with the keys that would help and by how much."""
    if device.memory is None:
        return []
    lines = []
    for number, phase in enumerate(memory.phases):
        if phase.total <= device.memory * USABLE:
            continue
        savings = []
        for name, value in _remedies(config, device.kind):
            changed = deepcopy(config)
            put(changed, name, value)
            saved = phase.total - estimate(changed, sizes, others, device).phases[number].total
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


def _remedies(config: PPOConfig | OfflineConfig, kind: str) -> Iterator[tuple[str, Any]]:
    """Keys, with values, that can lower the memory of a phase and are not set so yet."""
    if isinstance(config, PPOConfig):
        trained = [role for role in model_roles(config) if hasattr(role.section, "optim")]
        models = [role.model_key for role in trained]
        roles = [
            role.key for role in (*trained, *(role for role in model_roles(config) if role not in trained))
        ]
        micros = [f"{role.key}.ppo_micro_batch_size_per_gpu" for role in trained]
    else:
        models, roles, micros = ["model"], ["model"], ["data.micro_batch_size_per_gpu"]
    strategies = {role.model_key: role.section.strategy for role in reversed(model_roles(config))}
    for model in models:
        if not get(config, model).enable_gradient_checkpointing:
            yield f"{model}.enable_gradient_checkpointing", True
        if get(config, model).lora_rank == 0 and strategies[model] != "megatron":
            yield f"{model}.lora_rank", 16
    for micro in micros:
        if (get(config, micro) or 1) > 1:
            yield micro, 1
    yield from finer_layouts(config)
    if kind != "cuda":
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


def render(result: Plan) -> str:
    """The plan as text."""
    blocks = [text_table("batches", batch_rows(result.batches))]
    if result.layout:
        blocks.append(text_table("layout", result.layout))
    if result.ahead:
        blocks.append(text_table("generation ahead of training", result.ahead))
    if result.memory is not None:
        limit = f", {gib(result.device.memory)} per rank" if result.device.memory is not None else ""
        title = f"memory on {result.device.name}{limit} (activations are estimates)"
        blocks.append(text_table(title, _memory_rows(result.memory)))
    blocks.append("\n".join(f"warning: {line}" for line in result.warnings) or "no warnings")
    return "\n\n".join(blocks)


def _memory_rows(memory: Estimate) -> list[tuple[str, str, str]]:
    lines: list[tuple[str, str, str]] = []
    for role in memory.roles:
        trained = "" if role.trained in (0, role.parameters) else f", {role.trained:,} of them trained"
        lines.append((f"{role.role}: weights", gib(role.weights), f"{role.parameters:,} parameters{trained}"))
        if role.trained:
            copies = "two moments and a float32 copy" if role.master_copy else "two moments"
            lines.append((f"{role.role}: gradients", gib(role.gradients), "summed in float32"))
            lines.append((f"{role.role}: optimiser", gib(role.optimiser), copies))
            per_token = f"{gib(1000 * role.activations_per_token)} per 1,000 tokens"
            phase = next(phase for phase in memory.phases if phase.name == f"update {role.role}")
            kept = phase.parts.get("activations")
            lines.append((f"{role.role}: activations", "measured" if kept is None else gib(kept), per_token))
    if memory.cache_tokens:
        full = f"{memory.cache_tokens:,} tokens: all running sequences at their longest"
        lines.append(("KV cache", gib(memory.cache_bytes), full))
    for phase in memory.phases:
        parts = " + ".join(f"{name} {gib(size)}" for name, size in phase.parts.items() if size)
        more = "" if phase.name == "generate" or "activations" in phase.parts else " + activations"
        lines.append((f"peak, {phase.name}", gib(phase.total), parts + more))
    return lines


def check_text(config: AnyConfig) -> str:
    """The answer to `--check`; a layout that the model cannot have is an error."""
    if isinstance(config, (PPOConfig, OfflineConfig)):
        errors = model_layout_errors(config)
        if isinstance(config, PPOConfig):
            errors += teacher_model_errors(config)
        if errors:
            raise ConfigError("\n".join(errors))
        return render(plan(config))
    lines = unused_keys(config)
    if isinstance(config, GenerationConfig):
        lines += machine_errors(config)
    return "\n".join(["every key is valid", *(f"warning: {line}" for line in lines)])
