"""The data's own answers: as ids, as rows of a batch, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.config.schema import DataConfig
from verl.data.assemble import add_answers, assemble_rollouts, sampled_rows
from verl.data.files import Rows
from verl.data.proto import DataProto, object_column
from verl.data.rl_dataset import RLDataset
from verl.errors import DataError
from verl.reward.base import RewardResult
from verl.rollout.base import Response
from verl.trainer.experience import attach_scores


def dataset(tokenizer, *answers, **settings):
    rows = [{"prompt": "hi", "response": answer} for answer in answers]
    return RLDataset(DataConfig(**settings), Rows.from_list(rows), tokenizer, answers=True)


def test_an_answer_ends_as_the_policy_ends_it(tokenizer):
    eos = tokenizer.eos_token_id
    message = [{"role": "assistant", "content": "a b"}]
    text, chat = dataset(tokenizer, "a b", message)._items([0, 1])
    expected = tokenizer("a b", add_special_tokens=False)["input_ids"]
    assert text["answer_ids"] == [*expected, eos] == chat["answer_ids"]
    plain = RLDataset(DataConfig(), Rows.from_list([{"prompt": "hi"}]), tokenizer)
    assert "answer_ids" not in plain[0]


def test_a_missing_column_is_named_with_those_that_exist(tokenizer):
    rows = Rows.from_list([{"prompt": "hi", "solution": "3"}])
    with pytest.raises(
        DataError, match=r"no column 'response' \(data.response_key\). It has: prompt, solution.*=solution"
    ):
        RLDataset(DataConfig(), rows, tokenizer, answers=True)


def test_long_answers_are_refused_before_training(tokenizer):
    length = len(tokenizer("a b c d", add_special_tokens=False)["input_ids"]) + 1
    seen, advice = (
        f"1 of 2 answers .* longer than .*=2 .*has {length}",
        f"Set data.max_response_length={length}",
    )
    with pytest.raises(DataError, match=rf"{seen}\. {advice}"):
        dataset(tokenizer, "a", "a b c d", max_response_length=2)


@pytest.mark.parametrize("answer", [None, "", 3, [{"role": "user", "content": "a"}]])
def test_what_is_no_text_is_refused_with_its_row(tokenizer, answer):
    with pytest.raises(DataError, match=r"'response' .*of row 1 "):
        dataset(tokenizer, "a", answer)


def rollouts(scores=(1.0, 2.0, 3.0, 4.0)):
    prompts = DataProto.from_dict(
        non_tensors={
            "uid": list("aabb"),
            "prompt_ids": object_column([[5], [5], [6, 7], [6, 7]]),
            "answer_ids": object_column([[1, 2, 3], [1, 2, 3], [4], [4]]),
        }
    )
    responses = [Response("", 0, [9] * n, [-0.5] * n, "length", policy_version=7) for n in (1, 2, 2, 1)]
    batch = assemble_rollouts(prompts, responses, pad_token_id=0)
    return attach_scores(batch, [RewardResult(score) for score in scores])


def test_an_answer_is_one_more_row_of_its_prompt():
    batch = add_answers(rollouts(), 2, pad_token_id=0)
    assert batch.batch["from_data"].tolist() == [False, False, True] * 2
    assert list(batch.non_tensor_batch["uid"]) == list("aaabbb")
    assert batch.batch["responses"][[2, 5]].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch.batch["input_ids"][5].tolist() == [6, 7, 4, 0, 0]
    assert batch.batch["attention_mask"][[2, 5]].tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.batch["response_mask"][[2, 5]].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert not batch.batch["token_level_scores"][[2, 5]].any()
    assert batch.batch["token_versions"][2].tolist() == [7, 7, 7]
    assert list(batch.non_tensor_batch["finish_reason"]) == ["length", "length", "stop"] * 2
    again = sampled_rows(batch)
    assert len(again) == 4 and not again.batch["from_data"].any()
    for name, tensor in rollouts().batch.items():
        assert torch.equal(again.batch[name][:, : tensor.shape[1]], tensor), name


def test_an_answer_is_in_the_group_of_responses_with_a_score():
    batch = add_answers(rollouts((None, 2.0, None, None)), 2, pad_token_id=0)
    uids = list(batch.non_tensor_batch["uid"])
    assert uids[1] == uids[2] == "a" and uids[0] != "a"
    assert np.unique(uids[3:5]).size == 2


def test_prompts_read_without_answers_are_refused():
    batch = rollouts()
    del batch.non_tensor_batch["answer_ids"]
    with pytest.raises(DataError, match="no 'answer_ids' column"):
        add_answers(batch, 2, pad_token_id=0)
