"""`/v1/chat/completions`, as OpenAI has it."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from verl.serve.parameters import (
    MOST_LIKELIEST,
    MOST_SAMPLES,
    check_model,
    read_sampling,
    read_seed,
    read_tools,
    refuse_penalties,
    require_scores,
    usage_of,
)
from verl.serve.served_model import (
    DrawOrder,
    SampleAnswer,
    SampleDelta,
    ServedModel,
    TokenScore,
    arguments_text,
)
from verl.serve.wire import ApiError, EventStream, Fields, event

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(frozen=True)
class ChatServer:
    model: ServedModel

    async def answer(self, fields: Fields) -> dict[str, Any] | EventStream:
        model = self.model
        check_model(fields, model)
        offered = read_tools(fields)
        prompt = model.chat_prompt(fields.list_of("messages") or [], offered.schemas)
        most = fields.integer("max_completion_tokens", 1)
        older = fields.integer("max_tokens", 1)
        sampling = read_sampling(fields, model, len(prompt), most=older if most is None else most)
        sampling = model.ending_turns(sampling)
        log_probs, likeliest = fields.flag("logprobs"), fields.integer("top_logprobs", 0, MOST_LIKELIEST) or 0
        if likeliest:
            if not log_probs:
                raise ApiError(400, "'top_logprobs' needs 'logprobs': true", param="top_logprobs")
            require_scores(model, "top_logprobs")
        n = fields.integer("n", 1, MOST_SAMPLES) or 1
        order = DrawOrder(prompt, sampling, n, read_seed(fields), likeliest=likeliest)
        order = offered.shown(order, model)
        streamed, usage = fields.flag("stream"), _usage_wanted(fields)
        with_ids = fields.flag("return_token_ids")
        refuse_penalties(fields)
        fields.only("response_format", {"type": "text"})
        fields.only("store", False)
        fields.only("modalities", ["text"])
        fields.only("service_tier", "auto", "default")
        for label in ("user", "metadata"):  # names for the client's own books
            fields.value(label)
        fields.done()
        if streamed:
            return EventStream(self._events(order, log_probs, usage))
        answers = await model.all_answers(order)
        body = self._head("chat.completion") | {
            "choices": [self._choice(each, log_probs, with_ids) for each in answers],
            "usage": usage_of(len(order.prompt_ids), [each.token_ids for each in answers]),
        }
        return body | ({"prompt_token_ids": list(order.prompt_ids)} if with_ids else {})

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"chatcmpl-{uuid.uuid4().hex}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.model.name}

    def _choice(self, answer: SampleAnswer, log_probs: bool, with_ids: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = written_calls(answer)
        return {
            "index": answer.sample,
            "message": message,
            "logprobs": self._log_probs(answer.scores) if log_probs else None,
            "finish_reason": answer.finish,
        } | ({"token_ids": answer.token_ids} if with_ids else {})

    def _log_probs(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        return {"content": written_scores(self.model, scores), "refusal": None}

    async def _events(self, order: DrawOrder, log_probs: bool, usage: bool) -> AsyncIterator[str]:
        head, begun = self._head("chat.completion.chunk"), set()
        drawn: list[Sequence[int]] = []

        def chunk(
            sample: int, delta: dict[str, Any], finish: str | None, scores: Sequence[TokenScore]
        ) -> str:
            first = {} if sample in begun else {"role": "assistant"}
            begun.add(sample)
            choice = {"index": sample, "delta": first | delta, "finish_reason": finish}
            choice["logprobs"] = self._log_probs(scores) if log_probs and scores else None
            return event({**head, "choices": [choice]})

        async with aclosing(self.model.answers(order, streamed=True)) as answers:  # type: ignore[type-var]
            async for answer in answers:
                new = answer if isinstance(answer, SampleDelta) else answer.rest
                if new.text or new.scores or new.sample not in begun:
                    yield chunk(new.sample, {"content": new.text}, None, new.scores)
                if isinstance(answer, SampleAnswer):
                    calls = [{"index": at, **call} for at, call in enumerate(written_calls(answer))]
                    if calls:
                        yield chunk(new.sample, {"tool_calls": calls}, None, ())
                    yield chunk(new.sample, {}, answer.finish, ())
                    drawn.append(answer.token_ids)
        if usage:
            yield event({**head, "choices": [], "usage": usage_of(len(order.prompt_ids), drawn)})
        yield event("[DONE]")


def written_scores(model: ServedModel, scores: Sequence[TokenScore]) -> list[dict[str, Any]]:
    def one(token: int, log_prob: float | None) -> dict[str, Any]:
        text = model.decode([token])
        raw = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(log_prob or 0.0, LOWEST), "bytes": raw}

    return [
        one(each.token, each.log_prob) | {"top_logprobs": [one(*near) for near in each.likeliest]}
        for each in scores
    ]


def written_calls(answer: SampleAnswer) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": arguments_text(call)},
        }
        for call in answer.calls
    ]


def _usage_wanted(fields: Fields) -> bool:
    options = Fields(fields.mapping("stream_options") or {})
    wanted = options.flag("include_usage")
    options.only("include_obfuscation", False)
    options.done()
    return wanted
