"""A real run of the loop on the tiny model, with a look at what passes between it and its workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import read_metrics, tiny_run
from verl.data.proto import DataProto
from verl.rollout.base import GenerationSettings


@dataclass
class Generated:
    """One call of the rollout engine."""

    step: int
    settings: GenerationSettings
    batch: DataProto


@dataclass
class Update:
    """One optimiser step."""

    step: int
    role: str
    mini: DataProto
    metrics: dict[str, float]


@dataclass
class Seen:
    """What happened in a run, in order. `step` is the loop's number at that moment."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    batches: dict[int, DataProto] = field(default_factory=dict)
    generated: list[Generated] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    folder: Path = Path()
    loop: Any = None

    def row(self, step: int) -> dict[str, Any]:
        return next(row for row in self.rows if row["step"] == step)

    def of(self, role: str, step: int | None = None) -> list[Update]:
        return [u for u in self.updates if u.role == role and step in (None, u.step)]


Change = Callable[[Seen, DataProto], None]


@pytest.fixture
def watch(
    tiny_model_dir: Path, digits_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Seen]:
    """Train as the command does. `change(seen, batch)` may alter what the rollout engine answered; `within(loop)` is
    called after every step."""
    from verl.config.load import load_ppo_config
    from verl.trainer.loop import RLLoop
    from verl.trainer.main_ppo import run
    from verl.workers.local import LocalGroup

    step, generate, train = RLLoop.step, LocalGroup.generate, LocalGroup.train

    def go(
        *extra: str,
        folder: str = "run",
        change: Change | None = None,
        within: Callable[[Any], None] | None = None,
    ) -> Seen:
        seen = Seen()

        def watched_step(loop: Any) -> dict[str, float]:
            seen.loop = loop
            metrics = step(loop)
            seen.batches[loop.step_number] = loop.batch
            if within is not None:
                within(loop)
            return metrics

        def watched_generate(group: Any, prompts: Any, settings: Any, on_finish: Any = None) -> DataProto:
            batch = generate(group, prompts, settings, on_finish)
            if change is not None:
                change(seen, batch)
            number = seen.loop.step_number if seen.loop is not None else 0
            seen.generated.append(Generated(number, settings, batch))
            return batch

        def watched_train(group: Any, role: str, mini: DataProto, **options: Any) -> Any:
            metrics = train(group, role, mini, **options)
            numbers = {name: float(metric.value) for name, metric in metrics.items()}
            seen.updates.append(Update(seen.loop.step_number, role, mini, numbers))
            return metrics

        with monkeypatch.context() as patch:
            patch.setattr(RLLoop, "step", watched_step)
            patch.setattr(LocalGroup, "generate", watched_generate)
            patch.setattr(LocalGroup, "train", watched_train)
            result = run(
                load_ppo_config(
                    tiny_run(
                        tiny_model_dir,
                        digits_data,
                        "trainer.total_training_steps=2",
                        *extra,
                        folder=tmp_path / folder,
                    )
                )
            )
        seen.folder = result.folder
        seen.rows = read_metrics(result.folder) if (result.folder / "metrics.jsonl").exists() else []
        return seen

    return go


@pytest.fixture
def reward_file(tmp_path: Path) -> Callable[[str], str]:
    """The override that names a reward function with this body; it sees `words`, `truth` and `number`."""

    def write(body: str) -> str:
        file = tmp_path / "reward.py"
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        file.write_text(
            "def compute_score(solution_str, ground_truth, extra_info):\n"
            "    words, truth, number = solution_str.split(), ground_truth, extra_info['number']\n"
            f"{lines}"
        )
        return f"reward.custom_reward_function.path={file}"

    return write
