"""Damage in any file is found, named, and the checkpoint passed over."""

from __future__ import annotations

import logging
import pickle
import random
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from verl.checkpoint import CheckpointManager
from verl.checkpoint.files import files_below
from verl.checkpoint.manifest import MANIFEST, read_manifest, verify, write_manifest
from verl.checkpoint.steps import newest_complete
from verl.errors import CheckpointError


@pytest.fixture(scope="module")
def saved(job: ModuleType, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    engines = {"actor": job.make_engine(), "critic": job.make_engine("critic")}
    manager = CheckpointManager(folder)
    for step in (1, 2):
        manager.save(
            step,
            engines,
            {"step": step, "tensor": job.make_batch(1).batch["target"]},
            tokenizer=tiny_tokenizer,
        )
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def flip_a_bit(path: Path, where: float) -> None:
    content = bytearray(path.read_bytes())
    position = min(int(where * len(content)), len(content) - 1)
    content[position] ^= 1 << random.Random(where).randrange(8)
    path.write_bytes(content)


def every_file(run: Path) -> list[Path]:
    return list(files_below(run / "global_step_2"))


def newest_path(run: Path) -> Path:
    newest = newest_complete(run)
    assert newest is not None
    return newest.path


def assert_skipped(run: Path, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Step 2 is passed over, with its name and the file's in the log, and step 1 is taken."""
    caplog.clear()
    name = file.relative_to(run / "global_step_2").as_posix()
    with caplog.at_level(logging.WARNING):
        assert newest_path(run) == run / "global_step_1", name
    told = [r.getMessage() for r in caplog.records if "global_step_2 is skipped" in r.getMessage()]
    assert len(told) == 1 and name in told[0], (name, told)


@pytest.mark.slow(seconds=6)
def test_a_flipped_bit_in_any_file_is_detected(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = every_file(run)
    assert len(files) > 15
    for file in files:
        whole = file.read_bytes()
        for where in (0.0, 0.5, 0.999):
            flip_a_bit(file, where)
            assert_skipped(run, file, caplog)
            file.write_bytes(whole)
    assert newest_path(run) == run / "global_step_2"


@pytest.mark.slow(seconds=3)
def test_a_shorter_longer_empty_or_missing_file_is_detected(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in every_file(run):
        whole = file.read_bytes()
        for content in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0"):
            file.write_bytes(content)
            if file.name == MANIFEST and content == whole[:-1]:
                continue  # only the newline at the end is gone: nothing is lost
            assert_skipped(run, file, caplog)
        file.unlink()
        assert_skipped(run, file, caplog)
        file.write_bytes(whole)


class Bait:
    """Unpickled, it would leave a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (Path.touch, (self.trace,))


@pytest.mark.slow(seconds=2)
def test_a_checkpoint_from_a_stranger_cannot_run_code(run: Path, job: ModuleType, tmp_path: Path) -> None:
    """Every file in turn replaced by a pickle, with a manifest that vouches for it."""
    trace = tmp_path / "ran"
    bait = pickle.dumps(Bait(trace))
    pickle.loads(bait)
    assert trace.exists(), "the bait does not work, so the test would prove nothing"
    trace.unlink()
    engines = {"actor": job.make_engine(), "critic": job.make_engine("critic")}
    folder = run / "global_step_2"
    for file in every_file(run):
        if file.name == MANIFEST:
            continue
        whole = file.read_bytes()
        file.write_bytes(bait)
        _vouch(folder)
        name = file.relative_to(folder).as_posix()
        manager = CheckpointManager(run, resume_mode="resume_path", resume_from_path=folder)
        if "/huggingface/" in name or "/lora_adapter/" in name:
            manager.resume(engines)  # not read when resuming
        else:
            with pytest.raises(CheckpointError):
                manager.resume(engines)
        assert not trace.exists(), name
        file.write_bytes(whole)
        _vouch(folder)


def _vouch(folder: Path) -> None:
    from dataclasses import replace

    from verl.checkpoint.files import record_of

    manifest = read_manifest(folder)
    files = {name: record_of(folder / name) for name in manifest.files}
    write_manifest(folder, replace(manifest, files=files), replace=True)


def test_a_manifest_cannot_point_elsewhere(run: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    from verl.checkpoint.files import record_of

    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder = run / "global_step_2"
    manifest = read_manifest(folder)
    for name in ("../../secret", str(secret)):
        write_manifest(
            folder, replace(manifest, files={**manifest.files, name: record_of(secret)}), replace=True
        )
        assert any("outside its folder" in problem for problem in verify(folder))


def test_when_nothing_is_whole_the_run_starts_afresh_and_says_why(
    run: Path, job: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        flip_a_bit(run / f"global_step_{step}/trainer_state.json", 0.5)
    with caplog.at_level(logging.WARNING):
        assert CheckpointManager(run).resume({"actor": job.make_engine()}) is None
    assert "global_step_2 is skipped" in caplog.text and "global_step_1 is skipped" in caplog.text


def test_a_half_deleted_or_foreign_folder_is_not_taken_for_a_checkpoint(run: Path) -> None:
    (run / "global_step_7").mkdir()
    (run / "global_step_8").write_text("a file")
    (run / "global_step_x").mkdir()
    assert newest_path(run) == run / "global_step_2"
