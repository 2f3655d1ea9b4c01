"""Checks in the first seconds of every training command; torch is imported only when all but the last have passed.

All problems are reported at once; of weights only file headers are read.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from verl.config.checks import unavailable
from verl.config.model_path import cached_config, context_length, endpoint, folder_problem, hub_error, offline
from verl.config.parallelism import TEACHER, needs_teacher
from verl.config.plan import RunPlan
from verl.config.run_checks import model_layout_errors, teacher_model_errors
from verl.config.schema import (
    GenerationModelConfig,
    ModelConfig,
    OfflineConfig,
    PPOConfig,
    RewardTrainingConfig,
    SFTModelConfig,
)
from verl.data.file_search import absent
from verl.errors import ConfigError, ModelError

logger = logging.getLogger(__name__)

_ANY_HEAD = ("critic.model.path", "reward.reward_model.model_path")
GIVEN_ROWS = "(given rows)"  # in the place of a file: data in memory, not yet written
PROMPT_AND_RESPONSE = "data.max_prompt_length + data.max_response_length"


def preflight(
    cfg: PPOConfig | OfflineConfig,
    *,
    given_model: bool = False,
    given_data: bool = False,
    saves: bool = True,
    again: bool = False,
) -> RunPlan:
    """The plan of a run; ConfigError with every reason why it cannot start. Models and data passed as objects are
    skipped, and without `saves` the space for checkpoints. `again`: this is called once more before the run starts,
    and gives its warnings then."""
    plan = RunPlan(cfg)
    problems = unavailable(cfg) + plan.absent + _absent_files(cfg, given_data)
    if not given_model:
        problems += _model_problems(_models(plan), any_head=isinstance(cfg, RewardTrainingConfig))
        problems += model_layout_errors(plan)
    if isinstance(cfg, PPOConfig) and needs_teacher(cfg):
        path = cfg.actor_rollout_ref.teacher.path
        wrong = _model_problems({f"{TEACHER}.path": path}) if path else []
        problems += wrong or teacher_model_errors(cfg, given_model=given_model)
    if problems:
        raise ConfigError("\n".join(problems))
    if not given_model and not again:
        if isinstance(cfg, OfflineConfig):
            warn_of_length(cfg.model, "data.max_length", cfg.data.max_length)
        else:
            longest = cfg.data.max_prompt_length + cfg.data.max_response_length
            warn_of_length(cfg.actor_rollout_ref.model, PROMPT_AND_RESPONSE, longest)
        if saves:
            require_disk(plan, Path(cfg.trainer.default_local_dir), total_steps=1)
    return plan


def require_disk(plan: RunPlan, folder: Path, total_steps: int) -> None:
    """Refuse a run that cannot save a checkpoint, and warn of one that cannot save all of them. Runs that save nothing
    and models of unknown size are skipped."""
    if isinstance(plan.config, PPOConfig) and plan.config.trainer.val_only:
        return
    try:
        verdict = plan.disk(total_steps, present=len(list(folder.glob("global_step_*"))))
    except (ModelError, AttributeError):
        return  # loading the model reports it; an object may be no transformers model
    if verdict.error:
        raise ConfigError(verdict.error)
    if verdict.warning:
        logger.warning("%s", verdict.warning)


def _absent_files(cfg: PPOConfig | OfflineConfig, given_data: bool) -> list[str]:
    named = {"data.val_files": [file for file in cfg.data.val_files if file != GIVEN_ROWS]}
    if not given_data:
        named["data.train_files"] = cfg.data.train_files
    if isinstance(cfg, PPOConfig):
        named |= {f"data.mixture[{i}].files": each.files for i, each in enumerate(cfg.data.mixture)}
    lines = [
        absent(entry, key)
        for key, entries in sorted(named.items())
        for entry in entries
        if entry != GIVEN_ROWS
    ]
    return [line for line in lines if line]


def _models(plan: RunPlan) -> dict[str, str]:
    """The models a run loads, by the keys that name them."""
    first, *others = plan.roles
    named = {f"{first.model_key}.path": first.model.path}
    for role in others:
        if role.model_key != TEACHER and role.model.path != first.model.path:
            named[f"{role.model_key}.path"] = role.model.path
    if isinstance(plan.config, PPOConfig):
        reward = plan.config.reward.reward_model
        if reward.enable and reward.model_path:
            named["reward.reward_model.model_path"] = reward.model_path
    return named


def _model_problems(models: Mapping[str, str], any_head: bool = False) -> list[str]:
    """What is wrong with models, by their keys; `any_head`: none of them must be a language model."""
    found = [
        folder_problem(path, key, language_model=not (any_head or key in _ANY_HEAD))
        for key, path in models.items()
    ]
    return [problem for problem in found if problem] or hub_problems(models)


def hub_problems(models: Mapping[str, str]) -> list[str]:
    """Models, by their keys, that are neither here nor on a hub that can be reached. Without the hub, models in the
    cache are used without asking it again: transformers would ask for every file several times."""
    wanted = {key: path for key, path in models.items() if not Path(path).expanduser().is_dir()}
    if not wanted:
        return []
    variable, address = offline(os.environ), endpoint(os.environ)
    reason = f"{variable}=1" if variable else hub_error(address)
    if not reason:
        return []
    lacking = [key for key, path in wanted.items() if cached_config(path) is None]
    if not lacking and not variable:
        logger.warning("%s cannot be reached (%s): models are taken from the cache", address, reason)
        os.environ["HF_HUB_OFFLINE"] = "1"
        if "huggingface_hub.constants" in sys.modules:  # which has read the variable already
            sys.modules["huggingface_hub.constants"].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    return [
        f"{key}: '{wanted[key]}' is no folder and not in the Hugging Face cache, and the hub cannot be reached "
        f"({reason}). Give a folder, or run `hf download {wanted[key]}` where it can"
        for key in lacking
    ]


def warn_of_length(
    model: ModelConfig | SFTModelConfig | GenerationModelConfig, keys: str, longest: int, path: str = ""
) -> None:
    """Of sequences longer than the model supports; `path`: where its files are, if not at `model.path`."""
    known = context_length(path or model.path, model.override_config)
    if known is not None and longest > known:
        logger.warning(
            "%s = %d, but the model supports %d tokens (max_position_embeddings in its config.json). Lower the "
            "lengths, or choose another model",
            keys,
            longest,
            known,
        )
