"""Host memory for saves in the background: taken ahead, used again, and not taken when there is too little."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch

from verl.checkpoint import CheckpointManager, PartSettings, save_op
from verl.checkpoint.save_op import Staging
from verl.checkpoint.state import StateSnapshot
from verl.checkpoint.tensors import TensorChunk

IN_BACKGROUND = {"actor": PartSettings(["model", "optimizer", "extra"], None, True)}


def some_state(scale: float = 1.0) -> StateSnapshot:
    tensors = {
        "matrix": torch.randn(30, 50) * scale,
        "strided": torch.randn(6, 8).T * scale,
        "half": torch.randn(7, dtype=torch.bfloat16),
        "scalar": torch.tensor(scale),
        "flags": torch.rand(5) > 0.5,
        "empty": torch.zeros(0, 3),
    }
    return StateSnapshot(
        {"model": [TensorChunk(key, (0,) * t.ndim, t) for key, t in tensors.items()], "extra": []}, {}
    )


def test_a_copy_is_equal_and_apart_from_its_source() -> None:
    kept = Staging()
    for scale in (1.0, 2.0):
        taken = some_state(scale)
        assert kept.reserve("actor", taken)
        copy = kept.copy("actor", taken)
        assert copy.chunks.keys() == taken.chunks.keys()
        for (_, ours), (_, theirs) in zip(copy.tensors(), taken.tensors(), strict=True):
            assert (ours.key, ours.offsets) == (theirs.key, theirs.offsets)
            assert ours.tensor.dtype == theirs.tensor.dtype and torch.equal(ours.tensor, theirs.tensor)
            before = ours.tensor.clone()
            theirs.tensor.zero_()
            assert torch.equal(ours.tensor, before)


def test_memory_is_used_again_until_the_state_changes_its_shape() -> None:
    kept = Staging()
    taken = some_state()
    kept.reserve("actor", taken)
    first = [chunk.tensor.data_ptr() for _, chunk in kept.copy("actor", taken).tensors()]
    kept.reserve("actor", some_state())
    assert [chunk.tensor.data_ptr() for _, chunk in kept.copy("actor", some_state()).tensors()] == first
    larger = StateSnapshot({"model": [TensorChunk("matrix", (0, 0), torch.ones(40, 50))]}, {})
    kept.reserve("actor", larger)
    assert torch.equal(kept.copy("actor", larger).chunks["model"][0].tensor, torch.ones(40, 50))


def test_the_memory_for_the_first_save_is_taken_beside_training(
    tmp_path: Path, job: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    by: list[str] = []
    free = save_op.free_host_bytes

    def noting() -> int:  # asked before each allocation
        by.append(threading.current_thread().name)
        return free()

    monkeypatch.setattr(save_op, "free_host_bytes", noting)
    engine = job.make_engine()
    manager = CheckpointManager(tmp_path, IN_BACKGROUND)
    assert manager.resume({"actor": engine}) is None
    job.train(engine, 0)
    for step in (1, 2):
        manager.save(step, {"actor": engine}, {})
        assert manager.wait() == tmp_path / f"global_step_{step}"
    (thread,) = by
    assert thread.startswith("checkpoint memory")


def test_without_memory_for_a_copy_the_save_is_made_at_once(
    tmp_path: Path, job: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(save_op, "free_host_bytes", lambda: 1000)
    engine = job.make_engine()
    manager = CheckpointManager(tmp_path, IN_BACKGROUND)
    with caplog.at_level(logging.WARNING):
        assert manager.save(1, {"actor": engine}, {"step": 1}) == tmp_path / "global_step_1"
    assert "async_save needs" in caplog.text and "not in the background" in caplog.text
    assert manager.resume({"actor": engine}) == {"step": 1}
