"""Which optional packages a config needs, and which of them are not installed. Imports none of them."""

from __future__ import annotations

import importlib.util

from verl.config.machine import started_by_torchrun
from verl.config.pools import rollout_pool
from verl.config.ranks import world_size
from verl.config.schema import ModelConfig, PPOConfig, SFTConfig, SFTModelConfig
from verl.errors import missing_package

_ENGINES = ("vllm", "sglang")
_TRACKERS = ("wandb", "tensorboard")


def missing_packages(config: PPOConfig | SFTConfig) -> list[str]:
    """A line for each package that is needed and not here: what needs it and how to install it."""
    return [
        str(missing_package(name, name, why))
        for name, why in needed(config).items()
        if importlib.util.find_spec(name) is None
    ]


def needed(config: PPOConfig | SFTConfig) -> dict[str, str]:
    """The optional packages a run with this config imports, each with the setting that asks for it."""
    found = {name: f"trainer.logger={name}" for name in config.trainer.logger if name in _TRACKERS}
    ranks = (
        f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}, trainer.nnodes={config.trainer.nnodes}"
    )
    models: dict[str, ModelConfig | SFTModelConfig]
    if isinstance(config, SFTConfig):
        models = {"model": config.model}
        if world_size(config) > 1 and not started_by_torchrun():
            found["ray"] = f"training on {world_size(config)} processes ({ranks}; or start it with torchrun)"
    else:
        models = {"actor_rollout_ref.model": config.actor_rollout_ref.model}
        if config.critic.enable:
            models["critic.model"] = config.critic.model
        rollout, judge = config.actor_rollout_ref.rollout, config.reward.reward_model
        if rollout.name in _ENGINES:
            found[rollout.name] = f"actor_rollout_ref.rollout.name={rollout.name}"
        if judge.enable and judge.n_gpus_per_node:
            found["ray"] = f"reward.reward_model.n_gpus_per_node={judge.n_gpus_per_node}"
        if rollout_pool(config):
            found["ray"] = f"actor_rollout_ref.rollout.n_gpus_per_node={rollout.n_gpus_per_node}"
        if world_size(config) > 1:
            found["ray"] = f"training on {world_size(config)} processes ({ranks})"
    for key, model in models.items():
        if model.lora_rank > 0:
            found["peft"] = f"{key}.lora_rank={model.lora_rank}"
    return found
