"""Log-probability, entropy and sum of squared probabilities straight from hidden states and the output matrix.

What always holds: [tokens, vocabulary] never exists; at any time at most one chunk of rows of it does, and the
backward pass recomputes the chunk instead of having kept it. The products run in the dtype of the inputs, every
reduction over the vocabulary and the sum of the weight's gradient over chunks in float32 (float64 for float64).

With x = cap(hidden W^T + bias) * scale / temperature, p = softmax(x), y the target:
  log_prob = x_y - lse,  entropy H = lse - sum p x,  sum_pi_squared = sum p^2 (no gradient),
  d log_prob / dx_j = [j = y] - p_j,  dH / dx_j = -p_j (x_j - sum p x).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_CHUNK_BYTES_CPU = 32 << 20
_CHUNK_BYTES_CUDA = 640 << 20


@dataclass(frozen=True)
class HeadOptions:
    """How logits are made of the matrix product, and which answers are wanted."""

    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0
    with_entropy: bool = False
    with_sum_pi_squared: bool = False
    chunk_rows: int | None = None

    @property
    def factor(self) -> float:
        return self.scale / max(self.temperature, 1e-8)


@dataclass
class HeadOutput:
    """Each [M]; None where not asked for."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    sum_pi_squared: torch.Tensor | None = None


def chunk_rows(vocab: int, device: torch.device) -> int:
    """Rows of the logits matrix held at once: enough for an efficient product, little beside the model."""
    budget = _CHUNK_BYTES_CUDA if device.type == "cuda" else _CHUNK_BYTES_CPU
    rows = max(budget // (4 * vocab), 16)
    return rows // 128 * 128 if rows >= 128 else rows


def _product_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b with the result in float32 (float64 stays), without rounding it to half precision on the way."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def _chunk_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: HeadOptions
) -> torch.Tensor:
    x = _product_float32(hidden, weight.t())
    if bias is not None:
        x += bias
    if options.softcap is not None:
        x.div_(options.softcap).tanh_().mul_(options.softcap)
    if options.factor != 1.0:
        x *= options.factor
    return x


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        options: HeadOptions,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        rows = options.chunk_rows or chunk_rows(weight.shape[0], weight.device)
        count = hidden.shape[0]
        answer = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        log_prob = hidden.new_empty(count, dtype=answer)
        lse = torch.empty_like(log_prob)
        mean_logit = torch.empty_like(log_prob) if options.with_entropy else None
        squares = torch.empty_like(log_prob) if options.with_sum_pi_squared else None
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            x = _chunk_logits(hidden[part], weight, bias, options)
            chosen = x.gather(1, target[part, None]).squeeze(1)
            top = x.amax(dim=1, keepdim=True)
            x -= top
            if mean_logit is not None:
                shifted = x.clone()
            p = x.exp_()
            total = p.sum(dim=1)
            lse[part] = total.log() + top.squeeze(1)
            log_prob[part] = chosen - lse[part]
            if mean_logit is not None:
                mean_logit[part] = torch.einsum("ij,ij->i", p, shifted) / total + top.squeeze(1)
                del shifted
            if squares is not None:
                squares[part] = torch.einsum("ij,ij->i", p, p) / total.square()
            del x, p
        ctx.options, ctx.rows = options, rows
        ctx.save_for_backward(hidden, weight, bias, target, lse, mean_logit)
        if squares is not None:
            ctx.mark_non_differentiable(squares)
        entropy = None if mean_logit is None else lse - mean_logit
        return log_prob, entropy, squares

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any,
        grad_log_prob: torch.Tensor | None,
        grad_entropy: torch.Tensor | None,
        _: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden, weight, bias, target, lse, mean_logit = ctx.saved_tensors
        options: HeadOptions = ctx.options
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if want_weight else None
        grad_bias = torch.zeros_like(bias, dtype=lse.dtype) if want_bias else None
        if grad_log_prob is None:
            grad_log_prob = torch.zeros_like(lse)
        for start in range(0, hidden.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            x = _chunk_logits(hidden[part], weight, bias, options)
            slope = None
            if options.softcap is not None:
                slope = x.div(options.softcap * options.factor).square_().neg_().add_(1)
            p = (x - lse[part, None]).exp_() if mean_logit is not None else x.sub_(lse[part, None]).exp_()
            if mean_logit is not None and grad_entropy is not None:
                x.sub_(mean_logit[part, None]).mul_(grad_entropy[part, None]).add_(grad_log_prob[part, None])
                grad_x = p.mul_(x).neg_()
            else:
                grad_x = p.mul_(grad_log_prob[part, None]).neg_()
            grad_x.scatter_add_(1, target[part, None], grad_log_prob[part, None])
            if slope is not None:
                grad_x *= slope
            if options.factor != 1.0:
                grad_x *= options.factor
            del x, p, slope
            if grad_bias is not None:
                grad_bias += grad_x.sum(dim=0)
            grad_x = grad_x.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_x, weight, out=grad_hidden[part])
            if grad_weight is not None:
                if grad_weight.dtype == grad_x.dtype:
                    grad_weight.addmm_(grad_x.t(), hidden[part])
                else:
                    grad_weight += _product_float32(grad_x.t(), hidden[part])
            del grad_x
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def fused_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    options: HeadOptions | None = None,
) -> HeadOutput:
    """hidden [M, D], weight [V, D], target [M] -> float32 [M] each, differentiable in hidden, weight and bias.

    `sum_pi_squared` carries no gradient."""
    log_probs, entropy, squares = _FusedHead.apply(hidden, weight, bias, target, options or HeadOptions())
    return HeadOutput(log_probs, entropy, squares)
