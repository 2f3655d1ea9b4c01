from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms import karmarkar_karp, padded_budget_batches, sequence_work, token_budget_batches
from verl.errors import ConfigError

costs = st.lists(st.integers(0, 100), max_size=30)


def loads(parts, values):
    return [sum(values[i] for i in part) for part in parts]


@given(values=costs, k=st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_every_index_lands_in_exactly_one_part(values, k):
    parts = karmarkar_karp(values, k)
    assert len(parts) == k and sorted(itertools.chain(*parts)) == list(range(len(values)))
    assert all(part == sorted(part) for part in parts)
    if len(values) >= k:
        assert all(parts)


@given(values=st.lists(st.integers(1, 60), min_size=1, max_size=7), k=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_the_heaviest_part_is_near_the_best_possible(values, k):
    """Differencing is at most 4/3 - 1/(3k) from the optimum, found here by trying every assignment."""
    best = sum(values)
    for choice in itertools.product(range(k), repeat=len(values)):
        shares = [0] * k
        for value, at in zip(values, choice, strict=True):
            shares[at] += value
        best = min(best, max(shares))
    assert max(loads(karmarkar_karp(values, k), values)) <= (4 / 3 - 1 / (3 * k)) * best + 1e-9


def test_differencing_beats_putting_the_longest_where_there_is_room():
    values = [8, 7, 6, 5, 4]  # greedy ends with 17 against 13
    assert sorted(loads(karmarkar_karp(values, 2), values)) == [14, 16]


def test_many_long_tailed_sequences_are_spread_almost_evenly():
    rng = random.Random(0)
    lengths = [int(rng.lognormvariate(6, 0.8)) for _ in range(1024)]
    work = sequence_work(lengths)
    shares = loads(karmarkar_karp(work, 8), work)
    assert max(shares) / min(shares) < 1.02


@given(
    lengths=st.lists(st.integers(0, 50), max_size=30),
    budget=st.integers(1, 240),
    at_least=st.integers(1, 6),
    rows=st.integers(1, 3),
)
@settings(max_examples=200, deadline=None)
def test_padding_counts_in_the_budget_of_padded_batches(lengths, budget, at_least, rows):
    batches = padded_budget_batches(lengths, budget, at_least, rows)
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    assert len(batches) >= min(at_least, len(lengths))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * rows * max(lengths[i] for i in batch) <= budget


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), budget=st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_padded_batches_are_as_few_as_possible(lengths, budget):
    """By trying every assignment of sequences to batches."""

    def fits(choice):
        batches = [[lengths[i] for i, at in enumerate(choice) if at == k] for k in set(choice)]
        return all(len(batch) == 1 or len(batch) * max(batch) <= budget for batch in batches)

    choices = itertools.product(range(len(lengths)), repeat=len(lengths))
    best = min(len(set(choice)) for choice in choices if fits(choice))
    assert len(padded_budget_batches(lengths, budget)) == best


@given(
    lengths=st.lists(st.integers(0, 50), max_size=30), budget=st.integers(1, 120), at_least=st.integers(1, 6)
)
@settings(max_examples=200, deadline=None)
def test_the_token_budget_is_a_hard_bound(lengths, budget, at_least):
    batches = token_budget_batches(lengths, budget, at_least)
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths))) and all(batches)
    assert all(len(batch) == 1 or sum(lengths[i] for i in batch) <= budget for batch in batches)
    assert len(batches) >= min(at_least, len(lengths))


def best_count(lengths, budget):
    """The fewest batches there can be, by trying every assignment."""
    for count in range(1, len(lengths) + 1):
        for choice in itertools.product(range(count), repeat=len(lengths)):
            sums = [0] * count
            for size, at in zip(lengths, choice, strict=True):
                sums[at] += size
            if max(sums) <= budget:
                return count
    return 0


@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=6), budget=st.integers(10, 25))
@settings(max_examples=40, deadline=None)
def test_there_are_at_most_a_few_more_batches_than_needed(lengths, budget):
    assert len(token_budget_batches(lengths, budget)) <= 11 / 9 * best_count(lengths, budget) + 6 / 9


def test_a_sequence_above_the_budget_stands_alone():
    batches = token_budget_batches([10, 500, 20, 30], 64)
    assert [1] in batches and sorted(map(len, batches)) == [1, 3]


def test_micro_batches_share_the_work_evenly():
    rng = random.Random(1)
    lengths = [min(int(rng.lognormvariate(6, 0.8)), 4000) for _ in range(400)]
    work = sequence_work(lengths, hidden_size=512)
    batches = token_budget_batches(lengths, 16384, hidden_size=512)
    shares = loads(batches, work)
    assert len(batches) <= -(-sum(lengths) // 16384) + 1 and max(shares) / min(shares) < 1.1


def test_work_grows_faster_than_length():
    short, long = sequence_work([1000, 10_000], hidden_size=256)
    assert long > 10 * short and sequence_work([0], 256) == [0]
    assert sequence_work([3], hidden_size=2) == [3 * (24 + 3)]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: karmarkar_karp([1, 2], 0), "0 parts"),
        (lambda: karmarkar_karp([1, float("nan")], 2), "every cost"),
        (lambda: karmarkar_karp([1, -2], 2), "every cost"),
        (lambda: token_budget_batches([1], 0), "ppo_max_token_len_per_gpu"),
        (lambda: token_budget_batches([-1], 5), "negative"),
    ],
)
def test_impossible_requests_are_refused(call, text):
    with pytest.raises(ConfigError, match=text):
        call()
