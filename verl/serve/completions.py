"""`/v1/completions` as OpenAI has it, with token ids as prompts and `echo` with log-probs, and `/tokenize`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from verl.data.special_tokens import require_characters
from verl.serve.openai_chat import LOWEST
from verl.serve.parameters import (
    MOST_LIKELIEST,
    MOST_SAMPLES,
    check_model,
    offer_tools,
    read_prompt,
    read_sampling,
    read_seed,
    refuse_penalties,
    require_scores,
    usage_of,
)
from verl.serve.served_model import DrawOrder, SampleAnswer, SampleDelta, ServedModel, TokenScore
from verl.serve.wire import ApiError, EventStream, Fields, event, unsupported

_MOST_PROMPTS = 1024


@dataclass(frozen=True)
class _Wanted:
    log_probs: int | None
    echo: bool
    draws: bool
    """False: nothing is drawn, the prompts are only scored."""


@dataclass(frozen=True)
class CompletionServer:
    model: ServedModel

    async def answer(self, fields: Fields) -> dict[str, Any] | EventStream:
        model = self.model
        check_model(fields, model)
        prompts = self._prompts(fields.value("prompt"))
        longest = max(map(len, prompts))
        most, echo = fields.integer("max_tokens", 0), fields.flag("echo")
        log_probs = fields.integer("logprobs", 0, MOST_LIKELIEST)
        if most == 0 and not echo:
            raise ApiError(400, "'max_tokens' must be at least 1 without 'echo'", param="max_tokens")
        if log_probs is not None and (echo or log_probs):
            require_scores(model, "logprobs")
        sampling = read_sampling(fields, model, longest, most=16 if most is None else max(most, 1))
        n, seed = fields.integer("n", 1, MOST_SAMPLES) or 1, read_seed(fields)
        # Prompts are scored by a pass of their own with `echo`, which has the answer's tokens as well.
        likeliest = 0 if echo else log_probs or 0
        orders = [DrawOrder(ids, sampling, n, seed, likeliest=likeliest) for ids in prompts]
        wanted = _Wanted(log_probs, echo, most != 0)
        streamed = fields.flag("stream")
        if fields.mapping("stream_options") is not None:
            raise unsupported("stream_options", "by /v1/completions")
        refuse_penalties(fields)
        fields.only("best_of", 1)
        fields.only("suffix", "")
        fields.value("user")
        fields.done()
        if streamed:
            if echo or len(orders) > 1 or log_probs is not None:
                raise unsupported("stream", "with echo, logprobs or several prompts")
            return EventStream(self._events(orders[0]))
        tasks = [asyncio.ensure_future(self._choices(order, wanted)) for order in orders]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        choices = [choice for group, _ in found for choice in group]
        drawn = [ids for _, groups in found for ids in groups]
        return self._head() | {
            "choices": [choice | {"index": number} for number, choice in enumerate(choices)],
            "usage": usage_of(sum(map(len, prompts)), drawn),
        }

    def _prompts(self, value: Any) -> list[list[int]]:
        several = isinstance(value, list) and (not value or not isinstance(value[0], int))
        given = [read_prompt(each) for each in (value if several else [value])]
        if not 1 <= len(given) <= _MOST_PROMPTS:
            raise ApiError(400, f"'prompt' must be 1 to {_MOST_PROMPTS} prompts", param="prompt")
        require_characters(given, "'prompt'")
        ids = [self.model.text_prompt(each) if isinstance(each, str) else each for each in given]
        most = len(self.model.tokenizer)
        for each in ids:
            if not each or not all(0 <= token < most for token in each):
                message = f"a prompt needs at least one token, each between 0 and {most - 1}"
                raise ApiError(400, message, param="prompt")
        return ids

    def _head(self) -> dict[str, Any]:
        name = f"cmpl-{uuid.uuid4().hex}"
        return {
            "id": name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.model.name,
        }

    async def _choices(
        self, order: DrawOrder, wanted: _Wanted
    ) -> tuple[list[dict[str, Any]], list[list[int]]]:
        model, prompt = self.model, list(order.prompt_ids)
        text = model.decode(prompt) if wanted.echo else ""
        if not wanted.draws:
            scores = (
                await model.score(prompt, 0, wanted.log_probs or 0) if wanted.log_probs is not None else []
            )
            choice = self._choice(text, "length", None if wanted.log_probs is None else scores)
            return [choice for _ in range(order.n)], []
        answers = await model.all_answers(order)
        choices = []
        for answer in answers:
            scores = answer.scores
            if wanted.echo and wanted.log_probs is not None:
                ids = [*prompt, *(each.token for each in scores)]
                given = await model.score(ids, 0, wanted.log_probs)
                drawn = zip(scores, given[len(prompt) :], strict=True)
                # The drawn tokens have the numbers that the engine drew them with.
                scores = given[: len(prompt)] + [replace(near, log_prob=own.log_prob) for own, near in drawn]
            choices.append(
                self._choice(
                    text + answer.text, answer.finish_reason, None if wanted.log_probs is None else scores
                )
            )
        return choices, [answer.token_ids for answer in answers]

    def _choice(self, text: str, finish: str, scores: Sequence[TokenScore] | None) -> dict[str, Any]:
        return {
            "index": 0,
            "text": text,
            "finish_reason": finish,
            "logprobs": None if scores is None else self._log_probs(scores),
        }

    def _log_probs(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        decode, offsets, length = self.model.decode, [], 0
        tokens = [decode([each.token]) for each in scores]
        for text in tokens:
            offsets.append(length)
            length += len(text)

        def top(score: TokenScore) -> dict[str, float] | None:
            if score.log_prob is None:
                return None
            near = dict(score.likeliest) | {score.token: score.log_prob}
            found: dict[str, float] = {}
            for token, value in near.items():  # several tokens may have one text: the likeliest counts
                text = decode([token])
                found[text] = max(value, found.get(text, LOWEST))
            return found

        numbers = [None if each.log_prob is None else max(each.log_prob, LOWEST) for each in scores]
        return {
            "tokens": tokens,
            "token_logprobs": numbers,
            "top_logprobs": [top(each) for each in scores],
            "text_offset": offsets,
        }

    async def _events(self, order: DrawOrder) -> AsyncIterator[str]:
        head = self._head()
        async with aclosing(self.model.answers(order, streamed=True)) as answers:  # type: ignore[type-var]
            async for answer in answers:
                new = answer if isinstance(answer, SampleDelta) else answer.rest
                finish = answer.finish_reason if isinstance(answer, SampleAnswer) else None
                if new.text or finish:
                    choice = {
                        "index": new.sample,
                        "text": new.text,
                        "finish_reason": finish,
                        "logprobs": None,
                    }
                    yield event({**head, "choices": [choice]})
        yield event("[DONE]")

    # ---- the tokenizer

    async def tokenize(self, fields: Fields) -> dict[str, Any]:
        """A text, or messages with the template."""
        model = self.model
        check_model(fields, model)
        text, messages = fields.text("prompt"), fields.list_of("messages")
        if (text is None) == (messages is None):
            raise ApiError(400, "one of 'prompt' and 'messages' is needed", param="prompt")
        if messages is None:
            require_characters(text, "'prompt'")
            ids = model.text_prompt(str(text), fields.flag("add_special_tokens", True))
        else:
            offered = offer_tools(fields.list_of("tools") or [], "auto", None, True)
            ids = model.chat_prompt(messages, offered.schemas)
        fields.done()
        return {"tokens": ids, "count": len(ids), "max_model_len": model.context}

    async def tokenizer_info(self, fields: Fields) -> dict[str, Any]:
        """What lm-eval asks before it uses `/tokenize`."""
        tokenizer = self.model.tokenizer
        names = ("eos_token", "bos_token", "pad_token", "chat_template")
        return {name: getattr(tokenizer, name, None) for name in names}
