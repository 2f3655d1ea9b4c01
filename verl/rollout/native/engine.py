"""The native engine: continuous batching from the trainer's own weights, in the trainer's process.

`generate` is the whole of it: schedule, run, record, until nothing is left. On the CPU every step is one pass of
the module over prompts and decoding rows together; on a device prompts run between bursts of decode steps, which
are replayed graphs (`device_runner`).

Nothing cached outlives a `generate`, because the weights may have changed after it; the
module is put back as it was; a request that could never fit is refused before anything runs.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from verl.errors import RolloutError
from verl.rollout.base import BatchEngine, FinishReason, Request, Response
from verl.rollout.native.backbone import check_positions
from verl.rollout.native.block_manager import BlockManager
from verl.rollout.native.device_runner import DeviceRunner
from verl.rollout.native.device_session import LOOKAHEAD, DeviceSession, open_session
from verl.rollout.native.kv_cache import CacheLayout, PageCache, cache_layout, free_host_memory
from verl.rollout.native.limits import Limits
from verl.rollout.native.runner import CPURunner
from verl.rollout.native.scheduler import Scheduler, Step
from verl.rollout.native.sequence import Sequence, sequences_of
from verl.rollout.requests import Stopper, check_finite, check_requests, eos_token_ids
from verl.rollout.sampling import Kinds
from verl.rollout.source import as_source, causal_lm, generation_mode
from verl.rollout.verify import verify

log = logging.getLogger(__name__)

HASH_BLOCK = 16

PROMPT_PASSES = 8
"""At most so many prompt passes run between two bursts of decode steps. While rows are free and prompts wait they
follow each other, since a decode step of a few rows takes nearly as long as one of many; running rows, and an abort,
wait for no more than these."""


class NativeRollout(BatchEngine):
    """Generates with the trainer's module itself. `source` is a TrainEngine or a causal language model.

    `on_device` chooses the path for devices; None: where the weights are on one. (It also runs on the CPU.) A model is
    compared with its own forward before it generates for the first time, unless `verify` is False."""

    def __init__(
        self,
        source: Any,
        tokenizer: Any | None,
        config: Any | None = None,
        on_device: bool | None = None,
        verify: bool = True,
    ) -> None:
        self.source = as_source(source)
        self.tokenizer = tokenizer
        self.limits = Limits.of(config)
        self.on_device = on_device
        self.version = 0
        self.last_run: dict[str, int] = {}
        """Of the last `generate`: preemptions."""
        self._verify = verify
        self._known: tuple[weakref.ref[Any], CacheLayout] | None = None
        """The model that was looked at last, and what its cache looks like."""
        self._session: DeviceSession | None = None
        self._graphs_refused: tuple[int, str] | None = None
        """The version at which a decode step could not be captured last, and why."""
        self._aborted: set[str] = set()
        self._abort_all = False
        self._abort_lock = threading.Lock()
        self._busy = False

    def run_batch(self, requests: list[Request]) -> Iterator[Response]:
        if self._busy:
            raise RolloutError("this engine is generating already; finish or close that generate first")
        self._aborted.clear()
        self._abort_all = False
        with self.source.module() as module:
            model = causal_lm(module)
            stopper = Stopper(self.tokenizer, eos_token_ids(model, self.tokenizer))
            vocab_size = int(model.get_input_embeddings().num_embeddings)
            self.limits.check_dtype(model.get_input_embeddings().weight.dtype)
        stopper.check_stop_strings(requests)
        check_requests(requests, vocab_size, self.limits.max_model_len)
        return self._generate(requests, stopper)

    def _generate(self, requests: list[Request], stopper: Stopper) -> Iterator[Response]:
        if not requests:
            return
        self._busy = True
        # Prompts of like length side by side: decoding rows then need little padding.
        requests = sorted(requests, key=lambda r: len(r.prompt_ids))
        try:
            with self.source.module() as module, generation_mode(module, "verl") as model:
                weight = model.get_input_embeddings().weight
                on_device = self.on_device
                if on_device is None:  # on the CPU only the device's path knows fp8, and emulates it
                    on_device = weight.device.type != "cpu" or self.limits.fp8
                check_positions(model, max(len(r.prompt_ids) + r.sampling.max_tokens for r in requests))
                layout = self._layout(model, on_device)
                run = self._run_on_device if on_device else self._run_on_cpu
                yield from run(model, layout, requests, stopper)
        finally:
            self._busy = False

    def _layout(self, model: Any, on_device: bool) -> CacheLayout:
        """The shape of the model's cache; a model not met before is compared with its own forward."""
        if self._known is None or self._known[0]() is not model:
            layout = cache_layout(model)
            if self._verify:
                verify(model, "native", lambda requests: _small_run(model, requests, on_device))
            self._known = (weakref.ref(model), layout)
        return self._known[1]

    def _queue(self, scheduler: Scheduler, requests: list[Request]) -> None:
        arrival = 0
        for request in requests:
            scheduler.add(sequences_of(request, arrival))
            arrival += request.n

    # On the CPU

    def _run_on_cpu(
        self, model: Any, layout: CacheLayout, requests: list[Request], stopper: Stopper
    ) -> Iterator[Response]:
        scheduler, runner = self._build_for_cpu(model, layout, requests)
        self._queue(scheduler, requests)
        while not scheduler.idle:
            if self._abort_all or self._aborted:
                yield from self._end(scheduler, self._named_by_abort(scheduler))
                continue
            step = scheduler.schedule()
            scheduler.compact(step)
            samplers, tokens, log_probs = runner.run(step)
            check_finite(log_probs)
            scheduler.complete(step)
            finished: list[Response] = []
            ended: list[Sequence] = []
            for sequence, token, log_prob in zip(samplers, tokens, log_probs, strict=True):
                sequence.tokens.append(token)
                sequence.log_probs.append(log_prob)
                newest = len(sequence.tokens) - 1
                end = stopper.end(sequence.tokens, newest, sequence.request.sampling, sequence.prompt_length)
                if end is not None:
                    finished.append(sequence.response(end[1], self.version))
                    ended.append(sequence)
            if ended:
                scheduler.finish_all(ended)
            yield from finished
        self.last_run = {"preemptions": scheduler.preemptions}

    def _build_for_cpu(
        self, model: Any, layout: CacheLayout, requests: list[Request]
    ) -> tuple[Scheduler, CPURunner]:
        longest = max(len(r.prompt_ids) + r.sampling.max_tokens for r in requests)
        page_size = -(-longest // HASH_BLOCK) * HASH_BLOCK
        wanted = min(sum(r.n for r in requests) + 1, self.limits.max_num_seqs + 1)
        tokens = self.limits.cache_tokens
        if tokens is None:
            share = int(free_host_memory() * self.limits.gpu_memory_utilization)
            tokens = share // layout.token_bytes
        pages = min(wanted, tokens // page_size)
        if pages < 1:
            raise RolloutError(
                f"the longest request may reach {longest} tokens; the KV cache has room for {tokens} "
                "(data.max_prompt_length, data.max_response_length, rollout.gpu_memory_utilization)"
            )
        budget = self.limits.max_num_batched_tokens
        scheduler = Scheduler(
            BlockManager(pages, page_size, HASH_BLOCK),
            min(self.limits.max_num_seqs, budget),
            budget,
            prefix_in_same_step=False,
        )
        return scheduler, CPURunner(model, PageCache(pages, page_size))

    # On a device

    def _run_on_device(
        self, model: Any, layout: CacheLayout, requests: list[Request], stopper: Stopper
    ) -> Iterator[Response]:
        kinds = Kinds.of([request.sampling for request in requests])
        limits = self.limits
        if self._graphs_refused is not None and self._graphs_refused[0] == self.version:
            limits = replace(limits, enforce_eager=True)
        last, self._session = self._session, None
        session = open_session(last, model, requests, limits, stopper, kinds, layout)
        yield from self._serve(session, requests)
        self._session = session

    def _serve(self, session: DeviceSession, requests: list[Request]) -> Iterator[Response]:
        scheduler, runner = session.scheduler(self.limits), session.runner
        self._queue(scheduler, requests)
        in_flight = 0
        while not scheduler.idle:
            if self._abort_all or self._aborted:
                named = self._named_by_abort(scheduler)
                ended = self._evict(scheduler, runner, named)
                done = {id(sequence) for sequence, _ in ended}
                aborted = self._end(scheduler, [s for s in named if id(s) not in done])
                yield from self._responses(ended)
                yield from aborted
                continue
            # Tokens of the steps in flight are not known yet; new steps and their blocks come on top of them.
            left = max((r.sequence.max_length - r.sequence.length for r in runner.rows), default=0)
            steps = max(min(LOOKAHEAD, left - in_flight), 0)
            step = scheduler.schedule(lookahead=max(in_flight + steps, 1))
            ended = self._make_room(scheduler, runner, step)
            if len(step.decodes) != len(runner.rows):
                raise RuntimeError(
                    f"{len(step.decodes)} sequences are to decode and the runner has {len(runner.rows)} rows: "
                    f"{scheduler!r}"
                )
            if step.decodes and steps:
                runner.decode(steps)
                self._note_refusal(runner)
            in_flight = steps if step.decodes else 0
            for _ in range(PROMPT_PASSES - 1):
                if not step.chunks or step.preempted:
                    break
                self._prefill(scheduler, runner, step)
                step = scheduler.schedule(lookahead=0)
                ended += self._make_room(scheduler, runner, step)
            self._prefill(scheduler, runner, step)
            finished_rows = runner.poll_finished()
            scheduler.finish_all([sequence for sequence, _ in finished_rows])
            yield from self._responses([*ended, *finished_rows])
        self.last_run = {"preemptions": scheduler.preemptions}

    def _note_refusal(self, runner: DeviceRunner) -> None:
        """A step that cannot be captured runs without graphs until the next weight update, when it is tried again: the
        cause may have been temporary. The same cause is logged once."""
        error = runner.graph_error
        if error is None:
            return
        if self._graphs_refused is None or self._graphs_refused[1] != error:
            log.warning(
                "%s cannot be captured as a CUDA graph, its decode steps run one by one and slower: %s",
                type(runner.backbone.model).__name__,
                error,
            )
        self._graphs_refused = (self.version, error)

    def _make_room(
        self, scheduler: Scheduler, runner: DeviceRunner, step: Step
    ) -> list[tuple[Sequence, FinishReason]]:
        """What comes before a step: preempted sequences leave the device, blocks are copied. Returns what had ended."""
        ended = self._evict(scheduler, runner, step.preempted)
        if step.copies:
            runner.cache.copy(step.copies)
        return ended

    def _prefill(self, scheduler: Scheduler, runner: DeviceRunner, step: Step) -> None:
        if step.chunks:
            runner.prefill(step.chunks)
        scheduler.complete(step)

    def _evict(
        self, scheduler: Scheduler, runner: DeviceRunner, sequences: list[Sequence]
    ) -> list[tuple[Sequence, FinishReason]]:
        """Preempted or aborted sequences leave the device. Those that turn out to have ended are finished."""
        ended = runner.evict(sequences)
        for sequence, _ in ended:
            scheduler.finish(sequence)
        return ended

    def _responses(self, ended: list[tuple[Sequence, FinishReason]]) -> Iterator[Response]:
        for sequence, reason in ended:
            check_finite(sequence.log_probs)
            yield sequence.response(reason, self.version)

    def _named_by_abort(self, scheduler: Scheduler) -> list[Sequence]:
        """What `abort` has named since the last call; another thread may name more at any time, for the next."""
        with self._abort_lock:
            everything, names = self._abort_all, self._aborted
            self._abort_all, self._aborted = False, set()
        return [s for s in scheduler.everything() if everything or s.request.request_id in names]

    def _end(self, scheduler: Scheduler, sequences: list[Sequence]) -> list[Response]:
        """Take them out and answer with what there is."""
        answers = []
        for sequence in sequences:
            sequence.siblings = []
            scheduler.finish(sequence)
            answers.append(sequence.response("abort", self.version))
        return answers

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        with self._abort_lock:
            if request_ids is None:
                self._abort_all = True
            else:
                self._aborted.update(request_ids)

    def update_weights(self, source: Any, version: int) -> None:
        """The weights are the trainer's own: only the version is new (and the source, when one is given)."""
        if source is not None:
            self.source = as_source(source)
        self.version = version

    def sleep(self) -> None:
        """Give the cache's memory back. Captured graphs stay, where the cache can come back to its address."""
        if self._session is not None and not self._session.cache.park():
            self._session = None

    def close(self) -> None:
        self._session = None


def _small_run(model: Any, requests: list[Request], on_device: bool) -> list[Response]:
    """What a small engine generates: prompts in chunks and with a shared beginning, then decode steps."""
    budget = max(len(request.prompt_ids) for request in requests) - 4
    limits = Limits(max_num_batched_tokens=max(budget, 4), cache_tokens=1024, enforce_eager=True)
    return list(NativeRollout(model, None, limits, on_device, verify=False).generate(requests))
