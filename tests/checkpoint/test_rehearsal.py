"""What a run proves about its checkpoints before its first step, and what a failed save says."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from verl.checkpoint.manager import CheckpointManager, PartSettings
from verl.errors import CheckpointError


def rehearse(folder: Path, engine: Any, contents: list[str] | None = None, **more: Any) -> None:
    settings = {"actor": PartSettings(contents)}
    state = more.pop("state", {"step": 0})
    CheckpointManager(folder, settings).rehearse({"actor": engine, "ref": None}, state, **more)


@pytest.mark.parametrize("kind", [{}, {"kind": "critic"}, {"lora_rank": 2}, {"dtype": "bfloat16"}], ids=str)
def test_a_run_that_can_save_leaves_nothing_behind_and_draws_nothing(
    kind: dict[str, Any], tmp_path: Path, job: ModuleType, tiny_tokenizer: Any
) -> None:
    engine = job.make_engine(**kind)
    before = torch.get_rng_state()
    rehearse(tmp_path, engine, tokenizer=tiny_tokenizer)
    assert torch.equal(torch.get_rng_state(), before)
    assert list(tmp_path.iterdir()) == []
    assert not any(engine._optimizer.rule.has_state(name) for name in engine._optimizer.masters)


class BrokenTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        raise ValueError("no merges")


class ForgetfulTokenizer:
    def __init__(self, tokens: int = 9) -> None:
        self.tokens = tokens

    def save_pretrained(self, folder: Path) -> None:
        pass

    @classmethod
    def from_pretrained(cls, folder: Path) -> ForgetfulTokenizer:
        return cls(7)

    def __len__(self) -> int:
        return self.tokens


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [
        (BrokenTokenizer(), "checkpoint of the actor cannot be saved: ValueError: no merges"),
        (ForgetfulTokenizer(), "the tokenizer has 9 tokens, and 7 after saving it"),
    ],
)
def test_a_tokenizer_that_cannot_be_saved_ends_the_run_before_its_first_step(
    tokenizer: Any, says: str, tmp_path: Path, job: ModuleType
) -> None:
    with pytest.raises(CheckpointError, match=says):
        rehearse(tmp_path, job.make_engine(), tokenizer=tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_names_types_and_state_that_cannot_be_saved_are_named(
    tmp_path: Path, job: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = job.make_engine()
    with pytest.raises(CheckpointError, match="trainer's state cannot be saved: .*'loader' is a set"):
        rehearse(tmp_path, engine, state={"loader": {1}})
    odd = {**engine.saved_weights(), "lm_head.weight": torch.zeros(40, 16, dtype=torch.complex64)}
    monkeypatch.setattr(engine, "saved_weights", lambda: odd)
    with pytest.raises(
        CheckpointError, match="actor cannot be saved: .*'lm_head.weight' has type torch.complex64"
    ):
        rehearse(tmp_path, engine)
    del odd["lm_head.weight"]
    with pytest.raises(CheckpointError, match="lacks 1 weights of the architecture, first 'lm_head.weight'"):
        rehearse(tmp_path, engine, ["model", "hf_model"])


@pytest.mark.parametrize(
    ("dtype", "contents", "level", "says"),
    [
        ("float32", ["hf_model"], logging.INFO, r"save_contents=\[hf_model\].*a run resumes from"),
        ("bfloat16", ["hf_model"], logging.WARNING, r"save_contents=\[hf_model\].*cannot be resumed"),
        ("float32", ["optimizer", "extra"], logging.WARNING, "cannot be resumed"),
    ],
)
def test_contents_to_resume_from_that_are_lacking_are_said_at_start(
    dtype: str,
    contents: list[str],
    level: int,
    says: str,
    tmp_path: Path,
    job: ModuleType,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import re

    with caplog.at_level(logging.INFO, "verl"):
        rehearse(tmp_path, job.make_engine(dtype=dtype), contents)
    (record,) = [each for each in caplog.records if "save_contents" in each.getMessage()]
    assert record.levelno == level and re.search(says, record.getMessage())


def failing(error: Exception) -> Any:
    def fail(*arguments: object, **more: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (Exception("I/O error: Disk quota exceeded (os error 122)"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (FileNotFoundError(errno.ENOENT, "No such file"), False),
        (ValueError("GenerationConfig is invalid"), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_failed_save_names_its_cause_and_the_second_in_a_row_ends_the_run(
    error: Exception,
    advice: bool,
    background: bool,
    tmp_path: Path,
    job: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = {"actor": job.make_engine()}

    def save(manager: CheckpointManager, step: int) -> Path | None:
        return manager.save(step, parts, {"step": step}) or manager.wait()

    settings = {"actor": PartSettings(["model"], None, background)}
    manager = CheckpointManager(tmp_path / "a", settings)
    with monkeypatch.context() as patch:
        patch.setattr("verl.checkpoint.save_op.write_snapshot", failing(error))
        assert save(manager, 1) is None
    assert manager.failure is not None and str(error) in manager.failure
    assert ("Free some space" in manager.failure) == advice
    assert save(manager, 2) is not None  # which ends the row
    with monkeypatch.context() as patch:
        patch.setattr("verl.checkpoint.save_op.write_snapshot", failing(error))
        assert save(manager, 3) is None
        with pytest.raises(CheckpointError, match="steps 3 and 4 could not be saved") as found:
            save(manager, 4)
        assert str(error) in str(found.value) and "continue_without_checkpoints" in str(found.value)
        patient = CheckpointManager(tmp_path / "b", settings, continue_without=True)
        assert [save(patient, step) for step in (1, 2, 3)] == [None, None, None]
    assert save(patient, 4) is not None
