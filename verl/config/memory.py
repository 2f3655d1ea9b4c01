"""An estimate of the memory one rank needs, from a model's sizes and the config. Pure arithmetic.

What is exact: weights, gradients (summed in float32), optimiser (two float32 moments and, for 16-bit weights, a
float32 master copy), KV cache per token. What is estimated: activations, from the tensors one layer keeps for its
backward pass. The output matrix is applied in chunks, so logits are never held; the chunk is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.model_shape import ModelShape
from verl.config.schema import PPOConfig, SFTConfig

_CHUNK = {"cuda": 640 << 20, "cpu": 32 << 20}
"""Bytes of one chunk of logits; forward and backward hold up to two."""


def gib(size: int) -> str:
    """Bytes in words."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 // 10 else f"{size / 2**20:.1f} MiB"


def bytes_per_element(dtype: str, kind: str) -> int:
    """Of parameters in `dtype` on a device of this kind."""
    if dtype == "auto":
        return 2 if kind == "cuda" else 4
    return {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}[dtype]


@dataclass(frozen=True)
class RoleMemory:
    """Bytes one role holds on one rank."""

    role: str
    parameters: int
    trained: int
    weights: int
    gradients: int = 0
    optimiser: int = 0
    whole_weights: int = 0
    """Of the unsharded model, which generating needs."""
    activations_per_token: int = 0
    has_master: bool = False
    """The optimiser keeps a float32 copy of 16-bit weights."""
    workspace: int = 0
    """For the output matrix, while training."""
    params_parked: bool = False
    """The weights are in host memory while the role does not work."""
    optimiser_parked: bool = False

    @property
    def at_rest(self) -> int:
        """On the device while another role works."""
        weights = 0 if self.params_parked else self.weights
        return weights + (0 if self.optimiser_parked else self.optimiser)


def activation_bytes(shape: ModelShape, element: int, *, checkpointing: bool, offload: bool) -> int:
    """Kept per token from the forward to the backward pass, with the working set of one layer's backward."""
    # Each norm keeps its input in float32 and two results; attention its four projections, with norms on queries
    # and keys in float32 once more; a gated MLP four tensors of its width.
    norms = shape.norms * shape.hidden * (2 * element + 4)
    attention = (2 * shape.query + 2 * shape.key_value) * element
    if shape.qk_norm:
        attention += (shape.query + shape.key_value) * (element + 4)
    layer = norms + attention + 4 * shape.intermediate * element
    if offload:
        return 2 * layer
    if checkpointing:
        return shape.layers * shape.hidden * element + 2 * layer
    return (shape.layers + 1) * layer


def trained_role(
    name: str,
    shape: ModelShape,
    model: Any,
    optim: Any,
    fsdp: Any,
    shards: int,
    kind: str,
    *,
    value_head: bool,
) -> RoleMemory:
    """A model with its optimiser: the actor, the critic, or the model of fine-tuning."""
    element = bytes_per_element(model.dtype, kind)
    parameters = shape.value_parameters if value_head else shape.parameters
    trained = parameters
    if model.lora_rank > 0:
        trained = shape.lora_parameters(model.lora_rank, model.target_modules)
        parameters += trained
    elif model.freeze_embeddings:
        trained -= shape.embedding
    moments = 2 if optim.moments == "int8" else 8
    master = 0 if element == 4 or optim.stochastic_rounding else 4
    on_device = kind == "cpu" or not fsdp.offload_policy
    weights = parameters * element // shards
    return RoleMemory(
        role=name,
        parameters=parameters,
        trained=trained,
        weights=weights if on_device else 0,
        gradients=trained * 4 // shards if on_device else 0,
        optimiser=trained * (moments + master) // shards if on_device else 0,
        whole_weights=parameters * element,
        has_master=master > 0,
        activations_per_token=activation_bytes(
            shape,
            element,
            checkpointing=model.enable_gradient_checkpointing,
            offload=model.enable_activation_offload,
        ),
        workspace=0 if value_head else 2 * _CHUNK[kind] + shape.embedding * 4,
        params_parked=fsdp.param_offload and kind == "cuda",
        optimiser_parked=fsdp.optimizer_offload and kind == "cuda",
    )


def shards_of(strategy: str, role: Any, world: int) -> int:
    """Ranks that share one copy of a role's weights."""
    if strategy == "megatron":
        return role.megatron.tensor_model_parallel_size * role.megatron.pipeline_model_parallel_size
    return world if role.fsdp_config.fsdp_size == -1 else role.fsdp_config.fsdp_size


def ppo_roles(
    config: PPOConfig, shape: ModelShape, critic_shape: ModelShape | None, world: int, kind: str
) -> list[RoleMemory]:
    """The roles a PPO config asks for."""
    policy = config.actor_rollout_ref
    shards = shards_of(policy.actor.strategy, policy.actor, world)
    actor, fsdp = policy.actor, policy.actor.fsdp_config
    roles = [
        trained_role("actor", shape, policy.model, actor.optim, fsdp, shards, kind, value_head=False),
    ]
    uses_reference = actor.use_kl_loss or config.algorithm.use_kl_in_reward
    if uses_reference and policy.model.lora_rank == 0:
        element = bytes_per_element(policy.model.dtype, kind)
        shards = shards_of(policy.ref.strategy, policy.ref, world)
        parked = kind == "cuda" and policy.ref.fsdp_config.param_offload
        weights = shape.parameters * element // shards
        roles.append(RoleMemory("ref", shape.parameters, 0, weights, params_parked=parked))
    if config.critic.enable and critic_shape is not None:
        critic, model = config.critic, config.critic.model
        shards = shards_of(critic.strategy, critic, world)
        roles.append(
            trained_role(
                "critic", critic_shape, model, critic.optim, critic.fsdp_config, shards, kind, value_head=True
            )
        )
    return roles


def sft_roles(config: SFTConfig, shape: ModelShape, world: int, kind: str) -> list[RoleMemory]:
    """The one role of fine-tuning."""
    model = config.model
    shards = shards_of(model.strategy, model, world)
    return [
        trained_role("model", shape, model, config.optim, model.fsdp_config, shards, kind, value_head=False)
    ]
