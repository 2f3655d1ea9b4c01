"""Credit by turns: turn_rloo against the exact gradient of a problem small enough to enumerate."""

from __future__ import annotations

import itertools

import pytest
import torch

from verl.algorithms import get_adv_estimator_fn

GROUP = 3
REWARDS = [(0.3, -0.1), (1.0, 0.2), (0.4, 2.0)]
"""At each of three turns: the reward for stopping there, and for going on."""
THETA = [0.4, -0.3, 0.8]


def trajectories() -> list[list[int]]:
    """The choices (0: stop) of every conversation there is."""
    return [[0], [1, 0], [1, 1, 0], [1, 1, 1]]


def log_probs_of(theta: torch.Tensor, choices: list[int]) -> list[torch.Tensor]:
    signs = [1 if choice else -1 for choice in choices]
    return [torch.nn.functional.logsigmoid(sign * theta[k]) for k, sign in enumerate(signs)]


def exact_gradient(theta: torch.Tensor) -> torch.Tensor:
    value = torch.zeros((), dtype=theta.dtype)
    for choices in trajectories():
        probability = torch.stack(log_probs_of(theta, choices)).sum().exp()
        value = value + probability * sum(REWARDS[k][choice] for k, choice in enumerate(choices))
    return torch.autograd.grad(value, theta)[0]


def every_group(theta: torch.Tensor):
    """All groups of `GROUP` conversations as one batch with tool tokens between turns: rewards, mask and log-probs
    [B, T], the group of each row, and the probability of its group [B].

    A turn that goes on has two tokens, the second of them certain."""
    rewards, masks, log_probs, index, weights = [], [], [], [], []
    for number, group in enumerate(itertools.product(trajectories(), repeat=GROUP)):
        found = [log_probs_of(theta, choices) for choices in group]
        probability = torch.stack([p for each in found for p in each]).sum().exp().detach()
        for choices, each in zip(group, found, strict=True):
            row_rewards, row_mask, row_log_probs = [], [], []
            for k, choice in enumerate(choices):
                row_mask += [1, 1, 0, 0] if choice else [1]
                row_rewards += [0.0, REWARDS[k][1], 9.0, 9.0] if choice else [REWARDS[k][0]]
                row_log_probs += [each[k], *[torch.zeros_like(each[k])] * (3 if choice else 0)]
            pad = 12 - len(row_mask)
            masks.append(row_mask + [0] * pad)
            rewards.append(row_rewards + [9.0] * pad)
            log_probs.append(torch.stack(row_log_probs + [torch.zeros_like(each[0])] * pad))
            index.append(number)
            weights.append(probability)
    return (
        torch.tensor(rewards, dtype=theta.dtype),
        torch.tensor(masks),
        torch.stack(log_probs),
        index,
        torch.stack(weights),
    )


def expected_gradient(theta: torch.Tensor, advantages: torch.Tensor, log_probs, weights) -> torch.Tensor:
    """Of the estimator, over all groups that can be drawn."""
    (gradient,) = torch.autograd.grad(
        (weights.unsqueeze(-1) * advantages * log_probs).sum() / GROUP, theta, retain_graph=True
    )
    return gradient


def by_turn_number(
    rewards: torch.Tensor, mask: torch.Tensor, index: list[int], *, own: bool, by_std: bool
) -> torch.Tensor:
    """What one might do instead: compare turns of the same number, with the members that have one. Either the turn's
    own reward with the others' mean, or the return from it on with the mean and deviation of all."""
    advantages = torch.zeros_like(rewards)
    values: dict[tuple[int, int], dict[int, float]] = {}
    spans: dict[tuple[int, int], list[int]] = {}
    for i, row in enumerate(mask.tolist()):
        starts = [t for t, kept in enumerate(row) if kept and (t == 0 or not row[t - 1])]
        for k, start in enumerate(starts):
            spans[i, k] = list(itertools.takewhile(lambda t, row=row: row[t], range(start, len(row))))
            counted = spans[i, k] if own else [t for t in range(start, len(row)) if row[t]]
            values.setdefault((index[i], k), {})[i] = float(rewards[i, counted].sum())
    for (_, k), found in values.items():
        for i, value in found.items():
            others = [other for j, other in found.items() if j != i]
            if by_std:
                centre = sum(found.values()) / len(found)
                scale = float(torch.tensor(list(found.values())).std()) + 1e-6 if others else 1.0
            else:
                centre, scale = sum(others) / max(len(others), 1), 1.0
            advantages[i, spans[i, k]] = (value - centre) / scale
    return advantages


@pytest.mark.parametrize("name", ["turn_rloo", "rloo"])
def test_the_expected_gradient_is_the_exact_one_where_the_policy_decides_when_to_stop(name):
    theta = torch.tensor(THETA, dtype=torch.float64, requires_grad=True)
    rewards, mask, log_probs, index, weights = every_group(theta)
    assert float(weights.sum()) == pytest.approx(GROUP, abs=1e-12), "all groups, each with its probability"
    advantages, _ = get_adv_estimator_fn(name)(token_level_rewards=rewards, response_mask=mask, index=index)
    torch.testing.assert_close(
        expected_gradient(theta, advantages, log_probs, weights), exact_gradient(theta), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("form", [{"own": True, "by_std": False}, {"own": False, "by_std": True}], ids=str)
def test_normalising_by_turn_number_is_biased(form):
    theta = torch.tensor(THETA, dtype=torch.float64, requires_grad=True)
    rewards, mask, log_probs, index, weights = every_group(theta)
    found = expected_gradient(theta, by_turn_number(rewards, mask, index, **form), log_probs, weights)
    exact = exact_gradient(theta)
    # Another length of the gradient is a matter of the learning rate, another direction is not.
    assert float((found / found.norm() - exact / exact.norm()).norm()) > 0.1


def test_turns_are_credited_with_what_follows_them():
    rewards = torch.tensor([[0.0, 1.0, 7.0, 2.0], [4.0, 0.0, 7.0, 7.0], [0.5, 0.5, 7.0, 3.0]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 0, 1]])
    advantages, returns = get_adv_estimator_fn("turn_rloo")(
        token_level_rewards=rewards, response_mask=mask, index=["a", "a", "a"]
    )
    assert returns.tolist() == [[3, 3, 0, 2], [4, 0, 0, 0], [4, 4, 0, 3]]
    # The second response ended: at the second turn it counts 0 for the two others.
    assert advantages.tolist() == [[-1, -1, 0, 2 - 3 / 2], [0.5, 0, 0, 0], [0.5, 0.5, 0, 3 - 2 / 2]]


def test_with_one_turn_each_it_is_rloo():
    g = torch.Generator().manual_seed(0)
    rewards, lengths = torch.randn(8, 5, generator=g), torch.randint(0, 6, (8, 1), generator=g)
    arguments = {
        "token_level_rewards": rewards,
        "response_mask": torch.arange(5) < lengths,
        "index": [0, 1] * 4,
    }
    wanted, _ = get_adv_estimator_fn("rloo")(**arguments)
    torch.testing.assert_close(get_adv_estimator_fn("turn_rloo")(**arguments)[0], wanted)
