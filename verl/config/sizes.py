"""Sizes of a model, from a copy that transformers builds on the meta device, and what follows from them: the memory
one rank needs in each phase of a step, and the size of a run's checkpoints.

Exact: weights, gradients (summed in float32), optimiser state, KV cache. Estimated: activations. Logits are never
stored: the output matrix is applied in chunks, which are counted.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.config.batch_math import BatchPlan, batch_plan
from verl.config.machine import Device
from verl.config.model_path import cached_config
from verl.config.parallelism import engine_size, rollout_pool, world_size
from verl.config.schema import PPOConfig, SFTConfig
from verl.errors import ModelError

HF_BY_DEFAULT_BELOW = 10_000_000_000  # parameters from which on checkpoints leave hf_model out by default
_LOGITS_CHUNK = {"cuda": 640 << 20, "cpu": 32 << 20}  # forward and backward hold up to two
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


@dataclass(frozen=True)
class ModelSizes:
    """Numbers of elements."""

    parameters: int
    embedding: int
    head: int  # of the output matrix; 0 where it is tied to the embedding
    hidden: int
    layers: int
    cache: int  # of the KV cache, per token
    kept: int  # kept per token and layer for the backward pass in the type of the weights (an estimate)
    kept_float32: int  # the same in float32, by norms
    linears: tuple[tuple[str, int], ...]  # name, inputs + outputs of each linear layer but the output matrix

    @property
    def value_parameters(self) -> int:
        """As a critic: one number per token in place of the output matrix."""
        return self.parameters - self.head + self.hidden

    def lora_parameters(self, rank: int, targets: list[str]) -> int:
        """Of LoRA adapters on the named modules."""
        endings = tuple(f".{target}" for target in targets)
        chosen = [
            size for name, size in self.linears if "all-linear" in targets or f".{name}".endswith(endings)
        ]
        return rank * sum(chosen)


def sizes_of(model: Any) -> ModelSizes:
    """The sizes of a transformers model, on the meta device or any other."""
    config = model.config.get_text_config()
    hidden, layers = config.hidden_size, config.num_hidden_layers
    heads = getattr(config, "num_attention_heads", 0)
    head_dim = getattr(config, "head_dim", None) or hidden // max(heads, 1)
    query, key_value = heads * head_dim, (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    width = getattr(config, "intermediate_size", None) or 4 * hidden
    experts = getattr(config, "num_experts_per_tok", None)
    if experts:
        width = experts * (getattr(config, "moe_intermediate_size", None) or width)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    linears, norms, qk_norm = [], 0, False
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and weight is not None:
            norms += weight.numel() == hidden
            qk_norm |= weight.numel() == head_dim != hidden
        if type(module).__name__ in ("Linear", "Conv1D") and module is not output:
            linears.append((name, sum(weight.shape)))
    norms = max(norms // layers, 1) * hidden
    normed = query + key_value if qk_norm else 0
    # Each norm keeps its input in float32 and two results; attention keeps its four projections, a gated MLP four
    # tensors of its width.
    kept = 2 * norms + 2 * query + 2 * key_value + normed + 4 * width
    tied = output is None or output.weight is embedding.weight
    return ModelSizes(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        embedding=embedding.weight.numel(),
        head=0 if tied else sum(parameter.numel() for parameter in output.parameters()),
        hidden=hidden,
        layers=layers,
        cache=2 * layers * key_value,
        kept=kept,
        kept_float32=norms + normed,
        linears=tuple(linears),
    )


def read_sizes(
    path: str, override: Mapping[str, Any] | None = None, *, download: bool = False
) -> ModelSizes | None:
    """The sizes of a model folder or hub id; None for an id that is not in the local cache (unless `download`)."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if path.startswith((".", "/", "~")) or path.count("/") != 1:
            raise ModelError(f"there is no model folder '{path}'")
        cached = cached_config(path)
        if cached is None and not download:
            return None
        folder = cached.parent if cached else Path(path)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        for name, value in (override or {}).items():
            setattr(config, name, value)
        with torch.device("meta"):
            return sizes_of(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    except Exception as error:  # transformers checks configs in many places, each with its own exceptions
        raise ModelError(
            f"no language model can be built from '{path}': {str(error).partition(chr(10))[0]}"
        ) from None


def critic_sizes_of(config: PPOConfig | SFTConfig, sizes: ModelSizes) -> ModelSizes | None:
    """The sizes of the critic's model; None where there is no critic, or its model is not here."""
    if not isinstance(config, PPOConfig) or not config.critic.enable:
        return None
    model = config.critic.model
    if model.path == config.actor_rollout_ref.model.path:
        return sizes
    return read_sizes(model.path, model.override_config)


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
    full_weights: int = 0  # of the unsharded model, which generating needs
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
        full_weights=parameters * element,
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
    # GPUs of a pool share the weights and the cache of their engine; the trainer's ranks hold full weights each.
    weights, cache = (
        (actor.full_weights // size, cache_bytes // size) if pool else (actor.full_weights, cache_bytes)
    )
    if device.memory is not None:
        # The engine never takes more than its share; sequences that do not fit wait their turn.
        share = rollout.gpu_memory_utilization if device.kind == "cuda" else 1.0
        cache = min(cache, max(int(device.memory * share) - weights, 0))
    parts = {"weights": weights, "KV cache": cache}
    if not pool:
        parts["weights"] += actor.weights if weights > actor.weights and not actor.params_offloaded else 0
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


@dataclass(frozen=True)
class DiskVerdict:
    """Why a run cannot save, and why it may not save all it plans to; empty where it can."""

    error: str = ""
    warning: str = ""


def checkpoint_bytes(
    config: PPOConfig | SFTConfig, sizes: ModelSizes, critic_sizes: ModelSizes | None, kind: str
) -> int:
    """Tensors of one checkpoint: master weights, moments and, where they are not hard links to them, full weights."""
    sections: list[tuple[Any, Any, Any]]
    if isinstance(config, SFTConfig):
        sections = [(config.model, config.optim, config.checkpoint)]
    else:
        policy, critic = config.actor_rollout_ref, config.critic
        sections = [
            (policy.model, policy.actor.optim, policy.actor.checkpoint),
            (critic.model, critic.optim, critic.checkpoint),
        ]
    total = 0
    trained = [role for role in roles(config, sizes, critic_sizes, kind) if role.trained]
    for role, (model, optim, checkpoint) in zip(trained, sections, strict=False):
        saved = role.trained if model.lora_rank else role.parameters
        contents = checkpoint.save_contents
        if contents is None:
            contents = ["model", "optimizer", *(["hf_model"] if saved < HF_BY_DEFAULT_BELOW else [])]
        element = role.full_weights // role.parameters
        master = element if optim.stochastic_rounding else 4
        linked = world_size(config) == 1 and master == element and not model.lora_rank and "model" in contents
        total += saved * master if "model" in contents else 0
        total += role.trained * (2 if optim.moments == "int8" else 8) if "optimizer" in contents else 0
        total += role.full_weights if "hf_model" in contents and not linked else 0
    return total


def disk_verdict(
    config: PPOConfig | SFTConfig, size: int, free: int, *, total_steps: int | None = None, present: int = 0
) -> DiskVerdict:
    """`size`: bytes of one checkpoint; `present`: checkpoints the run folder holds already."""
    trainer = config.trainer
    where = f"trainer.default_local_dir={trainer.default_local_dir}"
    if size > free:
        contents = "checkpoint" if isinstance(config, SFTConfig) else "actor_rollout_ref.actor.checkpoint"
        return DiskVerdict(
            error=f"{where}: a checkpoint takes about {gib(size)} and {gib(free)} are free. Set "
            f"trainer.default_local_dir to another disk, or {contents}.save_contents=[hf_model]"
        )
    total_steps, keep = total_steps or trainer.total_training_steps, trainer.max_actor_ckpt_to_keep
    if total_steps is None:
        return DiskVerdict()
    planned = -(-total_steps // trainer.save_freq) if trainer.save_freq > 0 else 1
    if keep is not None:  # an old one is deleted after the new one is complete
        planned = min(planned, keep + 1 + bool(trainer.keep_best))
    planned -= present
    if planned * size <= free:
        return DiskVerdict()
    fit = free // size
    fewer = f"trainer.max_actor_ckpt_to_keep={fit - 1}" if fit > 1 else "a larger trainer.save_freq"
    return DiskVerdict(
        warning=f"{where}: {planned} checkpoints of about {gib(size)} are planned ({total_steps} "
        f"steps, trainer.save_freq={trainer.save_freq}, trainer.max_actor_ckpt_to_keep={keep}), and {gib(free)} are "
        f"free, enough for {fit}. Set {fewer}, or trainer.default_local_dir to another disk"
    )


def free_bytes(folder: str | Path) -> int | None:
    """Free space where a folder is, or will be; None where the system does not say."""
    path = Path(folder).expanduser().absolute()
    while not path.exists() and path.parent != path:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None
