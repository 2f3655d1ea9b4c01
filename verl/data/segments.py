"""A row of text as segments: what is context, and what the policy itself would write.

Segments are encoded one by one, as prompts and responses are in a rollout, so a model is trained on the ids it
would see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.data.chat import ChatFormat, Messages
from verl.errors import DataError


@dataclass(frozen=True)
class Segment:
    """Consecutive text of a row."""

    text: str
    learned: bool
    takes_bos: bool = False
    """A string prompt: the tokenizer's beginning token goes in front."""
    ends: bool = False
    """The end-of-sequence token is appended, unless it is there."""


def pair_segments(chat: ChatFormat, prompt: Any, response: str, where: str) -> list[Segment]:
    """A prompt (string or messages) and the response to it; the end of the response is learned too."""
    raw, text = chat.prompt_text(prompt, where)
    return [
        Segment(text, learned=False, takes_bos=isinstance(raw, str)),
        Segment(response, learned=True, ends=True),
    ]


def conversation_segments(
    messages: Messages, chat: ChatFormat, where: str, learn_from: int = 0
) -> list[Segment]:
    """The conversation's text up to its last answer, cut where the assistant starts and stops writing.

    Answers before message `learn_from` are context. The template is applied to every beginning of the
    conversation; a beginning must stay as it is when more messages follow, else the model would learn from a
    context it never sees."""
    rendered = chat.render(messages, generate=False, where=where)
    segments: list[Segment] = []
    done = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number < learn_from:
            continue
        if number == 0:
            raise DataError(
                f"The conversation of {where} starts with the assistant: nothing prompts that answer."
            )
        before = chat.render(messages[:number], generate=True, where=where)
        after = chat.render(messages[: number + 1], generate=False, where=where)
        if not (
            rendered.startswith(before) and rendered.startswith(after) and done <= len(before) < len(after)
        ):
            raise DataError(
                f"The chat template renders the beginning of the conversation of {where} differently once message "
                f"{number} or a later one follows. Split it into one row per answer, or use a template that keeps "
                "earlier turns as they are (data.chat_template=FILE)."
            )
        segments.append(Segment(rendered[done : len(before)], learned=False))
        segments.append(Segment(rendered[len(before) : len(after)], learned=True))
        done = len(after)
    if not segments:
        raise DataError(f"The conversation of {where} has no message of the assistant to learn from.")
    return segments


def encode_segments(
    chat: ChatFormat, rows: Sequence[Sequence[Segment]], where: Sequence[str]
) -> list[tuple[list[int], list[int]]]:
    """The ids of each row, and 1 for each id that is learned from."""
    encoded = iter(chat.encode([segment.text for segments in rows for segment in segments]))
    return [
        _join(chat, segments, [next(encoded) for _ in segments], name)
        for segments, name in zip(rows, where, strict=True)
    ]


def _join(
    chat: ChatFormat, segments: Sequence[Segment], encoded: Sequence[list[int]], where: str
) -> tuple[list[int], list[int]]:
    eos: Any = chat.tokenizer.eos_token_id
    ids: list[int] = []
    mask: list[int] = []
    for segment, part in zip(segments, encoded, strict=True):
        if segment.takes_bos:
            part = chat.with_bos(part)
        if segment.ends and eos is not None and part[-1:] != [eos]:
            part = [*part, eos]
        learned = len(part) if segment.learned else 0
        if segment.learned and not segment.ends and eos in part:
            # What a template writes after the end of a turn (a newline, mostly) is never generated.
            learned = len(part) - part[::-1].index(eos)
        ids += part
        mask += [1] * learned + [0] * (len(part) - learned)
    if mask:
        mask[0] = 0
    if not any(mask):
        raise DataError(f"{where} has no token to learn from.")
    return ids, mask


def single_answer(value: Any) -> Any:
    """The text of a response given as a list with the assistant's one message; anything else as it is."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
        message = value[0]
        if message.get("role") == "assistant" and isinstance(message.get("content"), str):
            return message["content"]
    return value
