"""`/v1/responses`, as OpenAI has it. Nothing is stored: every request has the whole history."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from verl.serve.openai_chat import written_scores
from verl.serve.parameters import (
    MOST_LIKELIEST,
    check_model,
    read_sampling,
    read_seed,
    read_tools,
    require_scores,
    text_of,
)
from verl.serve.served_model import (
    DrawOrder,
    SampleAnswer,
    SampleDelta,
    ServedModel,
    arguments_text,
)
from verl.serve.wire import ApiError, EventStream, Fields, event, unsupported

_LOG_PROBS = "message.output_text.logprobs"
_INCLUDED = ("reasoning.encrypted_content", _LOG_PROBS)
_ECHOED = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature", "text"),
    *("tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user"),
)
"""What the answer repeats of the request."""
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(_ECHOED),
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
}
_TEXT_KINDS = ("input_text", "output_text", "text")

Named = Callable[..., str]
"""Writes an event of a type, with the next number."""


@dataclass(frozen=True)
class ResponsesServer:
    model: ServedModel

    async def answer(self, fields: Fields) -> dict[str, Any] | EventStream:
        model = self.model
        echoed = fields.copies(_ECHOED)
        check_model(fields, model)
        for name in ("previous_response_id", "conversation", "prompt"):
            if fields.value(name) is not None:
                raise unsupported(name, "(nothing is stored here): send the whole history as 'input'")
        offered = read_tools(fields, wrapped=False)
        prompt = model.chat_prompt(_messages(fields), offered.schemas)
        most = fields.integer("max_output_tokens", 1)
        sampling = model.ending_turns(read_sampling(fields, model, len(prompt), most=most))
        likeliest = fields.integer("top_logprobs", 0, MOST_LIKELIEST) or 0
        if likeliest:
            require_scores(model, "top_logprobs")
        included = fields.list_of("include") or []
        for name in included:
            if name not in _INCLUDED:
                raise unsupported("include", f"with the value {json.dumps(name)[:100]}")
        streamed, seed = fields.flag("stream"), read_seed(fields)
        _refuse_the_rest(fields)
        order = DrawOrder(prompt, sampling, seed=seed, likeliest=likeliest)
        order = offered.shown(order, model)
        head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model.name,
            "error": None,
            "store": False,
            **_DEFAULTS,
            **echoed,
        }
        scored = bool(likeliest) or _LOG_PROBS in included
        if streamed:
            return EventStream(self._events(order, head, scored))
        (answer,) = await model.all_answers(order)
        return self._ended(head, order, answer, self._output(answer, _new_id("msg"), scored))

    def _output(self, answer: SampleAnswer, message_id: str, scored: bool) -> list[dict[str, Any]]:
        items = []
        status = _status(answer)
        if answer.content or not answer.calls:
            scores = written_scores(self.model, answer.scores) if scored else []
            items.append(_spoken(message_id, status, [_part(answer.content, scores)]))
        for call in answer.calls:
            items.append(
                {
                    "id": _new_id("fc"),
                    "type": "function_call",
                    "call_id": call.id,
                    "name": call.name,
                    "arguments": arguments_text(call),
                    "status": "completed",
                }
            )
        return items

    def _ended(
        self, head: dict[str, Any], order: DrawOrder, answer: SampleAnswer, output: list[dict[str, Any]]
    ) -> dict[str, Any]:
        read, drawn = len(order.prompt_ids), len(answer.token_ids)
        cut = {"reason": "max_output_tokens"} if answer.finish_reason == "length" else None
        return head | {
            "status": _status(answer),
            "incomplete_details": cut,
            "output": output,
            "usage": {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": drawn,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": read + drawn,
            },
        }

    async def _events(self, order: DrawOrder, head: dict[str, Any], scored: bool) -> AsyncIterator[str]:
        numbers = itertools.count()

        def named(kind: str, **content: Any) -> str:
            kind = f"response.{kind}"
            return event({"type": kind, "sequence_number": next(numbers), **content}, kind)

        begun = head | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        message_id, opened = _new_id("msg"), False
        place = {"item_id": message_id, "output_index": 0, "content_index": 0}
        async with aclosing(self.model.answers(order, streamed=True)) as answers:  # type: ignore[type-var]
            async for answer in answers:
                if begun:
                    yield named("created", response=begun)
                    yield named("in_progress", response=begun)
                    begun = {}
                new = answer if isinstance(answer, SampleDelta) else answer.rest
                if not opened and (new.text or (isinstance(answer, SampleAnswer) and not answer.calls)):
                    opened = True
                    item = _spoken(message_id, "in_progress", [])
                    yield named("output_item.added", output_index=0, item=item)
                    yield named("content_part.added", **place, part=_part("", []))
                if new.text:
                    scores = written_scores(self.model, new.scores) if scored else []
                    yield named("output_text.delta", **place, delta=new.text, logprobs=scores)
                if isinstance(answer, SampleDelta):
                    continue
                output = self._output(answer, message_id, scored)
                for at, item in enumerate(output):
                    for written in _item_events(named, at, item, place):
                        yield written
                whole = self._ended(head, order, answer, output)
                yield named(whole["status"], response=whole)


def _item_events(named: Named, at: int, item: dict[str, Any], place: dict[str, Any]) -> list[str]:
    """The events that end an item; those of a call begin it, too."""
    if item["type"] == "message":
        (part,) = item["content"]
        return [
            named("output_text.done", **place, text=part["text"], logprobs=part["logprobs"]),
            named("content_part.done", **place, part=part),
            named("output_item.done", output_index=at, item=item),
        ]
    call = {"item_id": item["id"], "output_index": at}
    begun = {**item, "arguments": "", "status": "in_progress"}
    return [
        named("output_item.added", output_index=at, item=begun),
        named("function_call_arguments.delta", **call, delta=item["arguments"]),
        named("function_call_arguments.done", **call, name=item["name"], arguments=item["arguments"]),
        named("output_item.done", output_index=at, item=item),
    ]


def _refuse_the_rest(fields: Fields) -> None:
    text = Fields(fields.mapping("text") or {})
    text.only("format", {"type": "text"})
    text.done()
    options = Fields(fields.mapping("stream_options") or {})
    options.only("include_obfuscation", False)
    options.done()
    fields.only("truncation", "disabled")
    fields.only("service_tier", "auto", "default")
    fields.only("background", False)
    fields.only("reasoning", {})
    # Nothing is stored, whatever is asked; the others are names for the client's own books.
    for name in ("store", "user", "metadata", "safety_identifier", "prompt_cache_key"):
        fields.value(name)
    fields.done()


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """Instructions and input as messages of chat: what the model said and called in one turn is one message."""
    messages: list[dict[str, Any]] = []
    if (instructions := fields.text("instructions")) is not None:
        messages.append({"role": "system", "content": instructions})
    given = fields.value("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ApiError(400, "'input' must be a text or a list of items", param="input")
    speaks = False  # the last message is the model's, and calls may join it
    for number, item in enumerate(given):
        where = f"input.{number}"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"), where)})
        elif kind == "function_call":
            if not speaks:
                messages.append({"role": "assistant", "content": ""})
            function = {name: item.get(name) for name in ("name", "arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            raise ApiError(
                400,
                f"{where}: an item of type {kind!r:.50} is not supported; there are message, function_call "
                "and function_call_output",
                param="input",
            )
        speaks = messages[-1]["role"] == "assistant"
    return messages


def _content(content: Any, where: str) -> str:
    return text_of(content, where, _TEXT_KINDS)


def _spoken(message_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _part(text: str, scores: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}


def _status(answer: SampleAnswer) -> str:
    return "completed" if answer.finish_reason == "stop" else "incomplete"


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
