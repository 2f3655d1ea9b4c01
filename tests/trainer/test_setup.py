"""The run folder of a run that goes on, and of one whose disk is full."""

from __future__ import annotations

import errno
import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from verl.checkpoint.files import FileRecord
from verl.checkpoint.manifest import Manifest, write_manifest
from verl.config.load import from_dict
from verl.config.schema import DPOConfig, PPOConfig, RewardTrainingConfig, SFTConfig
from verl.errors import CheckpointError, VerlError
from verl.observe.run_folder import RunFolder
from verl.runtime import run_command
from verl.trainer.setup import changes, record_config, require_saved, resume_note, try_write_report

BASE = {"actor_rollout_ref.model.path": "org/a", "data.train_files": ["x.parquet"]}


def config(**more: Any) -> PPOConfig:
    return from_dict(PPOConfig, {**BASE, **{name.replace("__", "."): value for name, value in more.items()}})


@contextmanager
def no_room(size: int = 16) -> Iterator[None]:
    """Files of this process cannot grow beyond `size` bytes: writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_run_that_goes_on_with_other_settings_says_which(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with RunFolder(tmp_path) as folder:
        record_config(config(), folder)
        record_config(config(data__train_batch_size=512), folder)
        assert not caplog.records  # nothing to resume: it begins afresh
        (tmp_path / "global_step_1").mkdir()
        record_config(config(data__train_batch_size=512), folder)
        assert not caplog.records  # the same again, through YAML and back
        record_config(config(actor_rollout_ref__actor__optim__lr=3e-5), folder)
        said = caplog.text
        assert (
            "actor_rollout_ref.actor.optim.lr 1e-06 -> 3e-05" in said
            and "data.train_batch_size 512 -> 1024" in said
        )
        assert "trainer.experiment_name" in said and "trainer.resume_mode=disable" in said
        assert "The weights" not in said
        caplog.clear()
        record_config(config(actor_rollout_ref__model__path="org/b", trainer__resume_mode="disable"), folder)
        assert "other settings" not in caplog.text
        assert "holds checkpoints up to step 1" in caplog.text
        record_config(config(actor_rollout_ref__model__path="org/c"), folder)
        assert "The weights are those of its checkpoint, started from 'org/b'" in caplog.text


def test_fine_tuning_says_it_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def sft(path: str) -> SFTConfig:
        return from_dict(SFTConfig, {"model.path": path, "data.train_files": "x.parquet"})

    with RunFolder(tmp_path) as folder:
        record_config(sft("org/a"), folder)
        (tmp_path / "global_step_1").mkdir()
        record_config(sft("org/b"), folder)
    assert "model.path 'org/a' -> 'org/b'" in caplog.text and "started from 'org/a'" in caplog.text


def test_a_folder_of_another_command_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    values = {"model.path": "org/a", "data.train_files": "x.parquet"}
    kinds = (SFTConfig, DPOConfig, RewardTrainingConfig)
    tuned, preferred, scored = (from_dict(kind, values) for kind in kinds)
    for step in (3, 10):
        path = tmp_path / f"global_step_{step}"
        path.mkdir()
        files = {"x": FileRecord(1, "0")}
        write_manifest(path, Manifest(step, 1, {"actor": ["hf_model"]}, files, command="verl sft"))
    with RunFolder(tmp_path) as folder:
        record_config(tuned, folder)
        before = (tmp_path / "config.yaml").read_text()
        for other, command in (
            (preferred, "verl dpo"),
            (scored, "verl reward train"),
            (config(), "verl train"),
        ):
            with pytest.raises(CheckpointError) as error:
                record_config(other, folder)
            said = str(error.value)
            assert f"global_step_10 was written by `verl sft`, and `{command}` cannot continue it" in said
            for part in ("default_local_dir", "resume_mode=disable", "_10/actor/huggingface as model.path"):
                assert part in said
        assert (tmp_path / "config.yaml").read_text() == before
        record_config(tuned, folder)
        preferred.trainer.resume_mode = "disable"
        record_config(preferred, folder)


def test_changes_are_of_keys_both_have() -> None:
    before = {"a": {"b": 1, "c": [1]}, "gone": 1, "e": {}}
    assert changes(before, {"a": {"b": 2, "c": [1]}, "new": 1, "e": {}}) == [("a.b", 1, 2)]


def test_an_unreadable_config_of_before_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: [")
    (tmp_path / "global_step_1").mkdir()
    with RunFolder(tmp_path) as folder:
        record_config(config(), folder)
        assert folder.previous_config()["actor_rollout_ref"]["model"]["path"] == "org/a"


def test_a_finished_run_says_that_nothing_is_left() -> None:
    assert resume_note(3, 4) == "resumed after step 3"
    for key in ("trainer.total_training_steps", "trainer.experiment_name", "trainer.resume_mode=disable"):
        assert key in resume_note(4, 4)
    assert "4 of 2 steps" in resume_note(4, 2)


def test_a_full_disk_costs_samples_and_report_but_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunFolder(tmp_path) as folder:
        rows = [{"text": "x" * 100}]
        with no_room():
            folder.write_rollouts(1, rows)
            folder.write_validation(1, rows)
            folder.write_crash(ValueError("the cause"))
            try_write_report(folder)
            with pytest.raises(VerlError, match=r"cannot write to the folder .*trainer.default_local_dir"):
                folder.write_config({"a": "x" * 100})
        assert "rollouts/1.jsonl could not be written" in caplog.text
        assert "validation/1.jsonl could not be written" in caplog.text
        assert "crash.txt could not be written" in caplog.text and "report" in caplog.text
        assert sorted(file.name for file in tmp_path.rglob("*") if file.is_file()) == [".lock"]
        folder.write_rollouts(1, rows)
        assert json.loads((tmp_path / "rollouts" / "1.jsonl").read_text()) == rows[0]


def test_a_run_whose_last_checkpoint_is_missing_has_failed(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        with pytest.raises(
            CheckpointError,
            match=r"last step .3. could not be saved: ValueError: no merges\. In .*there is none",
        ):
            require_saved(folder, 3, 0, "ValueError: no merges")
        for step in (2, 10, 12):
            (tmp_path / f"global_step_{step}").mkdir()
        with pytest.raises(CheckpointError, match="newest complete one is global_step_10"):
            require_saved(folder, 12, 10, None)  # a folder of that name may be there from before
        require_saved(folder, 10, 10, None)


def test_a_command_ends_on_a_full_disk_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "/data/x")

    assert run_command(full, trains=True) == 2
    said = capsys.readouterr().err
    assert "/data/x" in said and "trainer.default_local_dir" in said and "Traceback" not in said
    assert run_command(full) == 2
    said = capsys.readouterr().err
    assert "/data/x" in said and "free some space" in said and "trainer." not in said

    def broken() -> int:
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        run_command(broken)
