"""`verl.workers.reward_manager` has all of them."""

from __future__ import annotations

from verl.reward.manager_classes import PrimeRewardManager

__all__ = ["PrimeRewardManager"]
