from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms import KL_ESTIMATORS, apply_kl_penalty, get_kl_controller, kl_penalty
from verl.errors import ConfigError

BASE = tuple(name for name in KL_ESTIMATORS if not name.endswith("+"))
NEVER_NEGATIVE = tuple(name for name in KL_ESTIMATORS if name.rstrip("+") not in ("kl", "k1"))


def by_hand(name, x):
    name = name.rstrip("+")
    if name in ("kl", "k1"):
        return x
    if name == "abs":
        return abs(x)
    if name in ("mse", "k2"):
        return x * x / 2
    d = min(max(-x, -20), 20)
    return min(max(math.exp(d) - d - 1, -10), 10)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@given(x=st.floats(-40, 40), ref=st.floats(-5, 0))
@settings(max_examples=25, deadline=None)
def test_value_by_hand(name, x, ref):
    logprob, ref = torch.tensor([ref + x], dtype=torch.float64), torch.tensor([ref], dtype=torch.float64)
    wanted = by_hand(name, float(logprob - ref))
    assert float(kl_penalty(logprob, ref, name)) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", NEVER_NEGATIVE)
@given(x=st.floats(-100, 100))
@settings(max_examples=25, deadline=None)
def test_never_negative(name, x):
    assert float(kl_penalty(torch.tensor(x), torch.tensor(0.0), name)) >= 0


@pytest.mark.parametrize("name", BASE)
@given(x=st.floats(-5, 5).filter(lambda v: abs(v) > 1e-3))
@settings(max_examples=25, deadline=None)
def test_plus_keeps_the_value_and_takes_the_gradient_of_k2(name, x):
    ref = torch.tensor([-1.0], dtype=torch.float64)
    results = {}
    for variant in (name, f"{name}+", "k2"):
        logprob = (ref + x).clone().requires_grad_()
        value = kl_penalty(logprob, ref, variant)
        value.sum().backward()
        results[variant] = (value.item(), logprob.grad.item())
    assert results[f"{name}+"] == (results[name][0], results["k2"][1])


@pytest.mark.parametrize("name", BASE)
def test_gradient_agrees_with_the_numerical_one(name):
    logprob = torch.linspace(-2, 1.9, 12, dtype=torch.float64).requires_grad_()
    ref = torch.full((12,), -0.123, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, ref, name), (logprob,))


def test_k3_is_unbiased_where_k1_is():
    """Summed over a whole vocabulary with its probabilities, both are the KL itself."""
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.5, 0.1, 0.4], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    for name in ("k1", "k3"):
        assert float((p * kl_penalty(p.log(), q.log(), name)).sum()) == pytest.approx(float(exact))


def test_unknown_estimator_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'k4'.*k3\+.*kl_loss_type"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


def test_kl_in_reward_token_by_token(make_batch):
    batch = make_batch(0)
    rewards, current = apply_kl_penalty(batch.rewards, batch.old, batch.ref, batch.mask, 0.3, "k2")
    means = []
    for i, row in enumerate(batch.mask.tolist()):
        kls = []
        for t, kept in enumerate(row):
            kl = by_hand("k2", float(batch.old[i, t] - batch.ref[i, t])) if kept else 0.0
            wanted = float(batch.rewards[i, t]) - 0.3 * kl if kept else 0.0
            assert float(rewards[i, t]) == pytest.approx(wanted)
            kls += [kl] if kept else []
        means += [sum(kls) / len(kls)] if kls else []
    assert current == pytest.approx(sum(means) / len(means), rel=1e-6)


def test_fixed_controller_stays():
    controller = get_kl_controller(SimpleNamespace(type="fixed", kl_coef=0.02, horizon=10, target_kl=0.1))
    controller.update(5.0, 100)
    controller.load_state_dict({"value": 7.0})
    assert controller.value == 0.02


@pytest.mark.parametrize(
    ("current", "factor"),
    [(0.11, 1 + 0.1 * 32 / 1000), (9.0, 1 + 0.2 * 32 / 1000), (0.0, 1 - 0.2 * 32 / 1000), (0.1, 1.0)],
)
def test_adaptive_controller_moves_towards_the_target(current, factor):
    section = SimpleNamespace(type="adaptive", kl_coef=0.5, horizon=1000, target_kl=0.1)
    controller = get_kl_controller(section)
    controller.update(current, 32)
    assert controller.value == pytest.approx(0.5 * factor)
    resumed = get_kl_controller(section)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == controller.value


@pytest.mark.parametrize(
    "section",
    [
        {"type": "linear"},
        {"type": "adaptive", "target_kl": 0.0},
        {"type": "adaptive", "horizon": 0},
    ],
)
def test_impossible_controllers_are_refused(section):
    with pytest.raises(ConfigError, match=r"algorithm\.kl_ctrl\."):
        get_kl_controller(SimpleNamespace(**({"kl_coef": 0.1, "horizon": 10, "target_kl": 0.1} | section)))
