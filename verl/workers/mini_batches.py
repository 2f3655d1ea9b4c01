"""How an update is cut: epochs, mini-batches, and the denominators every part of a mini-batch shares.

What always holds: the mini-batches are the same sequences in the same order whatever the number of ranks, so
that a run does not depend on how many processes carry it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from verl.algorithms.aggregation import batch_counts
from verl.data.proto import DataProto


def mini_batches(batch: DataProto, size: int, epochs: int, *, seed: int) -> Iterator[DataProto]:
    """`epochs` passes over `batch` in pieces of `size` sequences, each carrying its own denominators.

    The first pass keeps the order (groups stay together); later ones are shuffled."""
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        order = torch.randperm(len(batch), generator=generator) if epoch else torch.arange(len(batch))
        for start in range(0, len(batch), size):
            mini = batch[order[start : start + size]]
            mini.meta_info = {**batch.meta_info, **batch_counts(mini.batch["response_mask"])}
            yield mini
