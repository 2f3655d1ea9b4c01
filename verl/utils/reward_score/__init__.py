"""The scorers of `verl.reward.scorers` under verl's import path, for reward functions that call them."""

from __future__ import annotations

from verl.reward.functions import default_compute_score

__all__ = ["default_compute_score"]
