"""Build a Megatron engine: check the layout, open the model, build this rank's stage, read its slices of the files."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from verl.config.capabilities import strategy_spec
from verl.config.parallelism import Layout, layout_of
from verl.config.roles import ModelRole
from verl.engines.build import load_model, open_model
from verl.engines.megatron.engine import MegatronEngine
from verl.engines.megatron.groups import groups_of
from verl.engines.megatron.model import StageModel
from verl.engines.megatron.optimizer import StageAdamW
from verl.engines.megatron.pipeline import PipelineRunner
from verl.engines.megatron.places import Place, places
from verl.engines.microbatch_runner import MicroBatchRunner
from verl.engines.settings import EngineSettings, Kind, read_settings
from verl.engines.sharding import EngineRanks
from verl.engines.weights import copy_to_meta
from verl.errors import ConfigError, ModelError
from verl.models.attention import set_backend
from verl.models.introspection import decoder_layers, position_limit, token_weights
from verl.models.kernels import triton_fault
from verl.models.meta_init import ParameterIndex
from verl.models.ulysses import SequenceGroup
from verl.models.value_model import ValueModel, disable_dropout


def build_megatron(
    kind: Kind,
    model_cfg: Any,
    role_cfg: Any,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> MegatronEngine:
    """Strategy `megatron`; arguments as in `verl.engines.build_engine`."""
    if optimizer is not None:
        raise ConfigError("strategy=megatron has its own optimiser; set strategy=fsdp for one of yours")
    settings = read_settings(kind, model_cfg, role_cfg, **options)
    device, trained = settings.device, settings.trained
    ranks = EngineRanks(device, fsdp_size=None)
    layout = layout_of(role_cfg, ranks.world_size)
    torch.manual_seed(settings.seed)
    hf: Any
    if model is None:
        hf, index = open_model(settings) or _on_meta(settings, load_model(settings, torch.device("cpu")))
    else:
        hf, index = _taken(settings, model)
    check_layout(model_cfg, role_cfg, hf.config.get_text_config(), layout, ranks.world_size)
    groups = groups_of(layout)
    stage = StageModel(
        hf,
        groups,
        dtype=settings.dtype,
        device=device,
        value_head=kind == "critic",
        recompute=trained and model_cfg.enable_gradient_checkpointing,
        fused=device.type == "cuda" and triton_fault(device) is None,
    )
    set_backend(stage, settings.attention_backend(hf.config))
    stage.requires_grad_(trained)
    if trained and model_cfg.freeze_embeddings and groups.first:
        stage.gpt.embedding.requires_grad_(False)
    table = places(stage)
    load_stage(stage, table, index)
    stage.eval()
    runner = _runner(stage, hf, table, settings, ranks)
    return MegatronEngine(stage, hf, table, settings, ranks, runner)


def _taken(settings: EngineSettings, model: Any) -> tuple[Any, ParameterIndex]:
    """A user's model on the meta device, and its weights."""
    if settings.kind == "critic" and not isinstance(model, ValueModel):
        model = ValueModel(getattr(model, "base_model", model))
    disable_dropout(model)
    if settings.model.dtype == "auto":
        settings.dtype = next(model.parameters()).dtype
    return _on_meta(settings, model)


def _on_meta(settings: EngineSettings, model: Any) -> tuple[Any, ParameterIndex]:
    """A model in memory as one on the meta device, and where its weights are."""
    hf = copy_to_meta(model)
    if hf is None:
        raise ModelError(f"{type(model).__name__} cannot be copied; set strategy=fsdp for this model")
    return hf, ParameterIndex.of(model, settings.dtype)


def _runner(
    stage: StageModel, hf: Any, table: list[Place], settings: EngineSettings, ranks: EngineRanks
) -> MicroBatchRunner:
    groups, layout, config = stage.groups, stage.groups.layout, hf.config.get_text_config()
    weights = sum(count for layer in decoder_layers(hf) for _, count in token_weights(layer, config))
    sequence = optimizer = None
    if layout.cp > 1:
        sequence = SequenceGroup(groups.cp, groups.cp_rank, layout.cp, gradient_scale=1.0)
    if settings.schedule is not None:
        optimizer = StageAdamW(stage, table, **settings.optimizer_options())
    options = settings.runner_options(
        weights / config.num_hidden_layers / layout.tp,
        sequence=sequence,
        optimizer=optimizer,
        longest=position_limit(hf),
        halts_on_oom=layout.model_ranks * layout.ep > 1,
    )
    return (PipelineRunner if layout.pp > 1 else MicroBatchRunner)(stage, ranks, options)


def check_layout(model_cfg: Any, role_cfg: Any, hf: Any, layout: Layout, world: int) -> None:
    """Refuse what cannot be split: a model given in memory has not been checked with the config."""
    if layout.world_size != world:
        raise ConfigError(
            f"megatron sizes: {world} ranks are no multiple of tensor {layout.tp} x pipeline {layout.pp} x context "
            f"{layout.cp} = {layout.model_ranks}"
        )
    fits = strategy_spec("megatron").fits
    assert fits is not None
    for problem in fits(ModelRole("role", role_cfg, "model", model_cfg, layout), hf.to_dict()):
        raise ConfigError(problem)
    if hf.hidden_act != "silu":
        raise ModelError(
            f"strategy=megatron knows hidden_act='silu', the model's is {hf.hidden_act!r}; set strategy=fsdp"
        )
    if layout.stage_ranks % layout.ep:
        raise ConfigError(
            f"megatron.expert_model_parallel_size={layout.ep} does not divide the {layout.stage_ranks} ranks of a "
            "pipeline stage"
        )


@torch.no_grad()
def load_stage(model: StageModel, table: list[Place], index: ParameterIndex) -> None:
    """Every parameter of the stage; rows that belong to no weight (padding of the vocabulary) are zero."""
    used: dict[str, int] = {}
    for place in table:
        view = place.view(model.get_parameter(place.parameter))
        if tuple(view.shape) != place.sizes:
            raise ModelError(
                f"{place.name} has {place.sizes} numbers on this rank, its place in {place.parameter} is "
                f"{tuple(view.shape)}"
            )
        used[place.parameter] = max(used.get(place.parameter, 0), place.start + place.rows)
        if view.numel():
            start, columns = place.offsets[0], None
            if place.split == 1:
                first = place.offsets[1]
                columns = slice(first, first + place.sizes[1])
            index.read_rows(place.name, start, start + place.sizes[0], view, columns)
    for name, param in model.named_parameters():
        if name not in used:
            raise ModelError(f"no weight of the Hugging Face model belongs to {name}")
        param[used[name] :].zero_()
