"""Helpers of models that plug-ins import."""

from __future__ import annotations

from torch import Tensor

from verl.missing_names import explain


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Positions [B, T] from an attention mask: 0, 1, 2, ... over the tokens that are not padding."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


__getattr__ = explain(__name__)
