"""Log-probability, entropy and sum of squared probabilities straight from hidden states and the output matrix.

Logits [tokens, vocabulary] are computed one slice of columns at a time. As many slices as a part of the free memory
holds are kept for the backward pass, which recomputes the others: the numbers are the same, and the product is a
quarter of the work of this layer. The products run in the dtype of the inputs with float32 results, every reduction
over the vocabulary is float32 (float64 for float64). Slicing the vocabulary, not the tokens, gives each row of the
weight's gradient in one product over all tokens, already summed in float32.

With x = cap(hidden W^T + bias) * scale / temperature, p = softmax(x), y the target:
  log_prob = x_y - lse,  entropy H = lse - sum p x,  sum_pi_squared = sum p^2 (no gradient),
  d log_prob / dx_j = [j = y] - p_j,  dH / dx_j = -p_j (x_j - sum p x).

With the vocabulary split over ranks each folds its own rows of the output matrix; the statistics are then combined
over the ranks, and the backward pass needs no communication.

Shapes: M tokens, D hidden size, V vocabulary (this rank's part of it), C columns of a slice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist

from verl.memory import free_device_bytes, free_host_bytes
from verl.models.kernels import triton_fault

_SLICE_BYTES_CPU = 16 << 20
_SLICE_BYTES_CUDA = 512 << 20
FEWEST_COLUMNS = 256
_KEPT_SHARE = 8
"""Of the free memory one part in so many may hold logits: the rest is for the backward pass."""

HeadKernel = Literal["auto", "torch", "triton"]


@dataclass(frozen=True)
class HeadOptions:
    """How logits are computed from the matrix product, and which outputs are needed."""

    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0
    with_entropy: bool = False
    with_sum_pi_squared: bool = False
    columns: int | None = None
    kernel: HeadKernel = "auto"
    keeps_logits: bool = True
    """Whether the backward pass may find logits in memory."""

    @property
    def factor(self) -> float:
        return self.scale / max(self.temperature, 1e-8)


@dataclass
class HeadOutput:
    """Each [M]; None where not asked for."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    sum_pi_squared: torch.Tensor | None = None


def slice_columns(tokens: int, device: torch.device) -> int:
    """Columns of the logits in memory at once: enough for an efficient product, little compared to the model."""
    budget = _SLICE_BYTES_CUDA if device.type == "cuda" else _SLICE_BYTES_CPU
    columns = budget // (4 * max(tokens, 1))
    return max(columns // FEWEST_COLUMNS * FEWEST_COLUMNS, FEWEST_COLUMNS)


def slice_bytes(tokens: int, vocab: int, device: torch.device) -> int:
    """Of one slice of float32 logits and its gradient, which are in memory together."""
    return 2 * 4 * tokens * min(slice_columns(tokens, device), vocab)


def _kept_bytes(device: torch.device) -> int:
    """Of logits that may stay in memory till the backward pass."""
    if device.type != "cuda":
        return free_host_bytes() // _KEPT_SHARE
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free_device_bytes(device) + cached) // _KEPT_SHARE


def _use_triton(options: HeadOptions, x: torch.Tensor) -> bool:
    if options.kernel == "auto":
        return x.is_cuda and x.dtype != torch.float64 and triton_fault(x.device) is None
    return options.kernel == "triton"


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b in float32 (float64 stays), without rounding the result to half precision on the way."""
    if a.dtype in (torch.float32, torch.float64):
        x = a @ b
    elif a.is_cuda:
        x = torch.mm(a, b, out_dtype=torch.float32)
    else:
        x = (a @ b).float()
    return x if bias is None else x.add_(bias)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b in the precision of `total`, in index."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and _adds_in_place(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += product(a, b)


@lru_cache(maxsize=8)
def _adds_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a half-precision product to a float32 matrix without a detour; found by trying."""
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.full((16, 16), 0.5, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 16.5).all())


@dataclass(frozen=True)
class VocabularyShard:
    """Of an output matrix split over ranks: this rank has `rows` of them, from token `first` on."""

    first: int
    rows: int
    group: Any
    """The process group of the split; None: one rank has all."""


class RowStatistics:
    """Running maximum and sums of every row, folded in slice by slice (the maximum so far is taken out)."""

    def __init__(self, count: int, like: torch.Tensor, options: HeadOptions) -> None:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        new = like.new_zeros(count, dtype=dtype)
        self.top = torch.full_like(new, float("-inf"))
        self.total = new
        self.chosen = torch.zeros_like(new)
        self.weighted = torch.zeros_like(new) if options.with_entropy else None
        self.squares = torch.zeros_like(new) if options.with_sum_pi_squared else None

    def fold(self, x: torch.Tensor, target: torch.Tensor, first: int, options: HeadOptions) -> None:
        if _use_triton(options, x):
            from verl.models.kernels.head import fold_statistics

            sums = (self.top, self.total, self.weighted, self.squares, self.chosen)
            fold_statistics(x, target, first, options, *sums)
            return
        x = bend(x, options)
        index = target - first
        inside = (index >= 0) & (index < x.shape[1])
        found = x.gather(1, index.clamp(0, x.shape[1] - 1)[:, None]).squeeze(1)
        self.chosen = torch.where(inside, found, self.chosen)
        higher = torch.maximum(self.top, x.amax(dim=1))
        shrink = (self.top - higher).exp_()
        self.top = higher
        e = (x - higher[:, None]).exp_() if self.weighted is not None else x.sub_(higher[:, None]).exp_()
        self.total = self.total * shrink + e.sum(dim=1)
        if self.weighted is not None:
            self.weighted = self.weighted * shrink + torch.einsum("mc,mc->m", e, x)
        if self.squares is not None:
            self.squares = self.squares * shrink.square() + torch.einsum("mc,mc->m", e, e)

    @property
    def lse(self) -> torch.Tensor:
        return self.total.log() + self.top

    def combine(self, group: Any) -> None:
        """With those of the other parts of the vocabulary: one maximum and one sum over the ranks of `group`."""
        if self.top.numel() == 0:
            return
        own = self.top
        self.top = own.clone()
        dist.all_reduce(self.top, dist.ReduceOp.MAX, group=group)
        shrink = (own - self.top).exp_()  # 0 for a rank without rows, whose maximum is -inf
        parts = [self.chosen, self.total * shrink]
        if self.weighted is not None:
            parts.append(self.weighted * shrink)
        if self.squares is not None:
            parts.append(self.squares * shrink.square())
        sums = torch.stack(parts)
        dist.all_reduce(sums, group=group)
        self.chosen, self.total, *rest = sums.unbind()
        if self.weighted is not None:
            self.weighted = rest.pop(0)
        if self.squares is not None:
            self.squares = rest.pop(0)


def bend(x: torch.Tensor, options: HeadOptions) -> torch.Tensor:
    """Raw logits to the ones the softmax sees, in index."""
    if options.softcap is not None:
        x.div_(options.softcap).tanh_().mul_(options.softcap)
    return x if options.factor == 1.0 else x.mul_(options.factor)


RowGradients = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]
"""Of every row: log-sum-exp and mean logit, then the gradients of its log-prob and of its entropy."""


def _logit_gradient(
    x: torch.Tensor,
    target: torch.Tensor,
    first: int,
    options: HeadOptions,
    rows: RowGradients,
    dtype: torch.dtype,
) -> torch.Tensor:
    """d loss / d (raw logits of the slice), in `dtype`; overwrites x."""
    if _use_triton(options, x):
        from verl.models.kernels.head import logit_gradient

        return logit_gradient(x, target, first, options, *rows, dtype)
    lse, mean_logit, grad_log_prob, grad_entropy = rows
    x = bend(x, options)
    slope = None
    if options.softcap is not None:
        slope = x.div(options.softcap * options.factor).square_().neg_().add_(1)
    if mean_logit is not None and grad_entropy is not None:
        grad = (x - lse[:, None]).exp_()
        x.sub_(mean_logit[:, None]).mul_(grad_entropy[:, None]).add_(grad_log_prob[:, None])
        grad.mul_(x).neg_()
    else:
        grad = x.sub_(lse[:, None]).exp_().mul_(grad_log_prob[:, None]).neg_()
    index = target - first
    inside = (index >= 0) & (index < grad.shape[1])
    grad.scatter_add_(
        1, index.clamp(0, grad.shape[1] - 1)[:, None], torch.where(inside, grad_log_prob, 0)[:, None]
    )
    if slope is not None:
        grad *= slope
    if options.factor != 1.0:
        grad *= options.factor
    return grad.to(dtype)


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        options: HeadOptions,
        shard: VocabularyShard,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        columns = options.columns or slice_columns(hidden.shape[0], hidden.device)
        rows = RowStatistics(hidden.shape[0], hidden, options)
        kept: list[torch.Tensor] = []
        left = _kept_bytes(hidden.device) if options.keeps_logits and any(ctx.needs_input_grad) else 0
        for first in range(0, shard.rows, columns):
            block = slice(first, first + columns)
            x = product(hidden, weight[block].t(), None if bias is None else bias[block])
            left -= x.nbytes
            if left >= 0:
                kept.append(x)
                x = x if _use_triton(options, x) else x.clone()  # torch's code overwrites it
            rows.fold(x, target, shard.first + first, options)
            del x
        if shard.group is not None:
            rows.combine(shard.group)
        lse = rows.lse
        mean_logit = None if rows.weighted is None else rows.weighted / rows.total
        squares = None if rows.squares is None else rows.squares / rows.total.square()
        ctx.options, ctx.columns, ctx.first = options, columns, shard.first
        ctx.save_for_backward(hidden, weight, bias, target, lse, mean_logit)
        ctx.kept = kept
        if squares is not None:
            ctx.mark_non_differentiable(squares)
        ctx.set_materialize_grads(False)
        return rows.chosen - lse, None if mean_logit is None else lse - mean_logit, squares

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Any, grad_entropy: Any, _: Any) -> Any:  # type: ignore[override]
        hidden, weight, bias, target, lse, mean_logit = ctx.saved_tensors
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_log_prob = torch.zeros_like(lse) if grad_log_prob is None else grad_log_prob.contiguous()
        grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
        rows = (lse, mean_logit, grad_log_prob, grad_entropy)
        grad_hidden = torch.zeros_like(hidden, dtype=lse.dtype) if want_hidden else None
        grad_weight = torch.empty_like(weight) if want_weight else None
        grad_bias = torch.empty_like(bias) if want_bias else None
        for first in range(0, weight.shape[0], ctx.columns):
            block = slice(first, first + ctx.columns)
            if ctx.kept:
                x = ctx.kept.pop(0)
            else:
                x = product(hidden, weight[block].t(), None if bias is None else bias[block])
            grad_x = _logit_gradient(x, target, ctx.first + first, ctx.options, rows, hidden.dtype)
            del x
            if grad_hidden is not None:
                add_product(grad_hidden, grad_x, weight[block])
            if grad_weight is not None:
                torch.mm(grad_x.t(), hidden, out=grad_weight[block])
            if grad_bias is not None:
                grad_bias[block] = grad_x.sum(dim=0, dtype=lse.dtype)
            del grad_x
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def fused_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    options: HeadOptions | None = None,
    shard: VocabularyShard | None = None,
) -> HeadOutput:
    """hidden [M, D], weight [V, D], target [M] -> float32 [M] each, differentiable in hidden, weight and bias.

    `sum_pi_squared` carries no gradient. With a `shard`, weight and bias are this rank's part, targets are tokens of
    the whole vocabulary and all ranks return the same; each has its part's contribution to the gradient of `hidden`,
    to be summed over them."""
    shard = shard or VocabularyShard(0, weight.shape[0], None)
    if weight.shape[0] != shard.rows:
        raise ValueError(
            f"the output matrix has {weight.shape[0]} rows, its shard {shard.rows}: give those alone"
        )
    options = options or HeadOptions()
    if not torch.is_grad_enabled():  # which the function below cannot ask
        options = replace(options, keeps_logits=False)
    log_probs, entropy, squares = _FusedHead.apply(hidden, weight, bias, target, options, shard)
    return HeadOutput(log_probs, entropy, squares)
