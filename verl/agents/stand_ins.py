"""Conversations whose turns somebody else writes in place of the policy: an endpoint, or a person who types.

Only `draw` differs from a run. What is written is encoded by the run's tokenizer and template, so that limits, tools
and rewards are those of training. Calls are written in the format hermes, whatever the policy's is.
"""

from __future__ import annotations

import json
import shlex
import sys
from asyncio import wrap_future
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from verl.agents.base import Message, ToolFailed
from verl.agents.chat_endpoint import ChatEndpoint
from verl.agents.remote import plain_text
from verl.agents.runner import ConversationRunner, ConversationSampler, Talk
from verl.data.messages import stored_calls
from verl.errors import RolloutError
from verl.models.weight_source import WeightSource
from verl.rollout.base import BatchEngine, FinishReason, Request, Response

ANSWER_S = 600.0
"""For one turn of an endpoint."""


class NoEngine(BatchEngine):
    """In place of an engine where nothing is generated here."""

    def run_batch(self, requests: list[Request]) -> Iterator[Response]:
        raise RolloutError("nothing is generated here: turns are written by an endpoint or by hand")

    def update_weights(self, source: WeightSource, version: int) -> None:
        """There are none."""


class WrittenSampler(ConversationSampler):
    """Turns come as texts."""

    def __init__(self, runner: ConversationRunner) -> None:
        super().__init__(runner, NoEngine())

    def response(self, talk: Talk, text: str, most: int, *, cut: bool = False) -> Response:
        """A text as what the policy would have drawn: its ids and the end of the turn, at most so many. `cut`: the
        turn was not ended."""
        chat = self.turns.chat
        ids = chat.encode_following([chat.content(plain_text(text), "a turn")])[0]
        ends = self.turns.end_token_ids or (chat.tokenizer.eos_token_id,)
        ids = ids if cut else [*ids, ends[0]]
        reason: FinishReason = "length" if cut or len(ids) > most else "stop"
        return Response(talk.episode.key, 0, ids[:most], [0.0] * len(ids[:most]), reason)

    def fail(self, talk: Talk, error: str) -> Response:
        """The conversation ends here, with this error."""
        talk.conversation.error = error
        return Response(talk.episode.key, 0, [], [], "abort")


class EndpointSampler(WrittenSampler):
    """An OpenAI-compatible endpoint writes the turns; it gets the tools' schemas and the run's sampling parameters."""

    def __init__(self, runner: ConversationRunner, endpoint: ChatEndpoint, longest: int) -> None:
        """`longest`: tokens of a turn, as the endpoint counts them."""
        super().__init__(runner)
        self.endpoint, self.longest = endpoint, longest
        self._limit = "max_tokens"

    async def draw(self, talk: Talk, prompt: list[int], most: int, name: str | None = None) -> Response:
        sampling, schemas = talk.settings.sampling, self.agents.schemas(talk.episode.row)
        request: dict[str, Any] = {
            "messages": self.spoken(talk.conversation.messages),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if schemas:
            request["tools"] = [dict(schema) for schema in schemas]
        try:
            choice = await self._complete(request, min(most, self.longest))
            text = turn_text(choice["message"])
        except ToolFailed as failure:
            return self.fail(talk, f"the endpoint gave no turn: {failure.text}")
        except (KeyError, TypeError, ValueError) as error:
            return self.fail(talk, f"the endpoint's message cannot be read: {type(error).__name__}: {error}")
        return self.response(talk, text, most, cut=choice.get("finish_reason") == "length")

    async def _complete(self, request: dict[str, Any], most: int) -> dict[str, Any]:
        """The endpoint's choice. Some models take the limit only under its newer name, and say so."""
        try:
            return await self.endpoint.complete({**request, self._limit: most}, ANSWER_S)
        except ToolFailed as failure:
            if "max_completion_tokens" not in failure.text:
                raise
            self._limit = "max_completion_tokens"
        return await self.endpoint.complete({**request, self._limit: most}, ANSWER_S)

    def spoken(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation as endpoints know it: calls apart from the text, each answer after its call."""
        fields = {"tool": ("role", "content", "tool_call_id"), "assistant": ("role", "content", "tool_calls")}
        return [
            {
                name: message[name]
                for name in fields.get(message["role"], ("role", "content"))
                if name in message
            }
            for message in stored_calls(self.agents.format.apart(messages))
        ]


def turn_text(message: Mapping[str, Any]) -> str:
    """An endpoint's message as one text, with its calls in the format hermes."""
    parts = [str(message.get("content") or "")]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        parts.append(call_text(function["name"], function.get("arguments") or {}))
    return "\n".join(part for part in parts if part)


def call_text(name: str, arguments: Any) -> str:
    """Arguments that are text stay as they are: where it is no JSON the model is told so, as in a run."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {text}}}\n</tool_call>'


class TypedSampler(WrittenSampler):
    """A person types the turns. What is new in the conversation is shown first; `ask` writes it and reads the reply."""

    def __init__(self, runner: ConversationRunner, ask: Callable[[str], str | None]) -> None:
        super().__init__(runner)
        self.ask = ask
        self._shown = 0

    async def draw(self, talk: Talk, prompt: list[int], most: int, name: str | None = None) -> Response:
        messages = talk.conversation.messages
        if not talk.conversation.turns:
            self._shown = 0
        new = [f"{message['role']}: {message['content']}" for message in messages[self._shown :]]
        if not self._shown and (schemas := self.agents.schemas(talk.episode.row)):
            new += ["tools:", *(f"  {_usage(schema['function'])}" for schema in schemas)]
        self._shown = len(messages) + 1
        shown = "\n".join(new)
        while True:
            text = await self._reply_to(shown)
            if text is None:
                return self.fail(talk, "the input ended")
            try:
                return self.response(talk, typed_turn(text), most)
            except ValueError as error:
                shown = f"This call cannot be read: {error}"

    async def _reply_to(self, shown: str) -> str | None:
        """Asked in the thread that drives, where Ctrl-C arrives."""
        reply: Future[str | None] = Future()
        self.post(lambda: reply.set_result(self.ask(shown)))
        return await wrap_future(reply)


def typed_turn(text: str) -> str:
    """A typed reply as the text of a turn: `/name argument=value ...` or `/name {JSON}` is a call."""
    if not text.startswith("/"):
        return text
    name, _, rest = text[1:].strip().partition(" ")
    if rest.lstrip().startswith("{"):
        return call_text(name, json.loads(rest))
    arguments: dict[str, Any] = {}
    for word in shlex.split(rest):
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} is no argument=value")
        try:
            arguments[key] = json.loads(value)
        except ValueError:
            arguments[key] = value
    return call_text(name, arguments)


def _usage(function: Mapping[str, Any]) -> str:
    names = (function.get("parameters") or {}).get("properties") or {}
    about = str(function.get("description") or "").strip().partition("\n")[0]
    return f"/{function['name']} {' '.join(f'{name}=...' for name in names)}  {about}".rstrip()


def ask_terminal(text: str) -> str | None:
    """Show a text and read a reply: one line, or several where each but the last ends in a backslash. None: the input
    has ended."""
    sys.stderr.write(f"{text}\n> ")
    sys.stderr.flush()
    lines: list[str] = []
    while line := sys.stdin.readline():
        lines.append(line.rstrip("\n"))
        if not lines[-1].endswith("\\"):
            return "\n".join(each.removesuffix("\\") for each in lines)
        sys.stderr.write("... ")
        sys.stderr.flush()
    return None
