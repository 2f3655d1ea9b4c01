"""The histories of one agent, found from the requests it sends: a tree of the turns that the policy drew.

A request continues a turn if its messages are those the turn was drawn after, then the turn, then others. Equal in
meaning is enough: the ids that were drawn stay, and only what is new is encoded. Every turn is in one row only.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from verl.agents.base import Message, ToolCall
from verl.agents.conversation import Conversation
from verl.json_input import parse_json
from verl.rollout.base import Response

_THOUGHT = re.compile(r"\A.*?</think>", re.DOTALL)
_BRACKETED = re.compile(r"[\[{].*[\]}]", re.DOTALL)

Calls = tuple[tuple[str, str], ...]
"""The name of each call, and its arguments as JSON."""


@dataclass(frozen=True)
class Said:
    """The meaning of a message."""

    role: str
    text: str
    calls: Calls = ()
    raw: str = ""
    """All that was drawn, calls included."""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Said:
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = tuple((each["name"], _plain(each["arguments"])) for each in functions)
        return cls(message["role"], str(message.get("content") or "").strip(), calls)

    @classmethod
    def drawn(cls, content: str, calls: Sequence[ToolCall], raw: str) -> Said:
        named = tuple((call.name, _plain(call.arguments)) for call in calls)
        return cls("assistant", content.strip(), named, raw.strip())

    def means(self, given: Said) -> bool:
        """Whether a client may have made `given` of this: it may drop thoughts, and write calls as text."""
        if self.role != given.role:
            return False
        if (self.text, self.calls) == (given.text, given.calls):
            return True
        if not self.raw:
            return False
        texts = {self.text, _THOUGHT.sub("", self.text).strip()}
        if self.calls == given.calls:
            return given.text in texts
        if given.calls:
            return False
        return given.text == self.raw or any(
            given.text.startswith(text) and _calls_in(given.text[len(text) :]) == self.calls for text in texts
        )


def _plain(arguments: Any) -> str:
    return json.dumps(arguments, sort_keys=True, default=str)


def _calls_in(text: str) -> Calls:
    """Calls that a client wrote as JSON or as Python writes a list of them."""
    found = _BRACKETED.search(text)
    value: Any = None
    for read in (parse_json, ast.literal_eval):
        try:
            value = value or (read(found.group()) if found else None)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    calls = []
    for each in value if isinstance(value, list) else [value]:
        function = each.get("function", each) if isinstance(each, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return ()
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError):
                arguments = parse_json(arguments)
        calls.append((function["name"], _plain(arguments)))
    return tuple(calls)


@dataclass(eq=False)
class DrawnTurn:
    """What the policy drew for a request."""

    prompt_ids: list[int]
    parent: DrawnTurn | None
    history: list[Said]
    """The messages it was drawn after."""
    messages: list[Message]
    """Those after its parent, as they were rendered."""
    tools: str
    """Of its request."""
    main: bool
    """Whether the first request of its history has the row's own prompt."""
    note: str | None = None
    """Why it begins or leaves a history."""
    response: Response | None = None
    text: str = ""
    said: Said | None = None
    """None until the answer is there."""
    call_ids: dict[str, int] = field(default_factory=dict)
    """What the client knows its calls by."""
    dropped: str = ""
    """Why it is not trained: the client replaced it, or never read it."""

    @property
    def ids(self) -> list[int]:
        """Everything up to its end."""
        assert self.response is not None
        return [*self.prompt_ids, *self.response.token_ids]

    @property
    def path(self) -> list[DrawnTurn]:
        """From the first turn of its history."""
        turn: DrawnTurn | None = self
        turns = []
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def all_messages(self) -> list[Message]:
        return [
            message
            for turn in self.path
            for message in (*turn.messages, {"role": "assistant", "content": turn.text})
        ]


@dataclass
class HistoryPlace:
    """Where a request belongs."""

    parent: DrawnTurn | None
    history: list[Said]
    messages: list[Message]
    """Those that are new."""
    tools: str
    note: str | None = None
    replaced: list[DrawnTurn] = field(default_factory=list)
    """Turns that the client has written anew."""
    prompt_ids: list[int] = field(default_factory=list)


class Chains:
    """The turns of one agent, in the order in which they were asked for."""

    def __init__(self) -> None:
        self.turns: list[DrawnTurn] = []

    def place(self, messages: list[Message], tools: str) -> HistoryPlace:
        """Of a request with messages."""
        given = [Said.of(message) for message in messages]
        known = [turn for turn in self.turns if turn.said is not None and turn.history]
        equal = {turn: _common(turn.history, given) for turn in known}
        whole = [turn for turn in known if turn.tools == tools and equal[turn] == len(turn.history)]
        ends = [
            turn
            for turn in whole
            if len(given) > len(turn.history) + 1 and turn.said.means(given[len(turn.history)])  # type: ignore[union-attr]
        ]
        parents = {turn.parent for turn in self.turns}
        parent = max(ends, key=lambda turn: (len(turn.history), turn not in parents), default=None)
        start = 0 if parent is None else len(parent.history) + 1
        replaced = [
            turn
            for turn in whole
            if start <= len(turn.history) < len(given)
            and turn not in parents
            and turn not in ends
            and given[len(turn.history)].role == "assistant"
            and not turn.said.means(given[len(turn.history)])  # type: ignore[union-attr]
        ]
        history = [*parent.history, parent.said, *given[start:]] if parent is not None else given
        place = HistoryPlace(parent, history, messages[start:], tools, replaced=replaced)  # type: ignore[arg-type]
        if replaced:
            change = _change(replaced[-1].said, given[len(replaced[-1].history)])  # type: ignore[arg-type]
            place.note = f"the client wrote the last turn anew: {change}"
        elif parent in parents and parent is not None:
            place.note = "another continuation of an earlier turn"
        elif parent is None and known:
            furthest = max(known, key=lambda turn: equal[turn])
            at, before = equal[furthest], [*furthest.history, furthest.said]
            if at == len(furthest.history) and furthest.tools != tools:
                place.note = "another history: other tools"
            elif at == len(given):
                place.note = "another history: the messages are the beginning of an earlier request"
            else:
                place.note = (
                    f"another history: it differs from message {at} on: {_change(before[at], given[at])}"  # type: ignore[arg-type]
                )
        return place

    def place_ids(self, ids: Sequence[int]) -> HistoryPlace:
        """Of a request with token ids."""
        known = [turn for turn in self.turns if turn.response is not None and not turn.history]
        before = [turn for turn in known if len(turn.ids) < len(ids) and turn.ids == ids[: len(turn.ids)]]
        parent = max(before, key=lambda turn: len(turn.ids), default=None)
        return HistoryPlace(parent, [], [], "", prompt_ids=list(ids))

    def leaves(self, longest: bool) -> list[DrawnTurn]:
        """The last turns of the histories."""
        kept = [turn for turn in self.turns if turn.said is not None and not turn.dropped]
        parents = {turn.parent for turn in kept}
        ends = [turn for turn in kept if turn not in parents]
        if not longest:
            return ends
        drawn = {
            turn: sum(len(each.response.token_ids) for each in turn.path if each.response) for turn in ends
        }
        return sorted(ends, key=lambda turn: -drawn[turn])[:1]

    def write(self, conversation: Conversation, *, longest: bool, each_turn: bool) -> None:
        """The histories as turns of the conversation: what a history shares with an earlier one is the prompt of its
        row. `each_turn`: every turn is a row."""
        leaves = self.leaves(longest)
        if leaves:
            root = leaves[0].path[0]
            conversation.prompt_ids, conversation.messages = list(root.prompt_ids), list(root.messages)
        written: set[DrawnTurn] = set()
        for leaf in leaves:
            path = leaf.path
            new = [turn for turn in path if turn not in written]
            written |= set(new)
            for number, turn in enumerate(new):
                assert turn.response is not None
                own = turn.prompt_ids if each_turn or (number == 0 and not longest) else None
                if conversation.turns:
                    # What the policy read within a row is part of the row.
                    inside = number > 0 and not each_turn and turn.parent is not None
                    read = turn.prompt_ids[len(turn.parent.ids) :] if inside else []  # type: ignore[union-attr]
                    conversation.add_messages(read, turn.messages)
                conversation.add_model_turn(turn.response, turn.text, prompt_ids=own)
                conversation.turns[-1].note = turn.note


def _change(ours: Said, given: Said) -> str:
    """Two messages, from shortly before their first difference on."""
    texts = [" ".join((f"{each.role}:", each.text, *map(str, each.calls))) for each in (ours, given)]
    pairs = enumerate(zip(*texts, strict=False))
    start = max(next((at for at, (own, other) in pairs if own != other), min(map(len, texts))) - 20, 0)
    before, after = (repr(text[start : start + 80]) for text in texts)
    return f"{before} became {after}"


def _common(ours: Sequence[Said], given: Sequence[Said]) -> int:
    """How many messages from the first on mean the same."""
    pairs = enumerate(zip(ours, given, strict=False))
    return next((at for at, (own, other) in pairs if not own.means(other)), min(len(ours), len(given)))
