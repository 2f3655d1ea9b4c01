"""The rows of a batch over ranks, and their results in the order of the batch again.

Padding rows have an empty response mask and one attended token: they change no result and cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from verl.algorithms.balance import karmarkar_karp, sequence_work
from verl.config.parallelism import Layout
from verl.data.proto import DataProto
from verl.models.shared_prefixes import PrefixTree, prompt_lengths
from verl.workers.roles import TOKEN_ROW

Arrays = dict[str, np.ndarray]
T = TypeVar("T")


def pad_rows(tensors: Mapping[str, torch.Tensor], divisor: int) -> dict[str, torch.Tensor]:
    """Masked rows appended until `divisor` divides their number."""
    rows = next(iter(tensors.values())).shape[0]
    missing = -rows % divisor
    if not missing:
        return dict(tensors)
    padded = {}
    for name, tensor in tensors.items():
        fill = tensor[:1].expand(missing, *tensor.shape[1:]).clone()
        if name == "response_mask":
            fill.zero_()
        elif name == TOKEN_ROW:
            fill.fill_(-1)
        elif name == "attention_mask":
            # One attended token, before the response: a row of none would be a row without softmax.
            fill.zero_()
            fill[:, tensor.shape[1] - tensors["response_mask"].shape[1] - 1] = 1
        padded[name] = torch.cat([tensor, fill])
    return padded


def shard_rows(
    attention_mask: torch.Tensor,
    shards: int,
    *,
    balance: bool,
    hidden_size: int,
    together: int = 1,
    sharing: Mapping[str, torch.Tensor] | None = None,
) -> list[list[int]]:
    """Row numbers of each shard: about the same work each (`balance`), or the same number of rows in order. So many
    consecutive rows stay `together`. `sharing`: the batch, where ranks compute the common beginnings of rows once.

    The number of rows must be divisible by `shards * together` (`pad_rows`)."""
    rows = attention_mask.shape[0]
    if not balance or shards == 1:
        size = rows // shards
        return [list(range(shard * size, (shard + 1) * size)) for shard in range(shards)]
    if sharing is not None and together == 1:
        return _shared_shards(sharing, shards, hidden_size)
    lengths = attention_mask.sum(dim=1, dtype=torch.long).view(-1, together).sum(1).tolist()
    units = karmarkar_karp(sequence_work(lengths, hidden_size), shards)
    return [[unit * together + at for unit in share for at in range(together)] for share in units]


_CUTS = (1, 4)
"""Into how many units, at least, the work of a shard is cut."""


def _shared_shards(batch: Mapping[str, torch.Tensor], shards: int, hidden_size: int) -> list[list[int]]:
    """Rows with one prompt are on one rank as far as that is the least work for the rank that has most."""
    ids, attended, wanted = (batch[name].numpy() for name in ("input_ids", "attention_mask", "response_mask"))
    tree, prompts = PrefixTree.of(ids, attended), prompt_lengths(attended, wanted)
    per_token = np.array(sequence_work(tree.lengths.tolist(), hidden_size)) / np.maximum(tree.lengths, 1)
    most = int(tree.costs().sum()) // shards

    def work(rows: list[int]) -> float:
        part = tree.part(rows)
        return float((part.costs() * per_token[rows][part.order]).sum())

    choices = [tree.units(prompts, max(most // cut, 1)) for cut in _CUTS]
    choices.append(([[row] for row in range(len(ids))], tree.lengths))
    found: list[tuple[float, list[list[int]]]] = []
    for units, added in choices:
        if len(units) >= shards:  # or a rank would have no rows
            parts = karmarkar_karp([float((added * per_token)[unit].sum()) for unit in units], shards)
            shares = [sorted(row for at in part for row in units[at]) for part in parts]
            found.append((max(map(work, shares)), shares))
    return min(found, key=lambda each: each[0])[1]


def for_ranks(layout: Layout, shares: Sequence[T]) -> list[T]:
    """What each rank is given: ranks that work on the same rows the same share."""
    return [shares[layout.data_rank(rank)] for rank in range(layout.world_size)]


def reported(layout: Layout, answers: Sequence[T]) -> list[T]:
    """The answer for each share, in their order: one of the ranks that worked on it."""
    return [answers[rank] for rank in layout.reporters()]


def to_arrays(tensors: Mapping[str, torch.Tensor], rows: Sequence[int] | None = None) -> Arrays:
    index = None if rows is None else torch.tensor(rows, dtype=torch.long)
    return {
        name: (tensor if index is None else tensor.index_select(0, index)).numpy()
        for name, tensor in tensors.items()
    }


def from_arrays(arrays: Mapping[str, np.ndarray], meta_info: Mapping[str, Any] | None = None) -> DataProto:
    """A copy: arrays out of shared memory are read-only."""
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    return DataProto.from_dict(tensors=tensors, meta_info=meta_info)


def join(parts: Sequence[Arrays], shards: Sequence[Sequence[int]], rows: int) -> DataProto:
    """The shards' results in the order of the batch, without those of padding rows."""
    order = torch.tensor([row for share in shards for row in share], dtype=torch.long)
    tensors = {}
    for name in parts[0]:
        together = torch.from_numpy(np.concatenate([part[name] for part in parts]))
        ordered = torch.empty_like(together)
        ordered[order] = together
        tensors[name] = ordered[:rows]
    return DataProto.from_dict(tensors=tensors)
