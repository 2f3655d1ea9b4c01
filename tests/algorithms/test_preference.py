"""Preference losses: values by hand, and the additive form's gradient equals that of the loss itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from verl.algorithms.preference import (
    Answers,
    additive_loss,
    kto_kl,
    kto_loss,
    pair_terms,
    pair_weights,
    row_weights,
    share_right,
)
from verl.config.methods import PREFERENCE_LOSS, builtin_names
from verl.config.schema import PreferenceAlgorithmConfig

SETTINGS = PreferenceAlgorithmConfig(
    beta=0.3, label_smoothing=0.1, simpo_gamma=0.4, desirable_weight=1.2, undesirable_weight=0.7
)

PAIR_LOSSES = builtin_names(PREFERENCE_LOSS, lambda method: method.compares_responses)


def draw(pairs: int = 5, width: int = 7, seed: int = 0):
    """Log-probs [2P, T] with gradient, their mask, and the reference's sums; rows 2i and 2i + 1 are a pair."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(2 * pairs, width, generator=generator, dtype=torch.float64) * 2 - 0.05
    mask = torch.rand(2 * pairs, width, generator=generator) < 0.7
    mask[:, 0] = True
    reference = -torch.rand(2 * pairs, generator=generator, dtype=torch.float64) * 6
    return log_probs.requires_grad_(True), mask, reference


def sides(log_probs, mask, reference):
    sums = torch.where(mask, log_probs, 0.0).sum(-1)
    rows = Answers(sums, reference, mask.sum(-1).double())
    return [Answers(rows.log_prob[at::2], rows.reference[at::2], rows.tokens[at::2]) for at in (0, 1)]


def one_pair(chosen: float, rejected: float, tokens=(2.0, 4.0), reference=(-1.0, -2.0)):
    return [
        Answers(*(torch.tensor([x], dtype=torch.float64) for x in numbers))
        for numbers in zip((chosen, rejected), reference, tokens, strict=True)
    ]


def test_margins_that_rounding_can_make_are_ties():
    # Sums of -400: float32 cannot tell log-ratios of 1e-5 from 0, but those of 1e-2.
    reference = torch.tensor([-400.0, -400.0, -400.0, -400.0], dtype=torch.float64)
    moved = torch.tensor([1e-5, -1e-5, 1e-2, -1e-2], dtype=torch.float64)
    tokens = torch.full((4,), 50.0, dtype=torch.float64)
    chosen, rejected = Answers(reference + moved, reference, tokens), Answers(reference, reference, tokens)
    for loss in ("dpo", "robust", "ipo", "hinge"):
        assert pair_terms(loss, chosen, rejected, SETTINGS).accuracy.tolist() == [0.5, 0.5, 1.0, 0.0]
    assert pair_terms("simpo", chosen, rejected, SETTINGS).accuracy.tolist() == [0.5, 0.5, 1.0, 0.0]
    assert share_right(torch.tensor([0.0, 1e-30, -1e-30, math.nan])).tolist() == [0.5, 1.0, 0.0, 0.0]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # log-ratios: chosen -1.5 + 1 = -0.5, rejected -3 + 2 = -1; their difference is 0.5; means -0.75 and -0.75.
        ("dpo", -0.9 * math.log(sigmoid(0.15)) - 0.1 * math.log(sigmoid(-0.15))),
        ("robust", (-0.9 * math.log(sigmoid(0.15)) + 0.1 * math.log(sigmoid(-0.15))) / 0.8),
        ("ipo", (-0.25 + 0.25 - 1 / 0.6) ** 2),
        ("hinge", 1 - 0.15),
        ("simpo", -0.9 * math.log(sigmoid(-0.4)) - 0.1 * math.log(sigmoid(0.4))),
        ("orpo", 0.75 - 0.3 * math.log(0.5)),
    ],
)
def test_values_by_hand(name: str, expected: float):
    terms = pair_terms(name, *one_pair(-1.5, -3.0), SETTINGS)
    assert float(terms.loss) == pytest.approx(expected, rel=1e-12)


def test_odds_ratio_by_hand():
    chosen, rejected = one_pair(2 * math.log(0.6), 4 * math.log(0.2))
    odds = math.log(0.6 / 0.4) - math.log(0.2 / 0.8)
    expected = -math.log(0.6) - 0.3 * math.log(sigmoid(odds))
    assert float(pair_terms("orpo", chosen, rejected, SETTINGS).loss) == pytest.approx(expected, rel=1e-12)


def test_an_answer_of_probability_one_has_a_finite_odds_ratio():
    chosen, rejected = one_pair(0.0, -4.0)
    leaf = chosen.log_prob.requires_grad_(True)
    loss = pair_terms("orpo", replace(chosen, log_prob=leaf), rejected, SETTINGS).loss
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_additive_form_has_the_gradient_of_the_pairwise_loss(name: str):
    log_probs, mask, reference = draw()
    chosen, rejected = sides(log_probs, mask, reference)
    pair_terms(name, chosen, rejected, SETTINGS).loss.mean().backward()
    expected = log_probs.grad.clone()
    assert expected.abs().max() > 0

    fixed = [replace(side, log_prob=side.log_prob.detach()) for side in (chosen, rejected)]
    terms, up, down = pair_weights(name, fixed[0], fixed[1], SETTINGS)
    pairs = len(up)
    weight = torch.stack([up, down], 1).flatten() / pairs
    value = torch.stack([terms.loss, torch.zeros(pairs)], 1).flatten() / pairs
    for order in (
        torch.arange(2 * pairs),
        torch.randperm(2 * pairs, generator=torch.Generator().manual_seed(3)),
    ):
        for size in (1, 3, 2 * pairs):
            log_probs.grad = None
            total = 0.0
            for rows in order.split(size):  # pairs need not stay together
                loss = additive_loss(log_probs[rows], mask[rows], weight[rows], value[rows])
                loss.backward()
                total += float(loss.detach())
            torch.testing.assert_close(log_probs.grad, expected, rtol=1e-12, atol=1e-14)
            assert total == pytest.approx(float(terms.loss.mean()), rel=1e-12)


def test_additive_form_of_kto():
    log_probs, mask, reference = draw()
    desirable = torch.arange(len(log_probs)) % 2 == 0
    kl = kto_kl(torch.tensor([0.3, -0.1, 0.4], dtype=torch.float64))
    sums = torch.where(mask, log_probs, 0.0).sum(-1)
    tokens = mask.sum(-1).double()
    kto_loss(Answers(sums, reference, tokens), desirable, kl, SETTINGS).mean().backward()
    expected = log_probs.grad.clone()

    def loss(sums):
        return kto_loss(Answers(sums, reference, tokens), desirable, kl, SETTINGS)

    values, (weight,) = row_weights([sums], loss)
    log_probs.grad = None
    for rows in torch.arange(len(sums)).split(3):
        additive_loss(log_probs[rows], mask[rows], weight[rows] / 10, values[rows] / 10).backward()
    torch.testing.assert_close(log_probs.grad, expected, rtol=1e-12, atol=1e-14)


def test_kto_by_hand():
    answers = Answers(
        *(torch.tensor(x, dtype=torch.float64) for x in ([-1.0, -2.0], [-1.5, -1.0], [3.0, 3.0]))
    )
    values = kto_loss(answers, torch.tensor([True, False]), 0.2, SETTINGS)
    expected = [1.2 * (1 - sigmoid(0.3 * (0.5 - 0.2))), 0.7 * (1 - sigmoid(0.3 * (0.2 + 1.0)))]
    assert values.tolist() == pytest.approx(expected, rel=1e-12)
    assert float(kto_kl(torch.tensor([-2.0, 0.5]))) == 0.0


def test_rewards_are_log_ratios_and_without_a_reference_mean_log_probs():
    chosen, rejected = one_pair(-1.5, -3.0)
    assert float(pair_terms("dpo", chosen, rejected, SETTINGS).margin) == pytest.approx(0.3 * 0.5)
    assert float(pair_terms("simpo", chosen, rejected, SETTINGS).chosen_reward) == pytest.approx(0.3 * -0.75)
