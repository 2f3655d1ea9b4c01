"""The source of batches for a run's `trainer.async_training.mode`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.reward.base import RewardManager
from verl.trainer.experience import Experience, SyncExperience
from verl.trainer.pool_experience import PoolExperience
from verl.trainer.streaming import CarryOverExperience
from verl.workers.group import WorkerGroup

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig
    from verl.data.loader import Loader


def build_experience(
    cfg: PPOConfig,
    workers: WorkerGroup,
    rewards: RewardManager,
    tokenizer: Any,
    loader: Loader,
    total_steps: int,
) -> Experience:
    """The source of batches that `trainer.async_training.mode` names."""
    parts = (cfg, workers, rewards, tokenizer, loader)
    mode = cfg.trainer.async_training.mode
    if mode == "off" or cfg.trainer.val_only:
        return SyncExperience(*parts)
    return (CarryOverExperience if mode == "carry_over" else PoolExperience)(*parts, total_steps=total_steps)
