"""The critic is judged by the tokens the policy produced, and by no others."""

from __future__ import annotations

import pytest
import torch

from verl.data.proto import DataProto
from verl.observe.batch_health import batch_facts
from verl.observe.batch_metrics import batch_metrics


def test_explained_variance_is_that_of_the_policys_tokens():
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 0]])
    values, returns = (torch.randn(3, 4, generator=generator) for _ in range(2))
    noisy = {
        "values": torch.where(mask.bool(), values, 50.0),
        "returns": torch.where(mask.bool(), returns, -70.0),
    }
    batch = DataProto.from_dict(tensors={**noisy, "attention_mask": torch.ones(3, 6), "response_mask": mask})
    kept = [
        (float(v), float(r))
        for v, r, m in zip(values.flatten(), returns.flatten(), mask.flatten(), strict=True)
        if m
    ]

    def variance(numbers: list[float]) -> float:
        mean = sum(numbers) / len(numbers)
        return sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)

    expected = 1 - variance([r - v for v, r in kept]) / variance([r for _, r in kept])
    assert batch_metrics(batch)["critic/vf_explained_var"] == pytest.approx(expected, rel=1e-4)


def test_a_response_without_a_score_is_no_outlier():
    """Many rewards near a hundred, and one reward function that failed."""
    scores = torch.zeros(64, 2)
    scores[:, 1] = 100.0 + torch.arange(64) / 100
    scores[3] = 0
    errors = [None] * 64
    tensors = {
        "token_level_scores": scores,
        "attention_mask": torch.ones(64, 4, dtype=torch.long),
        "response_mask": torch.ones(64, 2, dtype=torch.long),
    }
    counted = DataProto.from_dict(tensors=tensors, non_tensors={"reward_error": errors})
    assert batch_facts(counted).outliers == 1
    errors[3] = "hung"
    failed = DataProto.from_dict(tensors=tensors, non_tensors={"reward_error": errors})
    assert batch_facts(failed).outliers == 0
    assert batch_metrics(failed)["reward/min"] == pytest.approx(100.0)
