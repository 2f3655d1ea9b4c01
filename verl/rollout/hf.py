"""The reference engine: batches of left-padded sequences through the Hugging Face module and its own cache.

Slow and plain on purpose: everything the native engine claims is compared with it. A batch runs until its last sequence
ends; rows that ended are dropped once they are half of the batch. The module is in evaluation mode with stock attention
while a batch runs, and as it was before afterwards.

Shape suffixes: B rows, L padded length, V vocabulary.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from verl.rollout.base import (
    BatchEngine,
    LiveStats,
    Request,
    Response,
    check_requests,
)
from verl.rollout.sampling import SamplingBatch, sample, seen_tokens
from verl.rollout.sequence import Sequence, Stopper, check_finite
from verl.rollout.source import ModuleEngine, generation_mode, verify

DEFAULT_BATCH = 256
"""Padded caches are large: more rows than this at a time are not worth their memory."""


def _sequences(requests: list[Request], version: int) -> list[Sequence]:
    return [Sequence(request, sample, version) for request in requests for sample in range(request.n)]


def _empty_cache(model: Any) -> Any:
    """transformers' cache: by the model's config where some layers keep more than keys and values, else plain (a
    config may name a sliding window that its layers do not use)."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=model.config)
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    return DynamicCache() if plain else cache


class _StepCall:
    """One forward pass with the arguments this model takes: some take no positions, some name their cache otherwise."""

    def __init__(self, model: Any, cache: Any) -> None:
        known = inspect.signature(model.forward).parameters
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        self.model = model
        self.takes_positions = "position_ids" in known or anything
        self.recurrent = "cache_params" in known
        self.fixed = {"use_cache": True, "cache_params" if self.recurrent else "past_key_values": cache}
        if "logits_to_keep" in known:
            self.fixed["logits_to_keep"] = 1

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        extra = {"position_ids": positions} if self.takes_positions else {}
        if self.recurrent and mask is not None and mask.shape[1] > ids.shape[1]:
            mask = None  # its mask is one of new tokens, and those of a decode step are never padding
        logits: torch.Tensor = self.model(input_ids=ids, attention_mask=mask, **extra, **self.fixed).logits
        return logits


class HFRollout(ModuleEngine, BatchEngine):
    """Generates with the trainer's module itself. `source` is a TrainEngine or a causal language model."""

    def __init__(self, source: Any, tokenizer: Any | None, config: Any | None = None) -> None:
        super().__init__(source, tokenizer)
        given = None if config is None else config.max_num_seqs
        self.batch_size = min(given or DEFAULT_BATCH, DEFAULT_BATCH)
        self._aborted: set[str] = set()
        self._abort_all = False
        self._live = LiveStats()
        self._known: weakref.ref[Any] | None = None
        """The model that was compared with its own forward."""

    def check(self, requests: list[Request]) -> None:
        if not self._unanswered:  # while a batch runs, what was read before it is still right
            self._read_model()
        check_requests(requests, self._vocab_size, self.tokenizer, position_limit=self._position_limit)

    def run_batch(self, requests: list[Request]) -> Iterator[Response]:
        self._aborted.clear()
        self._abort_all = False
        return self._generate(requests, self._stopper)

    def _generate(self, requests: list[Request], stopper: Stopper) -> Iterator[Response]:
        # Rows of like length together: less padding. Noise is keyed, so the order changes no token.
        rows = sorted(_sequences(requests, self.version), key=lambda row: row.length)
        for start in range(0, len(rows), self.batch_size):
            with self.source.module() as module, generation_mode(module, None) as model:
                self._require_equal(model)
                finished = self._run_batch(model, rows[start : start + self.batch_size], stopper)
            yield from finished
        self._live.write(self.stats, now=True)

    def _require_equal(self, model: Any) -> None:
        """Compare a model not met before with its own forward without a cache."""
        if self._known is None or self._known() is not model:
            stopper = Stopper(None, frozenset())
            verify(
                model,
                "hf",
                lambda requests: self._run_batch(model, _sequences(requests, self.version), stopper),
            )
            self._known = weakref.ref(model)

    @torch.no_grad()
    def _run_batch(self, model: Any, rows: list[Sequence], stopper: Stopper) -> list[Response]:
        device = model.get_input_embeddings().weight.device
        width = max(row.length for row in rows)
        input_ids_BL = torch.zeros(len(rows), width, dtype=torch.int64)
        mask_BL = torch.zeros(len(rows), width, dtype=torch.int64)
        for index, row in enumerate(rows):
            input_ids_BL[index, width - row.length :] = torch.tensor(row.tokens)
            mask_BL[index, width - row.length :] = 1
            row.set_version(self.version)
        input_ids_BL, mask_BL = input_ids_BL.to(device), mask_BL.to(device)
        history_BL = torch.where(mask_BL == 1, input_ids_BL, -1)
        positions_BL = (mask_BL.cumsum(-1) - 1).clamp_(min=0)
        settings = SamplingBatch.of([row.request.sampling for row in rows], [row.key for row in rows], device)
        produced_B = torch.tensor([row.produced for row in rows], device=device)
        cache = _empty_cache(model)
        call = _StepCall(model, cache)
        done: list[Response] = []
        alive: list[int | None] = list(range(len(rows)))
        while True:
            logits_BLV = call(input_ids_BL, mask_BL, positions_BL)
            seen_BV = seen_tokens(history_BL, logits_BLV.shape[-1]) if settings.kinds.penalty else None
            tokens_B, log_probs_B = sample(logits_BLV[:, -1], settings, produced_B, seen_BV)
            log_probs = log_probs_B.tolist()
            check_finite(log_probs)
            self._record(rows, alive, tokens_B.tolist(), log_probs, stopper, done)
            self._live.write(self.stats)
            kept = [index for index, row_index in enumerate(alive) if row_index is not None]
            if not kept:
                return done
            produced_B = produced_B + 1
            positions_BL = positions_BL[:, -1:] + 1
            mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(alive), 1)], dim=1)
            history_BL = torch.cat([history_BL, tokens_B[:, None]], dim=1)
            input_ids_BL = tokens_B[:, None]
            if len(kept) <= len(alive) // 2:
                rows_B = torch.tensor(kept, device=device)
                cache.reorder_cache(rows_B)  # also of layers that know no `batch_select_indices`
                settings, produced_B = settings.select(rows_B), produced_B[rows_B]
                input_ids_BL, mask_BL = input_ids_BL[rows_B], mask_BL[rows_B]
                positions_BL, history_BL = positions_BL[rows_B], history_BL[rows_B]
                alive = [alive[index] for index in kept]

    def _record(
        self,
        rows: list[Sequence],
        alive: list[int | None],
        tokens: list[int],
        log_probs: list[float],
        stopper: Stopper,
        done: list[Response],
    ) -> None:
        """Append the new tokens and end the rows that stop here (their entry in `alive` becomes None)."""
        for index, row_index in enumerate(alive):
            if row_index is None:
                continue
            row = rows[row_index]
            self._drawn_tokens += 1
            reason = row.extend([tokens[index]], [log_probs[index]], stopper)
            if reason is None and (self._abort_all or row.request.request_id in self._aborted):
                reason = "abort"
            if reason is not None:
                done.append(row.response(reason))
                alive[index] = None

    def abort_batch(self, request_ids: list[str] | None) -> None:
        if request_ids is None:
            self._abort_all = True
        else:
            self._aborted.update(request_ids)
