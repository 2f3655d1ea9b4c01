"""`verl.utils.dataset` has all of them."""

from __future__ import annotations

from verl.data.own_dataset import RLHFDataset, collate_fn

__all__ = ["RLHFDataset", "collate_fn"]
