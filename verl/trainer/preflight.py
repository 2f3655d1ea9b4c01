"""What can be seen to be wrong before anything heavy is imported: the first seconds of every training command.

What always holds: everything found is said at once, and nothing of the models' weights is read but file headers.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from verl.config.available import unavailable
from verl.config.hub import answer, endpoint, offline
from verl.config.machine import beyond_machine
from verl.config.model_folder import context_length, folder_problem
from verl.config.model_shape import cached_config
from verl.config.packages import missing_packages
from verl.config.schema import ModelConfig, PPOConfig, SFTConfig, SFTModelConfig
from verl.data.files import absent
from verl.errors import ConfigError

logger = logging.getLogger(__name__)


def preflight(cfg: PPOConfig | SFTConfig, *, given_model: bool = False, given_data: bool = False) -> None:
    """Raise ConfigError with every reason why the run could not begin; what is given as an object is not looked for."""
    problems = unavailable(cfg) + beyond_machine(cfg) + missing_packages(cfg)
    problems += _absent_files(cfg, given_data)
    if not given_model:
        problems += _model_problems(cfg) or hub_problems(_models(cfg))
    if problems:
        raise ConfigError("\n".join(problems))
    if not given_model:
        _warn_of_length(cfg)


def _absent_files(cfg: PPOConfig | SFTConfig, given_data: bool) -> list[str]:
    named = {"data.val_files": cfg.data.val_files}
    if not given_data:
        named["data.train_files"] = cfg.data.train_files
    if isinstance(cfg, PPOConfig):
        for number, part in enumerate(cfg.data.mixture):
            named[f"data.mixture[{number}].files"] = part.files
    lines = [absent(entry, key) for key, entries in sorted(named.items()) for entry in entries]
    return [line for line in lines if line]


def _models(cfg: PPOConfig | SFTConfig) -> dict[str, str]:
    """The models a run loads, by the keys that name them."""
    if isinstance(cfg, SFTConfig):
        return {"model.path": cfg.model.path}
    named = {"actor_rollout_ref.model.path": cfg.actor_rollout_ref.model.path}
    critic, reward = cfg.critic, cfg.reward.reward_model
    if critic.enable and critic.model.path != cfg.actor_rollout_ref.model.path:
        named["critic.model.path"] = critic.model.path
    if reward.enable and reward.model_path:
        named["reward.reward_model.model_path"] = reward.model_path
    return named


def _model_problems(cfg: PPOConfig | SFTConfig) -> list[str]:
    policy = ("model.path", "actor_rollout_ref.model.path")
    problems = [folder_problem(path, key, language_model=key in policy) for key, path in _models(cfg).items()]
    return [problem for problem in problems if problem]


def hub_problems(models: Mapping[str, str]) -> list[str]:
    """Models, by their keys, that can be had neither here nor from the hub. Where the hub cannot be reached, what is
    in the cache is taken without asking it again: every file would be asked for several times."""
    wanted = {key: path for key, path in models.items() if not Path(path).expanduser().is_dir()}
    if not wanted:
        return []
    variable = offline(os.environ)
    reason = f"{variable}=1" if variable else answer(endpoint(os.environ), os.environ)
    if not reason:
        return []
    lacking = [key for key, path in wanted.items() if cached_config(path) is None]
    if not lacking and not variable:
        logger.warning(
            "%s cannot be reached (%s): models are taken from the cache", endpoint(os.environ), reason
        )
        os.environ["HF_HUB_OFFLINE"] = "1"
        if "huggingface_hub.constants" in sys.modules:  # which has read the variable already
            sys.modules["huggingface_hub.constants"].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    return [
        f"{key}: there is no folder '{wanted[key]}' here; as a model of the Hugging Face hub it is not in the cache "
        f"and cannot be downloaded ({reason}). Give a folder, or download it where the hub can be reached "
        f"(hf download {wanted[key]})"
        for key in lacking
    ]


def _warn_of_length(cfg: PPOConfig | SFTConfig) -> None:
    model: ModelConfig | SFTModelConfig
    if isinstance(cfg, SFTConfig):
        model, keys, longest = cfg.model, "data.max_length", cfg.data.max_length
    else:
        model, keys = cfg.actor_rollout_ref.model, "data.max_prompt_length + data.max_response_length"
        longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    known = context_length(model.path, model.override_config)
    if known is not None and longest > known:
        logger.warning(
            "%s = %d, but the model was built for sequences of at most %d tokens (max_position_embeddings in its "
            "config.json): what lies beyond will be bad or fail. Lower the lengths, or choose another model",
            keys,
            longest,
            known,
        )
