"""Fill the parameters of a stage from the files of a Hugging Face model: each rank reads the slices it holds."""

from __future__ import annotations

import logging
from typing import Any

import torch

from verl.engines.megatron.model import StageModel
from verl.engines.megatron.places import Place
from verl.engines.settings import EngineSettings
from verl.engines.weights import copy_to_meta
from verl.errors import ModelError
from verl.models.loading import load_causal_lm, load_value_model
from verl.models.meta_init import ParameterIndex, open_causal_lm, open_value_model
from verl.models.safetensors_files import CannotStream

log = logging.getLogger(__name__)


def open_model(settings: EngineSettings) -> tuple[Any, ParameterIndex]:
    """The model of `model.path` on the meta device, and where its weights are: in its files or, where those cannot be
    read in parts, in host memory."""
    model_cfg, critic = settings.model, settings.kind == "critic"
    options = settings.load_options()
    try:
        return (open_value_model if critic else open_causal_lm)(model_cfg.path, **options)
    except CannotStream as reason:
        log.warning(
            "%s: every rank loads all of %r into host memory before sharding: %s",
            settings.kind,
            model_cfg.path,
            reason,
        )
    whole = (load_value_model if critic else load_causal_lm)(model_cfg.path, device="cpu", **options)
    module = copy_to_meta(whole)
    if module is None:
        raise ModelError(
            f"{type(whole).__name__} cannot be copied to the meta device; set strategy=fsdp for it"
        )
    return module, ParameterIndex.of(whole, settings.dtype)


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
