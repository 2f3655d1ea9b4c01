"""Assembled rollouts against the rows they were made from."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data.assemble import assemble_rollouts, concat_rollouts, response_lengths
from verl.data.proto import DataProto
from verl.errors import DataError
from verl.rollout.base import Response

PAD = 99


def prompts(rows: list[list[int]]) -> DataProto:
    return DataProto.from_dict(non_tensors={"prompt_ids": rows, "uid": [str(i) for i in range(len(rows))]})


def response(tokens: list[int], reason: str = "stop", version: int = 3) -> Response:
    return Response("r", 0, tokens, [-0.5 * (i + 1) for i in range(len(tokens))], reason, version)  # type: ignore[arg-type]


@dataclass
class TurnsResponse:
    token_ids: list[int]
    response_mask: list[int]
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str = "stop"
    policy_version: int = 0


def test_one_batch_by_hand() -> None:
    batch = assemble_rollouts(prompts([[1, 2, 3], [4]]), [response([5]), response([6, 7], "length", 4)], PAD)
    assert batch.batch["prompts"].tolist() == [[1, 2, 3], [PAD, PAD, 4]]
    assert batch.batch["responses"].tolist() == [[5, PAD], [6, 7]]
    assert batch.batch["input_ids"].tolist() == [[1, 2, 3, 5, PAD], [PAD, PAD, 4, 6, 7]]
    assert batch.batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert batch.batch["response_mask"].tolist() == [[1, 0], [1, 1]]
    assert batch.batch["rollout_log_probs"].tolist() == [[-0.5, 0.0], [-0.5, -1.0]]
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["stop", "length"]
    assert batch.non_tensor_batch["policy_version"].tolist() == [3, 4]
    assert batch.non_tensor_batch["uid"].tolist() == ["0", "1"]


tokens = st.lists(st.integers(0, 98), max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(0, 98), min_size=1, max_size=6), tokens), min_size=1, max_size=5
    )
)
def test_rows_can_be_read_back(rows: list[tuple[list[int], list[int]]]) -> None:
    batch = assemble_rollouts(prompts([p for p, _ in rows]), [response(r) for _, r in rows], PAD)
    assert batch.batch["prompts"].shape[1] == max(len(p) for p, _ in rows)
    assert batch.batch["responses"].shape[1] == max(1, *(len(r) for _, r in rows), 1)
    for i, (prompt, answer) in enumerate(rows):
        seen = batch.batch["attention_mask"][i].bool()
        assert batch.batch["input_ids"][i][seen].tolist() == prompt + answer
        assert batch.batch["responses"][i][batch.batch["response_mask"][i].bool()].tolist() == answer
    assert response_lengths(batch).tolist() == [len(r) for _, r in rows]


def test_empty_responses_are_rows_of_padding() -> None:
    batch = assemble_rollouts(prompts([[1], [2]]), [response([]), response([])], PAD)
    assert batch.batch["responses"].tolist() == [[PAD], [PAD]]
    assert batch.batch["response_mask"].sum() == 0 and batch.batch["attention_mask"].tolist() == [
        [1, 0],
        [1, 0],
    ]
    assert batch.batch["rollout_log_probs"].tolist() == [[0.0], [0.0]]


def test_tool_output_is_seen_but_not_learned_from() -> None:
    turns = TurnsResponse([5, 6, 7, 8], [1, 0, 0, 1], [-1.0, 0.0, 0.0, -2.0])
    batch = assemble_rollouts(prompts([[1]]), [turns], PAD)
    assert batch.batch["response_mask"].tolist() == [[1, 0, 0, 1]]
    assert batch.batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1]]


def test_log_probs_are_all_there_or_left_out() -> None:
    without = assemble_rollouts(prompts([[1]]), [TurnsResponse([5], [1])], PAD)
    assert "rollout_log_probs" not in without.batch
    with pytest.raises(DataError, match="log-prob"):
        assemble_rollouts(prompts([[1], [2]]), [response([5]), TurnsResponse([5], [1])], PAD)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match="1 responses for 2 prompts"):
        assemble_rollouts(prompts([[1], [2]]), [response([1])], PAD)
    with pytest.raises(DataError, match="response_mask of 1"):
        assemble_rollouts(prompts([[1]]), [TurnsResponse([5, 6], [1])], PAD)


def test_joining_batches_of_different_widths_changes_no_row() -> None:
    left = assemble_rollouts(prompts([[1, 2, 3]]), [response([5])], PAD)
    right = assemble_rollouts(prompts([[4]]), [response([6, 7, 8])], PAD)
    for part, score in ((left, 1.0), (right, 2.0)):
        part.batch["token_level_scores"] = part.batch["response_mask"] * score
        part.batch["reward_baselines"] = torch.tensor([score])
    both = concat_rollouts([left, right], PAD)
    direct = assemble_rollouts(prompts([[1, 2, 3], [4]]), [response([5]), response([6, 7, 8])], PAD)
    for name, tensor in direct.batch.items():
        assert torch.equal(both.batch[name], tensor), name
    assert both.batch["token_level_scores"].tolist() == [[1.0, 0.0, 0.0], [2.0, 2.0, 2.0]]
    assert both.batch["reward_baselines"].tolist() == [1.0, 2.0]
    left.batch["odd"] = torch.zeros(1, 17)
    with pytest.raises(DataError, match="odd"):
        concat_rollouts([left, left], PAD)
