"""Datasets under verl's import path. Their home is `verl.data.own_dataset`."""

from __future__ import annotations

from verl.data.own_dataset import RLHFDataset, collate_fn

__all__ = ["RLHFDataset", "collate_fn"]
