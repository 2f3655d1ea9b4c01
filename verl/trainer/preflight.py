"""What can be seen to be wrong before anything heavy is imported: the first seconds of every training command.

What always holds: everything found is said at once, and nothing of the models' weights is read but file headers.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.config.available import unavailable
from verl.config.disk import DiskVerdict, checkpoint_bytes, disk_verdict, free_bytes
from verl.config.hub import answer, endpoint, offline
from verl.config.machine import beyond_machine, on_cpu
from verl.config.model_folder import context_length, folder_problem
from verl.config.model_shape import ModelShape, cached_config, read_shape, shape_of
from verl.config.packages import missing_packages
from verl.config.plan import critic_shape_of
from verl.config.schema import ModelConfig, PPOConfig, SFTConfig, SFTModelConfig
from verl.data.files import absent
from verl.errors import ConfigError, ModelError

logger = logging.getLogger(__name__)


def preflight(cfg: PPOConfig | SFTConfig, *, given_model: bool = False, given_data: bool = False) -> None:
    """Raise ConfigError with every reason why the run could not begin; what is given as an object is not looked for."""
    problems = unavailable(cfg) + beyond_machine(cfg) + missing_packages(cfg)
    problems += _absent_files(cfg, given_data)
    if not given_model:
        problems += _model_problems(cfg) or hub_problems(_models(cfg))
        problems += [] if problems else _disk_error(cfg)
    if problems:
        raise ConfigError("\n".join(problems))
    if not given_model:
        _warn_of_length(cfg)


def _disk_error(cfg: PPOConfig | SFTConfig) -> list[str]:
    model = cfg.actor_rollout_ref.model if isinstance(cfg, PPOConfig) else cfg.model
    shape = _shape_or_none(model.path, model.override_config)
    verdict = _on_disk(cfg, shape)
    return [verdict.error] if verdict.error else []


def require_disk(cfg: PPOConfig | SFTConfig, folder: Path, total_steps: int, model: Any = None) -> None:
    """Refuse a run whose checkpoints have no room, and warn of one that has not room for all of them. `model`: one
    that was given as an object."""
    section = cfg.actor_rollout_ref.model if isinstance(cfg, PPOConfig) else cfg.model
    if model is not None:
        shape = _shape_of_given(model)
    else:
        shape = _shape_or_none(section.path, section.override_config)
    present = len(list(folder.glob("global_step_*")))
    verdict = _on_disk(cfg, shape, total_steps=total_steps, present=present)
    if verdict.error:
        raise ConfigError(verdict.error)
    if verdict.warning:
        logger.warning("%s", verdict.warning)


def _on_disk(cfg: PPOConfig | SFTConfig, shape: ModelShape | None, **more: int) -> DiskVerdict:
    """Nothing is said where nothing can be saved anyway, or the model's sizes are not known for certain."""
    free = free_bytes(cfg.trainer.default_local_dir)
    only_looks = isinstance(cfg, PPOConfig) and cfg.trainer.val_only
    if shape is None or not shape.exact or free is None or only_looks:
        return DiskVerdict()
    kind = "cpu" if on_cpu(cfg) else "cuda"
    return disk_verdict(cfg, checkpoint_bytes(cfg, shape, critic_shape_of(cfg, shape), kind), free, **more)


def _shape_or_none(path: str, override: Mapping[str, Any]) -> ModelShape | None:
    try:
        return read_shape(path, override)
    except ModelError:  # said by those who load it
        return None


def _shape_of_given(model: Any) -> ModelShape | None:
    try:
        return shape_of(model.config.get_text_config().to_dict())
    except (AttributeError, ModelError):
        return None


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
