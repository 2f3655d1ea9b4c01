"""The sandbox's settings, as plain data: the trainer sends them to every worker process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Limits for one program and where it runs; the keys of `reward.sandbox` and `reward.sandbox_fusion`."""

    timeout_s: float = 10.0
    memory_limit_mb: int = 1024
    max_processes: int = 64
    max_file_mb: int = 16
    all_or_nothing: bool = False
    allow_unisolated: bool = False
    url: str | None = None
    max_concurrent: int = 64
    budget_s: float = 24.0
    """For all tests of one response: less than the deadline of a reward call, so that a slow program fails its tests
    instead of leaving the response without a score."""

    @classmethod
    def from_config(cls, reward_cfg: Any) -> Settings:
        local, remote = reward_cfg.sandbox, reward_cfg.sandbox_fusion
        return cls(
            timeout_s=local.timeout_s,
            memory_limit_mb=local.memory_limit_mb,
            max_processes=local.max_processes,
            max_file_mb=local.max_file_mb,
            all_or_nothing=local.all_or_nothing,
            allow_unisolated=local.allow_unisolated,
            url=remote.url,
            max_concurrent=remote.max_concurrent,
            budget_s=0.8 * reward_cfg.timeout_s,
        )


_current = Settings()


def configure(new: Settings) -> None:
    """Use these settings in this process from now on."""
    global _current
    _current = new


def settings() -> Settings:
    return _current
