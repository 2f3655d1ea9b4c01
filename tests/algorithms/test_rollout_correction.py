"""Weights, rejection and metrics of rollout correction against straight loops over plain floats."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms import batch_counts, compute_rollout_correction, rollout_probs_diff_metrics
from verl.config.schema import RolloutCorrectionConfig
from verl.config.sections.algorithm import ROLLOUT_RS
from verl.errors import ConfigError


def rows_of(batch):
    """Per sequence: positions and clamped log-ratios of its policy tokens."""
    out = []
    for i, row in enumerate(batch.mask.tolist()):
        at = [t for t, kept in enumerate(row) if kept]
        out.append({t: min(max(float(batch.old[i, t] - batch.rollout[i, t]), -20), 20) for t in at})
    return out


def correct(batch, **config):
    section = RolloutCorrectionConfig(**config)
    return compute_rollout_correction(batch.old, batch.rollout, batch.mask, section)


def reference_weights(batch, level, low, high):
    weights = torch.zeros(batch.mask.shape, dtype=torch.float64)
    for i, row in enumerate(rows_of(batch)):
        for t, l in row.items():
            w = math.exp(l if level == "token" else min(max(sum(row.values()), -20), 20))
            if low is None:
                w = min(w, high)
            elif not low <= w <= high:
                w = 0.0
            weights[i, t] = w
    return weights


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("threshold", "low", "high"), [(1.2, None, 1.2), ("0.8_1.3", 0.8, 1.3)])
def test_weights_agree_with_plain_loops(level, threshold, low, high, make_batch):
    for seed in (0, 1):
        batch = make_batch(seed)
        weights, mask, _ = correct(batch, rollout_is=level, rollout_is_threshold=threshold)
        wanted = reference_weights(batch, level, low, high)
        torch.testing.assert_close(weights, wanted)
        assert torch.equal(mask, batch.mask) and mask.dtype == batch.mask.dtype and not weights.requires_grad
        assert bool((wanted[batch.mask.bool()] == (0.0 if low else high)).any()), "the threshold must bite"


def test_normalised_token_weights_have_mean_one(make_batch):
    batch = make_batch(0)
    weights, _, metrics = correct(batch, rollout_is="token", rollout_is_batch_normalize=True)
    assert float(weights.sum() / batch.mask.sum()) == pytest.approx(1.0)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.0)


def test_normalised_sequence_weights_have_mean_one_over_sequences(make_batch):
    batch = make_batch(0)
    weights, _, _ = correct(batch, rollout_is="sequence", rollout_is_batch_normalize=True)
    per_sequence = [float(row.max()) for row, kept in zip(weights, batch.mask, strict=True) if kept.any()]
    assert sum(per_sequence) / len(per_sequence) == pytest.approx(1.0)


def kept_by_hand(rule, row, low, high):
    """{t: kept} for one sequence; k1 bounds a ratio, k2 and k3 a divergence."""
    level, kind = rule.rsplit("_", 1)
    statistic = {
        "k1": lambda l: l,
        "k2": lambda l: l * l / 2,
        "k3": lambda l: math.exp(l) - l - 1,
    }[kind]
    values = {t: statistic(l) for t, l in row.items()}
    inside = (lambda x: low <= math.exp(x) <= high) if kind == "k1" else (lambda x: low <= x <= high)
    if level == "token":
        return {t: inside(x) for t, x in values.items()}
    total = sum(values.values())
    verdict = {
        "seq_sum": lambda: inside(total),
        "seq_mean": lambda: inside(total / len(values)),
        "seq_max": lambda: all(inside(x) for x in values.values()),
    }[level]
    return dict.fromkeys(values, verdict() if values else True)


@pytest.mark.parametrize("rule", ROLLOUT_RS)
def test_each_rejection_rule_agrees_with_plain_loops(rule, make_batch):
    low, high, text = (0.8, 1.25, "1.25") if rule.endswith("k1") else (0.0, 0.08, "0.08")
    kept_somewhere = rejected_somewhere = False
    for seed in range(4):
        batch = make_batch(seed)
        weights, mask, metrics = correct(batch, rollout_rs=rule, rollout_rs_threshold=text)
        assert weights is None
        wanted = torch.zeros_like(batch.mask)
        for i, row in enumerate(rows_of(batch)):
            for t, kept in kept_by_hand(rule, row, low, high).items():
                wanted[i, t] = int(kept)
        assert torch.equal(mask, wanted)
        gone = 1 - int(wanted.sum()) / int(batch.mask.sum())
        assert metrics[f"rollout_corr/rejected_by_{rule}"] == pytest.approx(gone, abs=1e-7)
        assert metrics["rollout_corr/rejected_tokens"] == pytest.approx(gone, abs=1e-7)
        kept_somewhere |= bool(wanted.any())
        rejected_somewhere |= gone > 0
    assert kept_somewhere and rejected_somewhere


def test_all_rules_must_hold_each_with_its_own_bound(make_batch):
    batch = make_batch(1)
    _, first, _ = correct(batch, rollout_rs="token_k1", rollout_rs_threshold="0.7_1.5")
    _, second, _ = correct(batch, rollout_rs="seq_mean_k3", rollout_rs_threshold=0.05)
    _, both, _ = correct(batch, rollout_rs="token_k1, seq_mean_k3", rollout_rs_threshold="0.7_1.5,0.05")
    assert torch.equal(both, first & second) and not torch.equal(first, second)


def test_what_is_rejected_leaves_weights_and_denominators(make_batch):
    batch = make_batch(1)
    weights, mask, metrics = correct(
        batch, rollout_is="token", rollout_rs="seq_max_k2", rollout_rs_threshold=0.05
    )
    assert bool((weights[mask == 0] == 0).all())
    before, after = batch_counts(batch.mask), batch_counts(mask)
    assert after["batch_num_tokens"] < before["batch_num_tokens"]
    assert after["global_batch_size"] < before["global_batch_size"]
    lost = 1 - after["global_batch_size"] / before["global_batch_size"]
    assert metrics["rollout_corr/rejected_sequences"] == pytest.approx(lost, abs=1e-6)


def test_metrics_agree_with_plain_loops(make_batch):
    batch = make_batch(2)
    _, _, metrics = correct(batch)
    rows = [row for row in rows_of(batch) if row]
    tokens = [l for row in rows for l in row.values()]
    old, roll, differences = [], [], []
    for i, row in enumerate(rows_of(batch)):
        if row:
            old.append(sum(float(batch.old[i, t]) for t in row) / len(row))
            roll.append(sum(float(batch.rollout[i, t]) for t in row) / len(row))
            differences += [abs(math.exp(batch.old[i, t]) - math.exp(batch.rollout[i, t])) for t in row]

    def mean(values):
        return sum(values) / len(values)

    spread = math.sqrt(sum((d - mean(differences)) ** 2 for d in differences) / (len(differences) - 1))
    ratios = [math.exp(l) for l in tokens]
    wanted = {
        "rollout_corr/kl": mean([-l for l in tokens]),
        "rollout_corr/k3_kl": mean([math.exp(l) - l - 1 for l in tokens]),
        "rollout_corr/training_ppl": mean([math.exp(-x) for x in old]),
        "rollout_corr/rollout_ppl": mean([math.exp(-x) for x in roll]),
        "rollout_corr/ppl_ratio": mean([math.exp(b - a) for a, b in zip(old, roll, strict=True)]),
        "rollout_corr/chi2_token": mean([r * r for r in ratios]) - 1,
        "rollout_corr/chi2_seq": mean([math.exp(2 * sum(row.values())) for row in rows]) - 1,
        "rollout_corr/eff_sample_size": sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios)),
        "training/rollout_probs_diff_mean": mean(differences),
        "training/rollout_probs_diff_max": max(differences),
        "training/rollout_probs_diff_std": spread,
    }
    assert metrics == pytest.approx(wanted, rel=1e-6)


@given(seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_equal_policies_need_no_correction(seed, make_batch):
    batch = make_batch(seed)
    batch.rollout = batch.old
    weights, mask, metrics = correct(
        batch,
        rollout_is="sequence",
        rollout_rs=",".join(ROLLOUT_RS),
        rollout_rs_threshold=",".join(["1.001" if rule.endswith("k1") else "0.001" for rule in ROLLOUT_RS]),
    )
    assert torch.equal(mask, batch.mask) and torch.equal(weights, batch.mask.double())
    assert metrics["rollout_corr/kl"] == 0 and metrics["rollout_corr/eff_sample_size"] == pytest.approx(1)


def test_far_apart_policies_stay_finite():
    old, roll = torch.full((2, 50), -300.0), torch.zeros(2, 50)
    for a, b in ((old, roll), (roll, old)):
        config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_batch_normalize=True)
        weights, _, metrics = compute_rollout_correction(a, b, torch.ones(2, 50), config)
        assert bool(weights.isfinite().all())
        assert all(math.isfinite(value) for value in metrics.values()), metrics


def test_an_empty_batch_has_no_metrics():
    empty = torch.zeros(2, 3)
    assert rollout_probs_diff_metrics(empty, empty, empty) == {}
    weights, mask, _ = compute_rollout_correction(
        empty,
        empty,
        empty,
        RolloutCorrectionConfig(rollout_is="token", rollout_rs="seq_mean_k1", rollout_rs_threshold=2),
    )
    assert torch.equal(weights, empty) and torch.equal(mask, empty)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"rollout_is": "turn"}, "rollout_is='turn'"),
        ({"rollout_is": "token", "rollout_is_threshold": "2_1"}, "rollout_is_threshold' is '2_1'"),
        ({"rollout_is": "token", "rollout_is_threshold": -1.0}, "rollout_is_threshold' is '-1.0'"),
        ({"rollout_rs": "seq_k1", "rollout_rs_threshold": 2}, "'seq_k1'; allowed"),
        ({"rollout_rs": "seq_mean_k1"}, "needs .*rollout_rs_threshold"),
        ({"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"}, "3 bounds for 2 rules"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "few"}, "'few'"),
    ],
)
def test_settings_that_cannot_work_are_named(config, text, make_batch):
    with pytest.raises(ConfigError, match=text):
        correct(make_batch(0), **config)


def test_plain_namespace_is_enough_of_a_config(make_batch):
    batch = make_batch(0)
    weights, _, _ = compute_rollout_correction(batch.old, batch.rollout, batch.mask, SimpleNamespace())
    assert weights is None


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_log_ratios_are_bounded_by_twenty(level):
    config = RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=1e12)
    old, roll = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[-300.0, 5.0]], dtype=torch.float64)
    weights, _, _ = compute_rollout_correction(old, roll, torch.ones(1, 2), config)
    wanted = [20.0, -5.0] if level == "token" else [15.0, 15.0]
    assert weights.log().tolist() == [pytest.approx(wanted)]


@pytest.mark.parametrize("rule", [name for name in ROLLOUT_RS if not name.endswith("k1")])
def test_padding_never_rejects_a_sequence(rule, make_batch):
    """With a lower bound above 0, a masked position counted as 'no difference' would."""
    batch = make_batch(1)
    _, mask, _ = correct(batch, rollout_rs=rule, rollout_rs_threshold="1e-12_1e12")
    assert torch.equal(mask, batch.mask)
