"""Files that users write, and training runs with them. Imports are inside, as most tests here need no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write a file and return its path."""

    def write(text: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.agents.talking import save_talker

    return save_talker(tmp_path_factory.mktemp("talker") / "model")


@pytest.fixture(scope="module")
def rewriting_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.agents.talking import REWRITING, save_talker

    return save_talker(tmp_path_factory.mktemp("rewriting") / "model", REWRITING)


@pytest.fixture
def keys(model: Path, write: Callable[..., str], tmp_path: Path) -> Callable[..., list[str]]:
    """The command line of a small GRPO run with the environment `World`."""
    from tests.agents.runs import KEY, REWARD, WORLD
    from tests.agents.talking import letter_rows, write_rows

    data = write_rows(tmp_path / "rows.jsonl", letter_rows(24, start=lambda number: number))
    write(REWARD, "score.py")

    def make(*more: str, world: str = WORLD, folder: str = "run") -> list[str]:
        return [
            f"data.train_files={data}",
            "data.train_batch_size=3",
            "data.max_prompt_length=32",
            "data.max_response_length=64",
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.rollout.n=4",
            f"{KEY}.enable=True",
            f"{KEY}.environment={write(world, 'world.py')}",
            f"{KEY}.format=ask",
            f"{KEY}.max_turns=3",
            f"{KEY}.max_parallel_calls=2",
            "algorithm.adv_estimator=grpo",
            "trainer.device=cpu",
            "trainer.logger=[]",
            "trainer.total_training_steps=2",
            f"trainer.default_local_dir={tmp_path / folder}",
            *more,
        ]

    return make


@pytest.fixture
def train(keys: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Train as the command does and keep every step's batch."""
    from tests.agents.runs import WORLD, Run
    from tests.tiny_run import read_metrics
    from verl.config.load import load_ppo_config
    from verl.trainer.loop import RLLoop
    from verl.trainer.main_ppo import run

    step = RLLoop.step

    def go(*more: str, world: str = WORLD, folder: str = "run") -> Any:
        batches: dict[int, Any] = {}

        def watched(loop: Any) -> dict[str, float]:
            metrics = step(loop)
            batches[loop.step_number] = loop.batch
            return metrics

        with monkeypatch.context() as patch:
            patch.setattr(RLLoop, "step", watched)
            result = run(load_ppo_config(keys(*more, world=world, folder=folder)))
        return Run(result.folder, read_metrics(result.folder), batches)

    return go
