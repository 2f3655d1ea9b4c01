"""`trainer.profile` on real runs: a trace of each chosen step, the same numbers, and no step lost to a profiler."""

from __future__ import annotations

import gzip
import json
import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tiny_run import read_metrics, tiny_run, untimed
from verl.config.load import load_ppo_config, load_sft_config
from verl.errors import ConfigError
from verl.trainer import sft_trainer
from verl.trainer.main_ppo import run


def operators(file: Path) -> set[str]:
    with gzip.open(file, "rt") as text:
        return {event["name"] for event in json.load(text)["traceEvents"] if event.get("cat") == "cpu_op"}


def train(model: Path, data: Path, folder: Path, *extra: str) -> Path:
    return run(
        load_ppo_config(tiny_run(model, data, "trainer.total_training_steps=3", *extra, folder=folder))
    ).folder


@pytest.fixture(scope="module")
def plain(tiny_model_dir: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny_model_dir, digits_data, tmp_path_factory.mktemp("plain"))


@pytest.mark.slow(seconds=2)
def test_only_the_chosen_steps_are_profiled_and_no_number_changes(
    plain: Path, tiny_model_dir: Path, digits_data: Path, tmp_path: Path
) -> None:
    folder = train(tiny_model_dir, digits_data, tmp_path / "run", "trainer.profile.steps=[1,3]")
    files = sorted(file.name for file in (folder / "profile").iterdir())
    assert files == ["step_1_rank_0.json.gz", "step_3_rank_0.json.gz"]
    for name in files:
        found = operators(folder / "profile" / name)
        assert "aten::mm" in found and any("Backward" in each for each in found), "generation and update"
    assert untimed(read_metrics(folder)) == untimed(read_metrics(plain))
    assert not (plain / "profile").exists()


def test_a_trace_that_cannot_be_written_is_lost_alone(
    plain: Path,
    tiny_model_dir: Path,
    digits_data: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("a file where the traces would go")
    with caplog.at_level(logging.WARNING):
        folder = train(tiny_model_dir, digits_data, tmp_path / "run", "trainer.profile.steps=[2]")
    assert "the profile of a step could not be written" in caplog.text
    assert untimed(read_metrics(folder)) == untimed(read_metrics(plain))


def test_a_step_that_fails_ends_its_profiler(tmp_path: Path) -> None:
    from verl.config.sections.trainer import ProfileConfig
    from verl.observe.metrics import profiled

    cfg = ProfileConfig(steps=[1, 2], ranks=[0])
    with pytest.raises(KeyError), profiled(cfg, 1, 0, tmp_path):
        raise KeyError("of the step")
    assert not list(tmp_path.iterdir())
    with profiled(cfg, 2, 0, tmp_path):
        torch.ones(2, 2) @ torch.ones(2, 2)
    with profiled(cfg, 2, 1, tmp_path), profiled(cfg, 3, 0, tmp_path):
        pass
    assert [file.name for file in tmp_path.rglob("*.gz")] == ["step_2_rank_0.json.gz"]
    assert "aten::mm" in operators(tmp_path / "profile" / "step_2_rank_0.json.gz")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["trainer.profile.steps=[0]"], "'trainer.profile.steps' is 0; it must be at least 1"),
        (["trainer.profile.steps=[2,9]"], "'trainer.profile.steps' has 9; this run has steps 1 to 3"),
        (
            ["trainer.profile.steps=[2]", "trainer.profile.ranks=[0,1]"],
            r"'trainer.profile.ranks' has 1; this run has 1 \(trainer.n_gpus_per_node=1 x trainer.nnodes=1\)",
        ),
        (
            ["trainer.profile.steps=[2]", "trainer.profile.ranks=[]"],
            "'trainer.profile.ranks' is empty",
        ),
    ],
)
def test_steps_and_ranks_that_the_run_does_not_have_are_refused(
    keys: list[str], message: str, tiny_model_dir: Path, digits_data: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_ppo_config(tiny_run(tiny_model_dir, digits_data, "trainer.total_training_steps=3", *keys))


def sft(model: Path, data: Path, folder: Path, *extra: str) -> Any:
    return load_sft_config(
        [
            f"model.path={model}",
            f"data.train_files={data}",
            "data.train_batch_size=4",
            "data.max_length=64",
            "trainer.device=cpu",
            "trainer.logger=[]",
            f"trainer.default_local_dir={folder}",
            *extra,
        ]
    )


def test_fine_tuning_is_profiled_and_its_data_says_which_steps_there_are(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    draw = random.Random(0)
    texts = [" ".join(str(draw.randrange(10)) for _ in range(5)) for _ in range(12)]
    rows = [{"prompt": [{"role": "user", "content": text}], "response": text} for text in texts]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="'trainer.profile.steps' has 4; this run has steps 1 to 3"):
        sft_trainer.run(sft(tiny_model_dir, data, tmp_path / "run", "trainer.profile.steps=[2,4]"))
    result = sft_trainer.run(sft(tiny_model_dir, data, tmp_path / "run", "trainer.profile.steps=[2]"))
    assert [file.name for file in (result.folder / "profile").iterdir()] == ["step_2_rank_0.json.gz"]
    assert "aten::mm" in operators(result.folder / "profile" / "step_2_rank_0.json.gz")


def test_a_profile_measures_how_long_the_gpu_was_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With events as a GPU gives them: overlapping streams count once, and those of the CPU not."""
    from torch.autograd import DeviceType

    from verl.config.sections.trainer import ProfileConfig
    from verl.observe import metrics

    class Event:
        def __init__(self, device: DeviceType, start: int, end: int) -> None:
            self.device_type, self.start_ns, self.end_ns = (lambda: device), (lambda: start), (lambda: end)

    now = 10**18
    spans = [(0, 100), (50, 150), (60, 70), (300, 400)]
    assert metrics.covered((now + start, now + end) for start, end in spans) == 250
    events = [Event(DeviceType.CUDA, now + start, now + end) for start, end in spans]
    events.append(Event(DeviceType.CPU, now, now + 10**9))
    clock = [5.0]
    results = SimpleNamespace(events=lambda: events)
    profiler = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(metrics, "_start", lambda: profiler)
    monkeypatch.setattr(
        metrics, "_stop", lambda profiler, file: clock.__setitem__(0, 100.0)
    )  # writing takes long
    with metrics.profiled(ProfileConfig(steps=[1], ranks=[0]), 1, 0, tmp_path) as measured:
        assert measured == {}
        clock[0] += 1e-6
    assert measured == {"perf/gpu_busy": pytest.approx(0.25, rel=1e-3)}
