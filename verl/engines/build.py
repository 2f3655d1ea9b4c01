"""Put an FSDP engine together: load or take the model, prepare and shard it, make the optimiser.

What always holds: adapters, freezing and checkpointing are settled before sharding, the optimiser sees what is
left after it; whether the model can be packed or compiled is found out by running it once.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl.engines import budget
from verl.engines.collective_replay import CollectiveReplay
from verl.engines.fsdp import FSDPEngine
from verl.engines.load_shards import fill
from verl.engines.microbatch_runner import MicroBatchRunner
from verl.engines.offload import ActivationOffload
from verl.engines.optim import MasterAdamW
from verl.engines.ranks import Ranks
from verl.engines.schedule import Schedule
from verl.engines.settings import EngineSettings, Kind, read_settings
from verl.engines.sharding import decoder_layers, release, shard
from verl.engines.whole_copy import WholeCopy, copy_without_weights
from verl.errors import ModelError
from verl.models.attention import use_verl_attention
from verl.models.forward import attach
from verl.models.fused_layers import fuse
from verl.models.loading import cast_parameters, disable_dropout, load_causal_lm, load_value_model
from verl.models.lora import add_lora
from verl.models.meta_init import CannotStream, WeightSource, open_causal_lm, open_value_model
from verl.models.packability import head_fault, packing_fault, padding_fault, randomness_fault
from verl.models.sizes import token_weights
from verl.models.value_model import ValueModel

log = logging.getLogger(__name__)


def build_fsdp(
    kind: Kind,
    model_cfg: Any,
    role_cfg: Any,
    *,
    model: nn.Module | None,
    device: str | torch.device,
    total_steps: int | None,
    seed: int,
    log_prob_cfg: Any = None,
    max_skipped_steps: int = 3,
    bad_batch_dir: Path | None = None,
) -> FSDPEngine:
    """Strategies `fsdp` and `fsdp2`; arguments as in `verl.engines.build_engine`."""
    device = torch.device(device)
    settings = read_settings(
        kind,
        model_cfg,
        role_cfg,
        device=device,
        log_prob=log_prob_cfg,
        max_skipped_steps=max_skipped_steps,
        bad_batch_dir=bad_batch_dir,
        seed=seed,
    )
    optim = None if kind == "ref" else role_cfg.optim
    schedule = None if optim is None else Schedule.from_config(optim, total_steps)
    ranks = Ranks(device, settings.sharding.fsdp_size)
    torch.manual_seed(seed)
    source = None
    if model is None:
        module, source = _load(kind, model_cfg, settings, ranks)
    else:
        module = _given(kind, model_cfg, settings, model, ranks)
    return assemble(
        module, settings, ranks, optim=optim, schedule=schedule, base_path=model_cfg.path, source=source
    )


def assemble(
    module: Any,
    settings: EngineSettings,
    ranks: Ranks,
    *,
    optim: Any,
    schedule: Schedule | None,
    base_path: str = "",
    source: WeightSource | None = None,
) -> FSDPEngine:
    """From a loaded module to an engine. `optim` is the optimiser section, None for a frozen engine; `source` has
    the weights of a module that was opened without them, for several ranks."""
    _choose_trained(module, settings, base_path, trained=optim is not None)
    stock_attention = module.config._attn_implementation or "sdpa"
    packed = settings.packed and use_verl_attention(module)
    if settings.packed and not packed:
        _tell_padded(module, "it does not use transformers' attention interface")
    if settings.gradient_checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module.eval()
    if not settings.torch_compile:
        fuse(module, ranks.device)
    attach(module)
    mesh = _mesh(settings, ranks)
    whole_copy = None
    if mesh is not None:
        copy = copy_without_weights(module)
        in_place = optim is not None and optim.stochastic_rounding
        shard(module, mesh, settings.sharding, settings.dtype, float32_masters=not in_place)
        if source is not None:
            on_host = settings.sharding.offload_policy
            fill(module, mesh, source, torch.device("cpu") if on_host else ranks.device)
        if copy is not None:
            whole_copy = WholeCopy(module, copy, ranks.device, settings.dtype)
    text_config = module.config.get_text_config()
    hidden_size = int(text_config.hidden_size)
    layers = decoder_layers(module)
    layer_weights = sum(count for layer in layers for _, count in token_weights(layer, text_config)) / len(
        layers
    )
    passes = MicroBatchRunner(
        module,
        ranks.device,
        ranks,
        packed=packed,
        train_cut=replace(settings.train_cut, hidden_size=hidden_size),
        forward_cut=replace(settings.forward_cut, hidden_size=hidden_size),
        label=settings.kind,
        cap_tokens=budget.best_tokens(layer_weights) if ranks.device.type == "cuda" else budget.CAP_CPU,
    )
    if mesh is not None:
        passes.release = lambda: release(module)
        passes.in_step = CollectiveReplay(module, replicated=mesh.ndim == 2)
    _find_out(module, passes, stock_attention)
    if settings.torch_compile:
        _try_compiled(passes, layers)
    if settings.activation_offload and ranks.device.type != "cpu":
        passes.activation_offload = ActivationOffload(ranks.device)
    optimizer = _optimizer(module, settings, optim, schedule)
    if optimizer is not None:
        passes.clear_gradients = optimizer.zero_grad
        passes.reserve_bytes = partial(_reserved_bytes, optimizer, settings.sharding.optimizer_offload)
    return FSDPEngine(
        module, settings, ranks, passes, optimizer, sharded=mesh is not None, whole_copy=whole_copy
    )


def _load(
    kind: Kind, model_cfg: Any, settings: EngineSettings, ranks: Ranks
) -> tuple[nn.Module, WeightSource | None]:
    """The model of `model.path`: whole with one rank; with several, its shell and where its weights are."""
    if not model_cfg.path:
        raise ModelError(
            "no model is given; set actor_rollout_ref.model.path to a Hugging Face folder or name"
        )
    options: dict[str, Any] = {
        "dtype": settings.dtype,
        "trust_remote_code": bool(model_cfg.trust_remote_code),
        "override_config": dict(model_cfg.override_config),
    }
    load = load_value_model if kind == "critic" else load_causal_lm
    if ranks.world_size == 1:
        return load(model_cfg.path, device=ranks.device, **options), None
    try:
        return (open_value_model if kind == "critic" else open_causal_lm)(model_cfg.path, **options)
    except CannotStream as reason:
        log.warning(
            "%s: every rank loads the whole of %r into host memory before it is sharded: %s",
            settings.kind,
            model_cfg.path,
            reason,
        )
    # Sharding moves layer by layer to the device, so that a rank never holds the whole model there.
    return load(model_cfg.path, device=torch.device("cpu"), **options), None


def _given(kind: Kind, model_cfg: Any, settings: EngineSettings, model: Any, ranks: Ranks) -> Any:
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if kind == "critic" and not isinstance(model, ValueModel):
        model = ValueModel(getattr(model, "base_model", model))
    disable_dropout(model)
    if model_cfg.dtype != "auto":
        cast_parameters(model, settings.dtype)
    else:
        settings.dtype = next(model.parameters()).dtype
    return model.to(ranks.device if ranks.world_size == 1 else torch.device("cpu"))


def _choose_trained(module: Any, settings: EngineSettings, base_path: str, trained: bool) -> None:
    module.requires_grad_(trained)
    if settings.lora is not None:
        lora = settings.lora
        add_lora(
            module, rank=lora.rank, alpha=lora.alpha, target_modules=lora.target_modules, base_path=base_path
        )
    if settings.freeze_embeddings:
        module.get_input_embeddings().requires_grad_(False)


def _mesh(settings: EngineSettings, ranks: Ranks) -> DeviceMesh | None:
    """With one rank there is nothing to shard; only host offloading layer by layer needs a mesh, of one."""
    if ranks.mesh is not None or not (settings.sharding.offload_policy and ranks.device.type == "cuda"):
        return ranks.mesh
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cuda", (1,), mesh_dim_names=("shard",))


def _optimizer(
    module: nn.Module, settings: EngineSettings, optim: Any, schedule: Schedule | None
) -> MasterAdamW | None:
    if optim is None or schedule is None:
        return None
    return MasterAdamW(
        [(name, param) for name, param in module.named_parameters() if param.requires_grad],
        schedule=schedule,
        weight_decay=float(optim.weight_decay),
        betas=(float(optim.betas[0]), float(optim.betas[1])),
        eps=float(optim.eps),
        grad_clip=settings.grad_clip,
        moments=optim.moments,
        stochastic_rounding=bool(optim.stochastic_rounding),
        seed=settings.seed,
        scale_loss=settings.dtype == torch.float16,
    )


def _reserved_bytes(optimizer: MasterAdamW, moments_on_host: bool, kind: str) -> int:
    """What the optimiser will hold beside a pass of this kind and does not hold yet."""
    if kind == "train":
        return optimizer.missing_moments() + optimizer.gradient_sums()
    return 0 if moments_on_host else optimizer.missing_moments()


def _find_out(module: Any, passes: MicroBatchRunner, stock_attention: str) -> None:
    """Run the model on a few tokens: pad what cannot be packed, refuse what cannot be trained."""
    if passes.packed:
        fault = packing_fault(module, passes.device, stock_attention)
        if fault:
            passes.packed = False
            module.set_attn_implementation(stock_attention)
            _tell_padded(module, fault)
            _forget_broken_pass(passes)
    fault = None if passes.packed else padding_fault(module, passes.device)
    fault = fault or randomness_fault(module, passes.device, passes.packed)
    if not fault and not isinstance(module, ValueModel):
        fault = head_fault(module, passes.device, passes.packed, stock_attention)
    if fault:
        raise ModelError(f"{type(module).__name__} cannot be trained here: {fault}")
    passes.release()


def _forget_broken_pass(passes: MicroBatchRunner) -> None:
    """A check that raised in the middle of a sharded pass leaves it unfinished."""
    if passes.in_step is not None and passes.in_step.can_recover:
        passes.in_step.forget()


def _try_compiled(passes: MicroBatchRunner, layers: list[nn.Module]) -> None:
    """One small pass forward and backward; where it fails, the model goes on uncompiled."""
    from verl.models.compiling import compile_layers, undo

    compile_layers(layers)
    try:
        passes.try_once()
    except (
        Exception
    ) as error:  # compilers fail with anything: missing toolchain, unsupported op, internal error
        undo(layers)
        log.warning(
            "use_torch_compile: compiling failed, training goes on without it (%s: %s)",
            type(error).__name__,
            str(error).strip().split("\n")[0][:200],
        )


def _tell_padded(module: nn.Module, reason: str) -> None:
    log.warning(
        "%s cannot be packed (%s): micro-batches are padded instead, which is slower; "
        "model.use_remove_padding=false says so without this notice",
        type(module).__name__,
        reason,
    )
