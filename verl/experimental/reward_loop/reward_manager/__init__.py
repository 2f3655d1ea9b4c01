"""Reward managers of single rows under verl's import path. Their home is `verl.reward.manager_classes`."""

from __future__ import annotations

from verl.reward.manager_classes import RewardManagerBase, get_reward_manager_cls, register
from verl.reward.manager_classes import RowRewardManager as NaiveRewardManager

__all__ = ["NaiveRewardManager", "RewardManagerBase", "get_reward_manager_cls", "register"]
