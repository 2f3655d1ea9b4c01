"""The record of a conversation, and its rows with history=split, by hand and for random conversations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.agents.base import ToolRecord
from verl.agents.conversation import Conversation
from verl.data.assemble import assemble_rollouts, split_turns
from verl.data.proto import DataProto
from verl.errors import DataError
from verl.rollout.base import Response

PAD = 99
QUESTION = {"role": "user", "content": "How many?"}


def response(tokens: list[int], reason: str = "stop", version: int = 3) -> Response:
    return Response("u#0/0", 0, tokens, [-0.5 * token for token in tokens], reason, version)  # type: ignore[arg-type]


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "name": "add", "tool_call_id": "c", "content": text}


def new(uid: str = "u", sample: int = 0) -> Conversation:
    return Conversation(uid, sample, [1, 2], [QUESTION])


def test_a_conversation_by_hand() -> None:
    conversation = new()
    conversation.add_model_turn(response([5, 6], version=4), "call")
    conversation.turns[-1].records.append(ToolRecord("add", {"a": 1}, "3", seconds=0.25))
    conversation.turns[-1].records.append(ToolRecord("add", {}, "no b", failure="failed"))
    conversation.add_reward(0.5)
    conversation.add_messages([7, 8, 9], [tool("3"), tool("no b")])
    conversation.add_model_turn(response([10], "length", version=3), "Five?")
    conversation.add_messages([11], [{"role": "user", "content": "Sure?"}])
    conversation.add_model_turn(response([12, 13], version=5), "Five.")
    conversation.add_reward(1.0)
    conversation.add_reward(0.25)
    assert conversation.token_ids == [5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert conversation.response_mask == [1, 1, 0, 0, 0, 1, 0, 1, 1]
    assert conversation.log_probs == [-2.5, -3.0, 0, 0, 0, -5.0, 0, -6.0, -6.5]
    assert conversation.versions == [4, 4, 4, 4, 4, 3, 3, 5, 5]
    assert conversation.policy_version == 3 and conversation.finish_reason == "stop"
    spans = [(turn.role, turn.start, turn.end, turn.reward) for turn in conversation.turns]
    assert spans == [
        ("assistant", 0, 2, 0.5),
        ("tool", 2, 5, None),
        ("assistant", 5, 6, None),
        ("user", 6, 7, None),
        ("assistant", 7, 9, 1.25),
    ]
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "user", "assistant"]
    transcript = json.loads(json.dumps(conversation.transcript()))
    assert transcript[0] == {
        "role": "assistant",
        "content": "call",
        "tool_calls": [
            {"name": "add", "arguments": {"a": 1}},
            {"name": "add", "arguments": {}, "failure": "failed"},
        ],
        "reward": 0.5,
    }
    assert transcript[1:3] == [{"role": "tool", "content": "3"}, {"role": "tool", "content": "no b"}]
    assert transcript[5] == {"role": "assistant", "content": "Five.", "reward": 1.25}


def test_a_tool_that_answers_as_the_user_is_still_a_tool() -> None:
    conversation = new()
    conversation.add_model_turn(response([5]), "call")
    conversation.add_messages([6], [{"role": "user", "content": "<tool_response>", "tool_call_id": "c"}])
    assert conversation.turns[-1].role == "tool" == conversation.transcript()[-1]["role"]


def test_the_model_continues_a_message_the_prompt_began() -> None:
    prompt = [QUESTION, {"role": "assistant", "content": "It is "}]
    conversation = Conversation("u", 0, [1], prompt)
    conversation.add_model_turn(response([5]), "five.")
    conversation.add_messages([6], [QUESTION])
    conversation.add_model_turn(response([7]), "Yes.")
    assert [message["content"] for message in conversation.messages] == [
        "How many?",
        "It is five.",
        "How many?",
        "Yes.",
    ]
    assert prompt[1]["content"] == "It is "  # samples of one prompt share it


def test_what_makes_no_row_is_refused() -> None:
    with pytest.raises(ValueError, match="before the model's first turn"):
        new().add_reward(1.0)
    with pytest.raises(ValueError, match="1 tokens, 0 log-probs"):
        new().add_model_turn(Response("u#0/0", 0, [5], [], "stop"), "x")
    assert new().policy_version == 0


@dataclass
class Drawn:
    """A model turn to make a conversation from: its prompt, its tokens, its reward."""

    prompt: list[int]
    tokens: list[int]
    reward: float


def rollouts(script: list[list[Drawn]]) -> DataProto:
    """As the loop has them before it splits: one row per conversation, scores at the end of each turn."""
    conversations = []
    for number, turns in enumerate(script):
        conversation = new(f"u{number // 2}", number % 2)
        for version, turn in enumerate(turns):
            conversation.add_model_turn(response(turn.tokens, version=version), "x", prompt_ids=turn.prompt)
            conversation.add_messages([], [tool("3")])
        conversation.finish_reason = "turns"
        conversations.append(conversation)
    columns = {
        "uid": [conversation.uid for conversation in conversations],
        "prompt_ids": [conversation.prompt_ids for conversation in conversations],
        "conversation": conversations,
    }
    batch = assemble_rollouts(DataProto.from_dict(non_tensors=columns), conversations, PAD)
    scores = torch.zeros(batch.batch["responses"].shape)
    for row, (turns, conversation) in enumerate(zip(script, conversations, strict=True)):
        for turn, span in zip(turns, conversation.model_turns, strict=True):
            if turn.tokens:
                scores[row, span.end - 1] = turn.reward
    batch.batch["token_level_scores"] = scores
    batch.batch["baselines"] = torch.arange(len(script), dtype=torch.float32)
    return batch


ids = st.lists(st.integers(0, 98), min_size=1, max_size=4)
drawn_turns = st.builds(Drawn, ids, st.lists(st.integers(0, 98), max_size=4), st.floats(-1, 1, width=32))


@settings(max_examples=30)
@given(script=st.lists(st.lists(drawn_turns, max_size=3), min_size=1, max_size=4))
def test_split_rows_hold_every_turn_once(script: list[list[Drawn]]) -> None:
    whole = rollouts(script)
    split = split_turns(whole, PAD)
    split.check()
    # A conversation without a turn keeps a row, so that its group stays whole.
    expected = [
        (number, turn)
        for number, turns in enumerate(script)
        for turn in turns or [Drawn(whole.non_tensor_batch["prompt_ids"][number], [], 0.0)]
    ]
    assert len(split) == len(expected)
    for row, (number, turn) in enumerate(expected):
        seen = split.batch["attention_mask"][row].bool()
        assert split.batch["input_ids"][row][seen].tolist() == turn.prompt + turn.tokens
        mask = split.batch["response_mask"][row].bool()
        assert split.batch["responses"][row][mask].tolist() == turn.tokens
        assert split.batch["rollout_log_probs"][row][mask].tolist() == [-0.5 * token for token in turn.tokens]
        scores = [0.0] * (len(turn.tokens) - 1) + [turn.reward] * bool(turn.tokens)
        assert split.batch["token_level_scores"][row][mask].tolist() == scores
        assert split.batch["token_level_scores"][row][~mask].abs().sum() == 0
        assert split.batch["baselines"][row] == number
        assert split.non_tensor_batch["uid"][row] == f"u{number // 2}"
        assert split.non_tensor_batch["session"][row] == f"u{number // 2}#{number % 2}"
        assert split.non_tensor_batch["prompt_ids"][row] == turn.prompt


def test_split_rows_know_how_their_turn_ended_and_who_drew_it() -> None:
    split = split_turns(
        rollouts([[Drawn([1], [5], 0.0), Drawn([1, 2], [6, 7], 1.0)], [Drawn([3], [8], 0.0)]]), PAD
    )
    assert split.non_tensor_batch["finish_reason"].tolist() == ["stop", "turns", "turns"]
    assert split.non_tensor_batch["policy_version"].tolist() == [0, 1, 0]
    assert split.batch["responses"].tolist() == [[5, PAD], [6, 7], [8, PAD]]
    assert split.batch["prompts"].tolist() == [[PAD, 1], [1, 2], [PAD, 3]]


def test_tokens_the_trainer_masked_stay_masked() -> None:
    batch = rollouts([[Drawn([1], [5, 6], 0.0), Drawn([1], [7], 0.0)]])
    batch.batch["response_mask"] = torch.tensor([[1, 0, 1]])
    assert split_turns(batch, PAD).batch["response_mask"].tolist() == [[1, 0], [1, 0]]


def test_what_cannot_be_split_is_refused() -> None:
    batch = rollouts([[Drawn([1], [5], 0.0)]])
    batch.batch["odd"] = torch.zeros(1, 17)
    with pytest.raises(DataError, match=r"'odd' \[1, 17\]"):
        split_turns(batch, PAD)
    batch = rollouts([[Drawn([1], [5], 0.0)]])
    batch.non_tensor_batch["conversation"][0].turns[0].prompt_ids = None
    with pytest.raises(DataError, match="u0#0 has no prompt of its own"):
        split_turns(batch, PAD)
