"""Runs steps on the CPU: one pass of the module over prompt chunks and decoding rows together, then the sampler."""

from __future__ import annotations

from typing import Any

import torch

from verl.rollout.base import FinishReason, Stopper, check_finite
from verl.rollout.native.attention import ChunkSpan, PagedAttention, make_segments
from verl.rollout.native.backbone import Backbone
from verl.rollout.native.kv_cache import PageCache
from verl.rollout.native.scheduler import Scheduler, Step
from verl.rollout.native.sequence import Sequence
from verl.rollout.sampling import Kinds, SamplingBatch, sample, seen_tokens


class CPURunner:
    """One block is one page: `table[0]` is a sequence's page."""

    def __init__(self, model: Any, cache: PageCache, stopper: Stopper) -> None:
        self.backbone = Backbone(model)
        self.cache = cache
        self.stopper = stopper
        self._settings: tuple[list[Sequence], SamplingBatch] | None = None

    def configure(self, stopper: Stopper, kinds: Kinds) -> None:
        self.stopper = stopper

    def rebind(self, model: Any) -> None:
        """Continue with another module of the same architecture."""
        self.backbone = Backbone(model)

    def step(self, scheduler: Scheduler) -> list[tuple[Sequence, FinishReason]]:
        """One scheduling iteration; the sequences that finished, and why."""
        step = scheduler.schedule()
        scheduler.compact(step)
        samplers, tokens, log_probs = self.forward(step)
        check_finite(log_probs)
        scheduler.complete(step)
        ended: list[tuple[Sequence, FinishReason]] = []
        for sequence, token, log_prob in zip(samplers, tokens, log_probs, strict=True):
            sequence.tokens.append(token)
            sequence.log_probs.append(log_prob)
            newest = len(sequence.tokens) - 1
            end = self.stopper.end(sequence.tokens, newest, sequence.request.sampling, sequence.prompt_length)
            if end is not None:
                ended.append((sequence, end[1]))
        scheduler.finish_all([sequence for sequence, _ in ended])
        return ended

    def evict(self, sequences: list[Sequence]) -> list[tuple[Sequence, FinishReason]]:
        """Sequences leave. None has ended without `step` having returned it."""
        return []

    @torch.no_grad()
    def forward(self, step: Step) -> tuple[list[Sequence], list[int], list[float]]:
        """The sequences that drew a token, their tokens and log-probs."""
        if step.copies:
            self.cache.copy(step.copies)
        page_size = self.cache.page_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        samplers: list[Sequence] = []
        spans: list[ChunkSpan] = []
        for chunk in step.chunks:
            page, first, end = chunk.sequence.table[0], len(ids), chunk.start + chunk.count
            ids += chunk.sequence.tokens[chunk.start : end]
            positions += range(chunk.start, end)
            slots += range(page * page_size + chunk.start, page * page_size + end)
            spans.append(ChunkSpan(page, first, chunk.start, chunk.count))
            for sequence in chunk.samplers:
                rows.append(len(ids) - 1)
                samplers.append(sequence)
        decodes = sorted(step.decodes, key=lambda s: s.table[0])
        segments = make_segments([s.table[0] for s in decodes], [s.computed + 1 for s in decodes], len(ids))
        for sequence in decodes:
            rows.append(len(ids))
            ids.append(sequence.tokens[-1])
            positions.append(sequence.computed)
            slots.append(sequence.table[0] * page_size + sequence.computed)
        samplers += decodes
        context = PagedAttention(self.cache, torch.tensor(slots), spans, segments)
        hidden_ND = self.backbone.hidden(torch.tensor(ids), torch.tensor(positions), context)
        if not samplers:
            return [], [], []
        tokens_B, log_probs_B = self._draw(self.backbone.logits(hidden_ND[rows]), samplers)
        return samplers, tokens_B.tolist(), log_probs_B.tolist()

    def _draw(self, logits_BV: torch.Tensor, samplers: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
        if self._settings is None or self._settings[0] != samplers:
            params, keys = [s.request.sampling for s in samplers], [s.key for s in samplers]
            self._settings = (samplers, SamplingBatch.of(params, keys))
        settings = self._settings[1]
        seen_BV = None
        if settings.kinds.penalty:
            history_BL = torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(s.tokens) for s in samplers], batch_first=True, padding_value=-1
            )
            seen_BV = seen_tokens(history_BL, logits_BV.shape[1])
        return sample(logits_BV, settings, torch.tensor([s.produced for s in samplers]), seen_BV)
