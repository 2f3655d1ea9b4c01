"""Build an FSDP engine: load or take the model, prepare and shard it, make the optimiser.

Order matters: adapters, freezing, checkpointing and fused layers come before sharding, the optimiser after it, because
sharding replaces parameters. Whether the model can be packed or compiled is found out by running it once.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl.engines.fsdp import FSDPEngine
from verl.engines.microbatch_runner import MicroBatchRunner, sum_of
from verl.engines.optim import MasterAdamW
from verl.engines.settings import EngineSettings, Kind, read_settings
from verl.engines.sharding import CollectiveReplay, EngineRanks, load_shards, reshard, shard
from verl.engines.weights import GatheredCopy, copy_to_meta
from verl.errors import ConfigError, ModelError
from verl.models.attention import register_attention, use_verl_attention
from verl.models.fused_linear import HeadOptions
from verl.models.introspection import (
    checkpoint_contexts,
    decoder_layers,
    per_row,
    position_limit,
    token_weights,
)
from verl.models.kernels import compile_together, triton_fault
from verl.models.loading import CannotStream, cast_parameters, load_causal_lm, load_value_model
from verl.models.lora import add_lora, given_lora
from verl.models.packability import head_fault, keep_score_cap, packing_fault, padding_fault, randomness_fault
from verl.models.packing import attach, pack
from verl.models.value_model import ValueModel, disable_dropout
from verl.models.weight_source import remember_dtypes

if TYPE_CHECKING:
    from verl.models.meta_init import ParameterIndex
    from verl.models.ulysses import SequenceGroup

log = logging.getLogger(__name__)


def build_fsdp(
    kind: Kind,
    model_cfg: Any,
    role_cfg: Any,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> FSDPEngine:
    """Strategies `fsdp` and `fsdp2`; arguments as in `verl.engines.build_engine`."""
    settings = read_settings(kind, model_cfg, role_cfg, **options)
    ranks = EngineRanks(settings.device, role_cfg.fsdp_config.fsdp_size)
    sequence = ranks.sequence_group(role_cfg.ulysses_sequence_parallel_size)
    torch.manual_seed(settings.seed)
    index: ParameterIndex | None = None
    if model is not None:
        module = _prepared(settings, model, ranks)
    elif ranks.world_size == 1:
        module = load_model(settings, ranks.device)
    else:  # sharding moves it to the device layer by layer, so that the device never holds all of it
        module, index = open_model(settings) or (load_model(settings, torch.device("cpu")), None)
    return assemble(module, settings, ranks, index=index, external=optimizer, sequence=sequence)


def assemble(
    module: Any,
    settings: EngineSettings,
    ranks: EngineRanks,
    *,
    index: ParameterIndex | None = None,
    external: torch.optim.Optimizer | None = None,
    sequence: SequenceGroup | None = None,
) -> FSDPEngine:
    """From a loaded module to an engine. `index` has the weights of a module on the meta device; `external` is a user's
    optimiser; `sequence` are the ranks that split sequences."""
    _choose_trained(module, settings)
    keep_score_cap(module)
    stock_attention = module.config._attn_implementation or "sdpa"
    packed = _use_packed_attention(module, settings, sequence)
    if settings.exact and packed:
        from verl.models.exact import use_exact

        use_exact(module, settings.device, settings.dtype)
    longest, compiled = position_limit(module), settings.trained and settings.role.use_torch_compile
    if settings.trained and settings.model.enable_gradient_checkpointing:
        checkpointing: dict[str, Any] = {"use_reentrant": False}
        if longest is not None:
            checkpointing["context_fn"] = checkpoint_contexts
        if settings.exact:
            from verl.models.exact import recomputed_exactly

            checkpointing["context_fn"] = recomputed_exactly
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    module.eval()
    if not compiled and ranks.device.type == "cuda":
        from verl.models.fused_layers import fuse

        fuse(module, ranks.device)
    per_row(module)
    attach(module)
    remember_dtypes(module, settings.dtype)
    mesh = _mesh(settings, ranks)
    gathered_copy = replay = None
    if mesh is not None:
        gathered_copy = _shard(module, settings, mesh, index)
        replay = CollectiveReplay(module, replicated=mesh.ndim == 2)
    if mesh is None and packed and ranks.device.type == "cuda":
        compile_together("training", partial(_try_pass, module, settings))
    packed = _checked(module, settings, packed, stock_attention, sequence, replay)
    if settings.exact and not packed:
        raise ModelError(
            f"trainer.exact=True needs packed sequences, which {type(module).__name__} cannot have"
        )
    layers, text_config = decoder_layers(module), module.config.get_text_config()
    layer_weights = sum(count for layer in layers for _, count in token_weights(layer, text_config))
    layer_weights /= len(layers)
    optimizer = graphs = None
    if settings.schedule is not None:
        trained = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        matrices = None
        if settings.role.optim.name == "muon":
            from verl.engines.muon import hidden_matrices

            hidden = hidden_matrices(layers)
            matrices = {name for name, param in trained if id(param) in hidden}
        optimizer = MasterAdamW(trained, external=external, matrices=matrices, **settings.optimizer_options())
        same_dtype = all(param.dtype == settings.dtype for _, param in trained)
        if mesh is None and packed and same_dtype and _captures(settings):
            from verl.engines.backbone_graphs import MEMORY_SHARE, BackboneGraphs

            share = min(MEMORY_SHARE, 2 * MEMORY_SHARE * (1 - settings.rollout_memory))
            positions = longest and longest[0]
            graphs = BackboneGraphs(module, optimizer, ranks.device, layer_weights, positions, share)
    options = settings.runner_options(
        layer_weights,
        packed=packed,
        optimizer=optimizer,
        graphs=graphs,
        replay=replay,
        sequence=sequence,
        longest=longest,
    )
    runner = MicroBatchRunner(module, ranks, options)
    if compiled:
        _try_compiled(module, runner, layers)
    return FSDPEngine(module, settings, ranks, runner, sharded=mesh is not None, gathered_copy=gathered_copy)


def _try_pass(module: Any, settings: EngineSettings) -> None:
    """A pass over a few tokens, backwards too where the model is trained."""
    ids = torch.zeros(2, 64, dtype=torch.long)
    packed = pack(ids, torch.ones_like(ids), torch.ones_like(ids[:, 1:]), settings.device)
    try:
        with torch.set_grad_enabled(settings.trained):
            outputs = module.verl_forward(packed, HeadOptions(with_entropy=True))
        if settings.trained:
            sum_of(outputs).backward()
    finally:
        module.zero_grad()


def _use_packed_attention(module: Any, settings: EngineSettings, sequence: SequenceGroup | None) -> bool:
    """Whether the model shall be packed and takes our attention."""
    wanted = bool(settings.model.use_remove_padding)
    packed = wanted and use_verl_attention(module, settings.attention_backend(module.config))
    if sequence is not None:
        from verl.models.ulysses import SIZE_KEY, check_heads

        if not wanted:
            raise ConfigError(
                f"{SIZE_KEY}={sequence.size} splits packed sequences, but model.use_remove_padding is false; set it to "
                f"true, or {SIZE_KEY}=1"
            )
        check_heads(module.config.get_text_config().num_attention_heads, sequence.size)
    if wanted and not packed:
        _pad(module, sequence, "it does not use transformers' attention interface")
    return packed


def _shard(
    module: nn.Module, settings: EngineSettings, mesh: DeviceMesh, index: ParameterIndex | None
) -> GatheredCopy | None:
    """Shard the module and fill it; the copy to generate from."""
    copy, options = copy_to_meta(module), settings.role.fsdp_config
    in_place = settings.trained and settings.role.optim.stochastic_rounding
    shard(module, mesh, options, settings.dtype, float32_masters=not in_place)
    if index is not None:
        load_shards(module, mesh, index, torch.device("cpu") if options.offload_policy else settings.device)
    return None if copy is None else GatheredCopy(module, copy, settings.device, settings.dtype)


def load_model(settings: EngineSettings, device: torch.device) -> nn.Module:
    """The model of `model.path` on a device."""
    load = load_value_model if settings.scalar else load_causal_lm
    return load(settings.model.path, device=device, **settings.load_options())


def open_model(settings: EngineSettings) -> tuple[nn.Module, ParameterIndex] | None:
    """The model of `model.path` on the meta device, and where in its files the weights are; None, and a warning, where
    they cannot be read in parts."""
    from verl.models.meta_init import open_causal_lm, open_value_model

    path, opened = settings.model.path, open_value_model if settings.scalar else open_causal_lm
    try:
        return opened(path, **settings.load_options())
    except CannotStream as reason:
        text = "%s: every rank loads all of %r into host memory before sharding: %s"
        log.warning(text, settings.kind, path, reason)
        return None


def _prepared(settings: EngineSettings, model: Any, ranks: EngineRanks) -> Any:
    """A user's model as the engine needs it."""
    if hasattr(model, "get_base_model"):  # a model of peft
        model = model.get_base_model()
    if not settings.lora and given_lora(model) is not None:
        raise ConfigError("the model has LoRA adapters, but model.lora_rank is 0; set it to their rank")
    if settings.scalar and not isinstance(model, ValueModel):
        model = ValueModel(getattr(model, "base_model", model), reward=settings.kind == "reward")
    disable_dropout(model)
    if settings.model.dtype != "auto":
        cast_parameters(model, settings.dtype)
    else:
        settings.dtype = next(model.parameters()).dtype
    return model.to(ranks.device if ranks.world_size == 1 else torch.device("cpu"))


def _choose_trained(module: Any, settings: EngineSettings) -> None:
    model = settings.model
    module.requires_grad_(settings.trained)
    if settings.lora:
        add_lora(
            module,
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            target_modules=model.target_modules,
            base_path=model.path,
        )
    if settings.trained and model.freeze_embeddings:
        module.get_input_embeddings().requires_grad_(False)


def _mesh(settings: EngineSettings, ranks: EngineRanks) -> DeviceMesh | None:
    """With one rank there is nothing to shard; only host offloading layer by layer needs a mesh, of one."""
    if ranks.mesh is not None or not (
        settings.role.fsdp_config.offload_policy and ranks.device.type == "cuda"
    ):
        return ranks.mesh
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cuda", (1,), mesh_dim_names=("shard",))


def _captures(settings: EngineSettings) -> bool:
    """Whether small passes become CUDA graphs. What recomputes or moves activations or compiles layers does not, nor
    weights that leave the device between steps: their graphs would keep the memory that is to be free then."""
    model, role = settings.model, settings.role
    return bool(
        settings.device.type == "cuda"
        and role.use_cuda_graphs
        and settings.dtype in (torch.bfloat16, torch.float16)
        and not model.enable_gradient_checkpointing
        and not model.enable_activation_offload
        and not role.use_torch_compile
        and not role.fsdp_config.param_offload
        and triton_fault(settings.device) is None
    )


def _checked(
    module: Any,
    settings: EngineSettings,
    packed: bool,
    stock_attention: str,
    sequence: SequenceGroup | None,
    replay: CollectiveReplay | None,
) -> bool:
    """Run the model on a few tokens, which are not split over ranks: whether it can be packed; refuse what cannot be
    trained."""
    device = settings.device
    if packed and (fault := packing_fault(module, device, stock_attention)):
        packed = False
        module.set_attn_implementation(stock_attention)
        _pad(module, sequence, fault)
        if replay is not None and replay.can_recover:
            replay.reset()  # a check that raised has left a sharded pass unfinished
    fault = None if packed else padding_fault(module, device)
    fault = fault or randomness_fault(module, device, packed)
    if not fault and not isinstance(module, ValueModel):
        fault = head_fault(module, device, packed, stock_attention)
    if fault:
        raise ModelError(f"{type(module).__name__} cannot be trained: {fault}")
    if replay is not None:
        reshard(module)
    return packed


def _try_compiled(module: nn.Module, runner: MicroBatchRunner, layers: list[nn.Module]) -> None:
    """torch.compile of each decoder layer, tried with one small pass; undone where that fails.

    Our attention stays outside the graphs, because its arguments (the lengths of the pack) differ at every call; shapes
    are dynamic, so that a new pack is not a new graph."""
    register_attention(outside_graphs=True)
    for layer in layers:
        layer.compile(dynamic=True)
    try:
        runner.probe(37, "train")  # a few tokens forward and backward
        module.zero_grad()
        module.eval()
    except Exception as error:  # compilers fail with anything: no toolchain, unsupported op, internal error
        for layer in layers:
            layer._compiled_call_impl = None
        import torch._dynamo

        torch._dynamo.reset()
        log.warning(
            "use_torch_compile: compiling failed, training continues without it (%s: %s)",
            type(error).__name__,
            str(error).strip().split("\n")[0][:200],
        )


def _pad(module: nn.Module, sequence: SequenceGroup | None, reason: str) -> None:
    """Say that the model is padded; refuse it where sequences are split."""
    if sequence is not None:
        from verl.models.ulysses import SIZE_KEY

        raise ModelError(
            f"{type(module).__name__} cannot be packed ({reason}), and only packed sequences can be split: set "
            f"{SIZE_KEY}=1 instead of {sequence.size}"
        )
    log.warning(
        "%s cannot be packed (%s): micro-batches are padded, which is slower; model.use_remove_padding=false silences "
        "this",
        type(module).__name__,
        reason,
    )
