"""Runs code a model wrote: at a remote service where its address is set, else in the local sandbox (bubblewrap), else,
only where the user allows it, without isolation. docs/sandbox.md says what the local one guarantees."""

from __future__ import annotations

import logging

from verl.config.sections.reward import RewardConfig, SandboxConfig
from verl.errors import RewardError
from verl.reward.sandbox.program import Outcome, Program

__all__ = ["Outcome", "Program", "configure", "configured", "require", "run"]

_log = logging.getLogger(__name__)
_config = RewardConfig()


def configure(config: RewardConfig) -> None:
    """Use the sections `sandbox` and `sandbox_fusion` of `config` in this process from now on."""
    global _config
    _config = config


def configured() -> RewardConfig:
    return _config


def run(program: Program, limits: SandboxConfig | None = None) -> Outcome:
    """Run one program, by default with the configured limits."""
    limits, url = limits or _config.sandbox, _config.sandbox_fusion.url
    if url:
        from verl.reward.sandbox import remote

        return remote.run(program, limits, url)
    from verl.reward.sandbox import local

    return local.run(program, limits)


def require() -> None:
    """Raise RewardError where programs could not be run as configured."""
    if _config.sandbox_fusion.url:
        return
    from verl.reward.sandbox import local

    problem = local.why_unavailable()
    if problem and not _config.sandbox.allow_unisolated:
        raise RewardError(local.refusal(problem))
    _log.info("model-written code: %s", local.describe())
