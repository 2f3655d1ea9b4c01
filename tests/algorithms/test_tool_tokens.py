"""Tool output inside rows changes nothing on the policy's tokens: advantages, losses and gradients, KL, rollout
correction and statistics are those of the rows without it."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from verl.algorithms import (
    LOSS_AGG_MODES,
    adv_estimator_names,
    agg_loss,
    apply_kl_penalty,
    batch_counts,
    compute_rollout_correction,
    compute_value_loss,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    group_filter_values,
    group_metrics,
)
from verl.config.methods import POLICY_LOSS, builtin_names
from verl.config.schema import ActorConfig, PolicyLossConfig, RolloutCorrectionConfig
from verl.config.sections.algorithm import ROLLOUT_RS

LOSS_CONFIG = ActorConfig(
    policy_loss=PolicyLossConfig(clip_cov_ratio=0.1, clip_cov_lb=-1.0, clip_cov_ub=2.0, kl_cov_ratio=0.1)
)

TOKEN_LOSSES = builtin_names(POLICY_LOSS, lambda method: not method.whole_groups)


def with_tool_tokens(batch: SimpleNamespace, seed: int, *, inside_turns: bool = True):
    """The batch with up to three tool tokens before each of its positions, and where [B, T] its positions went.

    Their rollout log-prob is 0, as rows have it; everything else on them is NaN. Without `inside_turns` none is put
    between two policy tokens, so that turns stay what they are."""
    rows, width = batch.mask.shape
    added = torch.randint(0, 4, (rows, width), generator=torch.Generator().manual_seed(seed))
    if not inside_turns:
        added[:, 1:] *= ~(batch.mask[:, 1:].bool() & batch.mask[:, :-1].bool())
    place = torch.arange(width) + added.cumsum(-1)
    wide = copy.copy(batch)
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            fill = float("nan") if value.is_floating_point() and name != "rollout" else 0
            setattr(
                wide, name, torch.full((rows, 4 * width), fill, dtype=value.dtype).scatter(1, place, value)
            )
    assert bool((wide.mask.sum(-1) == batch.mask.sum(-1)).all())
    return wide, place


@pytest.fixture(params=[0, 1])
def rows(request, make_batch):
    """The same rows without and with tool tokens, and where their positions went."""
    batch = make_batch(request.param, garbage=False)
    return SimpleNamespace(batch=batch, pair=with_tool_tokens(batch, request.param))


def same(rows, found, wanted, place=None):
    _, where = rows.pair if place is None else (None, place)
    mask = rows.batch.mask.bool()
    torch.testing.assert_close(found.gather(1, where)[mask], wanted[mask], rtol=1e-12, atol=1e-12)
    assert int((found != 0).sum()) == int((wanted[mask] != 0).sum()), "zero on tool tokens"


@pytest.mark.parametrize("name", adv_estimator_names())
def test_advantages_and_returns(name, rows):
    def estimate(b):
        return get_adv_estimator_fn(name)(
            token_level_rewards=b.rewards,
            response_mask=b.mask,
            index=b.index,
            values=b.values,
            gamma=0.9,
            lam=0.8,
            reward_baselines=b.baselines,
            old_log_probs=b.old,
            sum_pi_squared=b.sum_pi_squared,
            process_rewards=b.process_rewards,
            rewards_by_key=b.by_key,
        )

    wide, place = with_tool_tokens(rows.batch, 5, inside_turns=name != "turn_rloo")
    for found, wanted in zip(estimate(wide), estimate(rows.batch), strict=True):
        same(rows, found, wanted, place)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_policy_losses(name, mode, rows):
    def loss_of(b):
        config = copy.copy(LOSS_CONFIG)
        config.global_batch_info = {**batch_counts(b.mask), "loss_scale_factor": 7}
        leaf = b.log_prob.clone().requires_grad_()
        loss, metrics = get_policy_loss_fn(name)(
            old_log_prob=b.old,
            log_prob=leaf,
            advantages=b.advantages,
            response_mask=b.mask,
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=b.weights,
            kl=leaf,
        )
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient, metrics

    wide, _ = rows.pair
    (loss, gradient, metrics), (wanted, of_rows, numbers) = loss_of(wide), loss_of(rows.batch)
    torch.testing.assert_close(loss, wanted)
    same(rows, gradient, of_rows)
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx(
        {k: float(v) for k, v in numbers.items()}
    )


def test_value_loss(rows):
    def loss_of(b):
        return torch.stack(compute_value_loss(b.log_prob, b.returns, b.values, b.mask))

    torch.testing.assert_close(loss_of(rows.pair[0]), loss_of(rows.batch))


def test_kl_in_the_reward(rows):
    wide, _ = rows.pair
    (found, kl), (wanted, of_rows) = (
        apply_kl_penalty(b.rewards, b.old, b.ref, b.mask, 0.3, "k3") for b in (wide, rows.batch)
    )
    same(rows, found, wanted)
    assert kl == pytest.approx(of_rows)


@pytest.mark.parametrize(
    "config",
    [
        {"rollout_is": "token", "rollout_is_threshold": 1.2},
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
        *({"rollout_rs": rule, "rollout_rs_threshold": "0.02_1.3"} for rule in ROLLOUT_RS),
    ],
    ids=lambda config: next(iter(config.values())),
)
def test_rollout_correction(config, rows):
    (weights, mask, metrics), (wanted, of_rows, numbers) = (
        compute_rollout_correction(b.old, b.rollout, b.mask, RolloutCorrectionConfig(**config))
        for b in (rows.pair[0], rows.batch)
    )
    same(rows, mask, of_rows)
    assert metrics == pytest.approx(numbers)
    if wanted is not None:
        same(rows, weights, wanted)


def test_group_statistics(rows):
    wide, batch = rows.pair[0], rows.batch
    assert group_metrics(wide.rewards, wide.mask, wide.index) == group_metrics(
        batch.rewards, batch.mask, batch.index
    )
    found, wanted = (group_filter_values("seq_reward", b.rewards, None, b.mask) for b in (wide, batch))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_plain_aggregate(mode, rows):
    found, wanted = (
        agg_loss(b.advantages, b.mask, mode, loss_scale_factor=7.0) for b in (rows.pair[0], rows.batch)
    )
    torch.testing.assert_close(found, wanted)
