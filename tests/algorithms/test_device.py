"""The same result on CPU and GPU. Needs a GPU; skipped without."""

from __future__ import annotations

import pytest
import torch

from verl.algorithms import (
    adv_estimator_names,
    compute_rollout_correction,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    get_policy_loss_prepare,
    pf_ppo_indices,
)
from verl.config.methods import POLICY_LOSS, builtin_names
from verl.config.schema import ActorConfig, PolicyLossConfig, RolloutCorrectionConfig

TOKEN_LOSSES = builtin_names(POLICY_LOSS, lambda method: not method.whole_groups)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device at hand")
CONFIG = ActorConfig(policy_loss=PolicyLossConfig(clip_cov_ratio=0.1, clip_cov_lb=-1.0, kl_cov_ratio=0.1))


def moved(batch, device):
    values = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(batch).items()}
    values["by_key"] = {k: v.to(device) for k, v in batch.by_key.items()}
    return type(batch)(**values)


@pytest.mark.parametrize("name", adv_estimator_names())
def test_estimators(name, make_batch):
    results = []
    for device in ("cpu", "cuda"):
        b = moved(make_batch(1, rows=64, width=33), device)
        pair = get_adv_estimator_fn(name)(
            token_level_rewards=b.rewards,
            response_mask=b.mask,
            index=b.index,
            config=None,
            values=b.values,
            gamma=0.9,
            lam=0.8,
            reward_baselines=b.baselines,
            old_log_probs=b.old,
            sum_pi_squared=b.sum_pi_squared,
            process_rewards=b.process_rewards,
            rewards_by_key=b.by_key,
        )
        assert all(x.device.type == device for x in pair)
        results.append(tuple(x.cpu() for x in pair))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_losses(name, make_batch):
    results = []
    for device in ("cpu", "cuda"):
        b = moved(make_batch(1, rows=64, width=33), device)
        hook = get_policy_loss_prepare(name)
        more = {"prepared": hook(b.old, b.log_prob, b.advantages, b.mask, CONFIG)} if hook else {}
        leaf = b.log_prob.clone().requires_grad_()
        loss, _ = get_policy_loss_fn(name)(
            old_log_prob=b.old,
            log_prob=leaf,
            advantages=b.advantages,
            response_mask=b.mask,
            loss_agg_mode="token-mean",
            config=CONFIG,
            rollout_is_weights=b.weights,
            kl=leaf,
            **more,
        )
        loss.backward()
        results.append((loss.detach().cpu(), leaf.grad.cpu()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-11)


def test_rollout_correction_and_resampling(make_batch):
    config = RolloutCorrectionConfig(
        rollout_is="sequence", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.1
    )
    results = []
    for device in ("cpu", "cuda"):
        b = moved(make_batch(1, rows=64, width=33), device)
        weights, mask, metrics = compute_rollout_correction(b.old, b.rollout, b.mask, config)
        results.append((weights.cpu(), mask.cpu(), metrics, pf_ppo_indices(b.baselines).cpu()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-10)
