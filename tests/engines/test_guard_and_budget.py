"""Two small parts on their own: who counts skipped steps, and what a pass costs on a GPU."""

from __future__ import annotations

import pytest
import torch

from verl.engines import budget
from verl.engines.optim import MasterAdamW, Schedule
from verl.engines.runner_engine import NonFiniteGuard
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


def test_a_batch_that_cannot_be_saved_does_not_end_the_run(tools, tmp_path, caplog):
    (tmp_path / "bad").write_text("a file where the folder would be")
    guard = NonFiniteGuard("actor", 2, tmp_path / "bad")
    guard.remember(tools.batch())
    guard.after_step(True, 5)
    assert "the batch could not be saved" in caplog.text and guard.in_a_row == 1


def test_a_loss_scale_that_holds_grows_again(monkeypatch):
    monkeypatch.setattr("verl.engines.optim.GROW_EVERY", 3)
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = MasterAdamW([("weight", weight)], schedule=Schedule(lr=0.1), scale_loss=True)
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


def test_every_model_takes_the_budget_of_the_measured_size_nearest_to_it():
    known = sorted(budget.BEST_TOKENS)
    for weights in known:
        assert (
            budget.best_tokens(weights * 1.1)
            == budget.best_tokens(weights * 0.9)
            == budget.BEST_TOKENS[weights]
        )
    assert budget.best_tokens(0) == budget.BEST_TOKENS[known[0]]
    assert budget.best_tokens(1e12) == budget.BEST_TOKENS[known[-1]]
    assert all(tokens & (tokens - 1) == 0 for tokens in budget.BEST_TOKENS.values())


def test_room_is_left_for_moments_that_do_not_exist_yet(tools, monkeypatch):
    """Also beside passes without gradient: the first of them comes before the first step, and later ones after it."""
    from verl.models.fused_linear import slice_bytes

    engine = tools.engine(model=tools.model(), role={"ppo_micro_batch_size_per_gpu": None})
    asked = {}

    def measure(probe, device, *, cap, reserve_bytes, label):
        asked[label] = reserve_bytes
        return cap

    monkeypatch.setattr(budget, "measure", measure)
    engine.log_probs(tools.batch())
    engine.forward_backward(tools.batch(), tools.policy_loss)
    numbers = sum(p.numel() for p in tools.module(engine).parameters())
    head = slice_bytes(budget.CAP_CPU, tools.vocab, torch.device("cpu"))
    assert asked == {"actor (forward)": 8 * numbers + head, "actor (train)": 12 * numbers + head}
    asked.clear()
    offloaded = tools.engine(model=tools.model(), role={"fsdp_config.optimizer_offload": True})
    offloaded.log_probs(tools.batch())
    assert asked == {"actor (forward)": head}, "moments wait in host memory"


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_moments_are_missing_until_the_first_step(moments):
    weight = torch.nn.Parameter(torch.ones(40, 10))
    optimizer = MasterAdamW([("weight", weight)], schedule=Schedule(lr=0.1), moments=moments)
    each = {"float32": 8, "int8": 2}[moments]
    assert optimizer.bytes_to_allocate("forward", moments_on_host=False) == 400 * each
    assert optimizer.bytes_to_allocate("train", moments_on_host=True) == 400 * (each + 4)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.bytes_to_allocate("forward", moments_on_host=False) == 0


@pytest.mark.parametrize("kind", ["train", "forward"])
def test_the_probe_does_not_take_the_slice_of_logits_for_a_cost_of_every_token(tools, monkeypatch, kind):
    """A larger probe would hold a larger slice, until it reaches its bound; a real micro-batch is far above that."""
    from verl.models import fused_linear

    engine = tools.engine(model=tools.model(vocab_size=700))
    widths = set()
    product = fused_linear.product

    def recorded(a, b, bias=None):
        widths.add(b.shape[1])
        return product(a, b, bias)

    monkeypatch.setattr(fused_linear, "product", recorded)
    for tokens in (128, 512):
        tools.runner(engine).probe(tokens, kind)
    assert max(widths) == fused_linear.FEWEST_COLUMNS


def test_the_slice_of_logits_is_bounded():
    from verl.models.fused_linear import slice_bytes

    gpu = torch.device("cuda")
    assert slice_bytes(1024, 1000, gpu) == 2 * 4 * 1024 * 1000
    assert slice_bytes(32768, 150_000, gpu) == slice_bytes(65536, 150_000, gpu) == 1 << 30
