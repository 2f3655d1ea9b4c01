"""Roles (actor, rollout, reference, critic) and where they run. The loop sees only `WorkerGroup`."""

from __future__ import annotations

from typing import Any

_HOMES = {"RolloutWorker": "verl.trainer.worker_api", "TrainerWorker": "verl.trainer.worker_api"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'verl.workers' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
