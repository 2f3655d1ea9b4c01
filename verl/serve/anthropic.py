"""`/v1/messages` and `/v1/messages/count_tokens`, as Anthropic has them."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from verl.serve.parameters import OfferedTools, check_model, offer_tools, read_sampling, text_of
from verl.serve.served_model import DrawOrder, SampleAnswer, SampleDelta, ServedModel, arguments_text
from verl.serve.wire import ApiError, EventStream, Fields, event, unsupported

_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["threads"]}
"""Tells the client to send whole histories."""


@dataclass(frozen=True)
class MessagesServer:
    model: ServedModel

    async def answer(self, fields: Fields) -> dict[str, Any] | EventStream:
        model = self.model
        prompt, offered = self._prompt(fields)
        most = fields.integer("max_tokens", 1)
        if most is None:
            raise ApiError(400, "'max_tokens' is required", param="max_tokens")
        # Clients ask for more than they need; the answer ends with the context at the latest.
        most = max(min(most, model.context - len(prompt)), 1)
        sampling = read_sampling(fields, model, len(prompt), most=most, stop="stop_sequences")
        sampling = model.ending_turns(sampling)
        streamed = fields.flag("stream")
        fields.only("service_tier", "auto", "standard_only")
        fields.value("metadata")
        fields.done()
        order = offered.shown(DrawOrder(prompt, sampling), model)
        if streamed:
            return EventStream(self._events(order))
        (answer,) = await model.all_answers(order)
        return self._message() | {
            "content": _blocks(answer),
            **_ending(answer),
            "usage": {"input_tokens": len(order.prompt_ids), "output_tokens": len(answer.token_ids)},
        }

    async def count(self, fields: Fields) -> dict[str, Any]:
        prompt, _ = self._prompt(fields)
        fields.done()
        return {"input_tokens": len(prompt)}

    def _prompt(self, fields: Fields) -> tuple[list[int], OfferedTools]:
        if fields.value("thread") is not None:
            raise ApiError(400, "threads are not supported: send the whole history", details=_THREADS)
        check_model(fields, self.model)
        fields.only("thinking", {"type": "disabled"})
        # A hint to servers that bill by it: prefixes are reused here without.
        fields.value("cache_control")
        offered = _tools(fields)
        messages: list[dict[str, Any]] = []
        if (system := fields.value("system")) is not None:
            messages.append({"role": "system", "content": text_of(system, "system")})
        for number, message in enumerate(fields.list_of("messages") or []):
            messages += _messages(message, f"messages.{number}")
        return self.model.chat_prompt(messages, offered.schemas), offered

    def _message(self) -> dict[str, Any]:
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    async def _events(self, order: DrawOrder) -> AsyncIterator[str]:
        def named(kind: str, **content: Any) -> str:
            return event({"type": kind, **content}, kind)

        opened, text_open = 0, False
        async with aclosing(self.model.answers(order, streamed=True)) as answers:  # type: ignore[type-var]
            begun = False
            async for answer in answers:
                if not begun:
                    usage = {"input_tokens": len(order.prompt_ids), "output_tokens": 0}
                    yield named("message_start", message=self._message() | {"usage": usage})
                    begun = True
                new = answer if isinstance(answer, SampleDelta) else answer.rest
                if new.text:
                    if not text_open:
                        block = {"type": "text", "text": ""}
                        yield named("content_block_start", index=0, content_block=block)
                        text_open, opened = True, 1
                    delta = {"type": "text_delta", "text": new.text}
                    yield named("content_block_delta", index=0, delta=delta)
                if isinstance(answer, SampleDelta):
                    continue
                if text_open:
                    yield named("content_block_stop", index=0)
                for call in answer.calls:
                    used: dict[str, Any] = {
                        "type": "tool_use",
                        "id": call.id,
                        "name": call.name,
                        "input": {},
                    }
                    yield named("content_block_start", index=opened, content_block=used)
                    delta = {"type": "input_json_delta", "partial_json": arguments_text(call)}
                    yield named("content_block_delta", index=opened, delta=delta)
                    yield named("content_block_stop", index=opened)
                    opened += 1
                usage = {"output_tokens": len(answer.token_ids)}
                yield named("message_delta", delta=_ending(answer), usage=usage)
        yield named("message_stop")


def _ending(answer: SampleAnswer) -> dict[str, Any]:
    if answer.calls:
        reason = "tool_use"
    elif answer.stop is not None:
        reason = "stop_sequence"
    else:
        reason = "max_tokens" if answer.finish_reason == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": answer.stop if reason == "stop_sequence" else None}


def _blocks(answer: SampleAnswer) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": answer.content}] if answer.content else []
    calls = [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in answer.calls]
    return [*text, *calls]


def _tools(fields: Fields) -> OfferedTools:
    tools = []
    for tool in fields.list_of("tools") or []:
        if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
            raise unsupported("tools", "with a tool of the server: only your own")
        named = {
            "name": "name",
            "description": "description",
            "input_schema": "parameters",
            "strict": "strict",
        }
        # In the order in which OpenAI's clients and ours have them: templates write schemas as they are.
        function = {ours: tool[theirs] for theirs, ours in named.items() if theirs in tool}
        tools.append({"type": "function", "function": function})
    choice = fields.mapping("tool_choice") or {"type": "auto"}
    kinds = {"auto": "auto", "any": "required", "tool": "function", "none": "none"}
    if choice.get("type") not in kinds:
        raise unsupported("tool_choice", f"with the value {json.dumps(choice)[:100]}")
    name = choice.get("name") if choice["type"] == "tool" else None
    return offer_tools(tools, kinds[choice["type"]], name, not choice.get("disable_parallel_tool_use"))


def _messages(message: Any, where: str) -> list[dict[str, Any]]:
    """One of Anthropic's as OpenAI's: results of tools are messages of their own."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant"):
        raise ApiError(400, f"{where}: a message needs the role user or assistant")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise ApiError(400, f"{where}: the content must be a text or a list of blocks")
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            text = text_of(block.get("content") or "", where)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind in ("thinking", "redacted_thinking") and role == "assistant":
            raise ApiError(400, f"{where}: thinking blocks are not supported: this server gives none")
        else:
            texts.append(text_of([block], where))
    said: list[dict[str, Any]] = [{"role": role, "content": "".join(texts)}] if texts or calls else []
    if calls:
        said[0]["tool_calls"] = calls
    return [*results, *said]
