"""Losses that compare the responses to one prompt: their pairs, their additive form, and what leaves them."""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl.algorithms import (
    LOSS_AGG_MODES,
    agg_loss,
    batch_counts,
    get_policy_loss_fn,
    get_policy_loss_prepare,
)
from verl.algorithms.preference import Answers, pair_terms
from verl.algorithms.preference_losses import data_pairs, reward_pairs, win_rates
from verl.config.methods import POLICY_LOSS, builtin_names
from verl.config.schema import ActorConfig, PolicyLossConfig, PreferenceAlgorithmConfig
from verl.config.sections.actor import PAIRINGS
from verl.data.proto import DataProto
from verl.errors import ConfigError
from verl.workers.roles import LossConfig
from verl.workers.shard_batch import pad_rows

PAIRED = builtin_names(POLICY_LOSS, lambda method: "ref_log_prob" in method.needs)
GROUPED = builtin_names(POLICY_LOSS, lambda method: method.whole_groups)


def config(loss, **settings):
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss, **settings))


def mini_batch(batch):
    """As the trainer's, with one of each group's responses marked as the data's."""
    index = list(batch.index)
    from_data = torch.tensor([uid not in index[:row] for row, uid in enumerate(index)])
    tensors = {
        "response_mask": batch.mask,
        "token_level_rewards": batch.rewards,
        "ref_log_prob": batch.ref,
        "from_data": from_data,
    }
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": index})


def prepare(loss, batch, cfg, mini=None, log_prob=None):
    hook = get_policy_loss_prepare(loss)
    offered = {
        "log_prob": batch.log_prob if log_prob is None else log_prob,
        "old_log_prob": batch.old,
        "response_mask": batch.mask,
        "config": cfg,
        "batch": mini or mini_batch(batch),
    }
    return hook(**{name: offered[name] for name in inspect.signature(hook).parameters})


def evaluate(loss, batch, cfg, prepared=None, rows=slice(None), dp_size=1, mode="token-mean", leaf=None):
    leaf = batch.log_prob.clone().requires_grad_() if leaf is None else leaf
    prepared = prepare(loss, batch, cfg) if prepared is None else prepared
    info = {**batch_counts(batch.mask), "dp_size": dp_size, "loss_scale_factor": 11}
    value, metrics = get_policy_loss_fn(loss)(
        old_log_prob=batch.old[rows],
        log_prob=leaf[rows],
        response_mask=batch.mask[rows],
        loss_agg_mode=mode,
        config=LossConfig(cfg, info),
        prepared={name: each[rows] for name, each in prepared.items()},
    )
    (gradient,) = torch.autograd.grad(value, leaf, retain_graph=True)
    return value.detach(), gradient, metrics


def sums(batch, values):
    return torch.where(batch.mask.bool(), values, 0.0).sum(-1)


def pairwise_loss(loss, batch, cfg, leaf):
    """Pair by pair, with autograd through the loss itself."""
    settings = cfg.policy_loss
    policy, reference, rewards = (sums(batch, each) for each in (leaf, batch.ref, batch.rewards))
    tokens = batch.mask.sum(-1)
    from_data = mini_batch(batch).batch["from_data"]
    pair_settings = PreferenceAlgorithmConfig(beta=settings.beta, label_smoothing=settings.label_smoothing)
    total, count = 0, 0.0

    def term(better, worse):
        sides = [Answers(policy[[row]], reference[[row]], tokens[[row]]) for row in (better, worse)]
        return pair_terms(settings.pair_loss, *sides, pair_settings).loss.sum()

    for uid in dict.fromkeys(batch.index):
        rows = [row for row, other in enumerate(batch.index) if other == uid and tokens[row]]
        pairs = [(i, j) for i, j in itertools.permutations(rows, 2) if rewards[i] > rewards[j]]
        if loss == "spin":
            pairs = [(i, j) for i, j in itertools.permutations(rows, 2) if from_data[i]]
        elif settings.pairs == "best_worst" and pairs:
            best, worst = max(rewards[rows]), min(rewards[rows])
            pairs = [(i, j) for i, j in pairs if rewards[i] == best and rewards[j] == worst]
            total, count = total + sum(term(*pair) for pair in pairs) / len(pairs), count + 1
            continue
        total, count = total + sum(term(*pair) for pair in pairs), count + len(pairs)
    return total / count


CASES = [
    (loss, name, pairing)
    for loss in PAIRED
    for name in ("dpo", "ipo", "hinge", "robust")
    for pairing in (PAIRINGS if loss == "online_dpo" else ("best_worst",))
]


@pytest.mark.parametrize(("loss", "name", "pairing"), CASES)
def test_the_additive_form_has_value_and_gradient_of_the_pairwise_loss(loss, name, pairing, make_batch):
    smoothing = 0.2 if name in ("dpo", "robust") else 0.0
    cfg = config(loss, pair_loss=name, pairs=pairing, beta=0.3, label_smoothing=smoothing)
    for seed in range(3):
        batch = make_batch(seed, rows=16)
        value, gradient, _ = evaluate(loss, batch, cfg)
        leaf = batch.log_prob.clone().requires_grad_()
        expected = pairwise_loss(loss, batch, cfg, leaf)
        (wanted,) = torch.autograd.grad(expected, leaf)
        torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-14)
        assert bool(gradient.any())


@pytest.mark.parametrize("loss", GROUPED)
def test_neither_micro_batches_nor_ranks_nor_padding_change_anything(loss, make_batch):
    """Two ranks of several micro-batches each, filled up with copies of the first row that have no tokens."""
    cfg = config(loss, pairs="all")
    batch = make_batch(3, rows=13, width=6)
    for name in ("mask", "old", "log_prob", "ref", "rewards"):
        setattr(batch, name, getattr(batch, name).flip(0))
    batch.index = batch.index[::-1]  # a first row that counts, of which padding is a copy
    assert loss == "sppo" or float(prepare(loss, batch, cfg)["value"][0]) > 0
    whole, gradient, metrics = evaluate(loss, batch, cfg, mode="seq-mean-token-mean")
    leaf = batch.log_prob.clone().requires_grad_()
    columns = {"response_mask": batch.mask, "attention_mask": torch.ones(13, 12), **prepare(loss, batch, cfg)}
    padded = pad_rows({**columns, "old": batch.old, "number": torch.arange(13)}, 2)
    order = torch.randperm(14, generator=torch.Generator().manual_seed(0))
    total, joined = 0.0, dict.fromkeys(metrics, 0.0)
    for micro in order.split([3, 4, 2, 5]):  # the first two are one rank's
        part = SimpleNamespace(
            mask=padded["response_mask"], old=padded["old"], log_prob=leaf[padded["number"]]
        )
        info = {**batch_counts(batch.mask), "dp_size": 2}
        value, found = get_policy_loss_fn(loss)(
            old_log_prob=part.old[micro],
            log_prob=part.log_prob[micro],
            response_mask=part.mask[micro],
            loss_agg_mode="seq-mean-token-mean",
            config=LossConfig(cfg, info),
            prepared={name: padded[name][micro] for name in prepare(loss, batch, cfg)},
        )
        total = total + value / 2
        for name in found if loss in PAIRED else ():
            joined[name] += float(found[name].value)
    (cut,) = torch.autograd.grad(total, leaf)
    torch.testing.assert_close(total.detach(), whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(cut, gradient, rtol=1e-10, atol=1e-12)
    if loss in PAIRED:
        assert joined == pytest.approx({name: float(metric.value) for name, metric in metrics.items()})


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("loss", GROUPED)
def test_the_order_of_rows_does_not_matter(loss, pairing, make_batch):
    cfg, batch = config(loss, pairs=pairing), make_batch(5, rows=16)
    rewards = torch.zeros_like(batch.rewards)
    rewards[:, 0] = torch.arange(16) % 3  # many equal ones
    batch.rewards, batch.mask[1:, 0] = rewards, 1
    batch.log_prob, batch.old, batch.ref = (
        torch.where(batch.mask.bool(), each, 0.0).nan_to_num(0.0, 0.0, 0.0) - 0.1
        for each in (batch.log_prob, batch.old, batch.ref)
    )
    mini = mini_batch(batch)
    value, gradient, _ = evaluate(loss, batch, cfg, prepare(loss, batch, cfg, mini))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    shuffled = SimpleNamespace(mask=batch.mask[order], old=batch.old[order], log_prob=batch.log_prob[order])
    prepared = prepare(loss, shuffled, cfg, mini[order])
    again, other, _ = evaluate(loss, shuffled, cfg, prepared)
    torch.testing.assert_close(again, value, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(other, gradient[order], rtol=1e-12, atol=1e-14)


def answers(rewards, uids, tokens=None, width=3, seed=0):
    """One response for each reward, which is on its first token."""
    rows = len(rewards)
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(tokens if tokens is not None else [width] * rows)
    mask = (torch.arange(width) < lengths.unsqueeze(-1)).long()
    token_rewards = torch.zeros(rows, width, dtype=torch.float64)
    token_rewards[:, 0] = torch.tensor(rewards)
    drawn = [-torch.rand(rows, width, generator=generator, dtype=torch.float64) for _ in range(3)]
    return SimpleNamespace(
        mask=mask, rewards=token_rewards, index=list(uids), log_prob=drawn[0], ref=drawn[1], old=drawn[2]
    )


def test_ties_change_nothing_and_are_counted():
    cfg = config("online_dpo")
    ordered = answers([1.0, 0.0, 0.5], "aaa")
    value, gradient, metrics = evaluate("online_dpo", ordered, cfg)
    assert [float(metrics[f"actor/{name}"].value) for name in ("pairs", "tied_groups", "tied_pairs")] == [
        1,
        0,
        0,
    ]
    assert not gradient[2].any(), "neither the best nor the worst"
    more = answers([1.0, 0.0, 0.5, 2.0, 2.0, 7.0], "aaabbc")
    for name in ("log_prob", "ref", "old"):
        getattr(more, name)[:3] = getattr(ordered, name)
    again, wider, metrics = evaluate("online_dpo", more, cfg)
    torch.testing.assert_close(again, value)
    torch.testing.assert_close(wider[:3], gradient)
    assert not wider[3:].any()
    assert [float(metrics[f"actor/{name}"].value) for name in ("pairs", "tied_groups", "tied_pairs")] == [
        1,
        2,
        2,
    ]
    _, _, metrics = evaluate("online_dpo", more, config("online_dpo", pairs="all"))
    assert [float(metrics[f"actor/{name}"].value) for name in ("pairs", "tied_groups", "tied_pairs")] == [
        3,
        2,
        1,
    ]


def test_a_batch_without_any_order_has_no_loss():
    value, gradient, metrics = evaluate("online_dpo", answers([1.0] * 4, "aabb"), config("online_dpo"))
    assert float(value) == 0 and not gradient.any()
    assert float(metrics["actor/pairs"].value) == 0 and float(metrics["actor/tied_groups"].value) == 2


def test_pairs_of_a_group():
    rewards, uids, usable = (
        torch.tensor([1.0, 3.0, 3.0, 0.0, 9.0]),
        list("aaaaa"),
        torch.tensor([1, 1, 1, 1, 0]).bool(),
    )
    best = reward_pairs(rewards, uids, usable, "best_worst")
    assert list(zip(best.chosen.tolist(), best.rejected.tolist(), best.share.tolist(), strict=True)) == [
        (1, 3, 0.5),
        (2, 3, 0.5),
    ]
    every = reward_pairs(rewards, uids, usable, "all")
    assert set(zip(every.chosen.tolist(), every.rejected.tolist(), strict=True)) == {
        (0, 3), (1, 0), (1, 3), (2, 0), (2, 3),
    }  # fmt: skip
    assert float(every.ties.sum()) == 1 and not every.tied_groups.any()
    given = data_pairs(torch.tensor([0, 0, 1, 0, 0]).bool(), uids, usable)
    assert given.chosen.tolist() == [2, 2, 2] and given.rejected.tolist() == [0, 1, 3]
    nothing = reward_pairs(rewards, uids, torch.zeros(5).bool(), "all")
    assert nothing.count == 0


def test_a_response_may_be_several_rows():
    """The turns of a conversation together are one response."""
    cfg = config("online_dpo")
    whole = answers([1.0, 0.0], "aa", width=4)
    value, gradient, _ = evaluate("online_dpo", whole, cfg)
    cut = SimpleNamespace(
        **{
            name: torch.cat([getattr(whole, name)[:, :2], getattr(whole, name)[:, 2:]], 1).view(4, 2)
            for name in ("mask", "rewards", "log_prob", "ref", "old")
        },
        index=list("aaaa"),
    )
    mini = mini_batch(cut)
    mini.non_tensor_batch["session"] = np.array(list("xxyy"), dtype=object)
    again, turns, _ = evaluate("online_dpo", cut, cfg, prepare("online_dpo", cut, cfg, mini))
    torch.testing.assert_close(again, value)
    torch.testing.assert_close(turns.view(2, 4), gradient)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_sppo_is_per_prompt_and_takes_every_aggregation_mode(mode):
    rewards, uids, lengths = [1.0, 0.0, -0.5, 2.0, 2.0, 4.0], list("aabbba"), [3, 1, 2, 3, 1, 2]
    cfg, batch = config("sppo", sppo_eta=2.5), answers(rewards, uids, lengths)
    value, gradient, _ = evaluate("sppo", batch, cfg, mode=mode)
    leaf = batch.log_prob.clone().requires_grad_()
    rows = []
    for i, reward in enumerate(rewards):
        others = [rewards[j] for j in range(6) if uids[j] == uids[i] and j != i]
        wins = sum(1 / (1 + np.exp(other - reward)) for other in others) / len(others)
        moved = sums(batch, leaf)[i] - sums(batch, batch.old)[i]
        rows.append((moved - 2.5 * (wins - 0.5)) ** 2)
    matrix = torch.stack(rows).unsqueeze(-1).expand(6, 3)
    expected = agg_loss(matrix, batch.mask, mode, **batch_counts(batch.mask), loss_scale_factor=11)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, leaf)[0])


def test_a_win_rate_is_within_the_group_and_half_where_there_is_no_other():
    rates = win_rates(torch.tensor([1.0, 1.0, 5.0]), list("aab"), torch.ones(3).bool())
    assert rates.tolist() == [0.5, 0.5, 0.5]
    rates = win_rates(torch.tensor([50.0, 0.0, 0.0]), list("aaa"), torch.ones(3).bool())
    torch.testing.assert_close(rates, torch.tensor([1.0, 0.25, 0.25], dtype=torch.float64))


def test_spins_margin_falls_to_0_as_the_policy_becomes_the_data():
    """A policy of four answers; the data always gives the third. No reward anywhere; the opponent is the policy of the
    iteration before."""
    cfg = config("spin", beta=1.0)
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    margins = []
    for _ in range(12):
        reference = logits.detach().log_softmax(-1)
        drawn = torch.multinomial(reference.exp(), 16, replacement=True, generator=generator)
        rows = torch.cat([torch.tensor([2]), drawn])
        mini = DataProto.from_dict(
            tensors={
                "response_mask": torch.ones(17, 1),
                "ref_log_prob": reference[rows, None],
                "from_data": torch.arange(17) == 0,
            },
            non_tensors={"uid": ["a"] * 17},
        )
        for _ in range(5):
            log_prob = logits.log_softmax(-1)[rows, None]
            batch = SimpleNamespace(mask=mini.batch["response_mask"], old=None, log_prob=log_prob.detach())
            prepared = prepare("spin", batch, cfg, mini)
            loss, metrics = get_policy_loss_fn("spin")(
                log_prob=log_prob, response_mask=batch.mask, config=cfg, prepared=prepared
            )
            (gradient,) = torch.autograd.grad(loss, logits)
            logits.data -= 2.0 * gradient
        margins.append(float(metrics["actor/margin"].value))
    assert max(margins[:3]) > 0.5
    assert abs(margins[-1]) < 0.02 * max(margins)
    assert float(logits.detach().softmax(-1)[2]) > 0.95


@pytest.mark.parametrize("loss", GROUPED)
def test_a_call_without_the_whole_mini_batch_says_what_is_missing(loss):
    batch = answers([1.0, 0.0], "aa")
    with pytest.raises(ConfigError, match=f"loss_mode={loss} compares the responses.*prepare hook"):
        get_policy_loss_fn(loss)(
            old_log_prob=batch.old,
            log_prob=batch.log_prob,
            response_mask=batch.mask,
            config=ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss)),
        )


def test_missing_columns_are_named():
    batch = answers([1.0, 0.0], "aa")
    mini = mini_batch(batch)
    del mini.batch["ref_log_prob"]
    with pytest.raises(ConfigError, match="loss_mode=online_dpo needs.*ref_log_prob"):
        prepare("online_dpo", batch, config("online_dpo"), mini)
    mini = mini_batch(batch)
    del mini.batch["from_data"]
    with pytest.raises(ConfigError, match="loss_mode=spin needs.*from_data"):
        prepare("spin", batch, config("spin"), mini)
