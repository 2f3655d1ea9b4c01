"""Checkpoints of a run on several ranks: every rank saves and loads its own shards, rank 0 commits.

The interface is that of `CheckpointManager`, as the loop uses it. The run folder must be one that every node sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checkpoint import rng
from verl.checkpoint.resume import Found, resume_newest
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

    def resume(
        self, parts: Mapping[str, Any], take: Callable[[dict[str, Any]], None] = lambda state: None
    ) -> dict[str, Any] | None:
        """As `CheckpointManager.resume`; `take` is for this process, which has random states of its own."""

        def take_all(state: dict[str, Any]) -> None:
            # A checkpoint of one process has none of its own here: its state is rank 0's.
            if _OWN_RANDOM in state:
                rng.check(state[_OWN_RANDOM])
            take(state)

        state = resume_newest(self._find, lambda: all(self._calls.all("load_found")), take_all)
        if state is not None and _OWN_RANDOM in state:
            rng.restore(state.pop(_OWN_RANDOM))
        return state

    def _find(self, below: int | None) -> Found | None:
        found, *steps = self._calls.all("find_checkpoint", below)
        if any(step != (None if found is None else found[0]) for step in steps):
            raise CheckpointError(
                "the ranks do not see the same checkpoints: trainer.default_local_dir must be a folder that every "
                "node shares"
            )
        return found  # type: ignore[no-any-return]
