"""A short real run, and its command line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_run import tiny_run


@pytest.fixture(scope="session")
def keys(tiny_model_dir: Path, digits_data: Path) -> list[str]:
    """A config that is in order."""
    return tiny_run(
        tiny_model_dir,
        digits_data,
        f"data.val_files={digits_data}/val.jsonl",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
    )


@pytest.fixture(scope="session")
def finished_run(keys: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from verl.config.load import load_ppo_config
    from verl.trainer.main_ppo import run

    folder = tmp_path_factory.mktemp("runs") / "finished"
    return run(load_ppo_config([*keys, f"trainer.default_local_dir={folder}"])).folder


@pytest.fixture
def copied_run(finished_run: Path, tmp_path: Path) -> Callable[[], Path]:
    """The same run to break."""

    def copy() -> Path:
        return Path(shutil.copytree(finished_run, tmp_path / "run"))

    return copy
