"""Sequence parallelism by attention heads (Ulysses): each rank has an equal part of a pack's tokens.

Only attention needs other tokens: an all-to-all gives every rank all tokens with a part of the heads, a second one
brings the result back. Both move data without arithmetic and never wait for the device.

Shapes: H query heads, K key/value heads, P ranks, n tokens of a rank, N = n * P tokens of the pack, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist

from verl.errors import ConfigError
from verl.models.attention import AttentionCall, AttentionContext

SIZE_KEY = "ulysses_sequence_parallel_size"


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that split each sequence."""

    group: Any
    """Their process group."""
    rank: int
    size: int
    gradient_scale: float
    """By how much each rank's gradients are multiplied, so that the engine's reduction over ranks sums them: `size`
    where it averages over the ranks of the group, 1 where it sums."""


def check_heads(heads: int, size: int) -> None:
    """Refuse a degree that does not divide the query heads."""
    if heads % size:
        allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ConfigError(
            f"{SIZE_KEY}={size} does not divide the {heads} attention heads of the model (on one tensor-parallel "
            f"rank); allowed: {allowed}"
        )


class _Exchange(torch.autograd.Function):
    """[P, ...] -> [P, ...]: block i goes to rank i, block j comes from rank j."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _all_to_all(grad, ctx.group), None


def _all_to_all(x: torch.Tensor, group: Any) -> torch.Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


class _SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sequence: SequenceGroup) -> torch.Tensor:
        ctx.scale = sequence.gradient_scale
        x = x.clone()
        dist.all_reduce(x, group=sequence.group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad * ctx.scale, None


def sum_over_group(x: torch.Tensor, sequence: SequenceGroup) -> torch.Tensor:
    """The sum of all ranks' x. Every rank computes the same loss from it, so that each has the gradient of its own x
    already."""
    return _SumOverGroup.apply(x, sequence)  # type: ignore[no-any-return]


class UlyssesAttention:
    """Attention over all tokens of a pack, for ranks that each have an equal part of them.

    (No dataclass, for the reason given in `PackedAttention`.)"""

    def __init__(self, whole: AttentionContext, sequence: SequenceGroup) -> None:
        self.whole, self.sequence = whole, sequence

    def attend(self, call: AttentionCall) -> torch.Tensor:
        q, k, v = call[:3]
        size = self.sequence.size
        check_heads(q.shape[1], size)
        # Query heads that share a key/value head and a rank, where groups of heads are cut at the ranks' borders: each
        # such run gets a copy of its key/value head, so that all ranks have equal groups.
        group = q.shape[1] // k.shape[1]
        copies = group // gcd(group, q.shape[1] // size)
        if copies > 1:
            k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
        if q.shape[-1] == v.shape[-1]:
            q, k, v = self._to_heads([q, k, v])
        else:
            (q, k), (v,) = self._to_heads([q, k]), self._to_heads([v])
        sink = None if call.sink is None else call.sink.chunk(size)[self.sequence.rank]
        out = self.whole.attend(call.on(q, k, v)._replace(sink=sink))
        parts = _Exchange.apply(out[0].unflatten(0, (size, -1)), self.sequence.group)  # [P, n, H/P, D]
        return parts.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def _to_heads(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[1, H, n, D] each -> [1, H/P, N, D] each, in one exchange. Blocks are laid out by tokens first: what arrives
        is then in the order of the pack."""
        size = self.sequence.size
        blocks = [x[0].unflatten(0, (size, -1)).transpose(1, 2) for x in tensors]  # [P, n, H/P, D]
        heads = [block.shape[2] for block in blocks]
        together = _Exchange.apply(torch.cat(blocks, dim=2), self.sequence.group).flatten(0, 1)
        return [x.transpose(0, 1).unsqueeze(0) for x in together.split(heads, dim=1)]
