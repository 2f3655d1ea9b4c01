"""Every policy loss against straight loops over plain floats; gradients against numerical ones."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from verl.algorithms import (
    LOSS_AGG_MODES,
    get_policy_loss_fn,
    get_policy_loss_prepare,
)
from verl.config.methods import POLICY_LOSS, builtin_names
from verl.config.schema import ActorConfig, PolicyLossConfig
from verl.errors import ConfigError

LOSSES = builtin_names(POLICY_LOSS, lambda method: not method.whole_groups)
SEQUENCE_LOSSES = ("gspo", "sapo")  # their aggregation is part of the method
LOW, HIGH, BOUND = 0.15, 0.3, 1.6
CONFIG = ActorConfig(
    clip_ratio_low=LOW,
    clip_ratio_high=HIGH,
    clip_ratio_c=BOUND,
    policy_loss=PolicyLossConfig(
        clip_cov_ratio=0.1,
        clip_cov_lb=-0.2,
        clip_cov_ub=1.5,
        kl_cov_ratio=0.1,
        ppo_kl_coef=0.7,
        tau_pos=1.3,
        tau_neg=2.1,
        beta=0.4,
    ),
)


def run(name, batch, mode="token-mean", config=CONFIG, log_prob=None, weights=None, **more):
    log_prob = batch.log_prob if log_prob is None else log_prob
    return get_policy_loss_fn(name)(
        old_log_prob=batch.old,
        log_prob=log_prob,
        advantages=batch.advantages,
        response_mask=batch.mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
        **{"kl": log_prob, **more},  # any number with a gradient will do
    )


# --- the reference: nothing but loops and floats -----------------------------------------------------------------


def clip(x, low, high):
    return min(max(x, low), high)


def positions(mask, i):
    return [t for t in range(len(mask[i])) if mask[i][t]]


def covariances(batch, log_prob):
    mask = batch.mask.tolist()
    at = [(i, t) for i in range(len(mask)) for t in positions(mask, i)]
    mean_a = sum(float(batch.advantages[i, t]) for i, t in at) / len(at)
    mean_l = sum(float(log_prob[i, t]) for i, t in at) / len(at)
    return {
        (i, t): (float(batch.advantages[i, t]) - mean_a) * (float(log_prob[i, t]) - mean_l) for i, t in at
    }


def token_losses(name, batch, log_prob, frozen, prepared=None):
    """{(i, t): loss}. `frozen` are the log-probs wherever the method stops the gradient."""
    mask, out = batch.mask.tolist(), {}
    for i in range(len(mask)):
        at = positions(mask, i)
        if not at:
            continue
        a = {t: float(batch.advantages[i, t]) for t in at}
        logp = {t: float(log_prob[i, t]) for t in at}
        sg = {t: float(frozen[i, t]) for t in at}
        d = {t: logp[t] - float(batch.old[i, t]) for t in at}
        sg_d = {t: sg[t] - float(batch.old[i, t]) for t in at}
        old = {t: float(batch.old[i, t]) for t in at}
        if name == "geo_mean":
            bounded = [min(d[t], HIGH) if a[t] >= 0 else max(d[t], -LOW) for t in at]
            value = -sum(a.values()) / len(at) * math.exp(sum(bounded) / len(at))
        for t in at:
            if name in ("vanilla", "clip_cov"):
                r = math.exp(clip(d[t], -20, 20))
                value = max(-a[t] * r, -a[t] * clip(r, 1 - LOW, 1 + HIGH))
                if name == "vanilla" and a[t] < 0:
                    value = min(value, -a[t] * BOUND)
                if name == "clip_cov" and prepared["clip_cov_dropped"][i, t]:
                    value = 0.0
            elif name == "gspo":
                s = math.exp(min(logp[t] - sg[t] + sum(sg_d.values()) / len(at), 10))
                value = max(-a[t] * s, -a[t] * clip(s, 1 - LOW, 1 + HIGH))
            elif name == "sapo":
                tau = 1.3 if a[t] > 0 else 2.1
                value = -a[t] / (1 + math.exp(-tau * (math.exp(d[t]) - 1))) * 4 / tau
            elif name == "cispo":
                value = -clip(math.exp(sg_d[t]), 1 - LOW, 1 + HIGH) * a[t] * logp[t]
            elif name == "gpg":
                value = -logp[t] * a[t]
            elif name == "kl_cov":
                value = -a[t] * math.exp(d[t]) + (0.7 * abs(d[t]) if prepared["kl_cov_chosen"][i, t] else 0.0)
            elif name in ("dppo_tv", "dppo_kl"):
                p, q = math.exp(sg[t]), math.exp(old[t])
                if name == "dppo_tv":
                    distance = abs(p - q)
                else:
                    distance = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
                far = (p > q and distance > HIGH) if a[t] > 0 else (p < q and distance > LOW)
                value = 0.0 if far else -a[t] * min(math.exp(sg_d[t]), BOUND) * logp[t]
            elif name == "dro":
                value = -(logp[t] * a[t] - 0.4 / 2 * d[t] ** 2)
            elif name == "distillation":
                value = logp[t]
            out[i, t] = value
    return out


def aggregate(losses, batch, mode, weights=None):
    mask = batch.mask.tolist()
    if weights is not None:
        losses = {at: value * float(weights[at]) for at, value in losses.items()}
    rows = {i: [losses[i, t] for t in positions(mask, i)] for i in range(len(mask)) if positions(mask, i)}
    tokens = sum(len(values) for values in rows.values())
    sums = [sum(values) for values in rows.values()]
    return {
        "token-mean": sum(sums) / tokens,
        "token-sum": sum(sums),
        "seq-mean-token-sum": sum(sums) / len(rows),
        "seq-mean-token-sum-norm": sum(sums) / len(rows) / len(mask[0]),
        "seq-mean-token-mean": sum(sum(v) / len(v) for v in rows.values()) / len(rows),
    }[mode]


def reference(name, batch, mode, log_prob=None, frozen=None, prepared=None, weights=None):
    log_prob = batch.log_prob if log_prob is None else log_prob
    frozen = log_prob if frozen is None else frozen
    mode = "seq-mean-token-mean" if name in SEQUENCE_LOSSES else mode
    return aggregate(token_losses(name, batch, log_prob, frozen, prepared), batch, mode, weights)


def prepare(name, batch):
    hook = get_policy_loss_prepare(name)
    if hook is None:
        return None
    return hook(
        old_log_prob=batch.old,
        log_prob=batch.log_prob,
        advantages=batch.advantages,
        response_mask=batch.mask,
        config=CONFIG,
        generator=torch.Generator().manual_seed(0),
    )


def prepared_keyword(name, batch):
    found = prepare(name, batch)
    return {} if found is None else {"prepared": found}


# --- the tests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_agrees_with_plain_loops(name, mode, weighted, make_batch):
    for seed in (0, 1):
        batch = make_batch(seed)
        more = prepared_keyword(name, batch)
        weights = batch.weights if weighted else None
        loss, _ = run(name, batch, mode, weights=weights, **more)
        wanted = reference(name, batch, mode, prepared=more.get("prepared"), weights=weights)
        assert float(loss) == pytest.approx(wanted, rel=1e-6, abs=1e-8)


class _Surrogate(torch.autograd.Function):
    """Forward: the reference with its stopped parts frozen at the base point. Backward: our gradient there. So
    gradcheck compares our gradient with the numerical one of a function we did not write for the purpose."""

    @staticmethod
    def forward(ctx, log_prob, name, batch, mode, prepared, weights):
        ctx.gradient = _gradient(name, batch, mode, prepared, weights)
        value = reference(name, batch, mode, log_prob, batch.log_prob, prepared, weights)
        return torch.tensor(value, dtype=torch.float64)

    @staticmethod
    def backward(ctx, upstream):
        return upstream * ctx.gradient, None, None, None, None, None


def _gradient(name, batch, mode, prepared, weights):
    leaf = batch.log_prob.clone().requires_grad_()
    more = {} if prepared is None else {"prepared": prepared}
    with torch.enable_grad():
        loss, _ = run(name, batch, mode, log_prob=leaf, weights=weights, **more)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("weighted", [True, pytest.param(False, marks=pytest.mark.slow(seconds=2))])
def test_gradient_agrees_with_the_numerical_one(name, weighted, make_batch):
    for seed in (0, 1):
        batch = make_batch(seed, rows=8, width=5, garbage=False)
        leaf = batch.log_prob.clone().requires_grad_()
        weights = batch.weights if weighted else None
        mode = "seq-mean-token-sum"
        assert torch.autograd.gradcheck(
            _Surrogate.apply, (leaf, name, batch, mode, prepare(name, batch), weights), eps=1e-7, atol=1e-5
        )


@pytest.mark.parametrize("name", ["vanilla", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro"])
def test_losses_without_a_stopped_gradient_pass_gradcheck_as_they_are(name, make_batch):
    batch = make_batch(2, rows=8, width=5, garbage=False)
    more = prepared_keyword(name, batch)
    leaf = batch.log_prob.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: run(name, batch, log_prob=x, **more)[0], (leaf,), eps=1e-7, atol=1e-5
    )


@pytest.mark.parametrize("name", LOSSES)
def test_garbage_behind_the_mask_reaches_neither_loss_nor_gradient(name, make_batch):
    results = []
    for garbage in (False, True):
        batch = make_batch(3, garbage=garbage)
        leaf = batch.log_prob.clone().requires_grad_()
        loss, metrics = run(name, batch, log_prob=leaf, weights=batch.weights)
        loss.backward()
        results.append((loss.detach(), leaf.grad, {k: float(v) for k, v in metrics.items()}))
    (clean, clean_grad, clean_metrics), (junk, junk_grad, junk_metrics) = results
    assert torch.equal(clean, junk) and torch.equal(clean_grad, junk_grad) and clean_metrics == junk_metrics
    assert bool((junk_grad[batch.mask == 0] == 0).all()) and bool((junk_grad != 0).any())


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_log_ratios_stay_finite(name):
    log_prob = torch.tensor([[-200.0, -1e-9, -0.5, -90.0]], requires_grad=True)
    loss, _ = get_policy_loss_fn(name)(
        old_log_prob=torch.tensor([[-1e-9, -200.0, -0.5, -0.1]]),
        log_prob=log_prob,
        advantages=torch.tensor([[1.0, -1.0, 1.0, -1.0]]),
        response_mask=torch.ones(1, 4),
        loss_agg_mode="token-mean",
        config=ActorConfig(),
        rollout_is_weights=None,
        kl=log_prob,
    )
    loss.backward()
    assert bool(loss.isfinite()) and bool(log_prob.grad.isfinite().all())


@pytest.mark.parametrize("name", LOSSES)
def test_a_micro_batch_without_policy_tokens_has_loss_and_gradient_zero(name, make_batch):
    batch = make_batch(0)
    batch.mask[:] = 0
    leaf = batch.log_prob.clone().requires_grad_()
    loss, metrics = run(name, batch, log_prob=leaf)
    loss.backward()
    assert loss.item() == 0 and torch.equal(leaf.grad, torch.zeros_like(leaf))
    assert all(math.isfinite(float(value)) for value in metrics.values())


@pytest.mark.parametrize("name", LOSSES)
def test_metrics_carry_no_gradient_and_have_their_names(name, make_batch):
    batch = make_batch(0)
    _, metrics = run(name, batch, log_prob=batch.log_prob.clone().requires_grad_())
    assert "actor/ppo_kl" in metrics and not any(value.requires_grad for value in metrics.values())
    if name in ("vanilla", "gspo", "cispo", "clip_cov", "geo_mean", "dppo_tv", "dppo_kl"):
        assert "actor/pg_clipfrac" in metrics


def test_distillation_without_a_teacher_is_refused(make_batch):
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.teacher\.path"):
        run("distillation", make_batch(0), kl=None)


def test_vanilla_counts_what_it_clipped():
    # ratios 2, 2, 0.5, 2 with bounds 0.8 .. 1.2 and a ceiling of 1.5
    old = torch.zeros(1, 4)
    log_prob = torch.tensor([[2.0, 2.0, 0.5, 2.0]]).log()
    _, metrics = get_policy_loss_fn("vanilla")(
        old_log_prob=old,
        log_prob=log_prob,
        advantages=torch.tensor([[1.0, -1.0, -1.0, 0.0]]),
        response_mask=torch.ones(1, 4),
        loss_agg_mode="token-mean",
        config=ActorConfig(clip_ratio_c=1.5),
        rollout_is_weights=None,
    )
    assert float(metrics["actor/pg_clipfrac"]) == pytest.approx(2 / 4)  # up with A > 0, down with A < 0
    assert float(metrics["actor/pg_clipfrac_lower"]) == pytest.approx(1 / 4)
    assert float(metrics["actor/ppo_kl"]) == pytest.approx(-float(log_prob.mean()), rel=1e-6)


@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo", "geo_mean", "dppo_tv"])
def test_clip_bounds_fall_back_to_clip_ratio(name, make_batch):
    batch = make_batch(1)
    both = run(name, batch, config=ActorConfig(clip_ratio=0.1))[0]
    each = run(name, batch, config=ActorConfig(clip_ratio=9.0, clip_ratio_low=0.1, clip_ratio_high=0.1))[0]
    assert torch.equal(both, each) and not torch.equal(both, run(name, batch, config=ActorConfig())[0])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("vanilla", {"clip_ratio_c": 1.05}),
        ("sapo", {"tau_pos": 4.0}),
        ("sapo", {"tau_neg": 4.0}),
        ("clip_cov", {"clip_cov_ratio": 0.5}),
        ("clip_cov", {"clip_cov_lb": 10.0}),
        ("clip_cov", {"clip_cov_ub": -0.1}),
        ("kl_cov", {"kl_cov_ratio": 0.5}),
        ("kl_cov", {"ppo_kl_coef": 9.0}),
        ("dro", {"beta": 9.0}),
    ],
)
def test_every_key_of_a_loss_changes_it(name, change, make_batch):
    batch = make_batch(1)
    policy = vars(CONFIG.policy_loss) | {k: v for k, v in change.items() if k in vars(CONFIG.policy_loss)}
    section = {k: v for k, v in change.items() if k not in policy}
    changed = ActorConfig(
        **({"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": BOUND} | section),
        policy_loss=PolicyLossConfig(**policy),
    )
    assert not torch.equal(run(name, batch)[0], run(name, batch, config=changed)[0])


@pytest.mark.parametrize(
    ("name", "config", "key"),
    [
        ("vanilla", SimpleNamespace(clip_ratio_c=1.0), "clip_ratio_c=1.0"),
        ("dro", SimpleNamespace(policy_loss=SimpleNamespace(beta=0.0)), "policy_loss.beta=0.0"),
        ("sapo", SimpleNamespace(policy_loss=SimpleNamespace(tau_neg=-1.0)), "policy_loss.tau_neg=-1.0"),
    ],
)
def test_a_setting_out_of_range_is_named(name, config, key, make_batch):
    with pytest.raises(ConfigError, match=key):
        run(name, make_batch(0), config=config)


def test_clip_cov_drops_the_right_number_of_the_right_tokens(make_batch):
    batch = make_batch(7, rows=30, width=9)
    dropped = prepare("clip_cov", batch)["clip_cov_dropped"]
    found = {tuple(at) for at in dropped.nonzero().tolist()}
    candidates = set()
    for (i, t), cov in covariances(batch, batch.log_prob).items():
        a, r = float(batch.advantages[i, t]), math.exp(batch.log_prob[i, t] - batch.old[i, t])
        if -0.2 < cov < 1.5 and not -a * clip(r, 1 - LOW, 1 + HIGH) > -a * r:
            candidates.add((i, t))
    assert len(found) == max(int(0.1 * int(batch.mask.sum())), 1) < len(candidates)
    assert found <= candidates


def test_clip_cov_draws_from_its_own_generator(make_batch):
    batch = make_batch(7, rows=30, width=9)
    before = torch.get_rng_state()
    hook = get_policy_loss_prepare("clip_cov")
    draw = lambda seed: hook(  # noqa: E731
        batch.old, batch.log_prob, batch.advantages, batch.mask, CONFIG, torch.Generator().manual_seed(seed)
    )["clip_cov_dropped"]
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert torch.equal(torch.get_rng_state(), before)
    seeded = lambda seed: hook(  # noqa: E731
        batch.old,
        batch.log_prob,
        batch.advantages,
        batch.mask,
        ActorConfig(policy_loss=PolicyLossConfig(**(vars(CONFIG.policy_loss) | {"seed": seed}))),
    )["clip_cov_dropped"]
    assert torch.equal(seeded(5), seeded(5)) and not torch.equal(seeded(5), seeded(6))


def test_kl_cov_chooses_the_highest_covariances(make_batch):
    batch = make_batch(8, rows=30, width=9)
    chosen = {tuple(at) for at in prepare("kl_cov", batch)["kl_cov_chosen"].nonzero().tolist()}
    ranked = sorted(covariances(batch, batch.log_prob).items(), key=lambda item: -item[1])
    assert chosen == {at for at, _ in ranked[: max(1, int(0.1 * len(ranked)))]}


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_at_least_one_token_is_chosen(name, make_batch):
    batch = make_batch(1)
    hook = get_policy_loss_prepare(name)
    config = ActorConfig(
        policy_loss=PolicyLossConfig(clip_cov_ratio=0.0, kl_cov_ratio=0.0, clip_cov_lb=-1e9, clip_cov_ub=1e9)
    )
    (chosen,) = hook(batch.old, batch.log_prob, batch.advantages, batch.mask, config).values()
    assert int(chosen.sum()) == 1


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_without_preparation_the_matrix_at_hand_is_the_mini_batch(name, make_batch):
    batch = make_batch(2)
    hook = get_policy_loss_prepare(name)
    prepared = hook(batch.old, batch.log_prob, batch.advantages, batch.mask, CONFIG)
    assert torch.equal(run(name, batch)[0], run(name, batch, prepared=prepared)[0])


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_preparation_for_another_loss_is_refused(name, make_batch):
    with pytest.raises(ConfigError, match=r"its prepare hook.*it got other"):
        run(name, make_batch(2), prepared={"other": torch.ones(12, 7)})


@pytest.mark.parametrize(("name", "log_bound"), [("vanilla", 20), ("gspo", 10)])
def test_log_ratios_are_bounded_where_the_method_says_so(name, log_bound):
    loss, _ = get_policy_loss_fn(name)(
        old_log_prob=torch.full((1, 3), -50.0, dtype=torch.float64),
        log_prob=torch.zeros(1, 3, dtype=torch.float64),
        advantages=-torch.ones(1, 3, dtype=torch.float64),
        response_mask=torch.ones(1, 3),
        loss_agg_mode="token-mean",
        config=ActorConfig(clip_ratio_c=1e12),
        rollout_is_weights=None,
    )
    assert loss.item() == pytest.approx(math.exp(log_bound))
