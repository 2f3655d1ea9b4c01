"""PRIME's estimator and the loss of its reward model, against closed forms in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from verl.algorithms import get_adv_estimator_fn, masked_whiten
from verl.algorithms.advantages import implicit_rewards, outcome_cross_entropy
from verl.algorithms.groups import dynamic_sampling_failed, groups_within


def estimate(name, batch, **more):
    return get_adv_estimator_fn(name)(
        token_level_rewards=batch.rewards, response_mask=batch.mask, index=batch.index, **more
    )


def weighed(outcome: float, process: float) -> SimpleNamespace:
    return SimpleNamespace(prime=SimpleNamespace(outcome_coef=outcome, process_coef=process))


@pytest.mark.parametrize("seed", range(3))
def test_without_process_rewards_it_is_whitened_rloo(seed, make_batch):
    batch = make_batch(seed)
    found, _ = estimate("prime", batch, process_rewards=batch.process_rewards, config=weighed(5.0, 0.0))
    wanted = masked_whiten(estimate("rloo", batch)[0], batch.mask)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-7)
    both, _ = estimate("prime", batch, process_rewards=batch.process_rewards, config=weighed(5.0, 1.0))
    assert not torch.allclose(both, wanted, atol=1e-2)


def test_a_token_is_credited_with_what_follows_it_beyond_the_others():
    """Two responses, of mean reward 2 and 1: the first has its rewards less 1 each, the second its own less 2;
    tool tokens take no part."""
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]])
    process = torch.tensor([[3.0, 1.0, 99.0, 2.0], [0.0, 2.0, 99.0, 99.0]], dtype=torch.float64)
    _, returns = get_adv_estimator_fn("prime")(
        token_level_rewards=torch.zeros_like(process),
        response_mask=mask,
        index=["p", "p"],
        process_rewards=process,
        config=weighed(1.0, 2.0),
    )
    assert (returns / 2).tolist() == [[3.0, 1.0, 0.0, 1.0], [-2.0, 0.0, 0.0, 0.0]]


def test_the_cross_entropy_and_its_gradient_are_the_closed_forms(make_batch):
    batch, beta = make_batch(1), 0.3
    log_prob = batch.log_prob.clone().requires_grad_()
    outcome = torch.arange(len(batch.mask)) % 2
    rewards = implicit_rewards(log_prob, batch.ref, batch.mask, beta)
    terms, logit = outcome_cross_entropy(rewards, batch.mask, outcome)
    terms.sum().backward()
    flags = batch.mask.bool()
    for row in range(len(flags)):
        at = flags[row]
        z = beta * (batch.log_prob[row][at] - batch.ref[row][at]).sum()
        assert float(logit[row]) == pytest.approx(float(z))
        right = torch.sigmoid(z if outcome[row] else -z)
        assert terms[row].item() == pytest.approx(float(-right.log()) if at.any() else 0.0)
        slope = beta * (torch.sigmoid(z) - outcome[row]) if at.any() else 0.0
        torch.testing.assert_close(log_prob.grad[row], slope * at.double())


def test_a_large_logit_has_a_finite_loss():
    rewards = torch.tensor([[900.0], [-900.0]])
    terms, _ = outcome_cross_entropy(rewards, torch.ones(2, 1), torch.tensor([0, 0]))
    assert terms.tolist() == [900.0, 0.0]


def test_bounds_on_the_mean_of_a_group_include_the_bounds():
    index = ["a"] * 5 + ["b"] * 5 + ["c"] * 5 + ["d"] * 5
    values = torch.tensor([1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0], dtype=torch.float64)

    def kept(lower, upper):
        return "".join(sorted({index[row] for row in groups_within(values, index, lower, upper).nonzero()}))

    assert kept(0.2, 0.8) == "ab" and kept(0.21, 0.8) == "b" and kept(0.2, 0.79) == "a"
    assert kept(0.2, None) == "abc" and kept(None, 0.2) == "ad" and kept(None, None) == "abcd"


def test_running_out_of_rounds_tells_constant_groups_from_those_out_of_bounds():
    text = str(dynamic_sampling_failed(rounds=3, groups=40, constant=20, wanted=16, outside=10))
    assert "10 of 16" in text and "20 of 40 groups (50%)" in text and "10 (25%)" in text
    assert "accuracy_lower_bound" in text and "accuracy_upper_bound" in text
