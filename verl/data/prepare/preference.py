"""Preference pairs, from the forms they are shared in, to messages: `prompt`, `chosen`, `rejected`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl.data.messages import after_prompt
from verl.data.prepare.base import Recipe, Row, first_of
from verl.data.prepare.sft_chat import turns_of, with_system
from verl.data.tool_messages import Messages, stored_calls
from verl.errors import DataError

_SPEAKER = re.compile(r"\n\n(Human|Assistant): ?")


def dialogue(text: str) -> Messages | None:
    """Messages of a text with `Human:` and `Assistant:` paragraphs (HH-RLHF); None for any other text."""
    parts = _SPEAKER.split("\n\n" + text.lstrip())
    if len(parts) < 3 or parts[0].strip():
        return None
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[who], "content": text.strip()}
        for who, text in zip(parts[1::2], parts[2::2], strict=True)
    ]


def _turns(value: Any, role: str, what: str) -> Messages:
    """Messages of any form; a text that is none is one message of `role`."""
    text = value if isinstance(value, str) else ""
    turns = turns_of(value) or dialogue(text) or ([{"role": role, "content": text}] if text else None)
    if turns is None:
        raise DataError(f"'{what}' is neither text nor messages: {str(value)[:100]!r}")
    return turns


def convert(row: Mapping[str, Any], index: int, split: str) -> Row | None:
    given = row.get("prompt", row.get("question", row.get("instruction")))
    sides = [
        _turns(first_of(row, names, names[0]), "assistant", names[0])
        for names in (("chosen", "response_chosen"), ("rejected", "response_rejected"))
    ]
    if given:
        prompt = _turns(given, "user", "prompt")
        sides = [[m for part in after_prompt(prompt, side, "the row") for m in part] for side in sides]
    chosen, rejected = (with_system(row, side) for side in sides)
    if (
        chosen[-1]["role"] != "assistant"
        or rejected[-1]["role"] != "assistant"
        or chosen[:-1] != rejected[:-1]
    ):
        return None  # the answers do not follow the same conversation
    if chosen == rejected or len(chosen) < 2:
        return None
    return {
        "prompt": stored_calls(chosen[:-1]),
        "chosen": stored_calls(chosen[-1:]),
        "rejected": stored_calls(rejected[-1:]),
    }


RECIPE = Recipe(
    "preference",
    "pairs of a better and a worse answer (HH-RLHF, UltraFeedback, prompt/chosen/rejected)",
    convert,
)
