"""`verl.workers.reward_manager` has all of them."""

from __future__ import annotations

from verl.reward.manager_classes import get_reward_manager_cls, register

__all__ = ["get_reward_manager_cls", "register"]
