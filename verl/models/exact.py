"""Exact mode: the same bits for the same tokens and weights, in every pass of trainer and native engine.

A row of a product, a norm or an attention must not depend on the other rows of the call. On a CPU all but three kinds
of operations have this property already: the library's matrix products choose their kernel by the number of rows,
attention its blocks by the numbers of queries and keys, and some functions (`_BY_ELEMENT`) compute the last elements of
a tensor in another way than the others. `ExactArithmetic` replaces these while a model that `use_exact` was called
for runs:

- a product has 16 rows or more, padded with zeros, in calls of a few fixed sizes. Which sizes agree is tried once for
  each shape of weight (`row_counts`); what cannot be shown to agree is not used.
- attention goes over blocks of 64 keys, in the order of their positions (`block_attention`).
- the output layer has slices of a fixed width (`COLUMNS`), and one function takes the log-probs from them.

Backward passes are the ordinary ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from verl.errors import ModelError
from verl.models.attention import DENSE, AttentionCall, dense_attention, set_backend
from verl.models.fused_linear import HeadOptions, RowStatistics
from verl.models.introspection import checkpoint_contexts

KEY = "trainer.exact"
COLUMNS = 4096
"""Of the logits, in a slice of the output layer."""
KEYS = 64
"""Of a block of attention."""
ROWS = 16
"""From this number of rows on the library's kernels compute a row alike, and so do those of several heads together."""
FEW_ROWS = 8
"""The same for the products of attention, which are short sums."""
_COUNTS = (256, 192, 128, 96, 64, 48, 32, ROWS)
_LANES = 32
"""Elements that a vectorised loop takes at once, at most."""
_GRAIN = 32768
"""Elements from which on several threads share a loop."""
_BY_ELEMENT = {F.silu, F.gelu, F.sigmoid, torch.sigmoid, Tensor.sigmoid, F.softplus}


def use_exact(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Passes of the model, packed and generating ones, are exact from now on."""
    if device.type != "cpu" or dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        raise ModelError(
            f"{KEY}=True computes in float32 on CPUs, not in {name} on {device.type}; set it to False, or "
            "trainer.device=cpu and actor_rollout_ref.model.dtype=float32"
        )
    set_backend(model, "exact")
    model.verl_exact = True  # type: ignore[assignment]


def recomputed_exactly() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of torch's gradient checkpointing for an exact model."""
    first, again = checkpoint_contexts()
    return first, _exactly(again)


@contextmanager
def _exactly(context: AbstractContextManager[None]) -> Iterator[None]:
    with context, ExactArithmetic():
        yield


def exact_head(options: HeadOptions | None) -> HeadOptions:
    return replace(options or HeadOptions(), columns=COLUMNS)


class ExactArithmetic(TorchFunctionMode):
    """Around the forward pass of an exact model: replaces products of rows with a matrix, and functions whose last
    elements differ."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BY_ELEMENT:
            return _by_element(func, *args, **kwargs)
        replacement = _PRODUCTS.get(func)
        if replacement is not None:
            found = replacement(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)


def _by_element(func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """With as many elements as are whole vectors for every thread: those left over are computed differently."""
    kwargs.pop("inplace", None)
    chunks = min(torch.get_num_threads(), -(-x.numel() // _GRAIN)) or 1
    missing = -x.numel() % (_LANES * chunks)
    if not missing and x.is_contiguous():
        return func(x, *args, **kwargs)
    return func(F.pad(x.flatten(), (0, missing)), *args, **kwargs)[: x.numel()].view(x.shape)


# -- products ---------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K], weight [N, K] -> [..., N]."""
    if torch.is_grad_enabled():
        out = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    else:
        out = _rows(x.reshape(-1, x.shape[-1]), weight, bias)
    return out.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _rows(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            grad @ weight if wanted[0] else None,
            grad.t() @ x if wanted[1] else None,
            grad.sum(0) if wanted[2] else None,
        )


def _rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    outer, inner = weight.shape
    counts = row_counts(inner, outer, bias is not None, torch.get_num_threads())
    rows, missing = x.shape[0], -x.shape[0] % ROWS
    x = F.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
    if rows + missing in counts:
        out = F.linear(x, weight, bias)
        return out[:rows] if missing else out
    out, start = x.new_empty(rows + missing, outer), 0
    while start < rows + missing:
        count = next(count for count in counts if count <= rows + missing - start)
        out[start : start + count] = F.linear(x[start : start + count], weight, bias)
        start += count
    return out[:rows]


@lru_cache(maxsize=1024)
def row_counts(inner: int, outer: int, has_bias: bool, threads: int) -> tuple[int, ...]:
    """The numbers of rows, the largest first, for which a product with a weight [outer, inner] has the same bits in
    every row. (The cost of trying them is about that of a thousand rows.)"""
    generator = torch.Generator().manual_seed(0)
    most = max(_COUNTS)
    x = torch.randn(most, inner, generator=generator)
    weight = torch.randn(outer, inner, generator=generator)
    bias = torch.randn(outer, generator=generator) if has_bias else None

    def product(rows: Tensor, count: int) -> Tensor:
        return torch.cat([F.linear(part, weight, bias) for part in rows.split(count)])

    with torch.no_grad():
        expected = product(x, ROWS)
        if not torch.equal(product(x.roll(ROWS // 2 + 1, 0), ROWS).roll(-ROWS // 2 - 1, 0), expected):
            raise ModelError(
                f"{KEY}=True: this machine's library computes a product of {ROWS} rows with a weight of "
                f"{outer} x {inner} differently from place to place ({threads} threads); try OMP_NUM_THREADS=1, or set "
                f"{KEY}=False"
            )
        return tuple(
            count
            for count in _COUNTS
            if torch.equal(product(x[: most // count * count], count), expected[: most // count * count])
        )


def _matmul(x: Any, other: Any, *, out: Any = None) -> Tensor | None:
    """None where it is no product of rows with a matrix: of batches, with the position of each token."""
    if out is not None or x.ndim < 2 or other.ndim != 2 or x.dtype != torch.float32:
        return None
    return linear(x, other.t())


def _f_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    return linear(input, weight, bias) if input.dtype == torch.float32 else None


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return input * beta + linear(mat1, mat2.t()) * alpha


def _grouped_mm(x: Tensor, weight: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
    """Rows up to offs[0] times weight[0] and so forth; what lies behind the last is zero."""
    parts, start = [], 0
    for expert, end in enumerate(offs.tolist()):
        if end > start:
            parts.append(linear(x[start:end], weight[expert].t()))
        start = end
    if start < len(x):
        parts.append(x.new_zeros(len(x) - start, weight.shape[2]))
    return torch.cat(parts)


_PRODUCTS: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _f_linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    **dict.fromkeys(
        (f for f in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if f), _grouped_mm
    ),
}


# -- attention --------------------------------------------------------------------------------------------------


def exact_attention(call: AttentionCall) -> Tensor:
    """Causal attention of [rows, H, L, D] in which the last query sees the last key."""
    if torch.is_grad_enabled():
        return _Attention.apply(*call[:3], call.sink, call)  # type: ignore[no-any-return]
    return _attention(call)


DENSE["exact"] = exact_attention


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: AttentionCall
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, *([] if sink is None else [sink]))
        ctx.call = call._replace(asked="auto")
        return _attention(call)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            q, k, v, *sink = inputs
            out = dense_attention(ctx.call.on(q, k, v)._replace(sink=sink[0] if sink else None))
        found = torch.autograd.grad(out, inputs, grad)
        return (*found, None) if sink else (*found, None, None)


def _attention(call: AttentionCall) -> Tensor:
    keys = call.k.shape[2]
    k, v = (F.pad(x, (0, 0, 0, -keys % KEYS)) for x in (call.k, call.v))
    return block_attention(call.on(call.q, k, v), keys)


def block_attention(call: AttentionCall, lengths: int | Tensor) -> Tensor:
    """q [B,H,L,D], k and v [B,K,P,D], whose P is a multiple of `KEYS`, to [B,H,L,D]. The last query of row b is the
    last of its `lengths` keys (one number for all, or of one query each a tensor [B]); what lies behind those is finite
    and counts for nothing.

    A running maximum is taken out of the scores. A block of which a query sees nothing changes none of its sums, so
    that it makes no difference which other queries want it."""
    with torch._C.DisableTorchFunction():  # none of it needs replacing
        return _blocks(call, lengths)


def _blocks(call: AttentionCall, lengths: int | Tensor) -> Tensor:
    q, k, v, scaling, window, softcap, *_ = call
    batch, heads, queries, size = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    scale = size**-0.5 if scaling is None else scaling
    shortest, longest = (lengths, lengths) if isinstance(lengths, int) else _bounds(lengths)
    unit = FEW_ROWS if max(size, v.shape[3]) <= 2 * KEYS else ROWS
    # Queries of one key head, position by position, so that those of the first positions can be left out.
    rows = (q * scale).unflatten(1, (kv_heads, groups)).transpose(2, 3)
    rows = rows.reshape(batch * kv_heads, queries * groups, size)
    rows = F.pad(rows, (0, 0, 0, -rows.shape[1] % unit))
    count = rows.shape[1]
    total = top = out = rows.new_empty(0)
    first = 0 if window is None else max(shortest - queries - window + 1, 0) // KEYS * KEYS
    for start in range(first, longest, KEYS):
        # The queries that see any of these keys, from a multiple of `unit` on; of the first block all.
        skipped = 0 if isinstance(lengths, Tensor) else max(start - lengths + queries, 0) * groups
        seeing = slice(skipped // unit * unit, count)
        block = slice(start, start + KEYS)
        k_block, v_block = (x[:, :, block].reshape(batch * kv_heads, KEYS, -1) for x in (k, v))
        scores = torch.bmm(rows[:, seeing], k_block.transpose(1, 2))
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        every = start + KEYS <= shortest - queries + 1 and (window is None or longest - start <= window)
        if not every:
            hidden = _hidden(lengths, queries, start, window)
            if isinstance(lengths, int):
                hidden = F.pad(hidden.repeat_interleave(groups, 0), (0, 0, 0, count - queries * groups))[
                    seeing
                ]
                scores.masked_fill_(hidden, float("-inf"))
            else:
                scores.view(batch, -1, KEYS).masked_fill_(hidden, float("-inf"))
        peak = scores.amax(-1, keepdim=True)
        if start == first:
            top = peak.clamp_(min=-1e30)  # a query may see nothing of a window's first block
            weights = scores.sub_(top).exp_()
            total, out = weights.sum(-1, keepdim=True), torch.bmm(weights, v_block)
            continue
        before = top[:, seeing]
        now = torch.maximum(before, peak)
        weights, shrink = scores.sub_(now).exp_(), (before - now).exp_()
        total[:, seeing].mul_(shrink).add_(weights.sum(-1, keepdim=True))
        out[:, seeing].mul_(shrink).add_(torch.bmm(weights, v_block))
        top[:, seeing] = now
    if call.sink is not None:
        sink = call.sink.view(kv_heads, 1, groups).expand(batch, kv_heads, queries, groups)
        sink = F.pad(sink.reshape(batch * kv_heads, -1, 1), (0, 0, 0, count - queries * groups))
        total = total + (sink - top).exp_()
    out = (out / total)[:, : queries * groups].unflatten(0, (batch, kv_heads)).unflatten(2, (queries, groups))
    return out.transpose(2, 3).flatten(1, 2)


def _bounds(lengths: Tensor) -> tuple[int, int]:
    return int(lengths.min()), int(lengths.max())


def _hidden(lengths: int | Tensor, queries: int, start: int, window: int | None) -> Tensor:
    """[queries, KEYS], or [B, 1, KEYS] for one query each: which keys from `start` on are not seen."""
    keys = torch.arange(start, start + KEYS)
    if isinstance(lengths, Tensor):
        behind = (lengths - 1)[:, None, None] - keys
    else:
        behind = torch.arange(lengths - queries, lengths)[:, None] - keys
    return behind < 0 if window is None else (behind < 0) | (behind >= window)


# -- output layer -----------------------------------------------------------------------------------------------


def raw_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[M, V], each slice of columns as `fused_head` computes it."""
    parts = []
    for first in range(0, len(weight), COLUMNS):
        part = slice(first, first + COLUMNS)
        product = linear(hidden, weight[part])
        parts.append(product if bias is None else product.add_(bias[part]))
    return torch.cat(parts, dim=1)


def log_probs_of(
    raw: Tensor, tokens: Tensor, temperatures: Sequence[float], softcap: float | None, scale: float
) -> Tensor:
    """[M] log-probs of tokens from `raw_logits`, each row at its temperature: what `fused_head` returns."""
    found = raw.new_empty(len(raw))
    for temperature in set(temperatures):
        rows = torch.tensor([at for at, each in enumerate(temperatures) if each == temperature])
        options = HeadOptions(temperature, softcap, scale)
        x, targets = raw[rows], tokens[rows]
        statistics = RowStatistics(len(rows), x, options)
        for first in range(0, x.shape[1], COLUMNS):
            statistics.fold(x[:, first : first + COLUMNS].contiguous(), targets, first, options)
        found[rows] = statistics.chosen - statistics.lse
    return found
