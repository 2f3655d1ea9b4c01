"""Rows of text as answers: each with the prompt that the model gives it to, encoded as a rollout would.

The ids before an answer are those of its prompt at inference, and the answer is encoded as what follows them. Answers
share a row of ids while the prompt of the next one begins with the row; else a new row begins, in which all before the
answer is context. So every answer is learned once, in the context in which it would be given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.config.schema import DataConfig
from verl.data.chat import ChatFormat
from verl.data.columns import require_column
from verl.data.files import Rows
from verl.data.messages import (
    Messages,
    Tools,
    after_prompt,
    as_tools,
    no_prompt,
    read_messages,
    shared_beginning,
)
from verl.data.special_tokens import unmarked
from verl.errors import DataError

Row = tuple[list[int], list[int]]
"""Ids, and 1 for each id that is learned from."""
_OPENED = "<think>"
_CLOSED = "</think>"


@dataclass(frozen=True)
class Answer:
    """What the model writes after a prompt, its end included; both with marks (`verl.data.special_tokens`)."""

    prompt: str
    text: str
    takes_bos: bool = False
    """The prompt is no template's: the tokenizer's beginning token goes in front."""


# -- reading rows


def read_exchange(
    chat: ChatFormat, prompt: Any, answer: Any, where: str, key: str = "response", *, templated: bool = False
) -> tuple[str | Messages, Messages]:
    """A prompt, a string where it is used as it is, and the messages that answer it. The answer may be a text,
    messages, or a whole conversation that repeats the prompt. `templated`: a string is a message of the user."""
    name = f"'{key}' of {where}"
    read = read_messages(answer, name)
    if read is None and not isinstance(answer, str):
        raise DataError(f"{name} must be a text or messages, got {type(answer).__name__}.")
    following = read or [{"role": "assistant", "content": answer}]
    before = chat.read_prompt(prompt, where)
    if before is None and not isinstance(prompt, str):
        raise no_prompt(prompt, where)
    if before is None and (templated or (read is not None and read[0]["role"] != "assistant")):
        before = [{"role": "user", "content": prompt}]
    if len(following) == 1 and following[0]["role"] == "assistant":
        in_template = before is not None and chat.apply_chat_template != "never"
        said = chat.without_end(following[0]["content"], templated=in_template)
        following = [{**following[0], "content": said}]
    if before is not None:
        return after_prompt(before, following, name)
    if len(following) > 1 or "tool_calls" in following[0]:
        raise DataError(
            f"{name} is several messages or calls, so the prompt must be messages too: a string is used as it is "
            "(data.apply_chat_template=always makes it a message of the user)."
        )
    return prompt, following


def read_pair(
    chat: ChatFormat, prompt: Any, answers: Mapping[str, Any], where: str, *, templated: bool = False
) -> tuple[str | Messages, list[Messages]]:
    """The prompt that two answers share, and the messages of each. `answers`: by the names of their columns. Without a
    prompt the answers are conversations, and what they share at their beginning is the prompt."""
    if prompt is None:
        chosen, rejected = (read_messages(answer, f"'{key}' of {where}") for key, answer in answers.items())
        if chosen is None or rejected is None:
            raise DataError(
                f"{where} has no prompt (data.prompt_key), and its answers are not conversations either."
            )
        prompt = shared_beginning(chosen, rejected, where)
    (before, chosen), (other, rejected) = (
        read_exchange(chat, prompt, answer, where, key, templated=templated)
        for key, answer in answers.items()
    )
    if before != other:
        raise DataError(f"The two answers of {where} follow different conversations.")
    return before, [chosen, rejected]


# -- texts


def exchange_answers(
    chat: ChatFormat, before: str | Messages, following: Messages, where: str, tools: Tools | None = None
) -> list[Answer]:
    """The answers of `read_exchange`."""
    if isinstance(before, str) or chat.apply_chat_template == "never":
        raw, text = chat.prompt_text(before, where, tools)
        if len(following) > 1 or "tool_calls" in following[0]:
            raise _never(where)
        said = _after_opened(text, following[0])
        return [Answer(text, chat.content(said, where), takes_bos=chat.takes_bos(raw))]
    if before and before[-1]["role"] == "assistant" and following[0]["role"] == "assistant":
        # The rest of a turn whose beginning is the end of the prompt.
        *earlier, last = chat.taken(before, tools)
        text = chat.render([*earlier, last], generate=True, where=where, tools=tools)
        whole = [*earlier, {**last, "content": last["content"] + following[0]["content"]}]
        return [Answer(text, _written(chat, text, whole, following[0], where, tools))]
    return conversation_answers([*before, *following], chat, where, learn_from=len(before), tools=tools)


def conversation_answers(
    messages: Messages, chat: ChatFormat, where: str, *, learn_from: int = 0, tools: Tools | None = ()
) -> list[Answer]:
    """The answers of a conversation from message `learn_from` on, without those of `weight` 0."""
    if chat.apply_chat_template == "never":
        raise _never(where)
    known = sum(message["role"] == "assistant" for message in messages[:learn_from])
    messages = chat.taken(messages, tools)
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"][known:]
    # Whether an answer is learned from, by the field that files of OpenAI have.
    weights = {number: messages[number].get("weight", 1) for number in numbers}
    for number, weight in weights.items():
        if weight not in (0, 1):
            raise DataError(
                f"'weight' of message {number} of {where} must be 0 (not learned from) or 1, got {weight!r}."
            )
    numbers = [number for number in numbers if weights[number]]
    if not numbers:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise DataError(
            f"The conversation of {where} has no message of the assistant to learn from (roles: {roles})."
        )
    if numbers[0] == 0:
        raise DataError(
            f"The conversation of {where} starts with the assistant: nothing prompts that answer. Put a message of the "
            "user or the system in front of it, or leave it out."
        )
    chat.warn_of_no_end(where)
    answers = []
    for number in numbers:
        name = f"{where}, message {number}"
        before = chat.render(messages[:number], generate=True, where=name, tools=tools, prefill=False)
        answers.append(
            Answer(before, _written(chat, before, messages[: number + 1], messages[number], name, tools))
        )
    return answers


def _never(where: str) -> DataError:
    return DataError(
        f"{where} is a conversation, which needs the chat template: data.apply_chat_template=never leaves it out."
    )


def _written(
    chat: ChatFormat,
    before: str,
    messages: Messages,
    answer: Mapping[str, Any],
    where: str,
    tools: Tools | None,
) -> str:
    """What the model writes after `before`, where `messages` end with the answer: the template's text if it has all
    that the answer says, else the answer's own text and the end of a turn."""
    whole = chat.render(messages, generate=False, where=where, tools=tools)
    text = whole.removeprefix(before) if whole.startswith(before) else ""
    if not text and answer is messages[-1]:
        # The template left something out of the context when the answer came: Mistral's writes the system message only
        # while the question is last.
        asked = [{"role": "user", "content": "a"}]
        header = chat.render(asked, generate=True, where=where, tools=tools)
        whole = chat.render([*asked, answer], generate=False, where=where, tools=tools)
        text = whole.removeprefix(header) if whole.startswith(header) else ""
    if text and (_holds(text, answer["content"]) or answer.get("tool_calls")):
        for name in ("content", "reasoning_content"):
            if not _holds(text, str(answer.get(name) or "")):
                chat.warn_once(
                    name,
                    f"the chat template leaves out '{name}' of answers, for example of {where}: it is not learned",
                )
        return text
    end = chat.turn_end
    if end is None or answer.get("tool_calls"):
        raise DataError(
            f"The chat template does not write the answer of {where} after the text that prompts it, which ends with "
            f"{unmarked(before)[-60:]!r}. Use another one (data.chat_template=FILE)."
        )
    said = _after_opened(before, answer)
    if before.rstrip().endswith(_OPENED) and _CLOSED not in said:
        chat.warn_once(
            "thinking",
            f"the chat template begins each answer with {_OPENED}, and that of {where} has no {_CLOSED}: it is learned "
            "as it is",
        )
    return chat.content(said, where) + end


def _holds(text: str, said: str) -> bool:
    """Whether a template's text has what is said; templates change the white space around it and around thinking."""
    return "".join(said.split()) in "".join(unmarked(text).split())


def _after_opened(before: str, answer: Mapping[str, Any]) -> str:
    """The text of an answer. Where the prompt has begun the thinking already, it does not begin it again."""
    text = str(answer["content"])
    if not before.rstrip().endswith(_OPENED):
        return text
    if answer.get("reasoning_content") and _CLOSED not in text:
        return f"{answer['reasoning_content']}\n{_CLOSED}\n\n{text}"
    begun = text.lstrip()
    if not begun.startswith(_OPENED):
        return text
    rest = begun.removeprefix(_OPENED)
    return rest.removeprefix("\n") if before.endswith("\n") else rest


# -- rows of a dataset


def sft_answers(
    chat: ChatFormat, row: Mapping[str, Any], where: str, keys: Mapping[str, str], *, conversation: bool
) -> list[Answer]:
    """What is learned of a row: a conversation, or a prompt with its response. `keys`: the columns of messages, prompt,
    response and tools."""
    tools = as_tools(row.get(keys["tools"]), where)
    if not conversation:
        prompt, response = row.get(keys["prompt"]), row.get(keys["response"])
        before, following = read_exchange(chat, prompt, response, where, keys["response"])
        return exchange_answers(chat, before, following, where, tools)
    given = row.get(keys["messages"])
    messages = read_messages(given, f"'{keys['messages']}' of {where}")
    if messages is None:
        raise DataError(
            f"'{keys['messages']}' of {where} is not a list of messages with 'role' and 'content': "
            f"{str(given)[:200]!r}."
        )
    return conversation_answers(messages, chat, where, tools=tools)


def pair_rows(
    chat: ChatFormat, prompt: Any, answers: Mapping[str, Any], where: str, reward: bool
) -> list[Row]:
    """The ids of a prompt with each of two answers. `reward`: for a reward model, which reads whole conversations."""
    before, sides = read_pair(chat, prompt, answers, where, templated=reward)
    if reward and not isinstance(before, str):
        # A value is computed before each token that is learned from: one more token asks for that of the last one.
        end: Any = chat.tokenizer.pad_token_id
        conversations = [chat.of_reward_models.conversation_ids([*before, *side], where) for side in sides]
        return [([*ids, end], [0] * len(ids) + [int(bool(ids))]) for ids in conversations]
    return _one_row_each(chat, before, sides, where)


def labelled_row(chat: ChatFormat, prompt: Any, answer: Any, where: str, key: str) -> Row:
    """The ids of a prompt with one answer, that of column `key`."""
    before, side = read_exchange(chat, prompt, answer, where, key)
    return _one_row_each(chat, before, [side], where)[0]


def _one_row_each(
    chat: ChatFormat, before: str | Messages, sides: Sequence[Messages], where: str
) -> list[Row]:
    """The ids of a prompt with each of its answers."""
    encoded = encode_answers(
        chat, [exchange_answers(chat, before, side, where) for side in sides], [where] * len(sides)
    )
    if any(len(rows) > 1 for rows in encoded):
        raise DataError(
            f"The chat template renders the beginning of the conversation of {where} differently once later messages "
            "follow. Split it into one row per answer, or use a template that keeps earlier turns as they are "
            "(data.chat_template=FILE)."
        )
    return [rows[0] for rows in encoded]


def step_row(
    chat: ChatFormat, prompt: Any, steps: Sequence[str], separator: str, where: str
) -> tuple[list[int], list[int]]:
    """The ids of a prompt and of an answer's steps, each with the separator behind it; and how many each part has."""
    before = chat.encode_prompts([prompt], [where])[0][2]
    texts = [chat.content(f"{step}{separator}", where) for step in steps]
    parts = [before, *chat.encode_following(texts)]
    return [token for part in parts for token in part], [len(part) for part in parts]


# -- ids


def encode_answers(
    chat: ChatFormat, conversations: Sequence[Sequence[Answer]], where: Sequence[str]
) -> list[list[Row]]:
    """The rows of each conversation."""
    answers = [answer for conversation in conversations for answer in conversation]
    prompts = iter(
        chat.prompt_ids([answer.prompt for answer in answers], [answer.takes_bos for answer in answers])
    )
    texts = iter(
        chat.encode_following([answer.text for answer in answers], [answer.prompt for answer in answers])
    )
    return [
        _rows(chat, [(next(prompts), next(texts)) for _ in conversation], name)
        for conversation, name in zip(conversations, where, strict=True)
    ]


def _rows(chat: ChatFormat, answers: Sequence[tuple[list[int], list[int]]], where: str) -> list[Row]:
    rows: list[Row] = []
    for prompt, text in answers:
        if not rows or prompt[: len(rows[-1][0])] != rows[-1][0]:
            rows.append(([], []))
        ids, mask = rows[-1]
        # What a template puts after its last special token (a newline, mostly) is never generated.
        end = next((at for at in range(len(text), 0, -1) if text[at - 1] in chat.atomic_ids), 0)
        learned = text[:end] if end and not str(chat.tokenizer.decode(text[end:])).strip() else text
        mask += [0] * (len(prompt) - len(ids)) + [1] * len(learned)
        ids[:] = prompt + learned
    eos: Any = chat.tokenizer.eos_token_id
    for ids, mask in rows:
        if eos is not None and (not ids or ids[-1] not in chat.atomic_ids):
            ids.append(eos)
            mask.append(1)
        if mask:
            mask[0] = 0
        if not any(mask):
            raise DataError(f"{where} has no token to learn from.")
    return rows


def answer_ids(
    chat: ChatFormat, prompts: Sequence[Any], answers: Sequence[Any], where: Sequence[str]
) -> list[list[int]]:
    """The ids that the model would write to give these answers to these prompts."""
    read = [
        exchange_answers(chat, *read_exchange(chat, *row), row[2])
        for row in zip(prompts, answers, where, strict=True)
    ]
    for several, name in zip(read, where, strict=True):
        if len(several) > 1:
            raise DataError(
                f"The response of {name} has {len(several)} answers of the assistant; it must be one."
            )
    rows = encode_answers(chat, read, where)
    return [[token for token, learned in zip(*of_row[-1], strict=True) if learned] for of_row in rows]


# -- the data's own answers to the prompts of reinforcement learning, as the policy would write them (SPIN)


class AnswerColumn:
    """The column `data.response_key`, encoded: each answer with the token that ends it."""

    def __init__(self, config: DataConfig, rows: Rows, chat: ChatFormat, files_key: str) -> None:
        self._config, self._rows, self._chat, self._files_key = config, rows, chat, files_key
        require_column(rows, config.response_key, "data.response_key", "response", files_key)

    def ids(self, numbers: Sequence[int]) -> list[list[int]]:
        """Of these rows."""
        rows = [self._rows[number] for number in numbers]
        prompts, answers = (
            [row.get(key) for row in rows] for key in (self._config.prompt_key, self._config.response_key)
        )
        for number, answer in zip(numbers, answers, strict=True):
            if answer is None or answer == "":
                raise DataError(
                    f"{self._files_key}: '{self._config.response_key}' (data.response_key) of "
                    f"{self._rows.origin(number)} must be a text, got {str(answer)[:80]!r}."
                )
        try:
            return answer_ids(self._chat, prompts, answers, [self._rows.origin(number) for number in numbers])
        except DataError as error:
            raise DataError(f"{self._files_key}: {error}") from error

    def check(self, numbers: Sequence[int]) -> None:
        """Refuse answers of these rows that are longer than a response may be."""
        limit = self._config.max_response_length
        lengths = [
            len(ids)
            for start in range(0, len(numbers), 1024)
            for ids in self.ids(numbers[start : start + 1024])
        ]
        long, longest = sum(length > limit for length in lengths), max(lengths, default=0)
        if long:
            worst = self._rows.origin(numbers[lengths.index(longest)])
            raise DataError(
                f"{self._files_key}: {long} of {len(lengths)} answers (data.response_key={self._config.response_key}) "
                f"are longer than data.max_response_length={limit} tokens; the longest, {worst}, has {longest}. Set "
                f"data.max_response_length={longest}, or leave those rows out."
            )
