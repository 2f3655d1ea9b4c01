"""What a few responses to each prompt say about groups, against enumeration, closed forms and simulation."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.algorithms.group_signal import (
    beta_signal,
    differs_at_k,
    proposed_size,
    rate_moments,
    signal_by_size,
    signal_chance,
    signal_window,
    wilson_interval,
)
from verl.errors import DataError


def groups_of(rates: np.ndarray, n: int, seed: int = 0) -> list[list[float]]:
    drawn = np.random.default_rng(seed).random((len(rates), n)) < rates[:, None]
    return drawn.astype(float).tolist()


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=7), st.data())
def test_subsets_that_differ_are_counted(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    subsets = [len(set(subset)) > 1 for subset in combinations(scores, k)]
    assert differs_at_k(scores, k) == pytest.approx(sum(subsets) / len(subsets))


def test_a_group_larger_than_what_was_drawn_is_refused() -> None:
    with pytest.raises(DataError, match="a group of 3 needs at least as many responses"):
        differs_at_k([0.0, 1.0], 3)


@pytest.mark.parametrize("n", [2, 3, 8, 32])
def test_the_window_is_where_signal_is_half_as_frequent_as_at_best(n: int) -> None:
    low, high = signal_window(n)
    best = max(signal_chance(rate, n) for rate in np.linspace(0, 1, 201))
    for rate in (low, high):
        assert signal_chance(rate, n) == pytest.approx(best / 2)
    assert 0 < low < 0.5 < high < 1
    assert low > signal_window(2 * n)[0]  # larger groups find rarer passes


@pytest.mark.parametrize("share", [0.02, 0.3, 0.95])
def test_the_interval_holds_the_true_share_in_95_of_100_samples(share: float) -> None:
    counts = np.random.default_rng(1).binomial(64, share, 2000)
    intervals = [wilson_interval(count / 64, 64) for count in counts]
    held = np.mean([low <= share <= high for low, high in intervals])
    assert 0.92 < held < 0.99
    assert wilson_interval(0, 64)[0] == 0 and 0 < wilson_interval(0, 64)[1] < 0.1


@pytest.mark.parametrize(("a", "b"), [(0.6, 1.4), (3.0, 1.0), (0.3, 0.3)])
def test_beta_signal_is_the_mean_chance_over_the_distribution(a: float, b: float) -> None:
    rates = np.random.default_rng(2).beta(a, b, 200_000)
    for n in (2, 8, 32):
        found = beta_signal(a / (a + b), a * b / ((a + b) ** 2 * (a + b + 1)), n)
        assert found == pytest.approx(np.mean(signal_chance(rates, n)), abs=0.005)
    assert beta_signal(0.3, 0.0, 4) == pytest.approx(signal_chance(0.3, 4))
    assert beta_signal(0.3, 0.21, 4) == 0  # every prompt always passes or never does


def test_moments_are_of_the_rates_without_the_spread_of_few_responses() -> None:
    rates = np.random.default_rng(3).choice([0.1, 0.7], 40_000)
    passed = np.random.default_rng(4).binomial(6, rates)
    mean, variance = rate_moments(passed.tolist(), [6] * len(passed))
    assert mean == pytest.approx(0.4, abs=0.01) and variance == pytest.approx(0.09, abs=0.004)
    assert rate_moments([1, 1, 1], [2, 2, 2]) == (0.5, 0.0)  # less spread than chance makes


def test_shares_of_all_sizes_are_those_of_groups_drawn_with_them() -> None:
    rates = np.random.default_rng(5).beta(0.6, 1.4, 6000)
    drawn = groups_of(rates, 8)
    sizes = signal_by_size(drawn, drawn)
    assert [(each.n, each.extrapolated) for each in sizes] == [
        (2, False), (4, False), (8, False), (16, True), (32, True),
    ]  # fmt: skip
    for each in sizes:
        simulated = np.mean([len(set(group)) > 1 for group in groups_of(rates, each.n, seed=9)])
        assert each.share == pytest.approx(simulated, abs=0.025)
        assert each.low < each.share < each.high


def test_scores_that_do_not_pass_or_fail_are_not_extrapolated() -> None:
    graded = [[0.1, 0.1, 0.3, 0.1], [0.2] * 4, [0.0, 0.1, 0.2, 0.3]]
    sizes = signal_by_size(graded, graded)
    assert [(each.n, each.share) for each in sizes] == [(2, pytest.approx(0.5)), (4, pytest.approx(2 / 3))]
    passes = [[0.0, 0.0, 1.0, 0.0], [0.0] * 4, [0.0, 0.0, 1.0, 1.0]]  # acc says what passes
    assert [each.n for each in signal_by_size(graded, passes)] == [2, 4, 8, 16]


def test_a_group_that_lost_responses_counts_for_smaller_sizes() -> None:
    groups = [[0.0, 1.0], [0.0] * 4]
    assert [each.share for each in signal_by_size(groups, groups)[:2]] == [0.5, 0.0]


def test_the_smallest_sufficient_group_is_proposed() -> None:
    half, rare = np.full(500, 0.5), np.full(500, 0.03)
    easy, hard = (signal_by_size(drawn, drawn) for drawn in (groups_of(half, 8), groups_of(rare, 8)))
    found = proposed_size(easy, 0.5)
    assert found is not None and found.n == 4  # not 2, which has it, too
    found = proposed_size(hard, 0.5)
    assert found is not None and found.n == 32 and found.extrapolated  # 1 - 0.97^32 is 0.62, of 16 it is 0.39
    none = [[0.0] * 8] * 20
    assert proposed_size(signal_by_size(none, none), 0.5) is None
