"""How long a step takes, from rates that were measured on one GPU (`measured_rates.json`, with source and date).

Between the measured sizes of models rates are interpolated; above them they fall with the number of parameters, below
them they stay. Ranks count as so many GPUs: communication between them is not in the estimate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from verl.config.parallelism import rollout_pool
from verl.config.plan import RunPlan
from verl.config.schema import PPOConfig
from verl.config.sections.trainer import POOL_ASYNC_MODES


@cache
def measured_rates() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(
        Path(__file__).with_name("measured_rates.json").read_text(encoding="utf-8")
    )
    return loaded


def rate(points: Sequence[dict[str, Any]], parameters: int, checkpointing: bool = False) -> float:
    """Tokens per second of one GPU for a model of this size."""
    factor = measured_rates()["checkpointing"]["factor"]
    known = []
    for point in points:  # all as with, or all as without checkpointing
        as_measured = point.get("checkpointing", checkpointing)
        change = factor ** (int(checkpointing) - int(as_measured))
        known.append((math.log(point["parameters"]), math.log(point["tokens_per_s"] * change)))
    size = math.log(parameters)
    if size <= known[0][0]:
        return math.exp(known[0][1])
    for (low, slow), (high, fast) in pairwise(known):
        if size <= high:
            return math.exp(slow + (fast - slow) * (size - low) / (high - low))
    return math.exp(known[-1][1] - (size - known[-1][0]))


@dataclass(frozen=True)
class StepTime:
    """Seconds of the phases of a step, and the tokens per second of one GPU in them."""

    phases: dict[str, tuple[float, float]]
    total: float
    extrapolated: bool
    """Whether the model is larger than all that were measured."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Between which the time lies, by the error seen on steps that were measured."""
        factor = measured_rates()["error_factor"]
        return self.total / factor, self.total * factor


def step_time(
    plan: RunPlan, response_tokens: int | None = None, prompt_tokens: int | None = None
) -> StepTime | str:
    """A step whose prompts and responses have so many tokens, by default their longest; or why there is no estimate."""
    config, rates = plan.config, measured_rates()
    if not isinstance(config, PPOConfig) or plan.device.kind != "cuda":
        return "only training with rewards on GPUs was measured"
    rollout, sizes = config.actor_rollout_ref.rollout, plan.sizes[plan.roles[0].name]
    if sizes is None or plan.size_problem:
        return plan.size_problem or "the model is not here"
    if sizes.experts:
        return "no mixture of experts was measured"
    if rollout.name not in rates["generate"]:
        return f"no rate of {rollout.name} was measured, only those of {', '.join(rates['generate'])}"
    response_tokens = config.data.max_response_length if response_tokens is None else response_tokens
    prompt_tokens = config.data.max_prompt_length if prompt_tokens is None else prompt_tokens
    batches = plan.batches()
    drawn = batches.sequences * response_tokens
    generators = rollout.nnodes * rollout.n_gpus_per_node if rollout_pool(config) else plan.world_size
    speed = rate(rates["generate"][rollout.name], sizes.parameters)
    generate = drawn / (speed * generators)
    phases = {"generate": (generate, speed)}
    for role in plan.roles:
        own = plan.sizes[role.name]
        if own is None:
            return f"the size of the {role.name} is not known"
        # The prompt of a group is computed once, where prefixes are shared.
        shared = getattr(role.model, "share_prefixes", False)
        tokens = drawn + prompt_tokens * (batches.prompts if shared else batches.sequences)
        # The first mini-batch's own forward pass gives the old log-probs of its rows.
        passes = 1 - 1 / batches.mini_batches if role is plan.roles[0] else 1.0
        forward = rate(rates["log-probs"], own.parameters)
        if passes:
            seconds = passes * tokens / (forward * plan.world_size)
            phases[f"log-probs of the {role.name}" if role.name != "critic" else "values"] = seconds, forward
        if hasattr(role.section, "optim"):
            update = rate(rates["update"], own.parameters, role.model.enable_gradient_checkpointing)
            epochs = plan.batches(role.name).epochs
            phases[f"update {role.name}"] = epochs * tokens / (update * plan.world_size), update
    total = sum(seconds for seconds, _ in phases.values())
    if config.trainer.async_training.mode in POOL_ASYNC_MODES:  # generated while earlier ones are trained
        total = max(generate, total - generate)
    largest = rates["update"][-1]["parameters"]
    return StepTime(phases, total, sizes.parameters > 1.1 * largest)
