"""Checkpoints of a run on several ranks: every rank saves and loads its own shards, rank 0 commits.

The interface is that of `CheckpointManager`, as the loop uses it. The run folder must be one that every node sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checkpoint import rng
from verl.errors import CheckpointError

if TYPE_CHECKING:
    from verl.workers.ray_calls import RankCalls

_OWN_RANDOM = "controller_random"


class RayCheckpoints:
    """Sends saving and resuming to the ranks."""

    def __init__(self, calls: RankCalls) -> None:
        self._calls = calls

    def save(
        self,
        step: int,
        parts: Mapping[str, Any],
        trainer_state: Mapping[str, Any],
        *,
        tokenizer: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> Path | None:
        """As `CheckpointManager.save`; `parts` and `tokenizer` are those of the ranks."""
        state = {**trainer_state, _OWN_RANDOM: rng.capture()}
        return self._calls.all("save", step, state, dict(metrics or {}))[0]

    def wait(self) -> Path | None:
        return self._calls.all("wait_for_save")[0]

    def resume(self, parts: Mapping[str, Any]) -> Any | None:
        """The trainer's state, or None for a fresh start."""
        state, *others = self._calls.all("resume")
        if any(found != (state is not None) for found in others):
            raise CheckpointError(
                "the ranks do not see the same checkpoints: trainer.default_local_dir must be a folder that every "
                "node shares"
            )
        if state is None:
            return None
        # A checkpoint of one process has none of its own here: its state is rank 0's.
        own = state.pop(_OWN_RANDOM, None)
        if own is not None:
            rng.restore(own)
        return state
