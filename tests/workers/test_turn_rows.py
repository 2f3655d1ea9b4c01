"""Updates on rows that are turns of one conversation: mini-batches of whole conversations, and the loss that the
conversations have as one row each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.turn_rows import FLOATS, TurnRows, turn_rows
from verl.algorithms import LOSS_AGG_MODES
from verl.config.sections.actor import ActorConfig, CriticConfig
from verl.data.proto import DataProto
from verl.engines.base import ModelOutput
from verl.workers.group import mini_batches, sessions_of
from verl.workers.roles import ActorRole, CriticRole, RolloutGap
from verl.workers.shard_batch import from_arrays, pad_rows, shard_rows, to_arrays

NO_ENGINE: Any = None


def as_engines_give() -> TurnRows:
    """Zeros instead of NaN off the mask."""
    rows = turn_rows()
    for batch in (rows.append, rows.split):
        batch.batch |= {name: batch.batch[name].nan_to_num(0.0) for name in FLOATS}
    return rows


def sessions(mini: DataProto) -> list[str]:
    return list(dict.fromkeys(mini.non_tensor_batch["session"]))


def test_conversations_stay_whole_and_count_once():
    split = turn_rows().split
    minis = list(mini_batches(split, 5, 3, seed=2))
    assert [len(sessions(mini)) for mini in minis] == [5, 5, 2] * 3
    everything = list(dict.fromkeys(split.non_tensor_batch["session"]))
    passes = [sum((sessions(mini) for mini in minis[at : at + 3]), []) for at in (0, 3, 6)]  # noqa: RUF017
    assert passes[0] == everything and passes[1] != everything != passes[2] != passes[1]
    assert all(sorted(each) == sorted(everything) for each in passes)
    for mini in minis:
        for name in sessions(mini):
            inside = torch.from_numpy(mini.non_tensor_batch["session"] == name)
            of_all = torch.from_numpy(split.non_tensor_batch["session"] == name)
            assert torch.equal(
                mini.batch["old_log_probs"][inside].nan_to_num(),
                split.batch["old_log_probs"][of_all].nan_to_num(),
            ), "all turns, in order"


def test_denominators_are_those_of_the_conversations():
    rows = turn_rows()
    for size in (4, 12):
        pairs = zip(
            mini_batches(rows.append, size, 2, seed=1), mini_batches(rows.split, size, 2, seed=1), strict=True
        )
        for whole, parts in pairs:
            assert whole.meta_info == parts.meta_info, "the same conversations in each pass, shuffled or not"
            sizes = sessions_of(parts).sizes
            tokens = whole.batch["response_mask"].sum(-1).repeat_interleave(sizes)
            assert torch.equal(parts.batch["sequence_num_tokens"], tokens) and max(sizes) > 1


def outputs(micro: DataProto, leaf: torch.Tensor) -> ModelOutput:
    return ModelOutput(log_probs=leaf, entropy=leaf**2, values=leaf)


def losses(role: ActorRole | CriticRole, batch: DataProto) -> tuple[float, torch.Tensor]:
    """The loss of the batch as one mini-batch, a row at a time, and its gradient by the model's outputs."""
    (mini,) = mini_batches(batch, len(batch), 1, seed=0)
    return losses_by_row(role, mini, ranks=1)


def losses_by_row(role: ActorRole | CriticRole, mini: DataProto, ranks: int) -> tuple[float, torch.Tensor]:
    mini.meta_info["dp_size"] = ranks
    total, gradients = 0.0, []
    for micro in mini:
        leaf = (micro.batch["old_log_probs"] * 1.1).requires_grad_()
        loss, _ = role.loss(outputs(micro, leaf), micro)
        gradients.append(torch.autograd.grad(loss, leaf)[0])
        total += loss.item()
    return total, torch.cat(gradients)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("kind", ["vanilla", "dro", "critic"])
def test_the_loss_is_that_of_the_conversations_as_one_row_each(mode, kind):
    rows = as_engines_give()
    role: ActorRole | CriticRole
    if kind == "critic":
        role = CriticRole(NO_ENGINE, CriticConfig(loss_agg_mode=mode), loss_scale_factor=9)
    else:
        cfg = ActorConfig(loss_agg_mode=mode, entropy_coeff=0.3, use_kl_loss=True, kl_loss_coef=0.7)
        cfg.policy_loss.loss_mode = kind
        role = ActorRole(NO_ENGINE, cfg, loss_scale_factor=9)
    (whole, rows.append.batch["gradient"]), (parts, rows.split.batch["gradient"]) = (
        losses(role, batch) for batch in (rows.append, rows.split)
    )
    assert parts == pytest.approx(whole, rel=1e-12) and whole != 0
    rows.same("gradient")


def test_the_loss_does_not_depend_on_ranks():
    rows = as_engines_give()
    role = ActorRole(NO_ENGINE, ActorConfig(loss_agg_mode="seq-mean-token-mean"), loss_scale_factor=9)
    whole, _ = losses(role, rows.append)
    (mini,) = mini_batches(rows.split, len(rows.split), 1, seed=0)
    mask = mini.batch["response_mask"]
    attended = torch.cat([torch.ones(len(mini), 2, dtype=torch.long), mask], dim=1)
    padded = pad_rows({**mini.batch, "attention_mask": attended}, 5)
    assert len(mini) % 5, "some ranks have a row of padding"
    shards = shard_rows(padded["attention_mask"], 5, balance=True, hidden_size=8)
    shares = [
        losses_by_row(role, from_arrays(to_arrays(padded, shard), mini.meta_info), ranks=5)[0]
        for shard in shards
    ]
    assert sum(shares) / 5 == pytest.approx(whole, rel=1e-12)


def test_the_gap_to_the_rollout_engine_leaves_tool_tokens_out():
    rows = as_engines_give()
    found = []
    for batch in (rows.append, rows.split):
        gap = RolloutGap()
        tensors = batch.batch
        # The trainer's log-prob of a tool token would be 0 as well; even another must not count.
        trainer = tensors["old_log_probs"] - (1 - tensors["response_mask"])
        gap.add(trainer, tensors["rollout_log_probs"], tensors["response_mask"])
        found.append({name: metric.value for name, metric in gap.metrics().items()})
    assert len(found[0]) == 3 and found[0] == pytest.approx(found[1])
