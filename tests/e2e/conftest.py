"""A short run of the real command's code path on the tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import read_metrics, tiny_run


@pytest.fixture
def overrides(tiny_model_dir: Path, digits_data: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The command line of a small GRPO run; keyword-like extras override it."""

    def make(*extra: str, folder: str = "run") -> list[str]:
        return tiny_run(
            tiny_model_dir, digits_data, "data.train_batch_size=16", *extra, folder=tmp_path / folder
        )

    return make


@pytest.fixture
def train(overrides: Callable[..., list[str]]) -> Callable[..., list[dict[str, Any]]]:
    """Run and return the rows of metrics.jsonl."""
    from verl.config.load import load_ppo_config
    from verl.trainer.main_ppo import run

    def go(*extra: str, folder: str = "run") -> list[dict[str, Any]]:
        result = run(load_ppo_config(overrides(*extra, folder=folder)))
        return read_metrics(result.folder)

    return go
