"""The loss scale of float16 over a long run: it recovers, and it does not cross precisions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from verl.engines import optim
from verl.engines.optim import FIRST_LOSS_SCALE, MasterAdamW
from verl.engines.schedule import Schedule


def optimizer(scale_loss: bool = True) -> tuple[MasterAdamW, nn.Parameter]:
    weight = nn.Parameter(torch.ones(7, dtype=torch.float16))
    return MasterAdamW([("w", weight)], schedule=Schedule(lr=0.0), scale_loss=scale_loss), weight


def step(made: MasterAdamW, weight: nn.Parameter, poison: float = 1.0) -> float:
    (weight.float().sum() * made.loss_scale * poison).backward()
    return made.step()["skipped"]


def test_a_scale_that_fell_to_one_grows_again(monkeypatch):
    monkeypatch.setattr(optim, "GROW_EVERY", 3)
    made, weight = optimizer()
    for _ in range(20):
        assert step(made, weight, poison=float("inf")) == 1
    assert made.loss_scale == 1.0
    scales = []
    for _ in range(6):
        assert step(made, weight) == 0
        scales.append(made.loss_scale)
    assert scales == [1, 1, 2, 2, 2, 4]


def test_without_scaling_the_scale_stays_one(monkeypatch):
    monkeypatch.setattr(optim, "GROW_EVERY", 1)
    made, weight = optimizer(scale_loss=False)
    step(made, weight)
    step(made, weight, poison=float("inf"))
    assert made.loss_scale == 1.0


@pytest.mark.parametrize(
    ("scales", "saved", "taken"),
    [(True, 512.0, 512.0), (True, 1.0, FIRST_LOSS_SCALE), (False, 512.0, 1.0)],
    ids=["the same precision", "saved in another", "loaded in another"],
)
def test_a_checkpoint_of_another_precision_brings_no_scale(scales, saved, taken):
    made, _ = optimizer(scales)
    made.take_loss_scale(saved)
    assert made.loss_scale == taken


def test_an_engine_resumes_in_another_precision(tools):
    half = tools.engine(model=tools.model(), dtype="float16")
    assert half.optimizer.loss_scale == FIRST_LOSS_SCALE
    state = copy.deepcopy(half.state_dict())
    whole = tools.engine(model=tools.model(), dtype="bfloat16")
    whole.load_state_dict(state)
    assert whole.optimizer.loss_scale == 1.0
    state["extra"]["loss_scale"] = 64.0
    half.load_state_dict(state)
    assert half.optimizer.loss_scale == 64.0
