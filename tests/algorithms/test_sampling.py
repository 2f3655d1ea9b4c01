from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms import (
    constant_groups,
    group_filter_values,
    mask_overlong,
    overlong_penalty,
    pf_ppo_indices,
)
from verl.algorithms.groups import dynamic_sampling_failed, pf_ppo_weights
from verl.errors import ConfigError


@given(
    rows=st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from([0.0, 1.0, 1 / 3])), min_size=1, max_size=20
    )
)
@settings(max_examples=40, deadline=None)
def test_constant_groups_are_those_with_one_value(rows):
    index, values = [g for g, _ in rows], torch.tensor([v for _, v in rows], dtype=torch.float64)
    wanted = [len({v for h, v in rows if h == g}) == 1 for g in index]
    assert constant_groups(values, index).tolist() == wanted


def test_each_filter_metric_reads_its_own_source(make_batch):
    batch = make_batch(0)
    finals = batch.rewards - 0.5
    extra = {"acc": [True, False] * 6, "score": [float(i) for i in range(12)]}

    def values(metric, extra=extra):
        return group_filter_values(metric, batch.rewards, finals, batch.mask, extra).tolist()

    def sums(matrix):
        return [
            sum(float(matrix[i, t]) for t in range(batch.mask.shape[1]) if batch.mask[i, t])
            for i in range(12)
        ]

    assert values("acc") == [1.0, 0.0] * 6 and values("score") == list(map(float, range(12)))
    assert values("seq_reward") == pytest.approx(sums(batch.rewards))
    assert values("seq_final_reward") == pytest.approx(sums(finals))
    assert values("score", {}) == pytest.approx(sums(batch.rewards))
    with pytest.raises(ConfigError, match="needs a reward function that returns a dict with 'acc'"):
        values("acc", {"score": [0.0] * 12})
    with pytest.raises(ConfigError, match="metric='f1'.*seq_final_reward"):
        values("f1")


def test_running_out_of_rounds_names_the_share_of_constant_groups():
    text = str(dynamic_sampling_failed(rounds=3, groups=40, constant=30, wanted=16))
    assert "10 of 16" in text and "75%" in text and "max_num_gen_batches" in text


@given(length=st.integers(0, 30), limit=st.integers(1, 25), data=st.data(), factor=st.floats(0, 3))
@settings(max_examples=40, deadline=None)
def test_overlong_penalty_by_hand(length, limit, data, factor):
    buffer = data.draw(st.integers(1, limit))
    wanted = max(min(-(length - (limit - buffer)) / buffer * factor, 0.0), -factor)
    got = overlong_penalty(torch.tensor([length]), limit, buffer, factor)
    assert got.tolist() == pytest.approx([wanted], abs=1e-5)


@pytest.mark.parametrize("buffer", [0, 65])
def test_a_buffer_that_does_not_fit_is_refused(buffer):
    with pytest.raises(ConfigError, match=f"overlong_buffer.len={buffer}"):
        overlong_penalty(torch.tensor([1]), 64, buffer)


def test_overlong_filtering_masks_truncated_responses_only():
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1]])
    assert mask_overlong(mask, [False, True, True]).tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert mask.tolist() == [[1, 1, 0], [1, 0, 1], [1, 1, 1]], "the argument stays as it was"


@pytest.mark.parametrize(
    ("method", "weights"),
    [("pow", [9.0, 1.0, 0.0, 4.0]), ("max_min", [0, 1, 0, 1]), ("max_random", [1, 1, 1, 4])],
)
def test_pf_ppo_weights(method, weights):
    scores = torch.tensor([-3.0, -1.0, 0.0, 2.0]) if method == "pow" else torch.tensor([0.5, 0.0, 0.7, 1.0])
    assert pf_ppo_weights(scores, method, 2.0).tolist() == weights


def test_pf_ppo_draws_by_weight_from_its_own_generator():
    scores = torch.tensor([0.0, 1.0, 3.0]).repeat(4000)
    before = torch.get_rng_state()
    drawn = pf_ppo_indices(scores, "pow", 1.0, torch.Generator().manual_seed(1))
    assert torch.equal(drawn, pf_ppo_indices(scores, "pow", 1.0, torch.Generator().manual_seed(1)))
    assert not torch.equal(drawn, pf_ppo_indices(scores, "pow", 1.0, torch.Generator().manual_seed(2)))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(drawn) == 12_000 and not bool((scores[drawn] == 0).any())
    assert float((scores[drawn] == 3).double().mean()) == pytest.approx(0.75, abs=0.02)


def test_pf_ppo_without_preference_draws_everything_alike():
    assert set(pf_ppo_indices(torch.zeros(50), "pow").tolist()) <= set(range(50))
    assert pf_ppo_weights(torch.zeros(3), "pow").tolist() == [1, 1, 1]


def test_unknown_reweighting_is_refused():
    with pytest.raises(ConfigError, match="reweight_method='best'.*max_min"):
        pf_ppo_weights(torch.ones(2), "best")
