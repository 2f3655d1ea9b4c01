"""verl trains language models with reinforcement learning.

Importing this package is quick and loads no torch: the public names below are fetched when first used.
"""

# ruff: noqa: F401 - the names are public

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl import missing_names

__version__ = "0.2.0"

_HOMES = {
    "DataProto": "verl.data.proto",
    "PPOTrainer": "verl.trainer.api",
    "PPOConfig": "verl.config.trl_arguments",
    "GRPOTrainer": "verl.trainer.api",
    "GRPOConfig": "verl.config.trl_arguments",
    "RLOOTrainer": "verl.trainer.api",
    "RLOOConfig": "verl.config.trl_arguments",
    "SFTTrainer": "verl.trainer.offline_api",
    "SFTConfig": "verl.config.trl_arguments",
    "DPOTrainer": "verl.trainer.offline_api",
    "DPOConfig": "verl.config.trl_arguments",
    "KTOTrainer": "verl.trainer.offline_api",
    "KTOConfig": "verl.config.trl_arguments",
    "RewardTrainer": "verl.trainer.offline_api",
    "RewardConfig": "verl.config.trl_arguments",
    "Session": "verl.trainer.session",
    "register_adv_est": "verl.config.methods",
    "register_policy_loss": "verl.config.methods",
    "TrainingConfig": "verl.trainer.api",
    "register_role": "verl.config.roles",
}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from verl.config.methods import register_adv_est, register_policy_loss
    from verl.config.roles import register_role
    from verl.config.trl_arguments import (
        DPOConfig,
        GRPOConfig,
        KTOConfig,
        PPOConfig,
        RewardConfig,
        RLOOConfig,
        SFTConfig,
    )
    from verl.data.proto import DataProto
    from verl.trainer.api import GRPOTrainer, PPOTrainer, RLOOTrainer, TrainingConfig
    from verl.trainer.offline_api import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer
    from verl.trainer.session import Session


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'verl' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


missing_names.install()
