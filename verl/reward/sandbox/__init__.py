"""Run code a model wrote, where it can do no harm.

Which sandbox runs it is a matter of settings: a remote service where its address is given, else the local one
(bubblewrap), else, only where the user said so, none. What the local one guarantees stands in
docs/sandbox.md.
"""

from __future__ import annotations

from verl.errors import RewardError
from verl.reward.sandbox.program import Outcome, Program
from verl.reward.sandbox.settings import Settings, configure, settings

__all__ = ["Outcome", "Program", "Settings", "configure", "require", "run", "settings"]


def run(program: Program, using: Settings | None = None) -> Outcome:
    """Run one program with the current settings, or with `using`."""
    chosen = using or settings()
    if chosen.url:
        from verl.reward.sandbox import remote

        return remote.run(program, chosen)
    from verl.reward.sandbox import local

    return local.run(program, chosen)


def require() -> None:
    """Refuse at start, with RewardError, where programs could not be run as the settings demand."""
    chosen = settings()
    if chosen.url:
        return
    from verl.reward.sandbox import local

    problem = local.why_unavailable()
    if problem is not None and not chosen.allow_unisolated:
        raise RewardError(local.refusal(problem))
