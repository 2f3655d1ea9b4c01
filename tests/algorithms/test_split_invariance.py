"""However a mini-batch is cut into micro-batches and spread over ranks, loss and gradient are the same: for every
loss, every aggregation mode, the value loss and the KL term."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms import (
    LOSS_AGG_MODES,
    agg_loss,
    batch_counts,
    compute_value_loss,
    get_policy_loss_fn,
    get_policy_loss_prepare,
    kl_penalty,
    loss_denominators,
)
from verl.config.methods import POLICY_LOSS, builtin_names
from verl.config.schema import ActorConfig, PolicyLossConfig

ROWS, WIDTH = 12, 6
CONFIG = ActorConfig(
    policy_loss=PolicyLossConfig(clip_cov_ratio=0.1, clip_cov_lb=-1.0, clip_cov_ub=2.0, kl_cov_ratio=0.1)
)

TOKEN_LOSSES = builtin_names(POLICY_LOSS, lambda method: not method.whole_groups)


@st.composite
def splits(draw):
    """Ranks, each a list of micro-batches, each a list of rows; ranks and micro-batches may differ in size."""
    order = draw(st.permutations(range(ROWS)))
    ranks = draw(st.integers(1, 4))
    cuts = sorted(draw(st.lists(st.integers(0, ROWS), min_size=ranks - 1, max_size=ranks - 1)))
    shares = [order[a:b] for a, b in zip([0, *cuts], [*cuts, ROWS], strict=True)]
    result = []
    for share in shares:
        inner = sorted(draw(st.sets(st.integers(1, max(len(share) - 1, 1)), max_size=3)))
        inner = [cut for cut in inner if cut < len(share)]
        parts = [share[a:b] for a, b in zip([0, *inner], [*inner, len(share)], strict=True)]
        result.append([list(part) for part in parts if part])
    return result


def split_and_join(ranks, leaf, share_of):
    """The mean over ranks of the sum over micro-batches, and its gradient: what data parallelism computes."""
    total = sum(share_of(rows) for micro_batches in ranks for rows in micro_batches) / len(ranks)
    (gradient,) = torch.autograd.grad(total, leaf)
    return total.detach(), gradient


def counts(batch, dp_size):
    return {**batch_counts(batch.mask), "dp_size": dp_size, "loss_scale_factor": 11}


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(ranks=splits(), seed=st.integers(0, 1000))
@settings(max_examples=8, deadline=None)
def test_policy_loss(name, mode, ranks, seed, make_batch):
    batch = make_batch(seed, ROWS, WIDTH)
    leaf = batch.log_prob.clone().requires_grad_()
    hook = get_policy_loss_prepare(name)
    prepared = hook and hook(
        old_log_prob=batch.old,
        log_prob=batch.log_prob,
        advantages=batch.advantages,
        response_mask=batch.mask,
        config=CONFIG,
        generator=torch.Generator().manual_seed(seed),
    )

    def share(rows, dp_size):
        config = copy.copy(CONFIG)
        config.global_batch_info = counts(batch, dp_size)
        more = {"prepared": {k: v[rows] for k, v in prepared.items()}} if prepared else {}
        loss, _ = get_policy_loss_fn(name)(
            old_log_prob=batch.old[rows],
            log_prob=leaf[rows],
            advantages=batch.advantages[rows],
            response_mask=batch.mask[rows],
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=batch.weights[rows],
            kl=leaf[rows],
            **more,
        )
        return loss

    whole = split_and_join([[list(range(ROWS))]], leaf, lambda rows: share(rows, 1))
    cut = split_and_join(ranks, leaf, lambda rows: share(rows, len(ranks)))
    torch.testing.assert_close(cut, whole, rtol=1e-9, atol=1e-11)
    assert bool(whole[1].any())


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(ranks=splits(), seed=st.integers(0, 1000))
@settings(max_examples=8, deadline=None)
def test_value_loss(mode, ranks, seed, make_batch):
    batch = make_batch(seed, ROWS, WIDTH)
    leaf = batch.log_prob.clone().requires_grad_()

    def share(rows, dp_size):
        return compute_value_loss(
            leaf[rows],
            batch.returns[rows],
            batch.values[rows],
            batch.mask[rows],
            0.3,
            mode,
            **counts(batch, dp_size),
        )[0]

    whole = split_and_join([[list(range(ROWS))]], leaf, lambda rows: share(rows, 1))
    torch.testing.assert_close(
        split_and_join(ranks, leaf, lambda rows: share(rows, len(ranks))), whole, rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(ranks=splits(), seed=st.integers(0, 1000))
@settings(max_examples=8, deadline=None)
def test_kl_term_of_a_loss_that_names_no_counts(mode, ranks, seed, make_batch):
    """A plug-in's bare `agg_loss(matrix, mask, mode)` is normalised by the mini-batch when the caller binds it."""
    batch = make_batch(seed, ROWS, WIDTH, garbage=False)
    leaf = batch.log_prob.clone().requires_grad_()

    def share(rows, dp_size):
        with loss_denominators(counts(batch, dp_size)):
            return agg_loss(kl_penalty(leaf[rows], batch.ref[rows], "k3"), batch.mask[rows], mode)

    whole = split_and_join([[list(range(ROWS))]], leaf, lambda rows: share(rows, 1))
    torch.testing.assert_close(
        split_and_join(ranks, leaf, lambda rows: share(rows, len(ranks))), whole, rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_choosing_per_micro_batch_would_not_be_invariant(name, make_batch):
    """Why the hook exists: without it each micro-batch chooses its own tokens, and the loss depends on the cut."""
    batch = make_batch(3, ROWS, WIDTH)
    config = copy.copy(CONFIG)
    config.global_batch_info = counts(batch, 1)

    def share(rows):
        return get_policy_loss_fn(name)(
            old_log_prob=batch.old[rows],
            log_prob=batch.log_prob[rows],
            advantages=batch.advantages[rows],
            response_mask=batch.mask[rows],
            loss_agg_mode="token-sum",
            config=config,
            rollout_is_weights=None,
        )[0]

    whole = share(list(range(ROWS)))
    assert not torch.isclose(whole, sum(share([row]) for row in range(ROWS)), rtol=1e-6)
