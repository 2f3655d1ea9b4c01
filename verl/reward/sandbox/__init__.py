"""Runs code a model wrote: at a remote service where its address is set, else in the local sandbox (bubblewrap), else,
only where the user allows it, without isolation. docs/sandbox.md says what the local one guarantees."""

from __future__ import annotations

import logging

from verl.errors import RewardError
from verl.reward.sandbox.program import Outcome, Program
from verl.reward.sandbox.settings import Settings, configure, settings

__all__ = ["Outcome", "Program", "Settings", "configure", "require", "run", "settings"]

_log = logging.getLogger(__name__)


def run(program: Program, using: Settings | None = None) -> Outcome:
    """Run one program with the current settings, or with `using`."""
    chosen = using or settings()
    if chosen.url:
        from verl.reward.sandbox import remote

        return remote.run(program, chosen)
    from verl.reward.sandbox import local

    return local.run(program, chosen)


def require() -> None:
    """Raise RewardError where programs could not be run as the settings demand."""
    chosen = settings()
    if chosen.url:
        return
    from verl.reward.sandbox import local

    found = local.availability()
    if not found.isolated and not chosen.allow_unisolated:
        raise RewardError(local.refusal(found.reason))
    _log.info("model-written code: %s", found.describe())
