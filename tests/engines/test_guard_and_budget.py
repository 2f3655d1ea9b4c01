"""Two small parts on their own: who counts skipped steps, and what a pass costs on a GPU."""

from __future__ import annotations

import pytest
import torch

from verl.engines import budget
from verl.engines.guard import NonFiniteGuard
from verl.engines.optim import MasterAdamW
from verl.engines.schedule import Schedule
from verl.errors import TrainingHalted


def test_a_skip_that_looks_for_a_loss_scale_is_neither_counted_nor_saved(tools, tmp_path):
    guard = NonFiniteGuard("actor", 2, tmp_path / "bad")
    for step in range(5):
        guard.remember(tools.batch())
        guard.after_step(True, step, expected=True)
    assert guard.in_a_row == 0 and not (tmp_path / "bad").exists()
    guard.after_step(True, 5)
    guard.after_step(True, 6, expected=True)  # in between it does not count as a good step either
    with pytest.raises(TrainingHalted, match="2 optimiser steps in a row"):
        guard.after_step(True, 7)


def test_a_loss_scale_that_holds_grows_again(monkeypatch):
    monkeypatch.setattr("verl.engines.optim.GROW_EVERY", 3)
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = MasterAdamW([("weight", weight)], schedule=Schedule.constant(0.1), scale_loss=True)
    first = optimizer.loss_scale
    scales = []
    for finite in (True, True, False, True, True, True, True):
        weight.grad = torch.full_like(weight, 1.0 if finite else float("inf"))
        assert optimizer.step()["skipped"] == (not finite)
        scales.append(optimizer.loss_scale / first)
    assert scales == [1, 1, 0.5, 0.5, 0.5, 1, 1], "half after a skip, double after three good steps in a row"


def test_the_cost_of_a_pass_is_a_line_over_its_tokens(monkeypatch):
    """A device whose passes take 7000 bytes and 30 per token, beside 500 that are there all the time."""
    held = {"peak": 0}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 500)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: held.update(peak=500))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: held["peak"])

    def probe(tokens: int) -> None:
        held["peak"] = max(held["peak"], 500 + 7000 + 30 * tokens)

    assert budget._cuda_cost(probe, torch.device("cuda")) == (7000.0, 30.0)
