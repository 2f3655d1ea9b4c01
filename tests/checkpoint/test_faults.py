"""Full disks, missing rights, vanished folders: the run goes on and the last checkpoint stays good."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from verl.checkpoint import CheckpointManager, PartSettings
from verl.checkpoint.manifest import read_manifest, verify
from verl.checkpoint.save_op import SaveOperation
from verl.checkpoint.state import encode
from verl.checkpoint.steps import list_steps
from verl.distributed import Ranks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs `mount`")
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def steps_in(folder: Path) -> list[int]:
    return [entry.step for entry in list_steps(folder)]


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_full_disk_costs_the_save_and_nothing_else(
    small_disk: Path, job: ModuleType, caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    """The disk is filled to every point of a save in turn, the last files included."""
    engine = job.make_engine()
    settings = {"actor": PartSettings(["model", "optimizer", "extra", "hf_model"], None, background)}
    manager = CheckpointManager(
        small_disk / "run", settings, max_actor_to_keep=1, peer_timeout_s=20, continue_without=True
    )
    manager.save(1, {"actor": engine}, {"step": 1})
    manager.wait()
    size = sum(f.stat().st_size for f in (small_disk / "run").rglob("*") if f.is_file())
    failures = 0
    for share in (0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95):
        stuffing = small_disk / "stuffing"
        free = shutil.disk_usage(small_disk).free
        stuffing.write_bytes(b"x" * max(0, free - int(share * size)))
        caplog.clear()
        before = steps_in(small_disk / "run")
        with caplog.at_level(logging.WARNING):
            done = manager.save(before[0] + 1, {"actor": engine}, {"step": before[0] + 1})
            done = manager.wait() if background else done
        stuffing.unlink()
        assert all(verify(entry.path) == [] for entry in list_steps(small_disk / "run"))
        if done is None:
            failures += 1
            assert "could not be saved" in caplog.text and "No space left" in caplog.text
            assert steps_in(small_disk / "run") == before
            assert not list((small_disk / "run").glob(".global_step*"))
        assert (
            CheckpointManager(small_disk / "run").resume({"actor": engine})["step"]
            == steps_in(small_disk / "run")[0]
        )
        job.train(engine, 1)
    assert failures >= 5
    done = manager.save(50, {"actor": engine}, {"step": 50})
    assert (manager.wait() if background else done) == small_disk / "run/global_step_50"


def test_a_disk_that_fills_up_inside_the_tokenizer_costs_the_save_alone(
    small_disk: Path, job: ModuleType, tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The library behind `tokenizer.json` has an error of its own for a full disk."""
    engine = job.make_engine()
    manager = CheckpointManager(small_disk / "run", continue_without=True)
    stuffing = small_disk / "stuffing"
    for pages in range(1, 12):
        stuffing.write_bytes(b"x" * max(0, shutil.disk_usage(small_disk).free - pages * 4096))
        with caplog.at_level(logging.WARNING):
            assert manager.save(1, {"actor": engine}, {"step": 1}, tokenizer=tiny_tokenizer) is None
        stuffing.unlink()
        assert not list((small_disk / "run").glob(".global_step*"))
    assert "(os error 28)" in caplog.text, "no save reached the tokenizer, so nothing was tested"
    assert manager.save(1, {"actor": engine}, {"step": 1}, tokenizer=tiny_tokenizer) is not None


def test_a_folder_that_vanished_is_made_again(tmp_path: Path, job: ModuleType) -> None:
    engine = job.make_engine()
    manager = CheckpointManager(tmp_path / "run")
    manager.save(1, {"actor": engine}, {})
    shutil.rmtree(tmp_path / "run")
    assert manager.save(2, {"actor": engine}, {"step": 2}) == tmp_path / "run/global_step_2"
    assert manager.resume({"actor": engine}) == {"step": 2}


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("ending", ["tmp", "old", "deleting"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_folder_in_the_place_of_a_working_folder_is_removed(
    tmp_path: Path, job: ModuleType, kind: str, ending: str
) -> None:
    engine, elsewhere = job.make_engine(), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("x")
    run = tmp_path / "run"
    CheckpointManager(run).save(1, {"actor": engine}, {"step": 1})
    for step in (1, 2):
        name = run / f".global_step_{step}.{ending}"
        name.symlink_to(elsewhere) if kind == "link" else name.write_text("x")
    manager = CheckpointManager(run, max_actor_to_keep=1)
    assert manager.resume({"actor": engine}) == {"step": 1}
    for step in (1, 2):
        assert manager.save(step, {"actor": engine}, {"step": step}) is not None
    manager.wait()
    assert steps_in(run) == [2] and (elsewhere / "mine").exists()


def test_a_folder_that_cannot_be_made_again_costs_the_save_only(
    tmp_path: Path, job: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    engine = job.make_engine()
    manager = CheckpointManager(tmp_path / "run")
    (tmp_path / "run").write_text("a file where the folder was")
    with caplog.at_level(logging.WARNING):
        assert manager.save(1, {"actor": engine}, {}) is None
    assert "could not be saved" in caplog.text and "training continues" in caplog.text.lower()


def test_a_folder_without_write_permission_costs_the_save_only(
    tmp_path: Path, job: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    engine = job.make_engine()
    folder = tmp_path / "run"
    CheckpointManager(folder).save(1, {"actor": engine}, {"step": 1})
    tmp_path.chmod(0o755)
    folder.chmod(0o555)
    as_root = os.geteuid() == 0
    if as_root:  # root may write anywhere: ask as someone else
        os.seteuid(65534)
    try:
        if os.access(folder, os.W_OK, effective_ids=True):
            pytest.skip("write permission cannot be taken away here")
        with caplog.at_level(logging.WARNING):
            assert CheckpointManager(folder).save(2, {"actor": engine}, {}) is None
        assert "Permission denied" in caplog.text
    finally:
        if as_root:
            os.seteuid(0)
        folder.chmod(0o755)
    assert CheckpointManager(folder).resume({"actor": engine}) == {"step": 1}


def test_a_rank_that_failed_or_never_answers_is_named(tmp_path: Path) -> None:
    work, final = tmp_path / ".work", tmp_path / "global_step_1"
    first, second = (SaveOperation(1, work, final, a_rank(rank, 2), peer_timeout_s=0.3) for rank in (0, 1))
    first.trees, second.trees = {"a": encode({"x": 1})}, {"b": encode({"y": 2})}
    first.open()
    first.announce()
    second.announce()
    first.write()
    with pytest.raises(TimeoutError, match="rank 1 has not written its files after 0.3 s"):
        first.commit()
    (work / ".not_written_by_rank_1").mkdir()  # as on a disk that cannot hold another file
    second.give_up("quota")
    with pytest.raises(OSError, match="rank 1 could not write its files$"):
        first.commit()
    (work / ".not_written_by_rank_1").rmdir()
    second.give_up("quota")
    with pytest.raises(OSError, match="rank 1 could not write its files: quota$"):
        first.commit()
    (work / ".not_written_by_rank_1").unlink()
    second.write()
    first.commit()
    assert set(read_manifest(final).files) == {"a.json", "b.json"}


def a_rank(rank: int, world_size: int) -> Ranks:
    ranks = Ranks()
    ranks.rank, ranks.world_size = rank, world_size
    return ranks
