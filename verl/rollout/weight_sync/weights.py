"""What leaves the trainer: whole weights under their Hugging Face names, one at a time.

What always holds: a tied output matrix is sent under its own name too. Engines that repack their copy of it would
otherwise go on with the old one, without any error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl.errors import RolloutError
from verl.models.lora import merged_weights, plain_name
from verl.rollout.source import causal_lm, whole_module

Pairs = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class TiedHead:
    """The two names of one matrix."""

    embedding: str
    head: str


def module_of(source: Any) -> AbstractContextManager[nn.Module]:
    """The module for looking at, not for computing: sharded weights need not be gathered for that."""
    model = None if isinstance(source, nn.Module) else getattr(source, "model", None)
    return nullcontext(model) if isinstance(model, nn.Module) else whole_module(source)


def tied_head(model: Any) -> TiedHead | None:
    """The names of the input and the output matrix where the model shares them, else None."""
    config = model.config.get_text_config()
    if not getattr(config, "tie_word_embeddings", False):
        return None
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    if head is None or id(embedding) not in names or id(head) not in names:
        return None
    return TiedHead(f"{names[id(embedding)]}.weight", f"{names[id(head)]}.weight")


def with_tied_head(pairs: Pairs, tied: TiedHead | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs, and the output matrix after them where it is tied and was not among them."""
    seen_head, embedding = False, None
    for name, tensor in pairs:
        if tied is not None:
            seen_head = seen_head or name == tied.head
            embedding = tensor if name == tied.embedding else embedding
        yield name, tensor
    if tied is not None and not seen_head:
        if embedding is None:
            raise RolloutError(
                f"the weights hold neither {tied.head} nor {tied.embedding}, but the model's config ties them; "
                "export every weight, or set tie_word_embeddings to False in the model's config"
            )
        yield tied.head, embedding


def weights_of(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of a TrainEngine, of a module, or of name and tensor pairs; adapters merged in."""
    if hasattr(source, "export_parameters"):
        yield from source.export_parameters()
    elif isinstance(source, nn.Module):
        yield from merged_weights(source)
    else:
        yield from source


def base_weights(source: Any) -> Pairs:
    """Every weight as it was before adapters, under the names of the model's files, for an engine that takes the
    adapters apart. A source that receives them says when they are there."""
    if hasattr(source, "base_parameters"):
        later: Pairs = source.base_parameters()
        return later
    return _base_weights(source)


def _base_weights(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    from transformers.core_model_loading import revert_weight_conversion

    with module_of(source) as module:
        model = causal_lm(module)
        for name, value in model.state_dict(keep_vars=True).items():
            plain = plain_name(name)
            if plain is not None:
                # Where transformers joins tensors on loading (the experts of a mixture), they come apart again.
                yield from revert_weight_conversion(
                    model, {plain: whole(value, computed_type(source))}
                ).items()


def whole(value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A weight gathered from its shards (all ranks in step), in `dtype` where it is a float."""
    tensor = value.detach()
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def computed_type(source: Any) -> torch.dtype | None:
    """The type a TrainEngine computes with: shards may be kept in a wider one."""
    dtype = getattr(getattr(source, "settings", None), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None
