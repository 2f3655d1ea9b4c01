"""What a Hugging Face module consists of: backbone, output head, decoder layers, weights multiplied per token.

Rotary embeddings whose frequencies depend on the length of the sequence ("longrope", "dynamic") are of the module too.
transformers decides by the longest sequence of a batch, and for "dynamic" also by what ran before. Invariant of a model
given to `per_row`: every row of a batch gets the frequencies it has alone, whatever its neighbours are and whatever
came before. Who calls the model says how long the rows are (`row_lengths`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from verl.errors import ModelError
from verl.models.value_model import ValueModel

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")


def class_of(module: nn.Module) -> type:
    """The module's class, without the one FSDP2 puts in front of it (`FSDPLlamaDecoderLayer`)."""
    bases = type(module).__mro__
    return next(base for base in bases if not base.__module__.startswith("torch.distributed.fsdp"))


@dataclass(frozen=True)
class OutputHead:
    """The output matrix of a causal language model and what its architecture does to the logits."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None
    scale: float


def backbone_of(model: Any) -> Any:
    """The model without its output head: its output has `last_hidden_state`."""
    if isinstance(model, ValueModel):
        return model.backbone
    inner = model.base_model
    if inner is model:  # its backbone has another name than `base_model_prefix` (Llama-4's text model)
        inner = getattr(model, "model", None)
    if inner is None or inner is model:
        raise ModelError(f"{type(model).__name__} has no backbone separate from its output head")
    return inner


def output_head(model: Any) -> OutputHead:
    """Read at every call: under sharding the weight is another tensor while the module runs."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear) or hasattr(layer, "base_layer"):
        raise ModelError(
            f"the output layer of {type(model).__name__} is a {type(layer).__name__}, not a plain linear layer; "
            "with LoRA, leave the output layer out of model.target_modules"
        )
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )
    return OutputHead(layer.weight, layer.bias, getattr(config, "final_logit_softcapping", None), scale)


def kept_in_float32(model: Any, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Matches the names of weights that transformers keeps in float32 where the others are of `dtype`; None: it keeps
    none."""
    owner = model.backbone if isinstance(model, ValueModel) else model
    ends = {torch.float16: ("", "_strict"), torch.bfloat16: ("_strict",)}.get(dtype, ())
    parts = [part for end in ends for part in getattr(owner, f"_keep_in_fp32_modules{end}", None) or ()]
    return re.compile("|".join(part.replace("*", ".*") for part in parts)) if parts else None


def is_exact(model: Any) -> bool:
    """Whether `verl.models.exact.use_exact` was called for it: its passes give the same bits."""
    return bool(getattr(model, "verl_exact", False))


def decoder_layers(model: Any) -> list[nn.Module]:
    """The repeated blocks: the classes the model declares unsplittable, else the longest list of modules."""
    backbone = model.backbone if isinstance(model, ValueModel) else model
    names = set(getattr(backbone, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if class_of(module).__name__ in names]
    if layers:
        return layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max((list(found) for found in lists), key=len, default=[])


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((int(value) for value in found if isinstance(value, int) and value > 0), None)


def token_weights(module: nn.Module, config: Any) -> Iterator[tuple[nn.Parameter, float]]:
    """Each parameter and how many of its numbers one token is multiplied with: of a mixture's experts, those it is
    routed to. `config` is the model's text config."""
    experts, used = _first(config, _EXPERTS), _first(config, _USED)
    for name, param in module.named_parameters():
        count = float(param.numel())
        if experts and used:
            # Experts are a list of modules called `experts`, or one parameter whose first dimension they are.
            routed = ".experts." in f".{name}" or (param.ndim == 3 and param.shape[0] == experts)
            count = count * used / experts if routed else count
        yield param, count


def tied_names(model: Any) -> dict[str, str]:
    """Names of the state dict that share their values with another name, and that name."""
    if isinstance(model, ValueModel) or not model.config.tie_word_embeddings:
        return {}
    tied, names = getattr(model, "_tied_weights_keys", None) or {}, model.state_dict().keys()
    return {name: target for name, target in tied.items() if name in names and target in names}


_row_lengths: ContextVar[np.ndarray | None] = ContextVar("row_lengths", default=None)


@contextmanager
def row_lengths(lengths: np.ndarray | None) -> Iterator[None]:
    """While the context lasts, `lengths` [b, L] says of each token how long its row is. None: one row, or rows that
    are all below the limit."""
    token = _row_lengths.set(lengths)
    try:
        yield
    finally:
        _row_lengths.reset(token)


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of torch's gradient checkpointing: a layer with a rotary embedding of its own, recomputed in the
    backward pass, sees the row lengths it was first computed with."""
    return nullcontext(), row_lengths(_row_lengths.get())


def _limits(module: Any) -> dict[str | None, tuple[int, str]]:
    """Of a rotary embedding, for each kind of layer (None: for all): up to how many tokens the frequencies are the
    same, and which kind of embedding it is. Empty where they never change."""
    kinds = getattr(module, "rope_type", None)
    limits: dict[str | None, tuple[int, str]] = {}
    for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        if kind == "longrope":
            parameters = module.config.rope_parameters
            parameters = parameters if layer_type is None else parameters[layer_type]
            limits[layer_type] = int(parameters["original_max_position_embeddings"]), kind
        elif isinstance(kind, str) and "dynamic" in kind:
            limits[layer_type] = int(module.original_max_seq_len), kind
    return limits


def position_limit(model: nn.Module) -> tuple[int, str] | None:
    """The longest sequence with the frequencies of short ones, and the kind of rotary embedding that limits it. Beyond
    it frequencies are others from the first token on: cached keys and shared beginnings would be wrong."""
    return min((limit for module in model.modules() for limit in _limits(module).values()), default=None)


def per_row(model: nn.Module) -> None:
    """Let the model's rotary embeddings decide for each row of a batch. Others are left as they are."""
    for module in model.modules():
        if _limits(module):
            module.forward = MethodType(_forward, module)


def _forward(module: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
    limit, lengths = _limits(module).get(layer_type), _row_lengths.get()
    call = partial(_call, module, x, layer_type)
    if limit is None or lengths is None:
        return call(position_ids)
    if position_ids.shape == (1, lengths.shape[1]):  # the same for all rows
        position_ids = position_ids.expand(lengths.shape)
    if position_ids.shape != lengths.shape:
        raise ModelError(
            f"{class_of(module).__name__} ({limit[1]}) gets positions of shape {tuple(position_ids.shape)} for a batch "
            f"of {lengths.shape}: its frequencies cannot be chosen by the length of each row"
        )
    most, kind = limit
    beyond = np.full_like(lengths, most + 1) if kind == "longrope" else lengths
    return _by_length(call, position_ids, lengths, np.where(lengths > most, beyond, most).ravel())


def _by_length(
    call: Callable[[torch.Tensor], Any], position_ids: torch.Tensor, lengths: np.ndarray, deciding: np.ndarray
) -> Any:
    """One call of the module for all tokens whose rows have the same frequencies: those of a row of `deciding` tokens.

    transformers takes the largest position for the length, so a token at the row's last position is added to each
    call: this rank may not have it, where ranks split sequences. Padding gets a position inside of its row."""
    last = torch.from_numpy(lengths - 1).to(position_ids.device, non_blocking=True)
    positions = torch.minimum(position_ids, last).flatten()
    found: tuple[torch.Tensor, ...] = ()
    for length in np.unique(deciding).tolist():
        at = torch.from_numpy(np.flatnonzero(deciding == length)).to(positions.device, non_blocking=True)
        out = call(torch.cat([positions[at], positions.new_full((1,), length - 1)])[None])
        parts = out if isinstance(out, tuple) else (out,)
        found = found or tuple(part.new_empty(len(positions), part.shape[-1]) for part in parts)
        for whole, part in zip(found, parts, strict=True):
            whole[at] = part[0, :-1]
    rows = tuple(part.unflatten(0, position_ids.shape) for part in found)
    return rows if len(rows) > 1 else rows[0]


def _call(module: Any, x: torch.Tensor, layer_type: str | None, position_ids: torch.Tensor) -> Any:
    """The module's own forward, after which it has the frequencies it had before: "dynamic" would keep those of the
    longest sequence so far."""
    options = {} if layer_type is None else {"layer_type": layer_type}
    prefix = "" if layer_type is None else f"{layer_type}_"
    before = getattr(module, f"{prefix}inv_freq")
    try:
        return class_of(module).forward(module, x, position_ids, **options)  # type: ignore[attr-defined]
    finally:
        if getattr(module, f"{prefix}inv_freq") is not before:
            setattr(module, f"{prefix}inv_freq", before)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
