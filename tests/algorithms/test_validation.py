"""Closed forms against enumeration of all subsets, and the names of validation metrics."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms import best_at_k, majority_at_k, pass_at_k, validation_metrics, worst_at_k
from verl.algorithms.validation import subset_sizes
from verl.errors import DataError


def expectation(values, k, statistic):
    subsets = list(itertools.combinations(range(len(values)), k))
    return sum(statistic(subset) for subset in subsets) / len(subsets)


@given(n=st.integers(1, 9), data=st.data())
@settings(max_examples=50, deadline=None)
def test_pass_at_k_equals_enumeration(n, data):
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    right = [1] * correct + [0] * (n - correct)
    wanted = expectation(right, k, lambda subset: float(any(right[i] for i in subset)))
    assert pass_at_k(n, correct, k) == pytest.approx(wanted)


@given(values=st.lists(st.floats(-10, 10), min_size=1, max_size=8), data=st.data())
@settings(max_examples=50, deadline=None)
def test_best_and_worst_at_k_equal_enumeration(values, data):
    k = data.draw(st.integers(1, len(values)))
    best = expectation(values, k, lambda subset: max(values[i] for i in subset))
    worst = expectation(values, k, lambda subset: min(values[i] for i in subset))
    assert best_at_k(values, k) == pytest.approx(best, abs=1e-9)
    assert worst_at_k(values, k) == pytest.approx(worst, abs=1e-9)


@given(
    samples=st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 1)), min_size=1, max_size=8),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_majority_at_k_equals_enumeration(samples, data):
    answers, values = [a for a, _ in samples], [v for _, v in samples]
    k = data.draw(st.integers(1, len(samples)))
    worth = {
        answer: sum(v for a, v in samples if a == answer) / answers.count(answer) for answer in set(answers)
    }

    def winner(subset):
        votes = [answers[i] for i in subset]
        most = max(votes.count(a) for a in votes)
        tied = [a for a in sorted(set(votes)) if votes.count(a) == most]
        return sum(worth[a] for a in tied) / len(tied)

    assert majority_at_k(answers, values, k) == pytest.approx(expectation(values, k, winner), abs=1e-9)


def test_majority_of_many_samples_is_exact_and_between_its_extremes():
    answers = ["right"] * 40 + [f"wrong{i % 8}" for i in range(88)]
    values = [float(a == "right") for a in answers]
    curve = [majority_at_k(answers, values, k) for k in (1, 16, 128)]
    assert curve[0] == pytest.approx(40 / 128) and curve[2] == pytest.approx(1.0)
    assert curve[0] < curve[1] < 1


@pytest.mark.parametrize("bad", [(3, 4, 1), (3, 1, 4), (3, 1, 0)])
def test_pass_at_k_refuses_impossible_counts(bad):
    with pytest.raises(DataError):
        pass_at_k(*bad)


def test_subset_sizes_double_up_to_n():
    assert [subset_sizes(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_names_and_values_of_a_run():
    sources = ["math"] * 4 + ["code"] * 2
    uids = ["p", "p", "q", "q", "p", "p"]
    metrics = validation_metrics(
        sources,
        uids,
        {
            "reward": [1.0, 0.0, 1.5, 0.5, 2.0, 4.0],
            "acc": [True, False, True, True, None, None],
            "pred": ["4", "5", "7", "7", "x", "x"],
            "note": ["a", "b", "c", "d", "e", "f"],
        },
    )
    core = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
    assert core == pytest.approx(
        {
            "val-core/math/acc/mean@2": 0.75,
            "val-core/math/acc/pass@2": 1.0,
            "val-core/math/acc/maj@2": 0.75,
            "val-core/code/reward/mean@2": 3.0,
            "val-core/code/reward/best@2": 4.0,
            "val-core/code/reward/maj@2": 3.0,
        }
    )
    aux = set(metrics) - set(core)
    assert {n for n in aux if "/math/acc/" in n} == {
        f"val-aux/math/acc/{stat}" for stat in ("std@2", "pass@1", "best@2", "worst@2")
    }
    assert metrics["val-aux/math/reward/mean@2"] == pytest.approx(0.75)
    assert metrics["val-aux/math/reward/best@2"] == pytest.approx((1.0 + 1.5) / 2)
    assert metrics["val-aux/math/reward/worst@2"] == pytest.approx((0.0 + 0.5) / 2)
    assert metrics["val-aux/math/reward/std@2"] == pytest.approx(math.sqrt(0.5))
    assert not any("note" in name or "/pred/" in name for name in metrics)


def test_one_sample_per_prompt_gives_a_mean_and_nothing_made_up():
    assert validation_metrics(["s", "s"], [0, 1], {"reward": [0.5, 0.2]}) == pytest.approx(
        {"val-core/s/reward/mean@1": 0.35}
    )


def test_samples_without_a_value_are_left_out_and_counted():
    metrics = validation_metrics(
        ["s"] * 5, ["a", "a", "b", "b", "c"], {"reward": [1.0, None, float("nan"), 0.5, None]}
    )
    assert metrics["val-core/s/reward/mean@2"] == pytest.approx(0.75)
    assert metrics["val-aux/s/reward/missing"] == 3


def test_acc_is_the_headline_only_where_every_scored_sample_has_it(caplog: pytest.LogCaptureFixture):
    rewards, uids = [1.0, 0.0, 0.0, 0.0, None], list(range(5))
    for nothing in (None, math.nan):
        caplog.clear()
        acc = [True, nothing, nothing, False, nothing]
        metrics = validation_metrics(["s"] * 5, uids, {"reward": rewards, "acc": acc})
        core = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
        assert core == {"val-core/s/reward/mean@1": 0.25, "val-core/s/reward/pass@1": 0.25}
        assert metrics["val-aux/s/acc/mean@1"] == 0.5 and metrics["val-aux/s/acc/missing"] == 3
        (said,) = caplog.messages
        assert said.startswith("s: 2 of 4 scored responses have no acc")
    caplog.clear()
    metrics = validation_metrics(["s"] * 5, uids, {"reward": rewards, "acc": [1, 0, 0, 0, None]})
    assert metrics["val-core/s/acc/mean@1"] == 0.25 and not caplog.messages


def test_a_prompt_is_a_uid_within_its_source():
    metrics = validation_metrics(["a", "b"], ["same", "same"], {"reward": [1.0, 3.0]})
    assert metrics["val-core/a/reward/mean@1"] == 1.0 and metrics["val-core/b/reward/mean@1"] == 3.0


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(DataError, match="different lengths"):
        validation_metrics(["s", "s"], [0, 1], {"reward": [1.0]})
