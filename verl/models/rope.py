"""Rotary embeddings whose frequencies depend on the length of the sequence ("longrope", "dynamic").

transformers decides by the longest sequence of a batch, and for "dynamic" also by what ran before. Invariant of a model
given to `per_row`: every row of a batch gets the frequencies it has alone, whatever its neighbours are and whatever
came before. Who calls the model says how long the rows are (`row_lengths`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from verl.errors import ModelError
from verl.models.introspection import class_of

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
