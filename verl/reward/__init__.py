"""Rewards: functions in worker processes, scorers, the sandbox for model-written code, reward models and judges.

Importing this package loads no torch, so that a worker process starts quickly.
"""

from __future__ import annotations

from verl.reward.base import FailureAccount, RewardManager, RewardResult, RewardSample
from verl.reward.managers import build_reward_manager, register_reward_manager
from verl.reward.scorers import get_scorer, register_scorer

__all__ = [
    "FailureAccount",
    "RewardManager",
    "RewardResult",
    "RewardSample",
    "build_reward_manager",
    "get_scorer",
    "register_reward_manager",
    "register_scorer",
]
