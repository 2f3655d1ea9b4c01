"""Numbers of a batch, against straight loops."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from tests.turn_rows import FLOATS, turn_rows
from verl.data.proto import DataProto
from verl.observe.batch_metrics import (
    ModelSize,
    batch_facts,
    batch_metrics,
    explained_variance,
    peak_flops,
    step_metrics,
)
from verl.observe.metrics import Timer


def ragged_batch(seed: int = 0) -> tuple[DataProto, list[dict[str, list[float]]]]:
    """A batch with NaN behind every mask, and the same as plain lists."""
    draw = random.Random(seed)
    rows = []
    for _ in range(5):
        prompt, length = draw.randint(1, 4), draw.randint(1, 6)
        rows.append(
            {"prompt": [1.0] * prompt}
            | {
                name: [draw.gauss(0, 1) for _ in range(length)]
                for name in ("token_level_scores", "token_level_rewards", "advantages", "returns", "values")
            }
        )
    P, T = max(len(r["prompt"]) for r in rows), max(len(r["values"]) for r in rows) + 1
    tensors = {name: torch.full((5, T), math.nan) for name in rows[0] if name != "prompt"}
    attention = torch.zeros(5, P + T, dtype=torch.long)
    for i, row in enumerate(rows):
        attention[i, P - len(row["prompt"]) : P + len(row["values"])] = 1
        for name, tensor in tensors.items():
            tensor[i, : len(row[name])] = torch.tensor(row[name])
    tensors |= {"attention_mask": attention, "response_mask": attention[:, P:]}
    reasons = np.array(["length", "stop", "stop", "length", "stop"], dtype=object)
    return DataProto.from_dict(tensors=tensors, non_tensors={"finish_reason": reasons}), rows


def test_every_metric_matches_a_plain_loop() -> None:
    batch, rows = ragged_batch()
    metrics = batch_metrics(batch, max_response_length=6, max_prompt_length=4)

    def expect(name: str, values: list[float]) -> None:
        assert metrics[f"{name}/mean"] == pytest.approx(sum(values) / len(values), rel=1e-5)
        assert metrics[f"{name}/max"] == pytest.approx(max(values), rel=1e-5)
        assert metrics[f"{name}/min"] == pytest.approx(min(values), rel=1e-5)

    expect("critic/score", [sum(r["token_level_scores"]) for r in rows])
    expect("reward", [sum(r["token_level_scores"]) for r in rows])
    expect("critic/rewards", [sum(r["token_level_rewards"]) for r in rows])
    for name in ("advantages", "returns", "values"):
        expect(f"critic/{name}", [v for r in rows for v in r[name]])
    expect("response_length", [len(r["values"]) for r in rows])
    expect("prompt_length", [len(r["prompt"]) for r in rows])
    assert metrics["response_length/clip_ratio"] == pytest.approx(0.4)
    assert metrics["prompt_length/clip_ratio"] == sum(len(r["prompt"]) >= 4 for r in rows) / 5


def test_what_was_not_computed_is_not_reported() -> None:
    batch, _ = ragged_batch()
    batch = batch.select(batch_keys=["attention_mask", "response_mask"])
    names = set(batch_metrics(batch))
    assert not any(name.startswith(("critic/", "reward/")) for name in names)
    assert "response_length/mean" in names


def test_a_sequence_left_out_of_the_loss_keeps_its_score() -> None:
    batch, rows = ragged_batch()
    batch.batch["response_mask"] = batch.batch["response_mask"].clone()
    batch.batch["response_mask"][0] = 0
    metrics = batch_metrics(batch)
    assert metrics["reward/mean"] == pytest.approx(
        sum(sum(r["token_level_scores"]) for r in rows) / 5, rel=1e-5
    )
    assert metrics["critic/advantages/mean"] == pytest.approx(
        np.mean([v for r in rows[1:] for v in r["advantages"]]), rel=1e-5
    )


def test_explained_variance_is_one_for_a_prophet_and_zero_for_a_constant() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0, 5.0])
    assert explained_variance(returns, returns) == pytest.approx(1.0)
    assert explained_variance(torch.full((4,), 3.0), returns) == pytest.approx(0.0, abs=1e-6)
    assert explained_variance(-returns, returns) < 0


def test_speed_is_tokens_over_seconds() -> None:
    batch, rows = ragged_batch()
    produced = sum(len(r["values"]) for r in rows)
    total = produced + sum(len(r["prompt"]) for r in rows)
    metrics = step_metrics(batch, {"gen": 2.0, "update_actor": 1.0, "step": 4.0}, devices=2)
    assert metrics["perf/total_num_tokens"] == total
    assert metrics["perf/throughput"] == pytest.approx(total / 8)
    assert metrics["perf/time_per_step"] == 4.0
    assert metrics["timing_per_token_ms/gen"] == pytest.approx(2000 / produced)
    assert metrics["timing_per_token_ms/update_actor"] == pytest.approx(1000 / total)
    assert "timing_per_token_ms/ref" not in metrics


def test_flops_count_matrix_products_and_causal_attention() -> None:
    size = ModelSize(parameters=100, layers=2, hidden=8)
    # per sequence: 6 N L for the weights; causal attention 2 products x 2 flops x L^2/2 x hidden, x3 with backward
    expected = sum(6 * 100 * n + 3 * 2 * (2 * 2 * n * n / 2 * 8) for n in (3, 5))
    assert size.training_flops(torch.tensor([3, 5])) == pytest.approx(expected)
    frozen = ModelSize(parameters=100, layers=2, hidden=8, frozen=90)  # no product for their gradient
    assert frozen.training_flops(torch.tensor([3, 5])) == pytest.approx(expected - 2 * 90 * 8)


def test_peaks_are_known_by_device_name() -> None:
    assert peak_flops("NVIDIA H200") == 990e12
    assert peak_flops("NVIDIA H20") == 148e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA GB200") == 2250e12
    assert peak_flops("cpu") is None


def test_spans_add_up_and_count_when_they_raise() -> None:
    ticks = iter([0.0, 1.0, 10.0, 12.5, 20.0, 20.25])
    timer = Timer(clock=lambda: next(ticks))
    with timer("gen"):
        pass
    with timer("gen"):
        pass
    with pytest.raises(ValueError), timer("adv"):
        raise ValueError
    assert timer.metrics() == {"timing_s/gen": 3.5, "timing_s/adv": 0.25}


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


def test_turns_of_a_conversation_in_rows_of_their_own_count_as_one_sequence() -> None:
    rows = turn_rows(prompts=5)
    found = []
    for batch in (rows.append, rows.split):
        tensors = batch.batch
        tensors |= {name: tensors[name].nan_to_num(0.0) for name in FLOATS}
        mask = tensors["response_mask"]
        tensors["attention_mask"] = torch.cat([torch.ones(len(mask), 2, dtype=torch.long), mask], dim=1)
        found.append(batch_metrics(batch, max_prompt_length=2))
        assert batch_facts(batch).sequences == 15
    assert found[0] == pytest.approx(found[1])
    assert found[0]["response_length/max"] > rows.split.batch["response_mask"].shape[1]
    assert batch_facts(rows.append) == batch_facts(rows.split)


def test_only_the_policys_own_tokens_can_be_repetitive() -> None:
    responses = torch.arange(80).repeat(4, 1)
    mask = torch.zeros_like(responses)
    mask[:, :40] = 1
    responses[0, :40] = 7  # the policy repeats itself, the tool does not
    responses[1, 40:] = 7  # the other way round
    mask[2:] = 0  # kept out of the loss: all counts
    responses[2] = 7
    batch = DataProto.from_dict(
        tensors={"responses": responses, "response_mask": mask, "attention_mask": torch.ones(4, 81)}
    )
    assert batch_facts(batch).repetitive_share == 0.5
    assert [batch_facts(row).repetitive_share for row in batch] == [1, 0, 1, 0]
