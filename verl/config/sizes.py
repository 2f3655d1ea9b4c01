"""Sizes of a model, from a copy that transformers builds on the meta device, and the memory one rank needs in each
phase of a step.

Exact: weights, gradients (summed in float32), optimiser state, KV cache. Estimated: activations. Logits are never
stored: the output matrix is applied in chunks, which are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.capabilities import engine_spec, strategy_spec
from verl.config.model_path import cached_config, config_problem, hub_silence
from verl.config.parallelism import Layout, engine_size, offload_section, rollout_pool
from verl.config.roles import ModelRole, roles_of
from verl.config.schema import OfflineConfig, PPOConfig
from verl.errors import ModelError

if TYPE_CHECKING:
    from verl.config.plan import RunPlan

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
    norms: int  # of the inputs of a layer's norms, per token: in `kept` twice and in `kept_float32` once
    experts: int  # of the weights of experts, in all layers
    linears: tuple[tuple[str, int], ...]  # name, inputs + outputs of each linear layer but the output matrix

    @property
    def value_parameters(self) -> int:
        """As a critic: one number per token in place of the output matrix."""
        return self.parameters - self.head + self.hidden

    def stage_weights(self, layout: Layout, value_head: bool) -> tuple[int, int]:
        """On each rank of the largest pipeline stage: dense weights, and weights of experts. Norms, which every
        tensor-parallel rank holds, are taken as split."""
        output = self.hidden if value_head else self.head
        if layout.pp == 1:
            ends = self.embedding + output
        else:  # a tied embedding is on the first and on the last stage
            ends = max(self.embedding, output)
        layers = self.parameters - self.embedding - self.head - self.experts
        dense = -(-layers // layout.pp) + ends
        return -(-dense // layout.tp), self.experts // (layout.pp * layout.ep)

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
        norms=norms,
        experts=sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name),
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
        if cached is None and (reason := hub_silence()):  # transformers would ask for most of a minute
            raise ModelError(
                f"'{path}' is no folder and not in the Hugging Face cache, and the hub cannot be reached ({reason}). "
                "A folder with its config.json alone is enough for a plan"
            )
        folder = cached.parent if cached else Path(path)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        if problem := config_problem(folder):
            raise ValueError(problem)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        for name, value in (override or {}).items():
            setattr(config, name, value)
        with torch.device("meta"):
            return sizes_of(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    except Exception as error:  # transformers checks configs in many places, each with its own exceptions
        raise ModelError(
            f"no language model can be built from '{path}': {str(error).partition(chr(10))[0]}"
        ) from None


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
    moments: int = 0  # on all ranks together
    full_weights: int = 0  # of the unsharded model, which generating needs
    activations_per_token: int = 0
    master_copy: bool = False  # the optimiser keeps a float32 copy of 16-bit weights
    workspace: int = 0  # for the output matrix, while training
    params_offloaded: bool = False  # while the role does not work
    optimiser_offloaded: bool = False
    sequence_ranks: int = 1  # that split the tokens of a micro-batch
    always: int = 0  # of the weights, on the device even while they are offloaded

    @property
    def idle(self) -> int:
        """On the device while another role works."""
        weights = self.always if self.params_offloaded else self.weights
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
    running: int = 0  # sequences that an engine generates at the same time


def activation_bytes(
    sizes: ModelSizes,
    element: int,
    *,
    checkpointing: bool,
    offload: bool,
    layout: Layout | None = None,
    in_flight: int = 1,
) -> int:
    """Per token from the forward to the backward pass, with the working set of one layer's backward. Tensor-parallel
    ranks split all but the norms; a pipeline stage keeps its layers' activations of `in_flight` micro-batches."""
    layout = layout or Layout()
    split, split_float32 = sizes.kept - 2 * sizes.norms, sizes.kept_float32 - sizes.norms
    layer = (2 * sizes.norms + split // layout.tp) * element + (sizes.norms + split_float32 // layout.tp) * 4
    layers = -(-sizes.layers * in_flight // layout.pp)
    if offload:
        return 2 * layer
    return layers * sizes.hidden * element + 2 * layer if checkpointing else (layers + 1) * layer


def _trained(role: ModelRole, sizes: ModelSizes, optim: Any, plan: RunPlan) -> RoleMemory:
    """A model with its optimiser."""
    model, section, layout, kind = role.model, role.section, role.layout, plan.device.kind
    full_shards = strategy_spec(section.strategy).full_shards
    element, value_head = element_bytes(model.dtype, kind), role.name == "critic"
    parameters = trained = sizes.value_parameters if value_head else sizes.parameters
    if model.lora_rank > 0:
        trained = sizes.lora_parameters(model.lora_rank, model.target_modules)
        parameters += trained
    elif model.freeze_embeddings:
        trained -= sizes.embedding
    master = 0 if element == 4 or optim.stochastic_rounding else 4
    moments = trained * optim.state_bytes
    if optim.name == "muon" and model.lora_rank == 0:  # the other weights have two of AdamW
        moments += 4 * (sizes.head + (0 if model.freeze_embeddings else sizes.embedding))
    on_device = 0 if kind == "cuda" and full_shards and section.fsdp_config.offload_policy else 1
    if not full_shards:
        dense, experts = sizes.stage_weights(layout, value_head)
        held = summed = dense + experts
        replicas = layout.dp * layout.cp
        updated = dense // replicas + experts // (layout.stage_ranks // layout.ep or 1)
    else:
        shards = _shards(section, plan)
        held, summed, updated = parameters // shards, trained // shards, trained // shards
    stages = min(layout.pp, plan.batches(role.name).micro_batches or layout.pp)
    _, offload = offload_section(section)
    return RoleMemory(
        role=role.name,
        parameters=parameters,
        trained=trained,
        weights=on_device * held * element,
        gradients=on_device * summed * 4,
        optimiser=on_device * (moments * updated // trained + updated * master),
        moments=moments,
        full_weights=parameters * element,
        master_copy=master > 0,
        activations_per_token=activation_bytes(
            sizes,
            element,
            checkpointing=model.enable_gradient_checkpointing,
            offload=model.enable_activation_offload,
            layout=layout,
            in_flight=stages,
        ),
        workspace=0 if value_head else 2 * _LOGITS_CHUNK[kind] + sizes.embedding * 4 // layout.tp,
        params_offloaded=offload.param_offload and kind == "cuda",
        optimiser_offloaded=offload.optimizer_offload and kind == "cuda",
        sequence_ranks=layout.cp,
    )


def _frozen(role: ModelRole, sizes: ModelSizes, plan: RunPlan) -> RoleMemory:
    kind = plan.device.kind
    if not strategy_spec(role.section.strategy).full_shards:
        held = sum(sizes.stage_weights(role.layout, value_head=False))
    else:
        held = sizes.parameters // _shards(role.section, plan)
    offloaded = kind == "cuda" and offload_section(role.section)[1].param_offload
    element = element_bytes(role.model.dtype, kind)
    copied = 0
    if role.name == "teacher" and role.section.top_k is None and (offloaded or held < sizes.parameters):
        copied = (sizes.head or sizes.embedding) * element  # each rank of the student has the output matrix
    return RoleMemory(
        role.name, sizes.parameters, 0, held * element + copied, params_offloaded=offloaded, always=copied
    )


def _shards(section: Any, plan: RunPlan) -> int:
    """Ranks that share one copy of a role's weights."""
    return plan.world_size if section.fsdp_config.fsdp_size == -1 else section.fsdp_config.fsdp_size


def role_memory(plan: RunPlan) -> list[RoleMemory]:
    """The models of a run; the trained one comes first."""
    config, found = plan.config, []
    # The frozen starts that have the section of the role they are the start of; the actor's has one of its own.
    starts = (
        {role.section for role in roles_of(config) if role.start_of} if isinstance(config, PPOConfig) else ()
    )
    for role in plan.roles:
        optim = config.optim if isinstance(config, OfflineConfig) else getattr(role.section, "optim", None)
        own = plan.sizes[role.name]
        if own is None:
            continue
        found.append(_frozen(role, own, plan) if optim is None else _trained(role, own, optim, plan))
        if role.name in starts and role.model.lora_rank == 0:
            found.append(replace(_frozen(role, own, plan), role=f"{role.name}'s start"))
    return found


def estimate(plan: RunPlan) -> Estimate:
    """Roles and phases of a step."""
    config, device, found, batches = plan.config, plan.device, plan.role_memory, plan.batches()
    updates = []
    for role in filter(lambda role: role.trained, found):
        parts = {
            "weights": role.weights,
            "gradients": role.gradients,
            "optimiser": role.optimiser,
            "output matrix": role.workspace,
            "other roles": sum(other.idle for other in found if other is not role),
        }
        # Where the engine measures what fits, the longest sequence must.
        own = plan.batches(role.role)
        tokens = own.largest_micro_batch or own.sequence_tokens
        parts["activations"] = role.activations_per_token * -(-tokens // role.sequence_ranks)
        updates.append(Phase(f"update {role.role}", parts))
    if isinstance(config, OfflineConfig):
        return Estimate(found, updates)
    actor, idle, sizes = found[0], found[1:], plan.sizes[plan.roles[0].name]
    assert sizes is not None  # a plan has those of the model first trained
    rollout, pool, size = config.actor_rollout_ref.rollout, rollout_pool(config), engine_size(config)
    engines = (rollout.nnodes * rollout.n_gpus_per_node if pool else plan.world_size) // size
    running = min(-(-batches.sequences // engines), rollout.most_sequences)
    cache_tokens = running * batches.sequence_tokens
    element = element_bytes(config.actor_rollout_ref.model.dtype, device.kind)
    cache_bytes, sequence_bytes = (
        tokens * sizes.cache * element for tokens in (cache_tokens, batches.sequence_tokens)
    )
    # The GPUs of an engine share its weights and its cache. The native engine uses the trainer's weights where a rank
    # has all of them, else a gathered copy; other engines have their own.
    weights, cache = actor.full_weights // size, cache_bytes // size
    layout = plan.roles[0].layout
    shared = layout.tp * layout.pp * layout.ep == 1
    if strategy_spec(plan.roles[0].section.strategy).full_shards:
        shared = plan.world_size == 1
    copied = engine_spec(rollout.name).owns_weights or not shared
    if device.memory is not None:
        # The engine never takes more than its share; sequences that do not fit wait their turn.
        share = rollout.gpu_memory_utilization if device.kind == "cuda" else 1.0
        cache = min(cache, max(int(device.memory * share) - weights, 0))
    parts = {"weights": weights, "KV cache": cache}
    if not pool:
        parts["weights"] += actor.weights if copied and not actor.params_offloaded else 0
        parts["optimiser"] = 0 if actor.optimiser_offloaded else actor.optimiser
        parts["other roles"] = sum(other.idle for other in idle)
    return Estimate(
        found,
        [Phase("generate", parts), *updates],
        cache_tokens,
        cache_bytes,
        sequence_bytes // size,
        running,
    )
