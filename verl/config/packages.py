"""Which optional packages a config needs, and which of them are not installed. Imports none of them."""

from __future__ import annotations

import importlib.util

from verl.config.machine import started_by_torchrun
from verl.config.pools import EXTERNAL_ENGINES, pools
from verl.config.ranks import world_size
from verl.config.schema import PPOConfig, SFTConfig
from verl.errors import missing_package

_TRACKERS = ("wandb", "tensorboard")


def missing_packages(config: PPOConfig | SFTConfig) -> list[str]:
    """A line for each package that is needed and not installed: what needs it and how to install it."""
    return [
        str(missing_package(name, name, why))
        for name, why in needed(config).items()
        if importlib.util.find_spec(name) is None
    ]


def needed(config: PPOConfig | SFTConfig) -> dict[str, str]:
    """The optional packages a run with this config imports, each with the setting that asks for it."""
    found = {name: f"trainer.logger={name}" for name in config.trainer.logger if name in _TRACKERS}
    launched = isinstance(config, SFTConfig) and started_by_torchrun()
    for pool in reversed(pools(config)):
        if (pool.key != "trainer" or world_size(config) > 1) and not launched:
            found["ray"] = pool.asked
    if isinstance(config, PPOConfig):
        policy = config.actor_rollout_ref
        if policy.rollout.name in EXTERNAL_ENGINES:
            found[policy.rollout.name] = f"actor_rollout_ref.rollout.name={policy.rollout.name}"
        adapters = {"actor_rollout_ref.model": policy.model.lora_rank}
        if config.critic.enable:
            adapters["critic.model"] = config.critic.model.lora_rank
    else:
        adapters = {"model": config.model.lora_rank}
    for key, rank in adapters.items():
        if rank > 0:
            found["peft"] = f"{key}.lora_rank={rank}"
    return found
