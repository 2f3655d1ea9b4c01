"""The config of a Session: the keys it reads, those it refuses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from verl.config.keys import get
from verl.config.load import from_dict
from verl.config.schema import PPOConfig
from verl.config.sections.data import PromptsConfig
from verl.errors import ConfigError

_PLACES = ("trainer.n_gpus_per_node", "trainer.nnodes")
_SIZES = ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size")
_FIXED = {
    "data.train_files": ["(prompts of sample)"],
    "algorithm.adv_estimator": "reinforce_plus_plus",
}
"""What the checks of the config ask for and a session does not read, with `_SIZES`, a row for each process."""
_READ = (
    "actor_rollout_ref.",
    *(f"data.{field.name}" for field in dataclasses.fields(PromptsConfig)),
    "trainer.device",
    "trainer.seed",
    "trainer.plugins",
    "trainer.total_training_steps",
    "trainer.watchdog_s",
    "trainer.health.max_skipped_steps",
    *_PLACES,
    "ray_kwargs.",
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
    places = [overrides.get(name, 1) for name in _PLACES]
    rows = math.prod(size for size in places if isinstance(size, int))
    fixed = _FIXED | dict.fromkeys(_SIZES, rows)
    cfg = from_dict(PPOConfig, {**fixed, **values, **overrides})
    for name in sorted(cfg.user_set):
        read = name.startswith(_READ) and not name.startswith(_UNREAD)
        if not read and get(cfg, name) != fixed.get(name):
            raise ConfigError(
                f"overrides set '{name}', which a Session does not read: it has no data files, rewards or "
                "advantages; your loop has them. It reads actor_rollout_ref.{model,actor,rollout,ref}, the keys of "
                "prompts in data, trainer.{device,seed,plugins,total_training_steps,n_gpus_per_node,nnodes}, ray_kwargs"
            )
    return cfg
