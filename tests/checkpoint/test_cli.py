"""`verl ckpt`: what people see."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

import pytest

from verl.checkpoint import CheckpointManager, PartSettings
from verl.checkpoint.cli import add_arguments, run
from verl.checkpoint.steps import in_use
from verl.errors import CheckpointError


def ckpt(*words: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def folder(tmp_path: Path, job: ModuleType) -> Path:
    """Steps 1 to 4, the second the best, the fourth damaged; and one without a manifest."""
    engine = job.make_engine()
    manager = CheckpointManager(tmp_path, {"actor": PartSettings(["model", "optimizer", "extra"])})
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.2)):
        manager.save(step, {"actor": engine}, {"step": step}, metrics={"val-core/acc": score})
        if step < 3:
            job.train(engine, step)
    (tmp_path / "global_step_4/trainer_state.json").write_text("{}")
    (tmp_path / "global_step_5").mkdir()
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("global_step_*"))


def test_ls_shows_each_step_and_its_state(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("ls", folder) == 0
    rows = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if "│" in line}
    assert "incomplete" in rows["5"] and "damaged: trainer_state.json" in rows["4"]
    assert "complete" in rows["2"] and "val-core/acc 0.9" in rows["2"] and "optimizer" in rows["2"]


def test_verify_names_the_damage_and_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("verify", folder) == 1
    out = capsys.readouterr().out
    assert "global_step_4: trainer_state.json has 2 bytes instead of" in out
    assert "global_step_5" in out and "files, all as written" in out
    assert ckpt("verify", folder / "global_step_2") == 0


def test_prune_keeps_the_newest_whole_one_and_the_best(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt("prune", folder, "--keep", 1, "--keep-best", "val-core/acc", "--dry-run") == 0
    assert capsys.readouterr().out.split() == ["would", "delete", "global_step_1"]
    assert len(names(folder)) == 5
    assert ckpt("prune", folder, "--keep", 1, "--keep-best", "val-core/acc") == 0
    assert names(folder) == ["global_step_2", "global_step_3", "global_step_4", "global_step_5"]
    assert ckpt("prune", folder, "--damaged") == 0
    assert names(folder) == ["global_step_3"]


def test_prune_leaves_what_is_in_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with in_use(folder / "global_step_1"):
        ckpt("prune", folder)
    assert "global_step_1 is in use and stays" in capsys.readouterr().out
    assert (folder / "global_step_1").exists() and not (folder / "global_step_2").exists()


def test_bad_input_is_told(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        ckpt("ls", folder / "nowhere")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        ckpt("verify", tmp_path_factory.mktemp("empty"))
    with pytest.raises(CheckpointError, match="--keep 0"):
        ckpt("prune", folder, "--keep", 0)
