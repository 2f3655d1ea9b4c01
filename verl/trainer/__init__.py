"""The programs: RL training (`main_ppo`), supervised fine-tuning (`sft_trainer`), and the Python API."""

from __future__ import annotations

from typing import Any

_HOMES = {
    "TrainingConfig": "verl.trainer.api",
    "PPOTrainer": "verl.trainer.api",
    "GRPOTrainer": "verl.trainer.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'verl.trainer' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
