"""The native engine: continuous batching from the trainer's own weights, in the trainer's process.

`generate` is the whole of it: schedule, run, record, until nothing is left. The cache is sized for the requests
at hand, within the memory allowed.

What always holds: nothing cached outlives a `generate`, because the weights may have changed after it; the
module is put back as it was; a request that could never fit is refused before anything runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from verl.errors import RolloutError
from verl.rollout.base import Request, Response, RolloutEngine
from verl.rollout.native.block_manager import BlockManager
from verl.rollout.native.kv_cache import PageCache, free_host_memory, token_bytes
from verl.rollout.native.runner import CPURunner
from verl.rollout.native.scheduler import Scheduler
from verl.rollout.native.sequence import Sequence, sequences_of
from verl.rollout.requests import Stopper, check_finite, check_requests, eos_token_ids
from verl.rollout.source import causal_lm, generation_mode, whole_module

log = logging.getLogger(__name__)

GRANULE = 16


@dataclass(frozen=True)
class Limits:
    """The keys of the rollout section this engine lives within."""

    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.5
    enforce_eager: bool = False
    dtype: str = "auto"
    max_model_len: int | None = None
    cache_tokens: int | None = None
    """Size of the KV cache in tokens; None: from memory."""

    @staticmethod
    def of(config: Any | None) -> Limits:
        names = Limits.__dataclass_fields__
        return Limits(**{name: getattr(config, name) for name in names if hasattr(config, name)})


class NativeRollout(RolloutEngine):
    """Generates with the trainer's module itself. `source` is a TrainEngine or a causal language model."""

    def __init__(self, source: Any, tokenizer: Any | None, config: Any | None = None) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.limits = Limits.of(config)
        self.version = 0
        self.stats: dict[str, int] = {}
        self._aborted: set[str] = set()
        self._abort_all = False
        self._busy = False

    def generate(self, requests: Iterable[Request]) -> Iterator[Response]:
        requests = list(requests)
        if self._busy:
            raise RolloutError("this engine is generating already; finish or close that generate first")
        self._aborted.clear()
        self._abort_all = False
        with whole_module(self.source) as module:
            model = causal_lm(module)
            stopper = Stopper(self.tokenizer, eos_token_ids(model, self.tokenizer))
            vocab_size = int(model.get_input_embeddings().num_embeddings)
        stopper.check_stop_strings(requests)
        check_requests(requests, vocab_size, self.limits.max_model_len)
        return self._generate(requests, stopper)

    def _generate(self, requests: list[Request], stopper: Stopper) -> Iterator[Response]:
        if not requests:
            return
        self._busy = True
        try:
            with whole_module(self.source) as module, generation_mode(module, "verl") as model:
                yield from self._run(model, requests, stopper)
        finally:
            self._busy = False

    def _run(self, model: Any, requests: list[Request], stopper: Stopper) -> Iterator[Response]:
        scheduler, runner = self._build(model, requests)
        arrival = 0
        # Prompts of like length side by side: decoding rows then need little padding.
        for request in sorted(requests, key=lambda r: len(r.prompt_ids)):
            scheduler.add(sequences_of(request, arrival))
            arrival += request.n
        while not scheduler.idle:
            if self._abort_all or self._aborted:
                yield from self._end_aborted(scheduler)
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
                reason = stopper.reason(sequence.tokens, sequence.request.sampling, sequence.prompt_length)
                if reason is not None:
                    finished.append(sequence.response(reason, self.version))
                    ended.append(sequence)
            if ended:
                scheduler.finish_all(ended)
            yield from finished
        self.stats = {"preemptions": scheduler.preemptions}

    def _end_aborted(self, scheduler: Scheduler) -> list[Response]:
        """Take out what `abort` named and answer with what there is."""
        answers = []
        for sequence in scheduler.everything():
            if self._abort_all or sequence.request.request_id in self._aborted:
                sequence.siblings = []
                scheduler.finish(sequence)
                answers.append(sequence.response("abort", self.version))
        self._abort_all = False
        self._aborted.clear()
        return answers

    def _build(self, model: Any, requests: list[Request]) -> tuple[Scheduler, CPURunner]:
        longest = max(len(r.prompt_ids) + r.sampling.max_tokens for r in requests)
        page_size = -(-longest // GRANULE) * GRANULE
        wanted = min(sum(r.n for r in requests) + 1, self.limits.max_num_seqs + 1)
        dtype = model.get_input_embeddings().weight.dtype
        tokens = self.limits.cache_tokens
        if tokens is None:
            tokens = int(free_host_memory() * self.limits.gpu_memory_utilization) // token_bytes(model.config, dtype)
        pages = min(wanted, tokens // page_size)
        if pages < 1:
            raise RolloutError(
                f"the longest request may reach {longest} tokens; the KV cache has room for {tokens} "
                "(data.max_prompt_length, data.max_response_length, rollout.gpu_memory_utilization)"
            )
        blocks = BlockManager(pages, page_size, GRANULE)
        budget = max(self.limits.max_num_batched_tokens, 1)
        scheduler = Scheduler(
            blocks, min(self.limits.max_num_seqs, budget), budget, prefix_in_same_step=False
        )
        return scheduler, CPURunner(model, PageCache(pages, page_size))

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        if request_ids is None:
            self._abort_all = True
        else:
            self._aborted.update(request_ids)

    def update_weights(self, source: Any, version: int) -> None:
        """The weights are the trainer's own: only the version is new (and the source, when one is given)."""
        if source is not None:
            self.source = source
        self.version = version
