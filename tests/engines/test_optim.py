"""AdamW over masters, its schedule and its cheaper variants."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from verl.engines import optim
from verl.engines.adamw import Quantised, round_stochastically
from verl.engines.muon import hidden_matrices, orthogonalised
from verl.engines.optim import FIRST_LOSS_SCALE, MasterAdamW, Schedule
from verl.errors import ConfigError


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": nn.Parameter(torch.randn(6, 5, generator=generator).to(dtype)),
        "vector": nn.Parameter(torch.randn(7, generator=generator).to(dtype)),
    }


def run(optimizer, params, steps=4, micro_batches=1):
    generator = torch.Generator().manual_seed(9)
    results = []
    for _ in range(steps):
        for _ in range(micro_batches):
            target = {name: torch.randn(param.shape, generator=generator) for name, param in params.items()}
            loss = sum(((param.float() - target[name]) ** 2).sum() for name, param in params.items())
            loss.backward()
        results.append(optimizer.step())
    return results


def test_float32_parameters_are_their_own_masters_and_follow_torch():
    params, reference = parameters(), parameters()
    optimizer = MasterAdamW(params.items(), schedule=Schedule(lr=0.1), weight_decay=0.1)
    assert all(optimizer.masters[name] is param for name, param in params.items())
    groups = [
        {"params": [reference["matrix"]], "weight_decay": 0.1},
        {"params": [reference["vector"]], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=0.1)
    run(optimizer, params)
    generator = torch.Generator().manual_seed(9)
    for _ in range(4):
        target = {name: torch.randn(param.shape, generator=generator) for name, param in reference.items()}
        sum(((p - target[name]) ** 2).sum() for name, p in reference.items()).backward()
        plain.step()
        plain.zero_grad()
    for name, param in params.items():
        torch.testing.assert_close(param, reference[name], rtol=1e-6, atol=1e-6)


def test_half_precision_parameters_learn_steps_smaller_than_their_rounding():
    """0.0001 is below the rounding step of bfloat16 at 1: without a master nothing would ever move."""
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    same = param
    optimizer = MasterAdamW([("w", param)], schedule=Schedule(lr=1e-4))
    for _ in range(50):
        param.float().sum().backward()
        optimizer.step()
    assert optimizer.masters["w"][0].item() == pytest.approx(1 - 50e-4, abs=1e-5)
    assert param is same and param[0].item() == pytest.approx(0.995, abs=0.003)
    assert torch.equal(param, optimizer.masters["w"].bfloat16())


def test_gradients_of_many_micro_batches_are_summed_in_float32():
    """256 + 1 is 256 in bfloat16; the sum of 256 and sixteen ones is not."""
    param = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("w", param)], schedule=Schedule(lr=0.0))
    (param * 256).sum().backward()
    assert optimizer.named_gradients()["w"].dtype == torch.bfloat16  # one micro-batch needs no copy
    for _ in range(16):
        param.sum().backward()
    assert optimizer.named_gradients()["w"].item() == 272.0
    assert optimizer.step()["grad_norm"] == pytest.approx(272.0)


def test_clipping_bounds_the_norm_and_reports_the_one_before():
    params = parameters()
    taken = {}

    class Spy:
        def step(self, gradients, lr, factor):
            taken.update({name: gradient * factor for name, gradient in gradients.items()})

    optimizer = MasterAdamW(params.items(), schedule=Schedule(lr=0.1), grad_clip=0.5)
    optimizer.rule = Spy()
    sum((param**2).sum() for param in params.values()).backward()
    expected = math.sqrt(sum(float((2 * param.detach()).square().sum()) for param in params.values()))
    result = optimizer.step()
    assert result["grad_norm"] == pytest.approx(expected, rel=1e-5)
    after = math.sqrt(sum(float(gradient.square().sum()) for gradient in taken.values()))
    assert after == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype, poison):
    params = parameters(dtype)
    optimizer = MasterAdamW(params.items(), schedule=Schedule(lr=0.1, kind="linear", total_steps=10))
    run(optimizer, params, steps=2)
    before = {name: param.detach().clone() for name, param in params.items()}
    moments = {n: s.clone() for n, s in optimizer.state()["exp_avg"].items()}
    (params["vector"].float() * torch.tensor([poison, 1, 1, 1, 1, 1, 1])).sum().backward()
    result = optimizer.step()
    assert result["skipped"] == 1.0 and optimizer.step_count == 2
    assert all(torch.equal(param, before[name]) for name, param in params.items())
    assert all(torch.equal(s, moments[n]) for n, s in optimizer.state()["exp_avg"].items())
    assert run(optimizer, params, steps=1)[0]["skipped"] == 0.0


def test_state_comes_back_bit_for_bit():
    for dtype in (torch.float32, torch.bfloat16):
        params, other = parameters(dtype), parameters(dtype, seed=3)
        first = MasterAdamW(params.items(), schedule=Schedule(lr=0.05))
        second = MasterAdamW(other.items(), schedule=Schedule(lr=0.05))
        run(first, params)
        state = first.state()
        for name, master in second.masters.items():
            with torch.no_grad():
                master.copy_(first.masters[name])
        second.write_back()
        second.load_state(state)
        run(first, params)
        run(second, other)
        assert all(torch.equal(param, other[name]) for name, param in params.items())


def test_gradients_can_be_rolled_back():
    params = parameters(torch.bfloat16)
    optimizer = MasterAdamW(params.items(), schedule=Schedule(lr=0.1))
    params["matrix"].float().sum().backward()
    snapshot = optimizer.gradient_snapshot()
    sum(param.float().square().sum() for param in params.values()).backward()
    optimizer.restore_gradients(snapshot)
    found = optimizer.named_gradients()
    assert found.keys() == {"matrix"} and torch.equal(found["matrix"].float(), torch.ones(6, 5))


def test_many_buckets_step_like_one(monkeypatch):
    params, other = parameters(), parameters()
    whole = MasterAdamW(params.items(), schedule=Schedule(lr=0.1), grad_clip=0.3)
    monkeypatch.setattr("verl.engines.adamw.BUCKET", 8)
    cut = MasterAdamW(other.items(), schedule=Schedule(lr=0.1), grad_clip=0.3)
    assert len(cut.rule.buckets) == 2
    run(whole, params)
    run(cut, other)
    for name, param in params.items():
        torch.testing.assert_close(param, other[name])


def test_float16_searches_a_loss_scale():
    params = parameters(torch.float16)
    optimizer = MasterAdamW(params.items(), schedule=Schedule(lr=0.01), scale_loss=True)
    start = optimizer.loss_scale
    assert start > 1
    (params["vector"].float().sum() * optimizer.loss_scale * 1e9).backward()
    assert optimizer.step()["skipped"] == 1.0 and optimizer.loss_scale == start / 2
    (params["vector"].float().sum() * optimizer.loss_scale).backward()
    assert optimizer.step()["grad_norm"] == pytest.approx(math.sqrt(7), rel=1e-3)


# -- cheaper variants -----------------------------------------------------------------------------------------------


def test_int8_moments_stay_close_to_float32():
    params, exact = parameters(), parameters()
    small = MasterAdamW(params.items(), schedule=Schedule(lr=0.05), moments="int8")
    full = MasterAdamW(exact.items(), schedule=Schedule(lr=0.05))
    run(small, params, steps=10)
    run(full, exact, steps=10)
    for name, param in params.items():
        assert (param - exact[name]).abs().max() < 0.05
        assert not torch.equal(param, exact[name])
    held = small.rule._first["matrix"]
    assert held.codes.dtype == torch.int8


def test_int8_state_survives_a_round_trip():
    params = parameters()
    optimizer = MasterAdamW(params.items(), schedule=Schedule(lr=0.05), moments="int8")
    run(optimizer, params)
    codes = {name: held.codes.clone() for name, held in optimizer.rule._root_second.items()}
    optimizer.load_state(optimizer.state())
    assert all(torch.equal(held.codes, codes[name]) for name, held in optimizer.rule._root_second.items())


@pytest.mark.parametrize("signed", [True, False])
def test_quantised_numbers_keep_their_digits_and_their_codes(signed):
    """Steps of codes shrink with the number; what divides a step does not become 0."""
    x = torch.rand(1000, generator=torch.Generator().manual_seed(0)) ** 4
    x[::7] = 0.0
    if signed:
        x[::2] *= -1
    held = Quantised(x, signed)
    held.quantize_(x)
    stored, codes = held.dequantize(), held.codes.clone()
    share, step = (x.abs() / x.abs().max()).sqrt(), 1 / held.levels
    error = (stored - x).abs() / x.abs().max()
    assert (error <= 1.001 * (share * step + step**2)).all()
    assert signed or (stored > 0).all()
    held.quantize_(stored)
    assert torch.equal(held.codes, codes) and torch.equal(held.dequantize(), stored)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [0.03, 0.5, 0.8])
@pytest.mark.parametrize(
    "below",
    # of float16 the last are the smallest normal number and ones below it
    [1.0, 0.0203857421875, -3.5, 60000.0, 2.0**-14, 3 * 2.0**-20, -5 * 2.0**-24, 0.0],
)
def test_stochastic_rounding_is_right_on_average(dtype, share, below):
    low = torch.tensor(below).to(dtype)
    high = torch.nextafter(low, torch.tensor(torch.inf, dtype=dtype))
    gap = (high.double() - low.double()).item()
    x = (low.double() + share * gap).float()
    rounded = round_stochastically(x.expand(20000), dtype, torch.Generator().manual_seed(0))
    assert rounded.dtype == dtype and set(rounded.tolist()) == {low.item(), high.item()}
    expected = (x.double() - low.double()).item() / gap
    assert ((rounded.double() - low.double()) / gap).mean().item() == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_leaves_what_the_type_has_and_what_no_type_has(dtype):
    limits = torch.finfo(dtype)
    x = torch.tensor([0.0, -0.0, 1.5, limits.max, -limits.max, limits.tiny, limits.smallest_normal / 2])
    x = torch.cat([x, torch.tensor([torch.inf, -torch.inf, torch.nan])])
    for seed in range(20):
        rounded = round_stochastically(x, dtype, torch.Generator().manual_seed(seed))
        assert torch.equal(rounded.float()[:-1], x[:-1]) and rounded[-1].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_trains_without_masters(dtype):
    param = nn.Parameter(torch.ones(2000, dtype=dtype))
    optimizer = MasterAdamW([("w", param)], schedule=Schedule(lr=1e-4), stochastic_rounding=True)
    assert optimizer.masters["w"] is param
    for _ in range(50):
        param.float().sum().backward()
        optimizer.step()
    assert param.float().mean().item() == pytest.approx(0.995, abs=5e-4)


# -- schedules ------------------------------------------------------------------------------------------------------


def test_constant_after_warm_up():
    schedule = Schedule(lr=1.0, warmup_steps=3)
    assert [schedule.at(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_and_cosine_end_at_the_minimum():
    linear = Schedule(lr=2.0, kind="linear", total_steps=10, min_lr_ratio=0.1)
    assert (
        linear.at(0) == 2.0
        and linear.at(5) == pytest.approx(2.0 * 0.55)
        and linear.at(10) == pytest.approx(0.2)
    )
    cosine = Schedule(lr=2.0, kind="cosine", warmup_steps=2, total_steps=12)
    assert cosine.at(2) == 2.0
    assert cosine.at(7) == pytest.approx(1.0)
    assert cosine.at(12) == pytest.approx(0.0) and cosine.at(50) == pytest.approx(0.0)


class Section:
    lr = 1.0
    lr_scheduler_type = "cosine"
    lr_warmup_steps = -1
    lr_warmup_steps_ratio = 0.2
    min_lr_ratio = 0.0


def test_warm_up_in_steps_or_as_a_share():
    assert Schedule.from_config(Section, 20).warmup_steps == 4
    explicit = type("Explicit", (Section,), {"lr_warmup_steps": 7})
    assert Schedule.from_config(explicit, 20).warmup_steps == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "total_training_steps"),
        ({"lr_scheduler_type": "constant"}, "lr_warmup_steps_ratio=0.2"),
        ({"lr_warmup_steps_ratio": 0.0}, "needs the number of optimiser steps"),
    ],
)
def test_impossible_schedules_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Schedule.from_config(type("Changed", (Section,), changes), None)


# -- the loss scale of float16 -------------------------------------------------------------------------------------


def float16_optimizer(scale_loss: bool = True) -> tuple[MasterAdamW, nn.Parameter]:
    weight = nn.Parameter(torch.ones(7, dtype=torch.float16))
    return MasterAdamW([("w", weight)], schedule=Schedule(lr=0.0), scale_loss=scale_loss), weight


def take_step(made: MasterAdamW, weight: nn.Parameter, poison: float = 1.0) -> float:
    (weight.float().sum() * made.loss_scale * poison).backward()
    return made.step()["skipped"]


def test_a_scale_that_fell_to_one_grows_again(monkeypatch):
    monkeypatch.setattr(optim, "GROW_EVERY", 3)
    made, weight = float16_optimizer()
    for _ in range(20):
        assert take_step(made, weight, poison=float("inf")) == 1
    assert made.loss_scale == 1.0
    scales = []
    for _ in range(6):
        assert take_step(made, weight) == 0
        scales.append(made.loss_scale)
    assert scales == [1, 1, 2, 2, 2, 4]


def test_without_scaling_the_scale_stays_one(monkeypatch):
    monkeypatch.setattr(optim, "GROW_EVERY", 1)
    made, weight = float16_optimizer(scale_loss=False)
    take_step(made, weight)
    take_step(made, weight, poison=float("inf"))
    assert made.loss_scale == 1.0


@pytest.mark.parametrize(
    ("scales", "saved", "taken"),
    [(True, 512.0, 512.0), (True, 1.0, FIRST_LOSS_SCALE), (False, 512.0, 1.0)],
    ids=["the same precision", "saved in another", "loaded in another"],
)
def test_a_checkpoint_of_another_precision_brings_no_scale(scales, saved, taken):
    made, _ = float16_optimizer(scales)
    made.take_loss_scale(saved)
    assert made.loss_scale == taken


def test_an_engine_resumes_in_another_precision(tools):
    half = tools.engine(model=tools.model(), dtype="float16")
    assert half.state()["extra"]["loss_scale"] == FIRST_LOSS_SCALE
    state = copy.deepcopy(half.state())
    whole = tools.engine(model=tools.model(), dtype="bfloat16")
    whole.load_state(state)
    assert whole.state()["extra"]["loss_scale"] == 1.0
    state["extra"]["loss_scale"] = 64.0
    half.load_state(state)
    assert half.state()["extra"]["loss_scale"] == 64.0


def test_a_norm_found_before_the_optimiser_was_moved_is_not_used():
    """Gradients added while it is in host memory are in the same tensors."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = MasterAdamW([("w", param)], schedule=Schedule(lr=0.0))
    param.sum().backward()
    optimizer._prepared = (optimizer.named_gradients(), optimizer.gradient_norm())
    optimizer.move(torch.device("cpu"))
    (2 * param).sum().backward()
    assert optimizer.step()["grad_norm"] == pytest.approx(3 * 3**0.5)


def muon(params, **options):
    return MasterAdamW(
        params.items(), schedule=Schedule(lr=0.02), weight_decay=0.1, matrices={"matrix"}, **options
    )


def test_muon_moves_matrices_as_torch_does_and_the_rest_by_adamw():
    params, reference = parameters(), parameters()
    optimizer = muon(params)
    assert optimizer.rule.matrices == ["matrix"]
    matrix = torch.optim.Muon(
        [reference["matrix"]], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    vector = torch.optim.AdamW([reference["vector"]], lr=0.02, weight_decay=0.0)
    run(optimizer, params)
    generator = torch.Generator().manual_seed(9)
    for _ in range(4):
        target = {name: torch.randn(param.shape, generator=generator) for name, param in reference.items()}
        sum(((p - target[name]) ** 2).sum() for name, p in reference.items()).backward()
        for plain in (matrix, vector):
            plain.step()
            plain.zero_grad()
    torch.testing.assert_close(params["matrix"], reference["matrix"], rtol=0, atol=1e-6)
    torch.testing.assert_close(params["vector"], reference["vector"], rtol=1e-6, atol=1e-6)


def test_muon_moves_matrices_and_no_convolutions():
    layer = nn.Module()
    layer.conv, layer.norm, layer.down = nn.Conv1d(4, 4, 3), nn.LayerNorm(4), nn.Linear(4, 2)
    layer.experts = nn.Parameter(torch.zeros(3, 4, 4))
    assert hidden_matrices([layer]) == {id(layer.down.weight), id(layer.experts)}


def test_muon_takes_each_matrix_of_a_stack_alone_and_orthogonalises():
    stack = torch.randn(3, 16, 5, generator=torch.Generator().manual_seed(2))
    for one, alone in zip(orthogonalised(stack), stack, strict=True):
        torch.testing.assert_close(one, orthogonalised(alone))
        values = torch.linalg.svdvals(one.float())
        assert values.min() > 0.6 and values.max() < 1.3
    assert torch.linalg.svdvals(stack[0]).max() > 3  # they were far from it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_continues_exactly_from_its_state(dtype):
    params, other = parameters(dtype), parameters(dtype)
    first, second = muon(params), muon(other)
    run(first, params)
    state = copy.deepcopy(first.state())
    assert set(state["momentum"]) == {"matrix"} and set(state["exp_avg_sq"]) == {"vector"}
    for name in other:
        second.masters[name].data.copy_(first.masters[name])
    second.write_back()
    second.load_state(state)
    run(first, params)
    run(second, other)
    assert all(torch.equal(first.masters[name], second.masters[name]) for name in params)
