"""The sandbox's settings, as plain data: the trainer sends them to every worker process."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from verl.config.sections.reward import RewardConfig, SandboxConfig, SandboxFusionConfig

_BUDGET = 0.8  # of the deadline of a reward call


@dataclass(frozen=True)
class Settings:
    """Limits for one program and where it runs; the keys of `reward.sandbox` and `reward.sandbox_fusion`."""

    timeout_s: float = SandboxConfig.timeout_s
    memory_limit_mb: int = SandboxConfig.memory_limit_mb
    max_processes: int = SandboxConfig.max_processes
    max_file_mb: int = SandboxConfig.max_file_mb
    all_or_nothing: bool = SandboxConfig.all_or_nothing
    allow_unisolated: bool = SandboxConfig.allow_unisolated
    url: str | None = SandboxFusionConfig.url
    max_concurrent: int = SandboxFusionConfig.max_concurrent
    budget_s: float = _BUDGET * RewardConfig.timeout_s
    """For all tests of one response: less than the deadline of a reward call, so that a slow program fails its tests
    instead of leaving the response without a score."""

    @classmethod
    def from_config(cls, config: RewardConfig) -> Settings:
        remote = config.sandbox_fusion
        return cls(
            **asdict(config.sandbox),
            url=remote.url,
            max_concurrent=remote.max_concurrent,
            budget_s=_BUDGET * config.timeout_s,
        )


_current = Settings()


def configure(new: Settings) -> None:
    """Use these settings in this process from now on."""
    global _current
    _current = new


def settings() -> Settings:
    return _current
