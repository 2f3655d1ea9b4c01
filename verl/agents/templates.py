"""What a chat template writes between the turns of a model, found by rendering it with placeholders.

With history=append the token ids of a conversation decode to the template's rendering of its messages, up to whitespace
around a turn and its thinking, which stays as the model drew it. Other templates are refused at start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from verl.agents.base import Message, Schema
from verl.agents.formats import ToolFormat
from verl.data.chat import ChatFormat
from verl.data.messages import PROBE_TOOL, answer_text, join_answers, short_call_id
from verl.data.special_tokens import is_encodable
from verl.errors import ConfigError, DataError

_PLACEHOLDER = "PlaceholderOfTheTurn"
_CALL = '<tool_call>\n{"name": "lookup", "arguments": {"word": "a"}}\n</tool_call>'
_SPLIT = "actor_rollout_ref.rollout.multi_turn.history=split (one training row per turn)"
_TEMPLATE = "data.chat_template=FILE (a template that leaves earlier turns as they are)"
_CUT = "\n[... cut ...]\n"


class ChatTurns:
    """The turns of conversations in one chat template. `tools` and `users` say which messages answer the model."""

    def __init__(
        self,
        chat: ChatFormat,
        *,
        tools: bool,
        users: bool,
        history: str,
        stop_ids: Iterable[int] = (),
        tool_format: ToolFormat | None = None,
    ) -> None:
        """Refuses, with ConfigError, a template that rewrites what the model saw; history=split takes it.

        `stop_ids`: further tokens that end a turn, as the model's generation config names them. `tool_format`: how the
        model writes calls, to give them to the template apart from the text where it wants that."""
        self.chat = chat
        self._format = tool_format
        self.users = users
        """Whether users may answer the model."""
        self._name = f"The chat template of '{chat.tokenizer.name_or_path}'"
        never = chat.apply_chat_template == "never"
        if never or not chat.tokenizer.chat_template:
            why = "data.apply_chat_template=never leaves it out" if never else "the tokenizer has none"
            raise ConfigError(f"Conversations of several turns need a chat template, and {why}: {_TEMPLATE}.")
        self._schemas = [PROBE_TOOL] if tools else []
        self._append = history != "split"
        self._as_calls = False
        """Whether the template takes a tool's answer only after a message with `tool_calls`."""
        self._hashed_ids = False
        """Whether call ids must be nine letters or digits."""
        self._atomic = chat.atomic_ids
        ends, named = (
            tool_format.ends if tool_format is not None else (),
            chat.tokenizer.convert_ids_to_tokens,
        )
        self._declared = tuple(token for token in sorted(self._atomic) if ends and named(token) in ends)
        """The ends of turns that the format names."""
        self._end: int | None = None
        """Of a turn that the user answers."""
        self._checked: set[tuple[str, ...]] = set()
        try:
            self._end = self._find_end([_question(1)])
            self.tool_role = tools and self._find_tool_role()
            """Whether tools answer in a role of their own; else they do as the user."""
            self._conversations = list(self._probes(tools, users))
            probed = (answers for probe in self._conversations for answers in probe)
            found = self._declared or {self._find_end(answers) for answers in probed}
            self.end_token_ids = tuple(sorted(token for token in found if token is not None))
            """What the template ends a turn with, where that is a special token: generation has to stop there."""
            self.stop_ids = {*self.end_token_ids, chat.tokenizer.eos_token_id, *stop_ids}
            self._styles = self._find_styles()
            for style in self._styles:
                for conversation in self._conversations:
                    self._prove(style, [_question(0)], conversation, self._schemas)
        except DataError as error:
            raise ConfigError(f"{self._name} cannot be used for several turns: {error}") from error

    # -- what a conversation uses

    def check_prompt(
        self, messages: Sequence[Message], tools: Sequence[Schema], where: str = "a row"
    ) -> None:
        """Refuses, with ConfigError, a prompt that the template rewrites once the model has answered: some move the
        system message, for example. Prompts of the same roles are checked once."""
        roles = tuple(message["role"] for message in messages)
        if self._append and self._conversations and roles not in self._checked:
            self._prove(self._styles[0], messages, self._conversations[-1], tools, f" for {where}")
            self._checked.add(roles)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """The ids of a conversation up to the header of the model's next turn."""
        if self._format is not None and (self._as_calls or self._format.wraps_content):
            messages = [self.chat.with_arguments(message) for message in self._format.apart(messages)]
        return self.chat.encode([self._render(messages, tools=tools)])[0]

    def after(self, drawn: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """What follows a turn of the model: its end if it did not draw it, the messages, the next header."""
        ids = self.chat.encode_following([self._after_text(messages)])[0]
        end = next((at for at, token in enumerate(ids) if token in self.end_token_ids), len(ids))
        # Encoded with the end of the turn in front, as it is when the whole conversation is encoded.
        return ids[end + 1 :] if drawn and ids[end : end + 1] == [drawn[-1]] else ids

    def text(self, drawn: Sequence[int]) -> str:
        """A turn as the content of its message: without the token that ends it, with all other special tokens."""
        return self.chat.drawn_text(drawn[:-1] if drawn and drawn[-1] in self.stop_ids else drawn)

    def tool_message(self, name: str, text: str, call_id: str) -> Message:
        """The answer of a tool as a message of this template."""
        text = str(_encodable(text))
        if not self.tool_role:
            return {"role": "user", "content": answer_text(text), "tool_call_id": call_id}
        if self._hashed_ids:
            call_id = short_call_id(call_id)
        return {"role": "tool", "name": name, "tool_call_id": call_id, "content": text}

    def truncate(self, text: str, limit: int, side: str) -> str:
        """At most `limit` tokens of a text: its left part, its right part, or both ends without the middle (`side`);
        where it was cut there is a mark."""
        text = str(_encodable(text))
        most = min(len(text), limit * self.longest_token)
        if most == len(text) and self._count(text) <= limit:
            return text
        mark = _CUT if self._count(_CUT) < limit else ""

        def cut(kept: int) -> str:
            head = {"left": kept, "middle": kept // 2, "right": 0}[side]
            return text[:head] + mark + text[len(text) - (kept - head) :]

        fits = 0
        while fits < most:  # between: what is known to fit, and the most that could
            kept = (fits + most + 1) // 2
            if self._count(cut(kept)) <= limit:
                fits = kept
            else:
                most = kept - 1
        return cut(fits)

    @cached_property
    def longest_token(self) -> int:
        return max(map(len, self.chat.tokenizer.get_vocab()))

    def _count(self, text: str) -> int:
        return len(self.chat.encode([self.chat.content(text, "an answer of a tool")])[0])

    # -- what the template writes

    def _render(
        self, messages: Sequence[Message], generate: bool = True, tools: Sequence[Schema] | None = None
    ) -> str:
        tools = self._schemas if tools is None else tools
        where = "a conversation of several turns"
        written = _encodable(join_answers(messages))
        return self.chat.render(written, generate=generate, where=where, tools=tools, drawn=True)

    def _turn(self, content: str, answers: Sequence[Message], thought: str = "") -> Message:
        """A model turn with these answers; `content` is part of what the template writes for it, `thought` its
        thinking."""
        if not self._as_calls or all(answer["role"] != "tool" for answer in answers):
            return {"role": "assistant", "content": thought + content}
        calls = [
            {
                "id": answer["tool_call_id"],
                "type": "function",
                "function": {"name": answer["name"], "arguments": {"word": content}},
            }
            for answer in answers
            if answer["role"] == "tool"
        ]
        return self.chat.with_arguments({"role": "assistant", "content": thought, "tool_calls": calls})

    def _after_text(self, messages: Sequence[Message]) -> str:
        """From the end of a turn to the header of the next."""
        turn = self._turn(_PLACEHOLDER, messages)
        text = self._render([_question(0), turn, *messages])
        if _PLACEHOLDER not in text:
            raise DataError("it leaves out the turn of the model")
        after = text.split(_PLACEHOLDER, 1)[1]
        ends = self._declared or (() if self._end is None else (self._end,))
        if "tool_calls" in turn:  # the rest of the calls is the model's, too
            written = map(str, self.chat.tokenizer.convert_ids_to_tokens(list(ends)))
            after = after[min((at for end in written if (at := after.find(end)) >= 0), default=0) :]
        return after

    def _find_end(self, answers: Sequence[Message]) -> int | None:
        """The special token that the template ends a turn with when these messages follow."""
        after = self._after_text(answers)
        for token in self.chat.encode_following([after])[0][:2]:  # whitespace may come first
            written = str(self.chat.tokenizer.convert_ids_to_tokens(token))
            if token in self._atomic and after.lstrip().startswith(written):
                return token
        if not self._append:
            return None
        raise ConfigError(
            f"{self._name} ends the model's turn with {after[:20]!r}, not with a special token: the token that "
            f"the model ends it with would be missing from the conversation. Set {_SPLIT}, or {_TEMPLATE}."
        )

    def _find_tool_role(self) -> bool:
        both = (True, False) if self._declared else (False, True)  # calls end in another token than an answer
        for as_calls in both if self._append or self._format is not None else (False,):
            for call_id in ("call_1", "call00001"):
                self._as_calls, self._hashed_ids = as_calls, len(call_id) == 9
                answer = {"role": "tool", "name": "lookup", "tool_call_id": call_id, "content": ""}
                with suppress(DataError):
                    turn = self._turn("said", [answer])
                    if self.chat.writes_tool_role(turn, call_id, self._schemas):
                        return True
        self._as_calls = self._hashed_ids = False
        return False

    # -- the proof

    def _probes(self, tools: bool, users: bool) -> Iterator[list[list[Message]]]:
        """Conversations: what answers the model, turn by turn."""
        calls = ("call00001", "call00002")
        one, two = (
            [self.tool_message("lookup", f"found {call}", call) for call in calls[:n]] for n in (1, 2)
        )
        first, second = [_question(1)], [_question(2)]
        if tools:
            yield [one, two, one]
        if users:
            yield [first, second, first]
        if tools and users:
            yield [one, first, two, second, one]

    def _find_styles(self) -> tuple[str, ...]:
        """Beginnings of turns to try: without thinking, unless the header asks for it, and with."""
        question = [_question(0)]
        header = self._render(question).removeprefix(self._render(question, generate=False))
        return (
            ("{}\n</think>\n\n",)
            if header.rstrip().endswith("<think>")
            else ("", "<think>\n{}\n</think>\n\n")
        )

    def _prove(
        self,
        style: str,
        prompt: Sequence[Message],
        conversation: Sequence[Sequence[Message]],
        tools: Sequence[Schema],
        where: str = "",
    ) -> None:
        """Every prompt of the conversation must be the one before, the turn and what `after` gives."""
        messages = list(prompt)
        row = self._render(messages, tools=tools)
        for number, answers in enumerate(conversation):
            thought, content = style.format(f"Thought {number}."), f"Turn {number}."
            if any("tool_call_id" in answer for answer in answers):
                content += f"\n{_CALL}"
            turn = self._turn(content, answers, thought)
            if messages[-1]["role"] == "assistant":  # a prompt that ends inside the model's turn
                turn = {**turn, "content": messages.pop()["content"] + turn["content"]}
            messages += [turn, *answers]
            longer = self._render(messages, tools=tools)
            if self._append:
                drawn = None if "tool_calls" in turn else thought + content
                problem = self._difference(row, drawn, self._after_text(answers), longer, bool(style))
                if problem is not None:
                    raise ConfigError(
                        f"{self._name} {problem}{where}. The model would be trained on something else than it saw. "
                        f"Set {_SPLIT}, or {_TEMPLATE}."
                    )
            elif any(line not in longer for answer in answers for line in answer["content"].splitlines()):
                raise DataError(f"it leaves out the message {answers[-1]}")
            row = longer

    def _difference(self, row: str, drawn: str | None, after: str, longer: str, thinking: bool) -> str | None:
        """Why `longer` is not `row`, the turn (`drawn`, where the template takes it as text) and `after`."""
        pairs = enumerate(zip(row, longer, strict=False))
        same = next((at for at, (old, new) in pairs if old != new), min(len(row), len(longer)))
        if same < len(row):
            old, new = row[same : same + 60], longer[same : same + 60]
            if "</think>" in old and row.endswith(old):
                return (
                    f"puts {old!r} in front of an answer and leaves it out once the answer is history (Qwen 3 does, "
                    "with data.apply_chat_template_kwargs.enable_thinking=False)"
                )
            kind = "drops or rewrites the thinking of" if thinking else "rewrites"
            return f"{kind} earlier turns when further messages follow ({old!r} becomes {new!r})"
        rest = longer[same:]
        if not rest.endswith(after):
            return (
                f"writes {rest[-60:]!r} after a later turn, where it writes {after[-60:]!r} after the first"
            )
        written = rest.removesuffix(after)
        if drawn is not None and written.strip() != drawn:
            kind = "drops or rewrites the thinking of earlier turns" if thinking else "rewrites earlier turns"
            return f"{kind} when further messages follow ({drawn[:60]!r} becomes {written[:60]!r})"
        return None


def _question(number: int) -> Message:
    """One of several: templates compare messages to find the last one."""
    return {"role": "user", "content": f"Question {number}?"}


def _encodable(value: Any) -> Any:
    """Half of a surrogate pair, as JSON may hold one, is no character; no tokenizer takes it."""
    if isinstance(value, Mapping):
        return {_encodable(name): _encodable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(each) for each in value]
    if isinstance(value, str) and not is_encodable(value):
        return value.encode("utf-8", "replace").decode("utf-8")
    return value
