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
def gone():
    """Whether a process has ended (or ends soon: the kernel takes a moment, on a busy machine a long one)."""

    def check(pid: int) -> bool:
        for _ in range(24_000):
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
            except OSError:
                return True
            if stat.rpartition(")")[2].split()[0] in "ZX":
                return True
            time.sleep(0.01)
        return False

    return check


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
