"""Masked sums and means under verl's import path. Their home is `verl.algorithms.aggregation`."""

from __future__ import annotations

from verl.algorithms.aggregation import masked_mean, masked_sum, masked_var, masked_whiten

__all__ = ["masked_mean", "masked_sum", "masked_var", "masked_whiten"]
