"""Every estimator against straight loops over sequences, and the properties that make it what it is."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import algorithm_loops as loops
from verl.algorithms import adv_estimator_names, get_adv_estimator_fn, group_ids, group_metrics
from verl.algorithms.advantages import discounted_returns
from verl.config.methods import adv_estimator
from verl.errors import ConfigError, DataError

GAMMA, LAM = 0.9, 0.8
ESTIMATORS = adv_estimator_names()
OUTCOME = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "turn_rloo")


def estimate(name, batch, **more):
    arguments = {
        "token_level_rewards": batch.rewards,
        "response_mask": batch.mask,
        "index": batch.index,
        "config": None,
        "values": batch.values,
        "gamma": GAMMA,
        "lam": LAM,
        "reward_baselines": batch.baselines,
        "old_log_probs": batch.old,
        "sum_pi_squared": batch.sum_pi_squared,
        "process_rewards": batch.process_rewards,
        "rewards_by_key": batch.by_key,
    }
    return get_adv_estimator_fn(name)(**(arguments | more))


def reference(name, batch):
    batch = SimpleNamespace(**vars(batch), gamma=GAMMA, lam=LAM)
    return loops.ESTIMATORS[name.removesuffix("_vectorized")](batch)


# --- the tests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_estimator_agrees_with_plain_loops(name, seed, make_batch):
    batch = make_batch(seed)
    for got, wanted in zip(estimate(name, batch), reference(name, batch), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)
        assert bool((got[batch.mask == 0] == 0).all())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator_in_float32_stays_close_and_keeps_the_dtype(name, make_batch):
    wide, narrow = make_batch(3), make_batch(3, dtype=torch.float32)
    for got, wanted in zip(estimate(name, narrow), reference(name, wide), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_stands_behind_the_mask_changes_no_bit(name, make_batch):
    for clean, junk in zip(
        estimate(name, make_batch(5, garbage=False)), estimate(name, make_batch(5)), strict=True
    ):
        assert torch.equal(clean, junk)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_order_of_the_batch_does_not_matter(name, seed, make_batch):
    batch = make_batch(seed)
    order = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(seed))
    shuffled = SimpleNamespace(
        **{k: v[order] for k, v in vars(batch).items() if isinstance(v, torch.Tensor)},
        index=batch.index[order.numpy()],
        by_key={k: v[order] for k, v in batch.by_key.items()},
    )
    for straight, moved in zip(estimate(name, batch), estimate(name, shuffled), strict=True):
        torch.testing.assert_close(moved, straight[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["grpo", "rloo", "gpg"])
@pytest.mark.parametrize("normalise", [True, False])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_group_advantages_sum_to_zero(name, normalise, seed, make_batch):
    batch = make_batch(seed, garbage=False)
    batch.mask[:] = 1
    advantages, _ = estimate(name, batch, norm_adv_by_std_in_grpo=normalise)
    ids, count = group_ids(batch.index)
    total = torch.zeros(count, dtype=torch.float64).index_add_(0, ids, advantages[:, 0])
    torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-8)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_opo_sums_to_zero_over_the_tokens_of_a_group(seed, make_batch):
    batch = make_batch(seed)
    advantages, _ = estimate("opo", batch)
    ids, count = group_ids(batch.index)
    total = torch.zeros(count, dtype=torch.float64).index_add_(0, ids, advantages.sum(-1))
    torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", [*OUTCOME, "reinforce_plus_plus_baseline", "gdpo"])
def test_a_group_of_one_gives_exactly_zero(name):
    rewards, mask = torch.tensor([[0.0, 5.0], [0.0, 0.3], [0.1, 0.0]]), torch.tensor([[1, 1], [1, 1], [1, 0]])
    fn = get_adv_estimator_fn(name)
    one_each, _ = fn(
        token_level_rewards=rewards,
        response_mask=mask,
        index=["a", "b", "c"],
        rewards_by_key={"x": rewards.sum(-1)},
    )
    assert torch.equal(one_each, torch.zeros(3, 2))


@pytest.mark.parametrize("name", [*OUTCOME, "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(name, reward):
    rewards = torch.tensor([[0.0, reward]] * 7)
    advantages, _ = get_adv_estimator_fn(name)(
        token_level_rewards=rewards, response_mask=torch.ones(7, 2), index=[0] * 7
    )
    assert torch.equal(advantages, torch.zeros(7, 2))


def test_dr_grpo_does_not_divide(make_batch):
    batch = make_batch(4)
    wanted = loops.spread(batch, loops.normalised(batch, loops.scores(batch), by_std=False))
    by_keyword, _ = estimate("grpo", batch, norm_adv_by_std_in_grpo=False)
    by_config, _ = estimate("grpo", batch, config=SimpleNamespace(norm_adv_by_std_in_grpo=False))
    torch.testing.assert_close(by_keyword, wanted, rtol=1e-9, atol=1e-9)
    assert torch.equal(by_keyword, by_config)


def test_passk_gives_a_tie_at_the_top_nothing():
    rewards, mask = torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3, 1)
    advantages, _ = get_adv_estimator_fn("grpo_passk")(
        token_level_rewards=rewards, response_mask=mask, index=[0, 0, 0]
    )
    assert torch.equal(advantages, torch.zeros(3, 1))


def test_gae_skips_tool_tokens_as_if_they_were_not_there(make_batch):
    batch = make_batch(6, rows=12)
    _, returns = estimate("gae", batch)
    row = 4
    keep = batch.mask[row].bool()
    alone = torch.zeros(2, int(keep.sum()), dtype=torch.float64)
    squeezed = get_adv_estimator_fn("gae")(
        token_level_rewards=torch.stack([batch.rewards[row][keep], alone[0]]),
        values=torch.stack([batch.values[row][keep], alone[0]]),
        response_mask=torch.ones(2, int(keep.sum())),
        gamma=GAMMA,
        lam=LAM,
    )[1]
    torch.testing.assert_close(returns[row][keep], squeezed[0])


def test_gamma_and_lam_come_from_the_config_when_not_given(make_batch):
    batch = make_batch(1)
    config = SimpleNamespace(gamma=GAMMA, lam=LAM)
    for name in ("gae", "reinforce_plus_plus"):
        from_config, _ = estimate(name, batch, gamma=None, lam=None, config=config)
        assert torch.equal(from_config, estimate(name, batch)[0])


@given(
    gamma=st.sampled_from([0.0, 1e-30, 0.3, 0.9, 0.999, 1.0]),
    width=st.integers(1, 70),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_discounted_returns_without_a_loop_equal_the_loop(gamma, width, seed):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randn(3, width, generator=g, dtype=torch.float64)
    mask = torch.rand(3, width, generator=g) > 0.3
    mask[0] = True
    batch = SimpleNamespace(rewards=rewards, mask=mask)
    torch.testing.assert_close(
        discounted_returns(rewards, mask, gamma), loops.rewards_to_go(batch, gamma), rtol=1e-10, atol=1e-12
    )


def test_gdpo_weighs_the_keys_it_is_told(make_batch):
    batch = make_batch(2)
    config = SimpleNamespace(gdpo_reward_keys=["form"], gdpo_reward_weights=[2.0])
    got, _ = estimate("gdpo", batch, config=config)
    weighed = [2 * value for value in loops.normalised(batch, list(batch.by_key["form"].unbind()))]
    wanted = loops.whiten(batch, loops.spread(batch, weighed))
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("gae", "values"),
        ("remax", "reward_baselines"),
        ("gdpo", "rewards_by_key"),
        ("optimal_token_baseline", "sum_pi_squared"),
        ("prime", "process_rewards"),
    ],
)
def test_an_estimator_says_what_it_lacks(name, missing):
    there = dict.fromkeys(("token_level_rewards", "response_mask", "index", "old_log_probs"))
    with pytest.raises(ConfigError, match=f"algorithm.adv_estimator={name} needs the argument '{missing}'"):
        adv_estimator(name)(**there)


@pytest.mark.parametrize(
    "name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "prime"]
)
def test_whitening_a_single_token_is_a_clear_error(name):
    with pytest.raises(DataError, match="at least 2 policy tokens"):
        get_adv_estimator_fn(name)(
            token_level_rewards=torch.ones(1, 2),
            response_mask=torch.tensor([[1, 0]]),
            index=[0],
            values=torch.ones(1, 2),
            rewards_by_key={"a": torch.ones(1)},
            process_rewards=torch.ones(1, 2),
        )


@pytest.mark.parametrize("name", [*OUTCOME, "remax", "optimal_token_baseline"])
def test_a_batch_of_empty_responses_gives_zeros(name, make_batch):
    batch = make_batch(0)
    batch.mask[:] = 0
    for got in estimate(name, batch):
        assert torch.equal(got, torch.zeros(batch.mask.shape, dtype=torch.float64))


@pytest.mark.parametrize(
    "index",
    [
        np.array(["b", "a", "b", "c"], dtype=object),
        ["b", "a", "b", "c"],
        [7, "a", 7, 3.5],
        torch.tensor([9, 2, 9, 4]),
        np.array([9, 2, 9, 4]),
    ],
)
def test_groups_are_found_in_any_kind_of_index(index):
    ids, count = group_ids(index)
    assert ids.tolist() == [0, 1, 0, 2] and count == 3


def test_an_index_of_the_wrong_length_is_refused(make_batch):
    with pytest.raises(DataError, match="3 entries for a batch of 12"):
        estimate("grpo", make_batch(0), index=[0, 1, 2])


def test_group_metrics_count_groups_that_teach_nothing():
    rewards = torch.tensor([[1.0], [1.0], [0.0], [1.0], [5.0], [2.0], [2.0], [2.0]])
    metrics = group_metrics(rewards, torch.ones(8, 1), ["eq", "eq", "mix", "mix", "one", "eq3", "eq3", "eq3"])
    assert metrics == {"training/groups": 4, "training/groups_of_one": 1, "training/groups_constant": 3}
