"""Runs of the loop on rows with tool tokens inside, and on conversations whose turns are rows of their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.tiny_run import untimed
from verl.data.assemble import assemble_rollouts
from verl.data.proto import DataProto
from verl.trainer.experience import SyncExperience


def split_in_two(batch: DataProto) -> DataProto:
    """Each response as two turns: the second row's prompt ends with the first one's response. Every token is predicted
    from the same tokens as before."""
    tensors, width = batch.batch, batch.batch["responses"].shape[1]
    owner, sessions, prompt_ids, parts, spans = [], [], [], [], []
    for row in range(len(batch)):
        prompt = tensors["prompts"][row][tensors["attention_mask"][row, :-width].bool()].tolist()
        length = int(tensors["attention_mask"][row, -width:].sum())
        for start, end in [(0, length // 2), (length // 2, length)]:
            if start == end:
                continue
            owner.append(row)
            sessions.append(f"conversation {row}")
            spans.append((start, end))
            prompt_ids.append(prompt + tensors["responses"][row, :start].tolist())
            parts.append(
                SimpleNamespace(
                    token_ids=tensors["responses"][row, start:end].tolist(),
                    log_probs=tensors["rollout_log_probs"][row, start:end].tolist(),
                    finish_reason=batch.non_tensor_batch["finish_reason"][row],
                    policy_version=batch.non_tensor_batch["policy_version"][row],
                )
            )
    columns = {name: column[owner] for name, column in batch.non_tensor_batch.items()}
    prompts = DataProto.from_dict(
        non_tensors={**columns, "prompt_ids": prompt_ids, "session": sessions}, meta_info=batch.meta_info
    )
    split = assemble_rollouts(prompts, parts, pad_token_id=0)
    scores = torch.zeros(split.batch["response_mask"].shape)
    for turn, (row, (start, end)) in enumerate(zip(owner, spans, strict=True)):
        scores[turn, : end - start] = tensors["token_level_scores"][row, start:end]
    split.batch["token_level_scores"] = scores
    return split


@pytest.mark.slow
def test_a_run_on_turns_as_rows_is_the_run_on_whole_conversations(watch, monkeypatch):
    keys = (
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.rollout_correction.rollout_is=sequence",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        "actor_rollout_ref.actor.optim.lr=1e-4",
    )
    whole = watch(*keys, folder="whole")
    collect = SyncExperience.collect

    def collect_split(self, step, timer):
        batch, metrics = collect(self, step, timer)
        return split_in_two(batch), metrics

    monkeypatch.setattr(SyncExperience, "collect", collect_split)
    parts = watch(*keys, folder="parts")
    assert len(parts.batches[1]) > len(whole.batches[1]) == 32
    assert len(parts.updates) == len(whole.updates) == 2 * (4 + 4)
    for found, wanted in zip(untimed(parts.rows), untimed(whole.rows), strict=True):
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)


def test_tool_tokens_are_no_gap_between_trainer_and_rollout(watch):
    """As if the second token of each longer response had come from a tool."""

    def change(_: object, batch: DataProto) -> None:
        inside = batch.batch["response_mask"][:, 2] == 1
        assert bool(inside.any())
        for name in ("response_mask", "rollout_log_probs"):
            batch.batch[name][inside, 1] = 0

    seen = watch(
        "algorithm.adv_estimator=turn_rloo",
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.total_training_steps=1",
        change=change,
    )
    tensors, metrics = seen.batches[1].batch, seen.row(1)
    mask = tensors["response_mask"].bool()
    assert metrics["training/rollout_probs_diff_max"] < 1e-4 and metrics["rollout_corr/k3_kl"] < 1e-6
    assert metrics["response_length/mean"] > float(mask.sum(-1).double().mean())
    for name in ("old_log_probs", "advantages", "rollout_is_weights"):
        assert not bool(tensors[name][~mask].any())
    assert seen.of("actor", 1)[0].mini.meta_info["batch_num_tokens"] == int(mask.sum())
