"""What every engine does with a request before and after the model: check it, and find where its response ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from verl.errors import RolloutError
from verl.rollout.base import FinishReason, Request, SamplingParams

_STOP_TAIL = 8
"""Tokens decoded beyond the characters of a stop string, for tokens that decode to nothing by themselves."""


def check_requests(requests: Sequence[Request], vocab_size: int, max_length: int | None = None) -> None:
    """Raise `RolloutError` for the first request that cannot be served.

    `max_length` is the most tokens (prompt and response) one sequence may have in this engine.
    """
    seen: set[str] = set()
    for request in requests:
        if request.request_id in seen:
            raise RolloutError(
                f"request {request.request_id!r} was submitted twice; ids key the draws and must differ"
            )
        seen.add(request.request_id)
        problem = _problem(request, vocab_size, max_length)
        if problem is not None:
            raise RolloutError(f"request {request.request_id!r}: {problem}")


def _problem(request: Request, vocab_size: int, max_length: int | None) -> str | None:
    if len(request.prompt_ids) == 0:
        return "the prompt is empty; it needs at least one token id"
    if request.n < 1:
        return f"n is {request.n}; it must be at least 1 (rollout.n)"
    low, high = min(request.prompt_ids), max(request.prompt_ids)
    if low < 0 or high >= vocab_size:
        return f"token id {low if low < 0 else high} lies outside the vocabulary of {vocab_size}"
    problem = _sampling_problem(request.sampling)
    if problem is not None:
        return problem
    if request.partial:
        if len(request.partial) != request.n:
            return (
                f"partial has {len(request.partial)} samples but n is {request.n}; give one list per sample"
            )
        longest = max(len(part) for part in request.partial)
        if longest >= request.sampling.max_tokens:
            return f"a partial has {longest} tokens already; max_tokens is {request.sampling.max_tokens}"
        known = [token for part in request.partial for token in part]
        if known and (min(known) < 0 or max(known) >= vocab_size):
            return f"a partial sample holds a token id outside the vocabulary of {vocab_size}"
    length = len(request.prompt_ids) + request.sampling.max_tokens
    if max_length is not None and length > max_length:
        return (
            f"prompt and max_tokens may reach {length} tokens; the limit is {max_length} (data.max_prompt_length, "
            "data.max_response_length, rollout.max_model_len)"
        )
    return None


def _sampling_problem(sampling: SamplingParams) -> str | None:
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}; it must be at least 1 (data.max_response_length)"
    if not (sampling.temperature >= 0 and math.isfinite(sampling.temperature)):
        return f"temperature is {sampling.temperature}; it must be 0 (greedy) or a positive number"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}; it must be above 0 and at most 1 (rollout.top_p)"
    if not 0 <= sampling.min_p <= 1:
        return f"min_p is {sampling.min_p}; it must be between 0 and 1"
    if not (sampling.repetition_penalty > 0 and math.isfinite(sampling.repetition_penalty)):
        return f"repetition_penalty is {sampling.repetition_penalty}; it must be a positive number"
    if any(text == "" for text in sampling.stop):
        return "a stop string is empty; it would end every response at once"
    return None


def eos_token_ids(model: Any, tokenizer: Any | None) -> frozenset[int]:
    """Every token that ends a sequence: the model's generation config and the tokenizer's end token."""
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        value = getattr(holder, "eos_token_id", None)
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, (list, tuple)):
            found.update(int(item) for item in value)
    return frozenset(found)


def check_finite(log_probs: Sequence[float]) -> None:
    """Broken weights give NaN; drawing from that would go unnoticed."""
    if not all(map(math.isfinite, log_probs)):
        raise RolloutError(
            "the logits are NaN or infinite: broken weights, or an overflow in this dtype (check the last update's "
            "gradient norm and rollout.dtype)"
        )


class Stopper:
    """Finds where a response ends: at a stop token, at a stop string, or at its longest."""

    def __init__(self, tokenizer: Any | None, eos_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        # Stop strings are searched in the raw text: cleaning moves spaces that later tokens follow, so that the answer
        # would depend on how many tokens are decoded at once.
        cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._decoding = {"clean_up_tokenization_spaces": False} if cleans else {}

    def check_stop_strings(self, requests: Sequence[Request]) -> None:
        """Stop strings need a tokenizer."""
        for request in requests:
            if request.sampling.stop and self.tokenizer is None:
                raise RolloutError(
                    f"request {request.request_id!r} has stop strings {list(request.sampling.stop)}, but the engine "
                    "has no tokenizer; use stop_token_ids"
                )

    def stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        ids = frozenset(sampling.stop_token_ids)
        return ids if sampling.ignore_eos else ids | self.eos_ids

    def end(
        self, token_ids: Sequence[int], start: int, sampling: SamplingParams, prompt_length: int = 0
    ) -> tuple[int, FinishReason] | None:
        """Where, among `token_ids[start:]`, the response `token_ids[prompt_length:]` ends and why; None if nowhere.

        The tokens before `start` are known not to end it. (3, "stop") means that the first 3 of `token_ids` stay.
        The work is linear in the new tokens, however long the response is.
        """
        longest = prompt_length + sampling.max_tokens
        limit = min(len(token_ids), longest)
        stopped = next((at + 1 for at in range(start, limit) if self._stops(token_ids[at], sampling)), None)
        if sampling.stop and self.tokenizer is not None:
            found = self._stop_string(token_ids, start, stopped or limit, sampling, prompt_length)
            if found is not None:
                return found, "stop"
        if stopped is not None:
            return stopped, "stop"
        return (limit, "length") if limit == longest else None

    def _stops(self, token: int, sampling: SamplingParams) -> bool:
        return token in sampling.stop_token_ids or (token in self.eos_ids and not sampling.ignore_eos)

    def _stop_string(
        self, token_ids: Sequence[int], start: int, limit: int, sampling: SamplingParams, prompt_length: int
    ) -> int | None:
        """The first count above `start`, at most `limit`, of tokens whose newest ones contain a stop string.

        All new tokens are decoded at once; only where that finds a stop string are they decoded one by one, to find
        the token that completes it."""
        tail = max(len(text) for text in sampling.stop) + _STOP_TAIL

        def contains(first: int, count: int) -> bool:
            ids = list(token_ids[max(prompt_length, first) : count])
            text = self.tokenizer.decode(ids, skip_special_tokens=False, **self._decoding)  # type: ignore[union-attr]
            return any(stop in text for stop in sampling.stop)

        if start >= limit or not contains(start + 1 - tail, limit):
            return None
        return next((count for count in range(start + 1, limit + 1) if contains(count - tail, count)), None)
