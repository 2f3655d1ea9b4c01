"""Validation of values and of combinations, before anything is loaded."""

from __future__ import annotations

from verl.config.schema import PPOConfig, SFTConfig


def check(config: PPOConfig | SFTConfig) -> list[str]:
    """Warnings about a config that can run; ConfigError for one that cannot."""
    return []
