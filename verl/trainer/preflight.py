"""What can be seen to be wrong before anything heavy is imported: the first seconds of every training command.

What always holds: everything found is said at once, and nothing of the models' weights is read but file headers.
"""

from __future__ import annotations

import logging

from verl.config.available import unavailable
from verl.config.machine import beyond_machine
from verl.config.model_folder import context_length, folder_problem
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
        problems += _model_problems(cfg)
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


def _model_problems(cfg: PPOConfig | SFTConfig) -> list[str]:
    if isinstance(cfg, SFTConfig):
        problems = [folder_problem(cfg.model.path, "model.path")]
    else:
        policy, critic, reward = cfg.actor_rollout_ref.model.path, cfg.critic, cfg.reward.reward_model
        problems = [folder_problem(policy, "actor_rollout_ref.model.path")]
        if critic.enable and critic.model.path != policy:
            problems.append(folder_problem(critic.model.path, "critic.model.path", language_model=False))
        if reward.enable and reward.model_path:
            problems.append(
                folder_problem(reward.model_path, "reward.reward_model.model_path", language_model=False)
            )
    return [problem for problem in problems if problem]


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
