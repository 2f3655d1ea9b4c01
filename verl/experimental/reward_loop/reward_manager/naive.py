"""`verl.experimental.reward_loop.reward_manager` has all of them."""

from __future__ import annotations

from verl.reward.manager_classes import RowRewardManager as NaiveRewardManager

__all__ = ["NaiveRewardManager"]
