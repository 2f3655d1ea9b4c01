"""How many processes there are and how they divide the work."""

from __future__ import annotations

from typing import Any

from verl.config.schema import GenerationConfig, PPOConfig, SFTConfig


def world_size(config: PPOConfig | SFTConfig | GenerationConfig) -> int:
    """Processes that train."""
    return config.trainer.n_gpus_per_node * config.trainer.nnodes


def model_parallel_size(role: Any) -> int:
    """Ranks that work on the same sequences together; `role` has a strategy and its sizes."""
    if role.strategy != "megatron":
        return role.ulysses_sequence_parallel_size
    sizes = role.megatron
    return sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size


def dp_size(config: PPOConfig | SFTConfig) -> int:
    """Ranks that hold different sequences of a batch."""
    role = config.actor_rollout_ref.actor if isinstance(config, PPOConfig) else config.model
    return max(world_size(config) // model_parallel_size(role), 1)


def divisors(number: int) -> list[int]:
    """Every divisor of a number, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def some_near(values: list[int], near: int) -> str:
    """A few of the values, those closest to the one given, as text."""
    closest = sorted(values, key=lambda value: abs(value - near))[:5]
    return ", ".join(str(value) for value in sorted(closest))
