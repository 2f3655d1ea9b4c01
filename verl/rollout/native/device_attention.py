"""Attention contexts of the "verl" implementation over a device's cache: prompts, and decoding generic models.

Keys and values are written before they are read, so prompts of one step may share blocks; no call waits for the device.
The number of kernels a layer launches does not grow with the number of prompts.

Shapes: N tokens of the step, T cached tokens read by it, P prompts, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from verl.models.attention import (
    RAGGED,
    AttentionCall,
    Backend,
    PackedAttention,
    RaggedBounds,
    ragged_attention,
)
from verl.rollout.native.device_state import DeviceCache, as_bytes
from verl.rollout.native.ops import DecodeInputs, Ops, decode_slots, dot_product_attention
from verl.rollout.native.scheduler import Chunk

Send = Callable[[torch.Tensor], torch.Tensor]
"""Brings a tensor to the device without waiting for it."""


class PromptInputs(NamedTuple):
    """The tokens of a prompt pass, [N] each: ids, positions, cache slots; and the last one of each chunk, [P]."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    last: torch.Tensor


@dataclass
class PromptAttention:
    """Attention of chunks of prompts laid end to end. `context_slots` are the cache slots of all tokens they read, None
    when every chunk starts its sequence, so that the new keys are all there is to read."""

    ops: Ops
    cache: DeviceCache
    slots: torch.Tensor
    context_slots: torch.Tensor | None
    inner: PackedAttention | ContinuedAttention

    def __post_init__(self) -> None:
        size = self.cache.block_size
        slots = self.context_slots
        self._context = None if slots is None else (slots // size, slots % size)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Write the new keys and values, then read."""
        cache = self.cache.layers[call.layer]
        self.ops.write_cache(call.k[0].transpose(0, 1), call.v[0].transpose(0, 1), cache, self.slots)
        return self.read(call)

    def read(self, call: AttentionCall) -> torch.Tensor:
        """The attention; the new keys and values have been written."""
        if self._context is not None:
            block, offset = self._context
            cache = self.cache.layers[call.layer]
            found = [as_bytes(x)[block, :, offset].view(x.dtype).to(call.q.dtype) for x in cache]
            call = call.on(call.q, *(x.transpose(0, 1)[None] for x in found))
        return self.inner.attend(call)


def prompt_inputs(
    chunks: list[Chunk], ops: Ops, cache: DeviceCache, send: Send
) -> tuple[PromptInputs, PromptAttention]:
    """What a pass over these chunks reads; one copy brings it to the device."""
    size = cache.block_size
    ids: list[int] = []
    slots: list[np.ndarray] = []
    context: list[np.ndarray] = []
    for chunk in chunks:
        end = chunk.start + chunk.count
        ids += chunk.sequence.tokens[chunk.start : end]
        blocks = np.array(chunk.sequence.table[: -(-end // size)], dtype=np.int64)
        context.append((blocks[:, None] * size + np.arange(size)).ravel()[:end])
        slots.append(context[-1][chunk.start :])
    starts = np.array([chunk.start for chunk in chunks])
    counts = np.array([chunk.count for chunk in chunks])
    lengths, last = starts + counts, counts.cumsum() - 1
    positions = np.arange(len(ids)) - np.repeat(last + 1 - lengths, counts)
    arrays = [np.array(ids), positions, np.concatenate(slots), last, last + 1, lengths.cumsum()]
    continued = bool(starts.any())
    arrays.append(np.concatenate(context) if continued else np.zeros(0, dtype=np.int64))
    # Each starts at a multiple of 16 bytes: for other addresses Triton would compile its kernels again.
    sent = send(torch.from_numpy(np.concatenate([np.pad(array, (0, len(array) % 2)) for array in arrays])))
    parts = sent.split([len(array) + len(array) % 2 for array in arrays])
    *inputs, ends_q, ends_k, context_slots = (
        part[: len(array)] for part, array in zip(parts, arrays, strict=True)
    )
    cu_q, cu_k = F.pad(torch.stack([ends_q, ends_k]), (1, 0)).to(torch.int32)
    inner: PackedAttention | ContinuedAttention = PackedAttention(
        cu_q, tuple(counts.tolist()), by_shape=False
    )
    if continued:
        inner = ContinuedAttention(counts, lengths, send, (cu_q, cu_k))
    attention = PromptAttention(ops, cache, inputs[2], context_slots if continued else None, inner)
    return PromptInputs(*inputs), attention


_SCORES = 1 << 27
"""Scores of attention that are in memory at once where no kernel avoids it."""


class ContinuedAttention:
    """Attention of chunks whose sequences began earlier: the queries of chunk i are the last `counts[i]` of its
    `lengths[i]` tokens, its keys are all of them. What the layers share is computed by the first that needs it."""

    def __init__(
        self,
        counts: Seq[int] | np.ndarray,
        lengths: Seq[int] | np.ndarray,
        send: Send,
        bounds: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.counts, self.lengths = np.array(counts), np.array(lengths)
        self._send = send
        self._ends_q, self._ends_k = self.counts.cumsum(), self.lengths.cumsum()
        self._bounds = bounds
        self._ragged: RaggedBounds | None = None
        self._batches: list[_PaddedBatch] | None = None
        self._order_N: torch.Tensor | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        call = call.within(int(self.lengths.max()))
        backend = call.backend()
        return self.ragged(call, backend) if backend in RAGGED else self.padded(call)

    def ragged(self, call: AttentionCall, backend: Backend = "varlen") -> torch.Tensor:
        """One call of a flash kernel. Its causal mask is aligned to the end: the last query sees the last key."""
        if self._ragged is None:
            bounds = self._bounds
            if bounds is None:
                ends = np.stack([self._ends_q, self._ends_k]).astype(np.int32)
                cu_q, cu_k = self._send(torch.from_numpy(np.pad(ends, ((0, 0), (1, 0)))))
                bounds = cu_q, cu_k
            self._ragged = RaggedBounds(bounds[0], int(self.counts.max()), bounds[1], int(self.lengths.max()))
        return ragged_attention(backend, call, self._ragged)

    def padded(self, call: AttentionCall) -> torch.Tensor:
        """Dense attention over padded batches, where no flash kernel serves: float32, capped scores, no GPU."""
        if self._batches is None or self._order_N is None:
            self._batches, self._order_N = self._make_batches()
        parts = [batch.attend(call) for batch in self._batches]
        return torch.cat(parts).index_select(0, self._order_N)[None]

    def _make_batches(self) -> tuple[list[_PaddedBatch], torch.Tensor]:
        """Chunks whose counts have one power of two above them make a batch, so that padding at most doubles the
        queries. Also returns the index of each token in their concatenated outputs."""
        order = np.zeros(self._ends_q[-1], dtype=np.int64)
        batches, base = [], 0
        powers = np.array([int(count - 1).bit_length() for count in self.counts])
        for power in np.unique(powers):
            chunks = (powers == power).nonzero()[0]
            counts, lengths = self.counts[chunks, None], self.lengths[chunks, None]
            column_q, column_k = np.arange(counts.max()), np.arange(lengths.max())
            # A padded query repeats the last one of its chunk, a padded key lies behind every query.
            column = np.minimum(column_q, counts - 1)
            index_q = self._ends_q[chunks, None] - counts + column
            index_k = self._ends_k[chunks, None] - lengths + np.minimum(column_k, lengths - 1)
            order[index_q] = base + np.arange(len(chunks))[:, None] * len(column_q) + column
            base += index_q.size
            positions = lengths - counts + column
            q_PA, k_PB, positions_PA = (
                self._send(torch.from_numpy(x)) for x in (index_q, index_k, positions)
            )
            batches.append(_PaddedBatch(q_PA, k_PB, positions_PA))
        return batches, self._send(torch.from_numpy(order))


@dataclass
class _PaddedBatch:
    """P chunks as a batch of A queries and B keys each: where these are, and the queries' positions."""

    queries_PA: torch.Tensor
    keys_PB: torch.Tensor
    positions_PA: torch.Tensor
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """[P * A, H, D]."""
        (q, k, v), window = call[:3], call.window
        if window not in self._masks:
            key_positions = torch.arange(self.keys_PB.shape[1], device=q.device)
            behind_PAB = self.positions_PA[:, :, None] - key_positions
            seen_PAB = behind_PAB >= 0 if window is None else (behind_PAB >= 0) & (behind_PAB < window)
            mask = torch.zeros(seen_PAB.shape, dtype=q.dtype, device=q.device)
            self._masks[window] = mask.masked_fill_(~seen_PAB, float("-inf"))[:, None]
        groups = q.shape[1] // k.shape[1]
        q_PHAD = q[0][:, self.queries_PA].transpose(0, 1)
        k_PHBD, v_PHBD = (x[0][:, self.keys_PB].transpose(0, 1).repeat_interleave(groups, 1) for x in (k, v))
        # Scores that are capped or have sinks are written to memory: few chunks at a time keep them small.
        scores = q_PHAD[0, ..., 0].numel() * k_PHBD.shape[2]
        step = len(q_PHAD) if call.plain else max(_SCORES // scores, 1)
        split = [x.split(step) for x in (q_PHAD, k_PHBD, v_PHBD, self._masks[window])]
        parts = [
            dot_product_attention(call.on(part_q, part_k, part_v), mask)
            for part_q, part_k, part_v, mask in zip(*split, strict=True)
        ]
        return torch.cat(parts).transpose(1, 2).flatten(0, 1)


@dataclass
class DecodeAttention:
    """One token for each row, for models that run through their own module."""

    ops: Ops
    cache: DeviceCache
    inputs: DecodeInputs

    def __post_init__(self) -> None:
        self._slots = decode_slots(self.inputs, self.cache.block_size, self.cache.blocks + 1)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        cache, (q, k, v) = self.cache.layers[call.layer], call[:3]
        self.ops.write_cache(k[0].transpose(0, 1), v[0].transpose(0, 1), cache, self._slots)
        scale = q.shape[-1] ** -0.5 if call.scaling is None else call.scaling
        q_MHD = q[0].transpose(0, 1).contiguous()
        options = (scale, call.window, call.softcap)
        return self.ops.decode_attention(q_MHD, cache, self.inputs, *options, sink=call.sink)[None]
