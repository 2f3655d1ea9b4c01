from __future__ import annotations

import pytest
import torch

from verl.algorithms import compute_value_loss


def test_value_loss_agrees_with_plain_loops(make_batch):
    for seed in (0, 1):
        batch = make_batch(seed)
        losses, clipped_hits, eps = [], 0, 0.4
        for i, row in enumerate(batch.mask.tolist()):
            for t, kept in enumerate(row):
                if not kept:
                    continue
                v, target, old = (float(x[i, t]) for x in (batch.log_prob, batch.returns, batch.values))
                clipped = min(max(v, old - eps), old + eps)
                losses.append(0.5 * max((v - target) ** 2, (clipped - target) ** 2))
                clipped_hits += (clipped - target) ** 2 > (v - target) ** 2
        loss, fraction = compute_value_loss(batch.log_prob, batch.returns, batch.values, batch.mask, eps)
        assert float(loss) == pytest.approx(sum(losses) / len(losses))
        assert float(fraction) == pytest.approx(clipped_hits / len(losses))


def test_gradient_agrees_with_the_numerical_one(make_batch):
    batch = make_batch(2, rows=6, width=4, garbage=False)
    leaf = batch.log_prob.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda v: compute_value_loss(v, batch.returns, batch.values, batch.mask, 0.4)[0], (leaf,)
    )


def test_garbage_behind_the_mask_reaches_no_gradient(make_batch):
    batch = make_batch(0)
    leaf = batch.log_prob.clone().requires_grad_()
    compute_value_loss(leaf, batch.returns, batch.values, batch.mask)[0].backward()
    assert bool(leaf.grad.isfinite().all()) and bool((leaf.grad[batch.mask == 0] == 0).all())
