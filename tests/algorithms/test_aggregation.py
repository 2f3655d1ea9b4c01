from __future__ import annotations

import pytest
import torch

from verl.algorithms import LOSS_AGG_MODES, agg_loss, batch_counts, loss_denominators
from verl.errors import ConfigError

LOSS = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0], [64.0, 64.0, 64.0]])
MASK = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "own", "given"),
    [
        ("token-mean", 61 / 5, 2 * 61 / 10),
        ("token-sum", 61.0, 2 * 61.0),
        ("seq-mean-token-sum", 61 / 2, 2 * 61 / 4),
        ("seq-mean-token-sum-norm", 61 / 2 / 3, 2 * 61 / 4 / 6),
        ("seq-mean-token-mean", (5 / 2 + 56 / 3) / 2, 2 * (5 / 2 + 56 / 3) / 4),
    ],
)
def test_each_mode_by_hand(mode, own, given):
    assert float(agg_loss(LOSS, MASK, mode)) == pytest.approx(own)
    counts = {"dp_size": 2, "batch_num_tokens": 10, "global_batch_size": 4, "loss_scale_factor": 6}
    assert float(agg_loss(LOSS, MASK, mode, **counts)) == pytest.approx(given)
    as_tensors = counts | {"batch_num_tokens": torch.tensor(10), "global_batch_size": torch.tensor(4)}
    assert float(agg_loss(LOSS, MASK, mode, **as_tensors)) == pytest.approx(given)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_nothing_to_learn_from_is_zero_and_differentiable(mode):
    matrix = torch.full((2, 3), float("nan"), requires_grad=True)
    loss = agg_loss(matrix, torch.zeros(2, 3), mode)
    loss.backward()
    assert loss.item() == 0 and torch.equal(matrix.grad, torch.zeros(2, 3))


def test_an_unknown_mode_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"token_mean.*token-mean, token-sum.*loss_agg_mode"):
        agg_loss(LOSS, MASK, "token_mean")


def test_a_scale_of_zero_is_refused():
    with pytest.raises(ConfigError, match="loss_scale_factor"):
        agg_loss(LOSS, MASK, "seq-mean-token-sum-norm", loss_scale_factor=0)


def test_counts_leave_out_sequences_without_policy_tokens():
    assert batch_counts(MASK) == {"batch_num_tokens": 5, "global_batch_size": 2}


def test_bound_denominators_serve_only_calls_that_name_none():
    with loss_denominators({"dp_size": 2, "batch_num_tokens": 10}):
        assert float(agg_loss(LOSS, MASK, "token-mean")) == pytest.approx(2 * 61 / 10)
        assert float(agg_loss(LOSS, MASK, "token-mean", batch_num_tokens=5)) == pytest.approx(61 / 5)
    assert float(agg_loss(LOSS, MASK, "token-mean")) == pytest.approx(61 / 5)
