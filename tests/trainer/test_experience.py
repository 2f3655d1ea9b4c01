"""What becomes of scores, and of responses that got none."""

from __future__ import annotations

import torch

from verl.data.proto import DataProto
from verl.reward.base import RewardResult
from verl.trainer.experience import attach_baselines, attach_scores, reward_metrics


def rollouts() -> DataProto:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1]])
    return DataProto.from_dict(tensors={"response_mask": mask}, non_tensors={"uid": ["p", "p", "p"]})


def test_a_score_stands_on_the_last_policy_token():
    batch = attach_scores(rollouts(), [RewardResult(1.0), RewardResult(0.5), RewardResult(-2.0)])
    assert batch.batch["token_level_scores"].tolist() == [[0, 0, 1.0], [0, 0.5, 0], [0, 0, -2.0]]
    assert list(batch.non_tensor_batch["uid"]) == ["p", "p", "p"]


def test_a_response_without_a_score_is_masked_and_leaves_its_group():
    batch = attach_scores(
        rollouts(), [RewardResult(1.0), RewardResult(None, error="hung"), RewardResult(0.0)]
    )
    assert batch.batch["response_mask"].tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 1]]
    assert batch.batch["token_level_scores"][1].tolist() == [0, 0, 0]
    assert batch.non_tensor_batch["uid"][1] not in ("p",) and list(batch.non_tensor_batch["uid"][[0, 2]]) == [
        "p",
        "p",
    ]
    assert reward_metrics(batch)["reward/failed"] == 1


def test_responses_whose_greedy_baseline_has_no_score_leave_the_loss():
    def two(first: RewardResult, second: RewardResult) -> DataProto:
        mask = torch.tensor([[1, 1], [1, 0]])
        prompts = DataProto.from_dict(tensors={"response_mask": mask}, non_tensors={"uid": ["p", "q"]})
        return attach_scores(prompts, [first, second])

    batch = two(RewardResult(1.0), RewardResult(0.0)).repeat(2)
    attach_baselines(batch, two(RewardResult(0.5), RewardResult(None, error="hung")), 2)
    assert batch.batch["reward_baselines"].tolist()[:2] == [0.5, 0.5]
    assert batch.batch["response_mask"].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
