"""An estimate of the memory one rank needs in each phase of a step, from a model's sizes and the config.

Exact: weights, gradients (summed in float32), optimiser state, KV cache. Estimated: activations. Logits are never
held: the output matrix is applied in chunks, which are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.config.batch_math import BatchPlan, batch_plan
from verl.config.machine import Device
from verl.config.model_sizes import ModelSizes
from verl.config.pools import engine_size, rollout_pool
from verl.config.ranks import world_size
from verl.config.schema import PPOConfig, SFTConfig

_LOGITS_CHUNK = {"cuda": 640 << 20, "cpu": 32 << 20}  # forward and backward hold up to two
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


def gib(size: int) -> str:
    """Bytes as text."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 // 10 else f"{size / 2**20:.1f} MiB"


def element_bytes(dtype: str, kind: str) -> int:
    """Of one parameter in `dtype` on a device of this kind."""
    return _BYTES.get(dtype, 2 if kind == "cuda" else 4)  # auto


@dataclass(frozen=True)
class RoleMemory:
    """Bytes one role holds on one rank."""

    role: str
    parameters: int
    trained: int
    weights: int
    gradients: int = 0
    optimiser: int = 0
    whole_weights: int = 0  # of the unsharded model, which generating needs
    activations_per_token: int = 0
    master_copy: bool = False  # the optimiser keeps a float32 copy of 16-bit weights
    workspace: int = 0  # for the output matrix, while training
    params_offloaded: bool = False  # while the role does not work
    optimiser_offloaded: bool = False

    @property
    def idle(self) -> int:
        """On the device while another role works."""
        weights = 0 if self.params_offloaded else self.weights
        return weights + (0 if self.optimiser_offloaded else self.optimiser)


@dataclass(frozen=True)
class Phase:
    """A phase of a step and the bytes on the device meanwhile, by what they are for."""

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
    cache_tokens: int = 0  # in the KV cache when all sequences that run at the same time are at their longest
    cache_bytes: int = 0
    sequence_bytes: int = 0  # of the KV cache of one sequence at its longest, on one device


def activation_bytes(sizes: ModelSizes, element: int, *, checkpointing: bool, offload: bool) -> int:
    """Per token from the forward to the backward pass, with the working set of one layer's backward."""
    layer = sizes.kept * element + sizes.kept_float32 * 4
    if offload:
        return 2 * layer
    return sizes.layers * sizes.hidden * element + 2 * layer if checkpointing else (sizes.layers + 1) * layer


def _trained(
    name: str, sizes: ModelSizes, model: Any, optim: Any, role: Any, config: PPOConfig | SFTConfig, kind: str
) -> RoleMemory:
    """A model with its optimiser."""
    element, fsdp, value_head = element_bytes(model.dtype, kind), role.fsdp_config, name == "critic"
    parameters = trained = sizes.value_parameters if value_head else sizes.parameters
    if model.lora_rank > 0:
        trained = sizes.lora_parameters(model.lora_rank, model.target_modules)
        parameters += trained
    elif model.freeze_embeddings:
        trained -= sizes.embedding
    moments = 2 if optim.moments == "int8" else 8
    master = 0 if element == 4 or optim.stochastic_rounding else 4
    shards = _shards(role, config)
    on_device = 0 if kind == "cuda" and fsdp.offload_policy else 1
    return RoleMemory(
        role=name,
        parameters=parameters,
        trained=trained,
        weights=on_device * parameters * element // shards,
        gradients=on_device * trained * 4 // shards,
        optimiser=on_device * trained * (moments + master) // shards,
        whole_weights=parameters * element,
        master_copy=master > 0,
        activations_per_token=activation_bytes(
            sizes,
            element,
            checkpointing=model.enable_gradient_checkpointing,
            offload=model.enable_activation_offload,
        ),
        workspace=0 if value_head else 2 * _LOGITS_CHUNK[kind] + sizes.embedding * 4,
        params_offloaded=fsdp.param_offload and kind == "cuda",
        optimiser_offloaded=fsdp.optimizer_offload and kind == "cuda",
    )


def _shards(role: Any, config: PPOConfig | SFTConfig) -> int:
    """Ranks that share one copy of a role's weights."""
    return world_size(config) if role.fsdp_config.fsdp_size == -1 else role.fsdp_config.fsdp_size


def roles(
    config: PPOConfig | SFTConfig, sizes: ModelSizes, critic_sizes: ModelSizes | None, kind: str
) -> list[RoleMemory]:
    """The models of a run; the trained one comes first."""
    if isinstance(config, SFTConfig):
        return [_trained("model", sizes, config.model, config.optim, config.model, config, kind)]
    policy, critic = config.actor_rollout_ref, config.critic
    found = [_trained("actor", sizes, policy.model, policy.actor.optim, policy.actor, config, kind)]
    if (policy.actor.use_kl_loss or config.algorithm.use_kl_in_reward) and policy.model.lora_rank == 0:
        weights = sizes.parameters * element_bytes(policy.model.dtype, kind) // _shards(policy.ref, config)
        offloaded = kind == "cuda" and policy.ref.fsdp_config.param_offload
        found.append(RoleMemory("ref", sizes.parameters, 0, weights, params_offloaded=offloaded))
    if critic.enable and critic_sizes is not None:
        found.append(_trained("critic", critic_sizes, critic.model, critic.optim, critic, config, kind))
    return found


def estimate(
    config: PPOConfig | SFTConfig, sizes: ModelSizes, critic_sizes: ModelSizes | None, device: Device
) -> Estimate:
    """Roles and phases of a config on a device."""
    found, batches = roles(config, sizes, critic_sizes, device.kind), batch_plan(config)
    updates = [
        _update(
            role, [other for other in found if other is not role], _micro_batch_tokens(config, role, batches)
        )
        for role in found
        if role.trained
    ]
    if isinstance(config, SFTConfig):
        return Estimate(found, updates)
    actor, others = found[0], found[1:]
    rollout, pool, size = config.actor_rollout_ref.rollout, rollout_pool(config), engine_size(config)
    engines = rollout.nnodes * rollout.n_gpus_per_node // size if pool else batches.ranks
    running = min(-(-batches.sequences // engines), rollout.max_num_seqs)
    cache_tokens = running * batches.sequence_tokens
    element = element_bytes(config.actor_rollout_ref.model.dtype, device.kind)
    cache_bytes, sequence_bytes = (
        tokens * sizes.cache * element for tokens in (cache_tokens, batches.sequence_tokens)
    )
    # GPUs of a pool share the weights and the cache of their engine; the trainer's ranks hold whole weights each.
    whole, cache = (
        (actor.whole_weights // size, cache_bytes // size) if pool else (actor.whole_weights, cache_bytes)
    )
    if device.memory is not None:
        # The engine never takes more than its share; sequences that do not fit wait their turn.
        share = rollout.gpu_memory_utilization if device.kind == "cuda" else 1.0
        cache = min(cache, max(int(device.memory * share) - whole, 0))
    parts = {"weights": whole, "KV cache": cache}
    if not pool:
        parts["weights"] += actor.weights if whole > actor.weights and not actor.params_offloaded else 0
        parts["optimiser"] = 0 if actor.optimiser_offloaded else actor.optimiser
        parts["other roles"] = sum(other.idle for other in others)
    return Estimate(
        found,
        [Phase("generate", parts), *updates],
        cache_tokens,
        cache_bytes,
        sequence_bytes // (size if pool else 1),
    )


def _micro_batch_tokens(config: PPOConfig | SFTConfig, role: RoleMemory, batches: BatchPlan) -> int | None:
    """Tokens in the largest micro-batch; None where the engine measures what fits."""
    micro, budget = batches.micro_batch_sequences, batches.micro_batch_tokens
    if role.role == "critic" and isinstance(config, PPOConfig):
        critic = config.critic
        micro = None if critic.use_dynamic_bsz else critic.ppo_micro_batch_size_per_gpu
        budget = critic.ppo_max_token_len_per_gpu if critic.use_dynamic_bsz else None
    if micro is not None:
        return min(micro, batches.rank_sequences) * batches.sequence_tokens
    return None if budget is None else max(budget, batches.sequence_tokens)


def _update(role: RoleMemory, others: list[RoleMemory], tokens: int | None) -> Phase:
    parts = {
        "weights": role.weights,
        "gradients": role.gradients,
        "optimiser": role.optimiser,
        "output matrix": role.workspace,
        "other roles": sum(other.idle for other in others),
    }
    if tokens is not None:
        parts["activations"] = role.activations_per_token * tokens
    return Phase(f"update {role.role}", parts)
