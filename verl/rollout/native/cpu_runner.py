"""Runs steps on the CPU: one pass of the module over prompt chunks and decoding rows together, then the sampler.

A block of the KV cache is a page as long as the longest sequence: the pages of several rows then are one strided
tensor, and attention over them one call without gathering anything (about a third of the time of gathering blocks of
16). Pages cost memory only as far as they were written to.

The tokens of a step come in one row: first the chunks of prompts, then one token for each decoding sequence. Every
layer writes the new keys and values to their pages and then reads the pages: a chunk by itself, decoding rows in
segments of neighbouring pages with one call each. Query heads that share a key/value head are laid out as several
queries of that head, so keys are never repeated.

Shape suffixes: N tokens, H query heads, K key/value heads, G queries per key/value head, D head size,
R rows of a segment, L context length, B sequences that draw, V vocabulary, E features of a column.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl.errors import RolloutError
from verl.models.attention import AttentionCall, AttentionContext
from verl.rollout.base import FinishReason
from verl.rollout.native.block_manager import Copy
from verl.rollout.native.model import Backbone, FusedDecoder, PlainProducts
from verl.rollout.native.ops import dot_product_attention
from verl.rollout.native.scheduler import Scheduler, Step
from verl.rollout.sampling import Kinds, SamplingBatch, sample, seen_tokens
from verl.rollout.sequence import Sequence, Stopper, check_finite

_CALL_COST = 400
"""What one more call costs, in padded tokens that it must save to be worth it (measured)."""
_FEWEST_COLUMNS, _MOST_COLUMNS = 4, 64
"""Tokens of a `ColumnDecoder`; for fewer and for more the module's own products are as fast or faster."""


class PageCache:
    """Keys and values on the CPU: for each layer [pages, page_size, kv_heads, head_dim]."""

    def __init__(self, pages: int, page_size: int, heads_first: bool = False) -> None:
        """`heads_first`: in memory the tokens of a head are side by side."""
        self.pages = pages
        self.page_size = page_size
        self._heads_first = heads_first
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors of one layer, shaped after the first keys [1, K, N, D] and values it writes."""
        pair = self._layers.get(index)
        if pair is None:
            # Zeros, since unwritten slots are read behind the mask; the system commits pages when they are touched.
            pair = (self._zeros(key), self._zeros(value))
            self._layers[index] = pair
        if pair[0].shape[2:] != (key.shape[1], key.shape[3]) or pair[0].dtype != key.dtype:
            raise RolloutError(
                f"layer {index} wrote keys of shape {tuple(key.shape)} and type {key.dtype} into a cache of "
                f"{tuple(pair[0].shape)} and type {pair[0].dtype}; was the model changed while generating?"
            )
        return pair

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        pages, heads, size = self.pages, like.shape[1], like.shape[3]
        if self._heads_first:
            return torch.zeros(pages, heads, self.page_size, size, dtype=like.dtype).transpose(1, 2)
        return torch.zeros(pages, self.page_size, heads, size, dtype=like.dtype)

    def copy(self, copies: Seq[Copy]) -> None:
        for pair in self._layers.values():
            for tensor in pair:
                for copy in copies:
                    tensor[copy.target, : copy.tokens] = tensor[copy.source, : copy.tokens]


@dataclass
class ChunkSpan:
    """Tokens `first` to `first + count` of the step have positions `start`... of the sequence in `page`."""

    page: int
    first: int
    start: int
    count: int


@dataclass
class Segment:
    """Decoding rows whose pages follow each other: step tokens `first`..., contexts `lengths_R`."""

    page: int
    first: int
    lengths_R: torch.Tensor
    longest: int
    shortest: int

    @property
    def rows(self) -> int:
        return len(self.lengths_R)


def make_segments(pages: list[int], lengths: list[int], first: int) -> list[Segment]:
    """Cut rows (sorted by page) where pages do not follow each other, or where padding would cost more than a call."""
    segments: list[Segment] = []
    start = 0
    for index in range(1, len(pages) + 1):
        if index < len(pages) and pages[index] == pages[index - 1] + 1:
            longest = max(lengths[start:index])
            padding = abs(lengths[index] - longest) * (index - start if lengths[index] > longest else 1)
            if padding < _CALL_COST:
                continue
        rows = lengths[start:index]
        segments.append(Segment(pages[start], first + start, torch.tensor(rows), max(rows), min(rows)))
        start = index
    return segments


@dataclass
class PagedAttention:
    """The context of one step."""

    cache: PageCache
    slots_N: torch.Tensor
    chunks: list[ChunkSpan]
    segments: list[Segment]
    _masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        q, k, v = call[:3]
        keys, values = self.cache.layer(call.layer, k, v)
        if call.asked == "exact":
            return self._exact(call, keys, values)
        keys.view(-1, *keys.shape[2:]).index_copy_(0, self.slots_N, k[0].transpose(0, 1))
        values.view(-1, *values.shape[2:]).index_copy_(0, self.slots_N, v[0].transpose(0, 1))
        heads, kv_heads = q.shape[1], k.shape[1]
        q_NHD = q[0].transpose(0, 1)
        out_NHD = torch.empty(q.shape[2], heads, v.shape[3], dtype=q.dtype)
        for chunk in self.chunks:
            end = chunk.start + chunk.count
            span = slice(chunk.first, chunk.first + chunk.count)
            k_1KLD, v_1KLD = (x[chunk.page, :end].transpose(0, 1)[None] for x in (keys, values))
            out_NHD[span] = _chunk(call.on(q[:, :, span], k_1KLD, v_1KLD))[0].transpose(0, 1)
        for segment in self.segments:
            rows = slice(segment.first, segment.first + segment.rows)
            pages = slice(segment.page, segment.page + segment.rows)
            q_RKGD = q_NHD[rows].unflatten(1, (kv_heads, heads // kv_heads))
            k_RKLD, v_RKLD = (x[pages, : segment.longest].transpose(1, 2) for x in (keys, values))
            mask = self._decode_mask(segment, call.window, q.dtype)
            out = dot_product_attention(call.on(q_RKGD, k_RKLD, v_RKLD), mask)
            out_NHD[rows] = out.flatten(1, 2)
        return out_NHD[None]

    def _exact(self, call: AttentionCall, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """As the trainer computes it, whatever the chunks and segments are."""
        from verl.models.exact import KEYS, block_attention

        q, k, v = call[:3]
        at = self.slots_N // self.cache.page_size, self.slots_N % self.cache.page_size
        keys[at], values[at] = k[0].transpose(0, 1), v[0].transpose(0, 1)
        parts: list[torch.Tensor] = []

        def read(pages: slice, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
            width = -(-longest // KEYS) * KEYS
            return keys[pages, :width].transpose(1, 2), values[pages, :width].transpose(1, 2)

        for chunk in self.chunks:
            span, end = slice(chunk.first, chunk.first + chunk.count), chunk.start + chunk.count
            k_1KLD, v_1KLD = read(slice(chunk.page, chunk.page + 1), end)
            out_1HND = block_attention(call.on(q[:, :, span], k_1KLD, v_1KLD), end)
            parts.append(out_1HND[0].transpose(0, 1))
        for segment in self.segments:
            q_RH1D = q[0, :, segment.first : segment.first + segment.rows].transpose(0, 1)[:, :, None]
            k_RKLD, v_RKLD = read(slice(segment.page, segment.page + segment.rows), segment.longest)
            parts.append(block_attention(call.on(q_RH1D, k_RKLD, v_RKLD), segment.lengths_R)[:, :, 0])
        return torch.cat(parts)[None]

    def _decode_mask(self, segment: Segment, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """[R, 1, 1, L], or None where every row sees the whole width. The same for all layers of a step."""
        key = (segment.first, window)
        if key not in self._masks:
            if segment.shortest == segment.longest and (window is None or window >= segment.longest):
                self._masks[key] = None
            else:
                position = torch.arange(segment.longest)
                lengths_R1 = segment.lengths_R[:, None]
                hidden = position >= lengths_R1
                if window is not None:
                    hidden |= position < lengths_R1 - window
                mask = torch.zeros(segment.rows, segment.longest, dtype=dtype)
                self._masks[key] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[key]


def _chunk(call: AttentionCall) -> torch.Tensor:
    """The last tokens of one sequence, with all of its keys."""
    q_1HND, k_1KLD, v_1KLD, scaling, window, *_ = call
    count, length, groups = q_1HND.shape[2], k_1KLD.shape[2], q_1HND.shape[1] // k_1KLD.shape[1]
    if count == length and call.plain and (window is None or window >= length):
        return F.scaled_dot_product_attention(
            q_1HND, k_1KLD, v_1KLD, is_causal=True, scale=scaling, enable_gqa=groups > 1
        )
    behind_NL = torch.arange(length - count, length)[:, None] - torch.arange(length)
    seen_NL = behind_NL >= 0 if window is None else (behind_NL >= 0) & (behind_NL < window)
    mask = torch.zeros(count, length, dtype=q_1HND.dtype).masked_fill_(~seen_NL, float("-inf"))
    if groups > 1:
        k_1KLD, v_1KLD = (x.repeat_interleave(groups, 1) for x in (k_1KLD, v_1KLD))
    return dot_product_attention(call.on(q_1HND, k_1KLD, v_1KLD), mask)


def _product(layer: nn.Linear, x_EN: torch.Tensor) -> torch.Tensor:
    if layer.bias is None:
        return torch.mm(layer.weight, x_EN)
    return torch.addmm(layer.bias[:, None], layer.weight, x_EN)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, dim: int) -> torch.Tensor:
    # Summed over neighbours in memory, as the modules do it: in another order results would differ in the last bits.
    scale = torch.rsqrt(x.movedim(dim, -1).contiguous().square().mean(-1).add_(eps))
    return (x * scale.unsqueeze(dim)).mul_(weight[:, None])


def _turned(x_HDN: torch.Tensor, cos_DN: torch.Tensor, sin_DN: torch.Tensor) -> torch.Tensor:
    first, second = x_HDN.chunk(2, dim=1)
    return (x_HDN * cos_DN).add_(torch.cat([-second, first], dim=1).mul_(sin_DN))


class ColumnDecoder:
    """The layers of the Llama family over few tokens, with one column for each token. Built by `match`; positions are
    below the `max_length` given there.

    A weight [out, in] times columns [in, N] is the form in which the CPU's library multiplies few tokens fastest, and
    its result is the next product's input. A column is the same whatever the others are, and the same as the modules'
    row where they have 16 tokens or more. No weight is copied."""

    def __init__(self, decoder: FusedDecoder) -> None:
        self._decoder = decoder

    @staticmethod
    def match(model: nn.Module, max_length: int) -> ColumnDecoder | None:
        """None where the layers are not exactly the known ones, or not float32."""
        if any(param.dtype != torch.float32 for param in model.parameters()):
            return None
        decoder = FusedDecoder.match(model, max_length)
        return None if decoder is None else ColumnDecoder(decoder)

    def hidden(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """As `Backbone.hidden`: ids and positions [N] -> [N, E]."""
        decoder, eps = self._decoder, self._decoder.eps
        cos_DN, sin_DN = (angles[position_ids].t().contiguous() for angles in decoder.rope)
        size = len(cos_DN)
        x_EN = F.embedding(input_ids, decoder.model.get_input_embeddings().weight).t().contiguous()
        for index, layer in enumerate(decoder.layers):
            products = layer.products
            assert isinstance(products, PlainProducts)
            normed_EN = _normed(x_EN, layer.input_norm, eps, 0)
            q_HDN, k_HDN, v_HDN = (
                _product(linear, normed_EN).unflatten(0, (-1, size))
                for linear in (products.q, products.k, products.v)
            )
            if layer.norms is not None:
                q_HDN = _normed(q_HDN, layer.norms[0], layer.norms[2], 1)
                k_HDN = _normed(k_HDN, layer.norms[1], layer.norms[2], 1)
            q_HDN, k_HDN = _turned(q_HDN, cos_DN, sin_DN), _turned(k_HDN, cos_DN, sin_DN)
            q, k, v = (x.permute(2, 0, 1).contiguous().transpose(0, 1)[None] for x in (q_HDN, k_HDN, v_HDN))
            mixed = context.attend(AttentionCall(q, k, v, layer.scale, layer.window, None, index))
            x_EN = x_EN + _product(products.out, mixed[0].flatten(1).t().contiguous())
            normed_EN = _normed(x_EN, layer.output_norm, eps, 0)
            gate_EN = F.silu(_product(products.gate, normed_EN), inplace=True)
            x_EN += _product(products.down, gate_EN.mul_(_product(products.up, normed_EN)))
        return _normed(x_EN, decoder.backbone.norm.weight, eps, 0).t().contiguous()


class CPURunner:
    """One block is one page: `table[0]` is a sequence's page."""

    def __init__(self, model: Any, cache: PageCache, stopper: Stopper) -> None:
        self.cache = cache
        self.rebind(model)
        self.stopper = stopper
        self._settings: tuple[list[Sequence], SamplingBatch] | None = None
        self._drawn: tuple[list[Sequence], list[int], list[float]] = ([], [], [])

    def configure(self, stopper: Stopper, kinds: Kinds) -> None:
        self.stopper = stopper

    def rebind(self, model: Any) -> None:
        """Continue with another module of the same architecture."""
        self.backbone = Backbone(model)
        self.columns = None
        if not self.backbone.exact:
            self.columns = ColumnDecoder.match(model, self.cache.page_size)

    def schedule(self, scheduler: Scheduler) -> Step:
        """What to compute now; running rows are adjacent in memory."""
        step = scheduler.schedule()
        scheduler.compact(step)
        return step

    def finished(self, scheduler: Scheduler) -> list[tuple[Sequence, FinishReason]]:
        """The sequences that ended with the tokens of the last pass, and why."""
        scheduler.stats.drawn_tokens += len(self._drawn[0])
        ended: list[tuple[Sequence, FinishReason]] = []
        for sequence, token, log_prob in zip(*self._drawn, strict=True):
            reason = sequence.extend([token], [log_prob], self.stopper)
            if reason is not None:
                ended.append((sequence, reason))
        scheduler.finish_all([sequence for sequence, _ in ended])
        return ended

    def evict(self, sequences: list[Sequence]) -> list[tuple[Sequence, FinishReason]]:
        """Sequences leave. None has ended without `step` having returned it."""
        return []

    def settle(self) -> list[tuple[Sequence, FinishReason]]:
        """Lengths are always exact here."""
        return []

    @torch.no_grad()
    def run(self, scheduler: Scheduler, step: Step) -> None:
        """One pass, and a token for each sequence that draws."""
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
            rows += [len(ids) - 1] * len(chunk.samplers)
            samplers += chunk.samplers
        decodes = sorted(step.decodes, key=lambda s: s.table[0])
        segments = make_segments([s.table[0] for s in decodes], [s.computed + 1 for s in decodes], len(ids))
        for sequence in decodes:
            rows.append(len(ids))
            ids.append(sequence.tokens[-1])
            positions.append(sequence.computed)
            slots.append(sequence.table[0] * page_size + sequence.computed)
        samplers += decodes
        ends_BD: list[torch.Tensor] = []
        if ids:
            context = PagedAttention(self.cache, torch.tensor(slots), spans, segments)
            few = _FEWEST_COLUMNS <= len(ids) <= _MOST_COLUMNS
            layers = self.columns if few and self.columns is not None else self.backbone
            hidden_ND = layers.hidden(torch.tensor(ids), torch.tensor(positions), context)
            ends_BD.append(hidden_ND[rows])
            for chunk, span in zip(step.chunks, spans, strict=True):
                if chunk.kept:
                    chunk.sequence.prompt_state = hidden_ND[span.first + span.count - 1].clone()
        for start in step.starts:
            ends_BD.append(start.prompt.prompt_state.expand(len(start.samplers), -1))
            samplers += start.samplers
        self._drawn = ([], [], [])
        if samplers:
            raw_BV = self.backbone.raw_logits(torch.cat(ends_BD))
            tokens_B, log_probs_B = self._draw(self.backbone.bent(raw_BV), samplers)
            if self.backbone.exact:
                temperatures = [s.request.sampling.log_prob_temperature for s in samplers]
                log_probs_B = self.backbone.exact_log_probs(raw_BV, tokens_B, temperatures)
            self._drawn = (samplers, tokens_B.tolist(), log_probs_B.tolist())
        check_finite(self._drawn[2])
        scheduler.complete(step)

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
