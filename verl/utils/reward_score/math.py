"""The older name of `verl.utils.reward_score.math_reward`."""

from __future__ import annotations

from verl.utils.reward_score.math_reward import compute_score, is_equiv

__all__ = ["compute_score", "is_equiv"]
