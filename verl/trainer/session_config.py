"""The config of a Session: the keys it reads, those it refuses."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torch import nn

from verl.config.keys import get
from verl.config.load import from_dict
from verl.config.schema import PPOConfig
from verl.config.sections.data import PromptsConfig
from verl.errors import ConfigError

_FIXED = {
    "data.train_files": ["(prompts of sample)"],
    "data.train_batch_size": 1,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
    "algorithm.adv_estimator": "reinforce_plus_plus",
}
"""What the checks of the config ask for and a session does not read."""
_READ = (
    "actor_rollout_ref.",
    *(f"data.{field.name}" for field in dataclasses.fields(PromptsConfig)),
    "trainer.device",
    "trainer.seed",
    "trainer.plugins",
    "trainer.total_training_steps",
    "trainer.watchdog_s",
    "trainer.health.max_skipped_steps",
)
_UNREAD = tuple(
    f"actor_rollout_ref.{name}"
    for name in (
        "actor.ppo_mini_batch_size",
        "actor.ppo_epochs",
        "actor.checkpoint.",
        "rollout.val_kwargs.",
        "rollout.multi_turn.",
        "rollout.nnodes",
        "rollout.n_gpus_per_node",
    )
)


def session_config(overrides: dict[str, Any], values: dict[str, Any]) -> PPOConfig:
    """The config of the user's keys over those of the arguments; a key that a session does not read is an error."""
    cfg = from_dict(PPOConfig, {**_FIXED, **values, **overrides})
    for name in sorted(cfg.user_set):
        read = name.startswith(_READ) and not name.startswith(_UNREAD)
        if not read and get(cfg, name) != _FIXED.get(name):
            raise ConfigError(
                f"overrides set '{name}', which a Session does not read: it has no data files, rewards, advantages or "
                "processes; your loop has them. It reads actor_rollout_ref.{model,actor,rollout,ref}, the keys of "
                "prompts in data, trainer.{device,seed,plugins,total_training_steps}"
            )
    return cfg


def model_name(model: Any) -> str:
    """What `model.path` is called."""
    if isinstance(model, nn.Module):
        return str(getattr(model, "name_or_path", "") or type(model).__name__)
    return str(model)


def refuse_several_processes() -> None:
    joined = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    count = max(joined, int(os.environ.get("WORLD_SIZE") or 1))
    if count > 1:
        raise ConfigError(
            f"Session was started in {count} processes (torchrun, WORLD_SIZE), but it is one process on one device; "
            "training on several is `verl train` or GRPOTrainer"
        )
