"""Attention by torch: its kernel for sequences of any lengths, and written out where it has capped scores or sinks.

A sink is a trained number of a query head. It is one more score of each of the head's queries, of a key without a
value: the output is sigmoid(lse - sink) times the one without it, where lse is the log-sum-exp of the scores that the
query sees. A kernel that returns its log-sum-exp needs no more than this gate.

Shapes: H query heads, N tokens of a pack, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

if TYPE_CHECKING:
    from verl.models.attention import AttentionCall, RaggedBounds


def written_attention(call: AttentionCall, mask: torch.Tensor | None) -> torch.Tensor:
    """q [..., heads, queries, D], k and v [..., heads, keys, D] to [..., heads, queries, D]; all scores are in memory.
    `mask` is added to them, or says which of them count. A head may hold the queries of several heads."""
    q, k, v, scaling, _, softcap, *_ = call
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return attention_weights(scores, call.sink).to(v.dtype) @ v


def attention_weights(scores: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Of [..., heads, queries, keys], at least in float32. `sink` [H]: heads times 1, or heads times queries."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sink is None:
        return torch.softmax(scores, dim=-1, dtype=wide)
    column = sink.to(wide).view(scores.shape[-3], -1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1, dtype=wide)[..., :-1]


def gated(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """[..., H, N, D] without sinks, its log-sum-exp [..., H, N] and `sink` [H] to the output with them."""
    gate = torch.sigmoid(lse - sink.to(lse.dtype)[:, None])
    return (out * gate.unsqueeze(-1)).to(out.dtype)


def varlen_attention(call: AttentionCall, bounds: RaggedBounds) -> torch.Tensor:
    """By torch's varlen kernel, whose signature has grown between releases: [N, H, D] each to [N, H, D]."""
    q, k, v, scaling, window, *_ = call
    cu_keys, longest_keys = bounds.key_side
    if call.sink is not None:
        rows = _Rows(bounds.queries, cu_keys, bounds.longest, longest_keys, scaling, window)
        return cast(torch.Tensor, _WithSinks.apply(q, k, v, call.sink, rows))
    from torch.nn.attention import varlen

    known = _parameters(varlen.varlen_attn)
    options: dict[str, Any] = {}
    if window is None and "is_causal" in known:
        options["is_causal"] = True
    elif "window_size" in known:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    else:
        raise RuntimeError("this torch has no sliding window in its varlen attention; use the flex backend")
    if scaling is not None and "scale" in known:
        options["scale"] = scaling
    elif scaling is not None:
        q = q * (scaling * q.shape[-1] ** 0.5)
    if q.shape[1] != k.shape[1] and "enable_gqa" in known:
        options["enable_gqa"] = True  # earlier releases group heads without being told
    out = varlen.varlen_attn(q, k, v, bounds.queries, cu_keys, bounds.longest, longest_keys, **options)
    return cast(torch.Tensor, out)


@lru_cache(maxsize=2)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


class _Rows(NamedTuple):
    """Where the sequences are, and what else the functions beneath torch's varlen attention are told."""

    queries: torch.Tensor
    keys: torch.Tensor
    longest: int
    longest_keys: int
    scale: float | None
    window: int | None

    @property
    def bounds(self) -> tuple[Any, ...]:
        """With no dropout, and whether the mask is causal without a window."""
        return (*self[:4], 0.0, self.window is None)

    @property
    def options(self) -> dict[str, Any]:
        left = -1 if self.window is None else self.window - 1
        return {"scale": self.scale, "window_size_left": left, "window_size_right": 0}


class _WithSinks(torch.autograd.Function):
    """The kernel's backward pass gets the gated output and a log-sum-exp that includes the sink: its weights,
    exp(score - lse), are then those of the softmax with the sink. (The autograd function of torch's varlen attention
    drops the gradient of the log-sum-exp: through a gate outside of it gradients would be wrong.)"""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor, rows: _Rows
    ) -> torch.Tensor:
        plain, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *rows.bounds, False, **rows.options
        )
        out = gated(plain.transpose(0, 1), lse, sink).transpose(0, 1).contiguous()
        ctx.rows, ctx.random = rows, (seed, offset)
        ctx.save_for_backward(q, k, v, sink, out, torch.logaddexp(lse, sink.to(lse.dtype)[:, None]))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sink, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        gradients = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, *ctx.rows.bounds, *ctx.random, **ctx.rows.options
        )
        weight = torch.exp(sink.to(lse.dtype)[:, None] - lse)  # [H, N]: of the sink in each softmax
        delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()
        return (*gradients, -(weight * delta).sum(1).to(sink.dtype), None)
