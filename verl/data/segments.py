"""A row of text as segments: what is context, and what the policy itself would write.

Segments are encoded one by one, as prompts and responses are in a rollout, so a model is trained on the ids it
would see.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.data.chat import ChatFormat
from verl.data.special_tokens import unmarked
from verl.data.tool_messages import Messages, Tools, calls_as_text, read_calls, with_short_ids
from verl.errors import DataError


@dataclass(frozen=True)
class Segment:
    """Consecutive text of a row."""

    text: str
    """With marks (`verl.data.special_tokens`)."""
    learned: bool
    takes_bos: bool = False
    """A string prompt: the tokenizer's beginning token goes in front."""
    ends: bool = False
    """The end-of-sequence token is appended."""


def pair_segments(
    chat: ChatFormat, prompt: Any, response: str, where: str, tools: Tools | None = None
) -> list[Segment]:
    """A prompt (string or messages) and the response to it; the end of the response is learned too."""
    raw, text = chat.prompt_text(prompt, where, tools)
    return [
        Segment(text, learned=False, takes_bos=chat.takes_bos(raw)),
        Segment(chat.answer(response, where), learned=True, ends=True),
    ]


def conversation_rows(
    messages: Messages, chat: ChatFormat, where: str, *, learn_from: int = 0, tools: Tools = ()
) -> list[list[Segment]]:
    """The conversation up to its last answer as rows, cut where the assistant starts and stops writing.

    The context of an answer is the template's text of the messages before it: what the model would see. While a context
    begins with the answer before it, both are in one row. Where the template writes earlier messages differently (Qwen
    3 drops their thinking once a question follows), a new row begins, and all before its answer is context. So every
    answer is learned once. Answers before message `learn_from` are context."""
    if chat.apply_chat_template == "never":
        raise DataError(
            f"{where} is a conversation, which needs the chat template: data.apply_chat_template=never leaves it out."
        )
    known = sum(message["role"] == "assistant" for message in messages[:learn_from])
    messages = _for_template(read_calls(messages, where), chat, where, tools)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"][known:]
    rows: list[list[Segment]] = []
    text = ""
    for number in answers:
        if number == 0:
            raise DataError(
                f"The conversation of {where} starts with the assistant: nothing prompts that answer. Put a message of "
                "the user or the system in front of it, or leave it out."
            )
        before, answer = _context_and_answer(
            messages[: number + 1], chat, f"{where}, message {number}", tools
        )
        if not rows or not before.startswith(text):
            rows.append([])
            text = ""
        rows[-1] += [Segment(before[len(text) :], learned=False), Segment(answer, learned=True)]
        text = before + answer
    if not rows:
        raise DataError(f"The conversation of {where} has no message of the assistant to learn from.")
    return rows


def conversation_segments(
    messages: Messages, chat: ChatFormat, where: str, learn_from: int = 0, tools: Tools = ()
) -> list[Segment]:
    """A conversation that must fit in one row."""
    rows = conversation_rows(messages, chat, where, learn_from=learn_from, tools=tools)
    if len(rows) > 1:
        raise DataError(
            f"The chat template renders the beginning of the conversation of {where} differently once later messages "
            "follow. Split it into one row per answer, or use a template that keeps earlier turns as they are "
            "(data.chat_template=FILE)."
        )
    return rows[0]


def _for_template(messages: Messages, chat: ChatFormat, where: str, tools: Tools) -> Messages:
    """Calls and answers of tools as the template takes them."""
    if all("tool_calls" not in message and message["role"] != "tool" for message in messages):
        return messages
    if not chat.writes_calls:
        return calls_as_text(messages, tool_role=chat.takes_tool_role)
    try:
        chat.render(messages, generate=False, where=where, tools=tools)
    except DataError:
        changed = with_short_ids(messages)
        try:
            chat.render(changed, generate=False, where=where, tools=tools)
        except DataError:
            return messages  # refused for the reason it was refused for
        return changed
    return messages


def _context_and_answer(messages: Messages, chat: ChatFormat, where: str, tools: Tools) -> tuple[str, str]:
    """What the model sees before the last message, and what it writes."""
    *earlier, last = messages
    before = chat.render(earlier, generate=True, where=where, tools=tools, prefill=False)
    whole = chat.render(messages, generate=False, where=where, tools=tools)
    answer = whole.removeprefix(before) if whole.startswith(before) else None
    if answer is None:
        # The template left something out of the context when the answer came: Mistral's writes the system message
        # only while the question is last. What is left begins where both differ.
        header = before.removeprefix(chat.render(earlier, generate=False, where=where, tools=tools))
        same = next(at for at in range(len(before)) if before[at : at + 1] != whole[at : at + 1])
        kept = next((at for at in range(same + 1, len(before)) if whole.startswith(before[at:], same)), None)
        if kept is not None and len(before) - kept > len(header):
            rest = whole[same + len(before) - kept :]
            answer = rest if _written(last, rest) else None
    if not answer:
        raise DataError(
            f"The chat template does not write the answer of {where} after the text that prompts it, which ends with "
            f"{unmarked(before)[-60:]!r}. Use another one (data.chat_template=FILE)."
        )
    if not _written(last, answer):
        kind = "the content of messages with tool_calls" if last.get("tool_calls") else "part of the answers"
        chat.warn_once(
            kind, f"the chat template leaves out {kind}, for example of {where}: it is not learned"
        )
    return before, answer


def _written(message: Mapping[str, Any], text: str) -> bool:
    """Whether the template's text has the content of a message; templates trim it, and rewrite the thinking."""
    content = message["content"]
    return not isinstance(content, str) or content.rpartition("</think>")[2].strip() in unmarked(text)


def encode_segments(
    chat: ChatFormat, rows: Sequence[Sequence[Segment]], where: Sequence[str]
) -> list[tuple[list[int], list[int]]]:
    """The ids of each row, and 1 for each id that is learned from."""
    atomic = chat.atomic_ids()
    encoded = iter(chat.encode([segment.text for segments in rows for segment in segments]))
    return [
        _join(chat, atomic, segments, [next(encoded) for _ in segments], name)
        for segments, name in zip(rows, where, strict=True)
    ]


def _join(
    chat: ChatFormat,
    atomic: Container[int],
    segments: Sequence[Segment],
    encoded: Sequence[list[int]],
    where: str,
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
        if segment.learned and not segment.ends:
            learned = _end_of_turn(chat, atomic, part)
        ids += part
        mask += [1] * learned + [0] * (len(part) - learned)
    if mask:
        mask[0] = 0
    if not any(mask):
        raise DataError(f"{where} has no token to learn from.")
    return ids, mask


def _end_of_turn(chat: ChatFormat, atomic: Container[int], ids: list[int]) -> int:
    """How many ids of a turn the model writes. What a template puts after its last special token (a newline, mostly) is
    never generated."""
    end = next((at for at in range(len(ids), 0, -1) if ids[at - 1] in atomic), 0)
    return end if end and not str(chat.tokenizer.decode(ids[end:])).strip() else len(ids)


def single_answer(value: Any) -> Any:
    """The text of a response given as a list with the assistant's one message; anything else as it is."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
        message = value[0]
        if message.get("role") == "assistant" and isinstance(message.get("content"), str):
            return message["content"]
    return value
