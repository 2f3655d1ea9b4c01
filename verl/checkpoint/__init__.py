"""Checkpoints: atomic, verified, loadable at any world size, without pickles. Importing this loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.checkpoint.manager import CheckpointManager, PartSettings

__all__ = ["CheckpointManager", "PartSettings"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from verl.checkpoint import manager

        return getattr(manager, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
