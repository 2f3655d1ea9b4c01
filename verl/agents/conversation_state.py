"""Finished conversations as plain data for a checkpoint, and back. Token lists are joined into few arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from verl.agents.base import ToolRecord
from verl.agents.conversation import Conversation, Turn
from verl.rollout.samples import pack_rows, unpack_rows

_TOKENS = {
    "prompt_ids": np.int64,
    "token_ids": np.int64,
    "response_mask": np.int64,
    "log_probs": np.float64,
    "versions": np.int64,
}
_FIELDS = ("uid", "sample", "messages", "finish_reason", "environment_reward", "error")


def pack_conversations(conversations: Sequence[Conversation]) -> dict[str, Any]:
    prompts = [turn.prompt_ids for each in conversations for turn in each.turns]
    return {
        "conversations": [
            {name: getattr(each, name) for name in _FIELDS} | {"turns": [_plain_turn(t) for t in each.turns]}
            for each in conversations
        ],
        "turn_prompts": pack_rows([ids for ids in prompts if ids is not None], np.int64),
        **{
            name: pack_rows([getattr(each, name) for each in conversations], dtype)
            for name, dtype in _TOKENS.items()
        },
    }


def unpack_conversations(packed: dict[str, Any]) -> list[Conversation]:
    found = []
    columns = {name: unpack_rows(packed[name]) for name in _TOKENS}
    prompts = iter(unpack_rows(packed["turn_prompts"]))
    for number, plain in enumerate(packed["conversations"]):
        conversation = Conversation(plain["uid"], plain["sample"], (), ())
        for name in _FIELDS:
            setattr(conversation, name, plain[name])
        for name, rows in columns.items():
            setattr(conversation, name, rows[number])
        for turn in plain["turns"]:
            records = [ToolRecord(**record) for record in turn["records"]]
            prompt = next(prompts) if turn["prompt_ids"] else None
            conversation.turns.append(Turn(**{**turn, "records": records, "prompt_ids": prompt}))
        found.append(conversation)
    return found


def _plain_turn(turn: Turn) -> dict[str, Any]:
    """Its prompt is in an array; here is only whether it has one."""
    return {**asdict(turn), "prompt_ids": turn.prompt_ids is not None}
