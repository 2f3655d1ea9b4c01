"""`--check`: what a config would do on this machine, before anything is loaded.

Reads config.json of the model and nothing else of it. What is an estimate is called one in the text; what a key
would save is found by planning again with that key changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.config.available import unavailable
from verl.config.batch_math import BatchPlan, batch_plan, text_table
from verl.config.batch_math import rows as batch_rows
from verl.config.device import Device, device_at_hand
from verl.config.disk import checkpoint_bytes, disk_verdict, free_bytes
from verl.config.keys import get, put
from verl.config.machine import beyond_machine
from verl.config.memory import gib
from verl.config.model_shape import ModelShape, read_shape
from verl.config.packages import missing_packages
from verl.config.phases import Estimate, estimate
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.unused import unused_keys

_SAFE = 0.9
"""Share of a device that can be used before fragmentation and the driver's own memory get in the way."""
_FILE_TYPES = (".parquet", ".json", ".jsonl", ".csv")


@dataclass
class Plan:
    """What would happen."""

    batches: BatchPlan
    device: Device
    shape: ModelShape | None
    memory: Estimate | None = None
    warnings: list[str] = field(default_factory=list)


def plan(config: PPOConfig | SFTConfig, device: Device | None = None) -> Plan:
    """The plan of a config on the device at hand, or on the one given."""
    device = device or device_at_hand(config.trainer.device, config.trainer.n_gpus_per_node)
    model = config.actor_rollout_ref.model if isinstance(config, PPOConfig) else config.model
    shape = read_shape(model.path, model.override_config)
    result = Plan(batch_plan(config), device, shape)
    result.warnings += unavailable(config) + unused_keys(config) + _missing(config, device)
    if shape is None:
        result.warnings.append(
            f"memory is not estimated: '{model.path}' is not a local folder and not in the Hugging Face cache"
        )
        return result
    if not shape.exact:
        result.warnings.append(
            f"model_type '{shape.model_type}' is not one this estimate knows; it is counted as if built like Llama"
        )
    critic_shape = critic_shape_of(config, shape)
    if isinstance(config, PPOConfig) and config.critic.enable and critic_shape is None:
        result.warnings.append(
            f"the critic is not in the estimate: no config.json of '{config.critic.model.path}'"
        )
    result.memory = estimate(config, shape, critic_shape, device)
    result.warnings += _too_large(config, result, critic_shape)
    result.warnings += _disk(config, shape, critic_shape, device.kind)
    return result


def _disk(
    config: PPOConfig | SFTConfig, shape: ModelShape, critic_shape: ModelShape | None, kind: str
) -> list[str]:
    """What does not fit on the disk of the run folder."""
    free = free_bytes(config.trainer.default_local_dir)
    if free is None:
        return []
    found = disk_verdict(config, checkpoint_bytes(config, shape, critic_shape, kind), free)
    return [line for line in (found.error, found.warning) if line]


def critic_shape_of(config: PPOConfig | SFTConfig, shape: ModelShape) -> ModelShape | None:
    """The sizes of the critic's model; None where there is no critic, or nothing is known of it."""
    if not isinstance(config, PPOConfig) or not config.critic.enable:
        return None
    model = config.critic.model
    return (
        shape
        if model.path == config.actor_rollout_ref.model.path
        else read_shape(model.path, model.override_config)
    )


def _missing(config: PPOConfig | SFTConfig, device: Device) -> list[str]:
    """Packages, files and GPUs the config names and this machine lacks."""
    lines = beyond_machine(config, device) + missing_packages(config)
    for key in ("data.train_files", "data.val_files"):
        for name in get(config, key):
            local = name.startswith((".", "/")) or Path(name).suffix in _FILE_TYPES
            if local and not Path(name).exists():
                lines.append(f"'{key}': there is no file or folder '{name}'")
    return lines


def _too_large(config: PPOConfig | SFTConfig, result: Plan, critic_shape: ModelShape | None) -> list[str]:
    """A line for each phase that does not fit, with the keys that would help and by how much."""
    total, memory, shape = result.device.memory, result.memory, result.shape
    if total is None or memory is None or shape is None:
        return []
    lines = []
    for number, phase in enumerate(memory.phases):
        if phase.total <= total * _SAFE:
            continue
        savings = []
        for name, value in _remedies(config, result.device.kind):
            changed = deepcopy(config)
            put(changed, name, value)
            after = estimate(changed, shape, critic_shape, result.device).phases[number]
            if after.total < phase.total:
                savings.append((phase.total - after.total, f"{name}={value}"))
        best = sorted(savings, reverse=True)[:4]
        if best:
            advice = "What would help: " + "; ".join(f"{text} (-{gib(saved)})" for saved, text in best)
        else:
            advice = "It needs a smaller model or a larger device"
        lines.append(
            f"'{phase.name}' needs about {gib(phase.total)} of {gib(total)} ({result.device.name}). {advice}"
        )
    return lines


def _remedies(config: PPOConfig | SFTConfig, kind: str) -> Iterator[tuple[str, Any]]:
    """Keys, with values, that can lower the memory of a phase and are not set so yet."""
    if isinstance(config, PPOConfig):
        models = ["actor_rollout_ref.model", *(["critic.model"] if config.critic.enable else [])]
        roles = [
            "actor_rollout_ref.actor",
            *(["critic"] if config.critic.enable else []),
            "actor_rollout_ref.ref",
        ]
        micros = [f"{role}.ppo_micro_batch_size_per_gpu" for role in ("actor_rollout_ref.actor", "critic")]
        rollout = "actor_rollout_ref.rollout"
    else:
        models, roles, micros, rollout = ["model"], ["model"], ["data.micro_batch_size_per_gpu"], ""
    for model in models:
        if not get(config, model).enable_gradient_checkpointing:
            yield f"{model}.enable_gradient_checkpointing", True
        if get(config, model).lora_rank == 0:
            yield f"{model}.lora_rank", 16
    for micro in micros:
        if (get(config, micro) or 1) > 1:
            yield micro, 1
    if kind != "cuda":
        return
    for role in roles:
        for offload in ("param_offload", "optimizer_offload"):
            if not getattr(get(config, role).fsdp_config, offload):
                yield f"{role}.fsdp_config.{offload}", True
    if rollout and get(config, rollout).gpu_memory_utilization > 0.2:
        yield f"{rollout}.gpu_memory_utilization", round(get(config, rollout).gpu_memory_utilization / 2, 2)
    yield "trainer.n_gpus_per_node", 2 * config.trainer.n_gpus_per_node


def render(result: Plan) -> str:
    """The plan as text."""
    blocks = [text_table("batches", batch_rows(result.batches))]
    if result.memory is not None:
        limit = f", {gib(result.device.memory)} per rank" if result.device.memory is not None else ""
        title = f"memory on {result.device.name}{limit} (activations are estimates)"
        blocks.append(text_table(title, _memory_rows(result.memory)))
    blocks.append("\n".join(f"warning: {line}" for line in result.warnings) or "no warnings")
    return "\n\n".join(blocks)


def _memory_rows(memory: Estimate) -> list[tuple[str, str, str]]:
    lines: list[tuple[str, str, str]] = []
    for role in memory.roles:
        name = role.role
        trained = "" if role.trained in (0, role.parameters) else f", {role.trained:,} of them trained"
        lines.append((f"{name}: weights", gib(role.weights), f"{role.parameters:,} parameters{trained}"))
        if not role.trained:
            continue
        copies = "two moments and a float32 copy" if role.has_master else "two moments"
        lines.append((f"{name}: gradients", gib(role.gradients), "summed in float32"))
        lines.append((f"{name}: optimiser", gib(role.optimiser), copies))
        kept = f"{gib(1000 * role.activations_per_token)} per 1,000 tokens"
        held = next((p.parts.get("activations") for p in memory.phases if p.name == f"update {name}"), None)
        lines.append((f"{name}: activations", "measured" if held is None else gib(held), kept))
    if memory.cache_tokens:
        full = f"{memory.cache_tokens:,} tokens: all running sequences at their longest"
        lines.append(("KV cache", gib(memory.cache_bytes), full))
    for phase in memory.phases:
        parts = " + ".join(f"{name} {gib(size)}" for name, size in phase.parts.items() if size)
        open_end = "" if phase.name == "generate" or "activations" in phase.parts else " + activations"
        lines.append((f"peak, {phase.name}", gib(phase.total), parts + open_end))
    return lines
