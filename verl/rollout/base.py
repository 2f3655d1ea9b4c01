"""The interface of rollout engines (token ids in, token ids out), and what they share: checks of requests, the end of a
response.

The tokens of a request depend only on its token ids, sampling parameters, seed and the weights, not on what else runs.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from verl.errors import RolloutError
from verl.observe.live import live

if TYPE_CHECKING:
    from verl.models.weight_source import WeightSource


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How to draw tokens. `temperature` 0 is greedy; `top_k` <= 0 and `top_p` 1 switch those filters off."""

    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    raw_log_probs: bool = False
    """Which distribution the log-probs of the drawn tokens belong to.

    False: softmax(logits / temperature), that is the one sampled from before top-k, top-p, min-p and the repetition
    penalty cut it. True: softmax(logits). A greedy request (temperature 0) has those of softmax(logits) either way.
    The trainer recomputes the same one: it divides its logits by the same temperature, or by 1 where this is set.
    Filters are left out on both sides, since what they keep depends on the policy and an update would have to
    differentiate through it; with filters on, both numbers therefore belong to the unfiltered policy."""

    @property
    def log_prob_temperature(self) -> float:
        """Of the distribution that log-probs belong to."""
        return 1.0 if self.raw_log_probs else self.temperature or 1.0


@dataclass(frozen=True)
class GenerationSettings:
    """One generation pass: how to sample, how often, and the seed of its draws."""

    sampling: SamplingParams
    n: int = 1
    seed: int = 0
    over_sample_rate: float = 0.0
    """The share of the samples that need not end: when the others have ended, these are answered as they are, with
    reason `abort`."""


@dataclass(frozen=True)
class Request:
    """One prompt, sampled `n` times. `seed` with `request_id`'s position-free key decides every draw."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    seed: int = 0
    partial: tuple[Sequence[int], ...] = ()
    """Tokens already produced for each sample (a resumed request); generation continues after them, and they
    count towards `max_tokens`. The response then holds only the new tokens: the caller kept the old ones."""
    prefix_id: str | None = None
    """Keep the KV blocks of this request's tokens (prompt and response) after it has finished, until `release` of this
    id or the next weight update: the following turn of the conversation then prefills only what is new."""
    key: str | None = None
    """What keys the draws instead of `request_id`, for requests that must have another id than usual."""

    streamed: bool = False
    """`progress` is asked about it: its tokens are copied to the host while it runs."""

    @property
    def draw_key(self) -> str:
        return self.request_id if self.key is None else self.key


@dataclass
class Response:
    """One finished sample. `log_probs` is aligned with `token_ids`; the end-of-sequence token is included."""

    request_id: str
    sample: int
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    policy_version: int = 0
    """Of the weights that drew the first token."""
    version_changes: list[tuple[int, int]] = field(default_factory=list)
    """(position in `token_ids`, version): from there on the weights were those of this version."""

    @property
    def versions(self) -> list[int]:
        """The version of the weights that drew each token."""
        starts = [(0, self.policy_version), *self.version_changes, (len(self.token_ids), 0)]
        return [version for (start, version), (end, _) in pairwise(starts) for _ in range(start, end)]


@dataclass
class RolloutStats:
    """A snapshot of an engine's work."""

    running: int = 0
    """Samples being generated."""
    waiting: int = 0
    """Samples submitted and not yet started."""
    kv_blocks_used: int = 0
    kv_blocks: int = 0
    generated_tokens: int = 0
    """Of responses returned since the engine was built."""
    drawn_tokens: int = 0
    """Since the engine was built, as far as it knows those of unfinished samples."""
    longest: int = 0
    """Tokens of the longest response being generated; 0 where that is not known."""
    prefilled_tokens: int = 0
    """Prompt tokens computed since the engine was built; those found in the KV cache do not count."""
    prompts: int = 0
    """Computed since the engine was built; samples that share one do not count, preempted ones do again."""
    prompt_passes: int = 0
    """Passes of the model with prompt tokens since the engine was built; 0 where that is not known."""
    preemptions: int = 0
    """Since the engine was built."""
    weight_sync: dict[str, float] = field(default_factory=dict)
    """Figures of the last weight update, under the names of the run's metrics."""


class RolloutEngine(ABC):
    """Generates from the policy's weights. Requests may be submitted while others run.

    `submit`, `abort`, `release` and `stats` may be called from any thread, the rest from one. Every sample of every
    request is answered exactly once; an error raised by `poll` drops all outstanding requests."""

    @abstractmethod
    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests. Raises `RolloutError`, and queues none of them, when one cannot be served."""

    @abstractmethod
    def poll(self, timeout_s: float | None = None) -> list[Response]:
        """Samples that finished since the last call. Drives an engine in this process.

        Waits for at least one, at most `timeout_s` seconds (None: no limit; 0: what is there, after at most one step).
        Empty when nothing is outstanding or the time is over."""

    @abstractmethod
    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End requests early (None: all); `poll` returns what they have with reason `abort`."""

    @abstractmethod
    def update_weights(self, source: WeightSource, version: int) -> None:
        """Take the weights of `source`, between two steps; tokens drawn from now on are of `version`.

        Samples may be running: they continue, with the keys and values they have or, with
        `rollout.recompute_kv_cache`, with new ones. No other request uses KV blocks of the old weights."""

    @abstractmethod
    def stats(self) -> RolloutStats:
        """Counts at this moment."""

    def progress(self, request_ids: Iterable[str]) -> list[Response]:
        """What unfinished samples of these requests, which are `streamed`, are known to have drawn, where the engine
        can tell. Asked by the thread that polls."""
        return []

    def release(self, prefix_ids: Iterable[str]) -> None:  # noqa: B027 (an engine may manage its cache by itself)
        """The KV blocks kept for these conversations may be reused."""

    def sleep(self) -> None:  # noqa: B027 (an engine may have nothing to do)
        """Free device memory until `wake`."""

    def wake(self) -> None:  # noqa: B027 (an engine may have nothing to do)
        """Allocate the memory again."""

    def close(self) -> None:  # noqa: B027 (an engine may have nothing to do)
        """Free everything; the engine cannot be used afterwards."""

    def generate(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Submit, then yield each sample as it finishes. Closing the iterator aborts the rest.

        For an engine with no other requests outstanding: `poll` would return their responses here."""
        requests = list(requests)
        stats = self.stats()
        if stats.running or stats.waiting:
            raise RolloutError(
                f"generate() needs an idle engine; {stats.running + stats.waiting} samples are outstanding. Use "
                "submit() and poll()"
            )
        self.submit(requests)
        responses = self._responses_to(requests)
        next(responses)  # up to its first yield, so that closing it before anything is read aborts, too
        return responses

    def _responses_to(self, requests: list[Request]) -> Iterator[Any]:
        missing = sum(request.n for request in requests)
        try:
            yield None
            while missing:
                responses = self.poll()
                if not responses:
                    raise RolloutError(f"{type(self).__name__} left {missing} samples unanswered")
                missing -= len(responses)
                yield from responses
        except GeneratorExit:
            with suppress(NotImplementedError):  # then they run to their end
                self.abort(request.request_id for request in requests)
            while self.poll():
                pass
            raise


class BatchEngine(RolloutEngine):
    """An engine that runs one batch of requests to its end at a time; requests submitted meanwhile wait."""

    version = 0
    _batch_lock = threading.RLock()
    _batch: Iterator[Response] | None = None
    _queued: tuple[Request, ...] = ()
    _aborted_queued: tuple[Request, ...] = ()
    _unanswered = 0
    """Samples of the running batch without a response."""
    _generated_tokens = 0
    _drawn_tokens = 0
    """Of an engine that counts them as they are drawn."""

    @abstractmethod
    def run_batch(self, requests: list[Request]) -> Iterator[Response]:
        """Yield each sample as it finishes."""

    def check(self, requests: list[Request]) -> None:
        """Raise `RolloutError` for a request that cannot be served."""

    def abort_batch(self, request_ids: list[str] | None) -> None:
        """End requests of the running batch early (None: all)."""
        raise NotImplementedError(f"{type(self).__name__} cannot abort requests")

    def submit(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        with self._batch_lock:
            self.check(requests)
            if self._batch is None:
                self._start_batch(requests)
            else:
                self._queued += tuple(requests)

    def _start_batch(self, requests: list[Request]) -> None:
        self._batch = iter(self.run_batch(requests))
        self._unanswered = sum(request.n for request in requests)

    def poll(self, timeout_s: float | None = None) -> list[Response]:
        """One response at a time; `timeout_s` cannot interrupt the batch."""
        while True:
            with self._batch_lock:
                aborted, self._aborted_queued = self._aborted_queued, ()
                batch = self._batch
            if aborted:
                return [
                    Response(r.request_id, sample, [], [], "abort", self.version)
                    for r in aborted
                    for sample in range(r.n)
                ]
            if batch is None:
                return []
            try:
                response = next(batch, None)
                if response is not None:
                    self._unanswered -= 1
                    self._generated_tokens += len(response.token_ids)
                    return [response]
                with self._batch_lock:
                    self._batch, self._unanswered = None, 0
                    queued, self._queued = self._queued, ()
                    if queued:
                        self._start_batch(list(queued))
            except BaseException:
                with self._batch_lock:
                    self._batch, self._queued, self._aborted_queued, self._unanswered = None, (), (), 0
                if batch is not None and hasattr(batch, "close"):
                    batch.close()
                raise

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        named = None if request_ids is None else list(request_ids)
        with self._batch_lock:
            aborted = [r for r in self._queued if named is None or r.request_id in named]
            self._queued = tuple(r for r in self._queued if r not in aborted)
            self._aborted_queued += tuple(aborted)
            if self._batch is not None:
                self.abort_batch(named)

    def stats(self) -> RolloutStats:
        with self._batch_lock:
            waiting = sum(request.n for request in (*self._queued, *self._aborted_queued))
            return RolloutStats(
                running=self._unanswered,
                waiting=waiting,
                generated_tokens=self._generated_tokens,
                drawn_tokens=self._drawn_tokens or self._generated_tokens,
            )


def check_requests(
    requests: Sequence[Request],
    vocab_size: int,
    tokenizer: Any | None,
    max_length: int | None = None,
    position_limit: tuple[int, str] | None = None,
) -> None:
    """Raise `RolloutError` for the first request that cannot be served.

    `max_length` is the most tokens (prompt and response) one sequence may have in this engine; `position_limit` is that
    of `verl.models.introspection`, for engines that cache keys."""
    for request in requests:
        problem = next(_problems(request, vocab_size, tokenizer, max_length), None)
        if problem is not None:
            raise RolloutError(f"request {request.request_id!r}: {problem}")
        length = len(request.prompt_ids) + request.sampling.max_tokens
        most, kind = position_limit or (math.inf, "")
        if length > most:
            raise RolloutError(
                f"a request may reach {length} tokens; beyond {most} the rotary embedding ({kind}) changes for cached "
                f"tokens; keep data.max_prompt_length + data.max_response_length within {most}, or use "
                "rollout.name=vllm"
            )


def _problems(
    request: Request, vocab_size: int, tokenizer: Any | None, max_length: int | None
) -> Iterator[str]:
    prompt, partial, sampling = request.prompt_ids, request.partial, request.sampling
    if len(prompt) == 0:
        yield "the prompt is empty"
    if request.n < 1:
        yield f"n is {request.n}; it must be at least 1 (rollout.n)"
    wrong = [token for ids in (prompt, *partial) for token in (min(ids, default=0), max(ids, default=0))]
    wrong = [token for token in wrong if not 0 <= token < vocab_size]
    if wrong:
        yield f"token id {wrong[0]} lies outside the vocabulary of {vocab_size}"
    if sampling.max_tokens < 1:
        yield f"max_tokens is {sampling.max_tokens}; it must be at least 1 (data.max_response_length)"
    if not (sampling.temperature >= 0 and math.isfinite(sampling.temperature)):
        yield f"temperature is {sampling.temperature}; it must be 0 (greedy) or a positive number"
    if not 0 < sampling.top_p <= 1:
        yield f"top_p is {sampling.top_p}; it must be above 0 and at most 1 (rollout.top_p)"
    if not 0 <= sampling.min_p <= 1:
        yield f"min_p is {sampling.min_p}; it must be between 0 and 1"
    if not (sampling.repetition_penalty > 0 and math.isfinite(sampling.repetition_penalty)):
        yield f"repetition_penalty is {sampling.repetition_penalty}; it must be a positive number"
    if "" in sampling.stop:
        yield "a stop string is empty; it would end every response at once"
    if sampling.stop and tokenizer is None:
        yield f"stop strings {list(sampling.stop)}, but the engine has no tokenizer; use stop_token_ids"
    if partial and len(partial) != request.n:
        yield f"partial has {len(partial)} samples but n is {request.n}; give one list per sample"
    longest = max(map(len, partial), default=0)
    if longest >= sampling.max_tokens:
        yield f"a partial has {longest} tokens already; max_tokens is {sampling.max_tokens}"
    length = len(prompt) + sampling.max_tokens
    if max_length is not None and length > max_length:
        yield (
            f"prompt and max_tokens may reach {length} tokens; the limit is {max_length} (data.max_prompt_length, "
            "data.max_response_length, rollout.max_model_len)"
        )


LIVE_S = 0.05
"""Between two updates while it generates: nothing to a step, and current to a reader."""


class LiveStats:
    """What one engine has written."""

    def __init__(self) -> None:
        self._written = 0.0
        self._before = RolloutStats()

    def write(self, stats: Callable[[], RolloutStats], *, now: bool = False) -> None:
        """After a step. `now`: also where the last update was a moment ago."""
        clock = time.monotonic()
        if not now and clock - self._written < LIVE_S:
            return
        self._written = clock
        new, old = stats(), self._before
        self._before = new
        live.set("sequences_running", new.running)
        live.set("sequences_waiting", new.waiting)
        live.set("longest_response_tokens", new.longest)
        if new.kv_blocks:
            live.set("kv_blocks", new.kv_blocks)
        live.set("kv_blocks_used", new.kv_blocks_used)
        # Differences: the counters of a process outlive its engines.
        live.add("generated_tokens_total", max(new.drawn_tokens - old.drawn_tokens, 0))
        live.add("prefilled_tokens_total", new.prefilled_tokens - old.prefilled_tokens)
        live.add("preemptions_total", new.preemptions - old.preemptions)
