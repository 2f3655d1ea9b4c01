"""Runs code a model wrote: at a remote service where its address is set, else in the local sandbox (bubblewrap), else,
only where the user allows it, without isolation. docs/sandbox.md says what the local one guarantees."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from verl.config.sections.reward import RewardConfig, SandboxConfig
from verl.errors import RewardError

__all__ = ["Outcome", "Program", "configure", "configured", "require", "run"]

_log = logging.getLogger(__name__)
End = Literal["ok", "error", "timeout", "memory", "output", "processes", "sandbox"]
_config = RewardConfig()


@dataclass(frozen=True)
class Program:
    """Python source and what it reads from standard input."""

    source: str
    stdin: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a program ended. `sandbox` means that it was not run: the fault is ours or the service's."""

    end: End
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    seconds: float = 0.0


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
