"""Attention over cached pages on the CPU, as the context of the "verl" attention implementation.

The tokens of a step come in one row: first the chunks of prompts, then one token for each decoding sequence.
Every layer writes the new keys and values to their pages and then reads the pages: a chunk by itself, decoding
rows in segments of neighbouring pages with one call each. Query heads that share a key/value head are laid out
as several queries of that head, so keys are never repeated.

Shape suffixes: N tokens, H query heads, K key/value heads, G queries per key/value head, D head size,
R rows of a segment, L context length.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from verl.rollout.native.kv_cache import PageCache

_CALL_COST = 400
"""What one more call costs, in padded tokens that it must save to be worth it (measured)."""


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

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        keys, values = self.cache.layer(int(module.layer_idx), k, v)  # type: ignore[arg-type]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, self.slots_N, k[0].transpose(0, 1))
        values.view(-1, *values.shape[2:]).index_copy_(0, self.slots_N, v[0].transpose(0, 1))
        heads, kv_heads = q.shape[1], k.shape[1]
        q_NHD = q[0].transpose(0, 1)
        out_NHD = torch.empty(q.shape[2], heads, v.shape[3], dtype=q.dtype)
        for chunk in self.chunks:
            end = chunk.start + chunk.count
            span = slice(chunk.first, chunk.first + chunk.count)
            out_NHD[span] = self._chunk(
                q[:, :, span],
                keys[chunk.page, :end].transpose(0, 1)[None],
                values[chunk.page, :end].transpose(0, 1)[None],
                scaling,
                sliding_window,
                softcap,
            )[0].transpose(0, 1)
        for segment in self.segments:
            rows = slice(segment.first, segment.first + segment.rows)
            pages = slice(segment.page, segment.page + segment.rows)
            q_RKGD = q_NHD[rows].unflatten(1, (kv_heads, heads // kv_heads))
            k_RKLD = keys[pages, : segment.longest].transpose(1, 2)
            v_RKLD = values[pages, : segment.longest].transpose(1, 2)
            mask = self._decode_mask(segment, sliding_window, q.dtype)
            out = dot_product_attention(q_RKGD, k_RKLD, v_RKLD, mask, scaling, softcap)
            out_NHD[rows] = out.flatten(1, 2)
        return out_NHD[None]

    def _chunk(
        self,
        q_1HND: torch.Tensor,
        k_1KLD: torch.Tensor,
        v_1KLD: torch.Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        count, length = q_1HND.shape[2], k_1KLD.shape[2]
        if count == length and softcap is None and (window is None or window >= length):
            return F.scaled_dot_product_attention(
                q_1HND,
                k_1KLD,
                v_1KLD,
                is_causal=True,
                scale=scaling,
                enable_gqa=q_1HND.shape[1] != k_1KLD.shape[1],
            )
        behind_NL = torch.arange(length - count, length)[:, None] - torch.arange(length)
        seen_NL = behind_NL >= 0 if window is None else (behind_NL >= 0) & (behind_NL < window)
        mask = torch.zeros(count, length, dtype=q_1HND.dtype).masked_fill_(~seen_NL, float("-inf"))
        groups = q_1HND.shape[1] // k_1KLD.shape[1]
        if groups > 1:
            k_1KLD, v_1KLD = (x.repeat_interleave(groups, 1) for x in (k_1KLD, v_1KLD))
        return dot_product_attention(q_1HND, k_1KLD, v_1KLD, mask, scaling, softcap)

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


def dot_product_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """SDPA, or its plain form where scores are capped."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v
