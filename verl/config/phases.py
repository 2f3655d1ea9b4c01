"""The phases of a step and what is on the device in each: the peak is what has to fit."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.config.batch_math import BatchPlan, batch_plan
from verl.config.device import Device
from verl.config.memory import RoleMemory, bytes_per_element, ppo_roles, sft_roles
from verl.config.model_shape import ModelShape
from verl.config.pools import engine_size, rollout_pool
from verl.config.ranks import world_size
from verl.config.schema import PPOConfig, SFTConfig


@dataclass(frozen=True)
class Phase:
    """One part of a step and what is on the device meanwhile, by name."""

    name: str
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Estimate:
    """The memory of one rank."""

    roles: list[RoleMemory]
    phases: list[Phase]
    cache_tokens: int = 0
    """Tokens the KV cache holds when every sequence that runs at the same time is at its longest."""
    cache_bytes: int = 0


def estimate(
    config: PPOConfig | SFTConfig, shape: ModelShape, critic_shape: ModelShape | None, device: Device
) -> Estimate:
    """Roles and phases of a config on a device."""
    batches, world = batch_plan(config), world_size(config)
    tokens = micro_batch_tokens(batches)
    if isinstance(config, SFTConfig):
        roles = sft_roles(config, shape, world, device.kind)
        return Estimate(roles, [training_phase(roles[0], [], tokens)])
    roles = ppo_roles(config, shape, critic_shape, world, device.kind)
    actor, others = roles[0], roles[1:]
    rollout = config.actor_rollout_ref.rollout
    pool, size = rollout_pool(config), engine_size(config)
    engines = rollout.nnodes * rollout.n_gpus_per_node // size if pool else batches.ranks
    running = min(-(-batches.sequences // engines), rollout.max_num_seqs)
    cache_tokens = running * batches.sequence_tokens
    element = bytes_per_element(config.actor_rollout_ref.model.dtype, device.kind)
    wanted = cache_tokens * shape.cache_elements * element
    # The GPUs that share a copy of the model beside the trainer's share its cache too.
    whole, cache = (actor.whole_weights // size, wanted // size) if pool else (actor.whole_weights, wanted)
    if device.memory is not None:
        # The engine never takes more than its share; sequences that do not fit wait their turn.
        share = rollout.gpu_memory_utilization if device.kind == "cuda" else 1.0
        cache = min(cache, max(int(device.memory * share) - whole, 0))
    generating = generating_phase(actor, others, cache)
    if pool:
        generating = Phase("generate", {"weights": whole, "KV cache": cache})
    phases = [generating, training_phase(actor, others, tokens)]
    for critic in (role for role in others if role.role == "critic"):
        rest = [role for role in roles if role is not critic]
        phases.append(training_phase(critic, rest, _critic_tokens(config, batches)))
    return Estimate(roles, phases, cache_tokens, wanted)


def micro_batch_tokens(batches: BatchPlan) -> int | None:
    """Tokens in the largest micro-batch; None where the engine measures what fits."""
    if batches.micro_batch_sequences is not None:
        return batches.micro_batch_sequences * batches.sequence_tokens
    if batches.micro_batch_tokens is not None:
        return max(batches.micro_batch_tokens, batches.sequence_tokens)
    return None


def _critic_tokens(config: PPOConfig, batches: BatchPlan) -> int | None:
    critic = config.critic
    if critic.use_dynamic_bsz:
        budget = critic.ppo_max_token_len_per_gpu
        return None if budget is None else max(budget, batches.sequence_tokens)
    micro = critic.ppo_micro_batch_size_per_gpu
    return None if micro is None else min(micro, batches.rank_sequences) * batches.sequence_tokens


def training_phase(role: RoleMemory, others: list[RoleMemory], tokens: int | None) -> Phase:
    """An update of one role; `tokens` in a micro-batch, None when they are measured to fit."""
    parts = {
        "weights": role.weights,
        "gradients": role.gradients,
        "optimiser": role.optimiser,
        "output matrix": role.workspace,
    }
    if tokens is not None:
        parts["activations"] = role.activations_per_token * tokens
    resting = sum(other.at_rest for other in others)
    if resting:
        parts["other roles"] = resting
    return Phase(f"update {role.role}", parts)


def generating_phase(actor: RoleMemory, others: list[RoleMemory], cache: int) -> Phase:
    """Generating from the actor's own weights, gathered whole."""
    resting = sum(other.at_rest for other in others)
    optimiser = 0 if actor.optimiser_parked else actor.optimiser
    shard = actor.weights if actor.whole_weights > actor.weights and not actor.params_parked else 0
    return Phase(
        "generate",
        {
            "weights": actor.whole_weights + shard,
            "optimiser": optimiser,
            "KV cache": cache,
            "other roles": resting,
        },
    )
