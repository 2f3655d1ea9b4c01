"""Helpers for tests that start real processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from verl.reward.base import RewardSample


@pytest.fixture
def make_sample():
    def make(index: int, response: str = "", **fields) -> RewardSample:
        return RewardSample(index, "prompt", response, **{"data_source": "test", **fields})

    return make


@pytest.fixture
def no_children_left():
    """After the test this process has no more children than before."""

    def children() -> set[str]:
        return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())

    before = children()
    yield
    for _ in range(24_000):
        if children() <= before:
            return
        time.sleep(0.01)
    raise AssertionError(f"left behind: {children() - before}")
