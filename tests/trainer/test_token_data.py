"""`rollouts/{step}.parquet` of real runs: the numbers of the update in the order of the samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_run import untimed
from verl.data.proto import DataProto
from verl.engines.microbatch_runner import MicroBatchRunner
from verl.observe.token_table import TokenFile, TokenRow
from verl.workers.roles import joined_outputs
from verl.workers.shard_batch import TOKEN_ROW

SEVERAL = ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_epochs=2"]


def samples(folder: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rollouts/{step}.jsonl").read_text().splitlines()]


def assert_is_row(row: TokenRow, batch: DataProto, at: int) -> None:
    """What the batch itself has of a response."""
    tensors = batch.batch
    length = int(tensors["attention_mask"][at, -tensors["responses"].shape[1] :].sum())
    assert len(row.texts) == length
    assert row.mask is not None and row.mask.tolist() == tensors["response_mask"][at, :length].tolist()
    assert row.age is not None and not row.age.any()
    advantage = np.broadcast_to(row.advantage, length)  # type: ignore[arg-type]
    np.testing.assert_allclose(advantage, tensors["advantages"][at, :length])


def test_numbers_are_those_of_the_first_pass_over_each_row(watch, tiny_tokenizer):
    seen = watch(
        *SEVERAL,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.actor.skip_zero_advantage=False",
        "trainer.total_training_steps=1",
    )
    batch, rows = seen.batches[1], samples(seen.folder, 1)
    assert [len(mini.mini) for mini in seen.updates] == [16] * 4
    file = TokenFile(seen.folder / "rollouts/1.parquet")
    assert len(file) == len(rows) == len(batch) == 32
    moved = []
    for at, (row, sample) in enumerate(zip(file.rows(), rows, strict=True)):
        assert_is_row(row, batch, at)
        words = b"".join(row.texts).decode().split()
        assert [word for word in words if word not in tiny_tokenizer.all_special_tokens] == sample[
            "response"
        ].split()
        length = len(row.texts)
        drawn = batch.batch["rollout_log_probs"][at, :length].numpy()
        assert row.log_prob is not None and row.ratio is not None and row.entropy is not None
        assert (row.entropy > 0).all()
        np.testing.assert_allclose(np.log(row.ratio), row.log_prob - drawn, atol=0.1)
        if at < 16:  # the first mini-batch: no step was taken yet
            np.testing.assert_allclose(row.log_prob, drawn, atol=0.05)
        else:
            moved.append(np.abs(row.log_prob - drawn).max())
        if sample["advantage"]:
            own = batch.batch["response_mask"][at].bool()
            assert sample["advantage"] == pytest.approx(float(batch.batch["advantages"][at][own].mean()))
    assert max(moved) > 0.1, "the second mini-batch was trained by the policy the first one changed"


def test_a_run_has_the_same_numbers_with_and_without(watch):
    mine, other = (
        watch(*SEVERAL, f"trainer.token_data={on}", folder=f"tokens-{on}") for on in ("true", "false")
    )
    assert untimed(mine.rows) == untimed(other.rows)
    assert samples(mine.folder, 2) == samples(other.folder, 2)
    assert sorted(file.name for file in (other.folder / "rollouts").iterdir()) == ["1.jsonl", "2.jsonl"]
    for left, right in zip(mine.updates, other.updates, strict=True):
        assert left.metrics == right.metrics


def test_a_micro_batch_that_did_not_fit_is_there_once(watch, monkeypatch):
    train_rows, failed = MicroBatchRunner._train_rows, []

    def too_small(self: Any, *arguments: Any) -> Any:
        found = train_rows(self, *arguments)
        if len(arguments[-1]) > 5:
            failed.append(len(arguments[-1]))
            raise torch.OutOfMemoryError("injected: out of memory")
        return found

    plain = watch("trainer.total_training_steps=1", folder="plain")
    monkeypatch.setattr(MicroBatchRunner, "_train_rows", too_small)
    seen = watch("trainer.total_training_steps=1", folder="small")
    assert failed
    files = [TokenFile(run.folder / "rollouts/1.parquet") for run in (plain, seen)]
    for one, two in zip(files[0].rows(), files[1].rows(), strict=True):
        np.testing.assert_allclose(one.log_prob, two.log_prob, atol=0.05)
        np.testing.assert_allclose(one.entropy, two.entropy, atol=0.05)


def test_steps_that_train_only_the_critic_have_what_the_rollout_gave(watch):
    seen = watch("algorithm.adv_estimator=gae", "trainer.critic_warmup=1", "trainer.total_training_steps=1")
    row = next(TokenFile(seen.folder / "rollouts/1.parquet").rows())
    drawn = seen.batches[1].batch["rollout_log_probs"][0, : len(row.texts)].numpy()
    assert row.entropy is None
    np.testing.assert_allclose(row.log_prob, drawn, atol=0.05)


def test_what_cannot_be_written_does_not_stop_the_run(watch, monkeypatch, caplog):
    monkeypatch.setattr("verl.observe.token_table.COLUMNS", None)
    seen = watch()
    assert "samples could not be written: AttributeError" in caplog.text
    assert len(seen.rows) >= 2 and len(samples(seen.folder, 2)) == 32


def test_outputs_of_ranks_are_joined_in_the_order_of_the_batch():
    one = {TOKEN_ROW: torch.tensor([3, 0, 3]), "log_probs": torch.tensor([[1.0], [2.0], [3.0]])}
    two = {TOKEN_ROW: torch.tensor([1, -1]), "log_probs": torch.tensor([[4.0], [5.0]])}
    found = joined_outputs([one, {}, two], 4)
    assert found is not None
    torch.testing.assert_close(
        found["log_probs"], torch.tensor([[2.0], [4.0], [torch.nan], [3.0]]), equal_nan=True
    )
    assert joined_outputs([{}], 4) is None


def test_rows_that_the_update_left_out_have_the_engines_numbers(watch, reward_file):
    """Only the first of every four prompts has different rewards."""
    body = "return float(words[:1] == ['1']) if number % 4 == 0 else 1.0"
    seen = watch(reward_file(body), "data.train_batch_size=16", "trainer.total_training_steps=1")
    batch = seen.batches[1].batch
    left_out = batch["row_weight"] == 0
    assert seen.row(1)["training/rows_skipped"] == int(left_out.sum()) > 16
    for at, row in enumerate(TokenFile(seen.folder / "rollouts/1.parquet").rows()):
        assert row.computed is not None and row.log_prob is not None
        assert row.entropy is not None and row.ratio is not None
        drawn = batch["rollout_log_probs"][at, : len(row.texts)].numpy()
        np.testing.assert_allclose(row.log_prob, drawn, atol=0.05)
        assert row.computed.tolist() == [int(not left_out[at])] * len(drawn)
        assert np.isnan(row.entropy).all() == np.isnan(row.ratio).all() == bool(left_out[at])
