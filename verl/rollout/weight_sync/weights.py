"""The output matrix of models that share it with the input embedding.

It is sent under its own name too: an engine that repacks its copy would otherwise keep the old one without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from verl.errors import RolloutError

Pairs = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class TiedHead:
    """The two names of one matrix."""

    embedding: str
    head: str


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
