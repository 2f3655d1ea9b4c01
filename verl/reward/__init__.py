"""Rewards: find and call a stranger's function safely, our scorers, the sandbox, model rewards and judges.

Importing this room loads no torch, so that a worker process starts quickly.
"""

from __future__ import annotations

from verl.reward.base import RewardManager, RewardResult, RewardSample
from verl.reward.build import build_reward_manager, register_reward_manager
from verl.reward.failures import FailureAccount
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
