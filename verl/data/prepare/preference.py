"""Preference pairs, from the forms they are shared in, to messages: `prompt`, `chosen`, `rejected`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl.data.chat import Messages
from verl.data.prepare.base import Recipe, Row, first_of
from verl.data.prepare.sft_chat import turns_of
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


def _conversation(value: Any, prompt: Messages | None, what: str) -> Messages:
    turns = dialogue(value) if isinstance(value, str) else turns_of(value)
    if turns is None and isinstance(value, str):
        turns = [{"role": "assistant", "content": value}]
    if not turns:
        raise DataError(f"'{what}' is neither text nor messages: {str(value)[:100]!r}")
    if prompt and turns[: len(prompt)] != prompt:
        turns = [*prompt, *turns]
    return turns


def convert(row: Mapping[str, Any], index: int, split: str) -> Row | None:
    given = row.get("prompt", row.get("question", row.get("instruction")))
    prompt = [{"role": "user", "content": given}] if isinstance(given, str) else turns_of(given)
    if isinstance(given, str) and dialogue(given):
        prompt = dialogue(given)
    chosen, rejected = (
        _conversation(first_of(row, names, names[0]), prompt, names[0])
        for names in (("chosen", "response_chosen"), ("rejected", "response_rejected"))
    )
    if (
        chosen[-1]["role"] != "assistant"
        or rejected[-1]["role"] != "assistant"
        or chosen[:-1] != rejected[:-1]
    ):
        return None  # the answers do not follow the same conversation
    if chosen == rejected or len(chosen) < 2:
        return None
    return {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}


RECIPE = Recipe(
    "preference",
    "pairs of a better and a worse answer (HH-RLHF, UltraFeedback, prompt/chosen/rejected)",
    convert,
)
