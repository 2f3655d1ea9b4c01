"""KL per token between a student and a teacher, straight from hidden states and output matrices.

Logits [tokens, vocabulary] are computed one slice of columns at a time, and again in the backward pass, as in
`verl.models.fused_linear`; reductions over the vocabulary are float32 (float64 for float64). With x the student's
logits, t the teacher's, p and q their softmax:
  reverse: KL(p || q),  d/dx_j = p_j (log p_j - log q_j - KL),
  forward: KL(q || p),  d/dx_j = p_j - q_j,
  jensen_shannon: (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2,
    d/dx_j = p_j (log p_j - log m_j - KL(p || m)) / 2.

From a whole distribution, the teacher's hidden states are given and its output matrix is on the student's rank. From
the teacher's k most probable tokens, all others together are one further outcome for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from verl.models.fused_linear import FEWEST_COLUMNS, HeadOptions, add_product, bend, product, slice_columns
from verl.models.introspection import OutputHead, output_head
from verl.models.packing import Pack, head_outputs, hidden_of_targets

HIDDEN, TOKENS, LOG_PROBS = "teacher_hidden", "teacher_tokens", "teacher_log_probs"
TEACHER_TENSORS = (HIDDEN, TOKENS, LOG_PROBS)
"""Names in a batch: [B, T, D]; or [B, T, k] and [B, T, k + 1], the last of which is all other tokens."""


@dataclass(frozen=True)
class _Head:
    """An output matrix over the common vocabulary, and how its product becomes logits."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    options: HeadOptions

    @classmethod
    def of(cls, head: OutputHead, vocabulary: int, options: HeadOptions) -> _Head:
        bias = None if head.bias is None else head.bias.detach()[:vocabulary]
        options = replace(options, softcap=head.softcap, scale=head.scale)
        return cls(head.weight.detach()[:vocabulary], bias, options)

    def slices(self, hidden: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Columns and their logits [M, C]: half as many as of one model's head, as those of two are in memory."""
        most = slice_columns(hidden.shape[0], self.weight.device) // 2
        size = self.options.columns or max(most // FEWEST_COLUMNS * FEWEST_COLUMNS, FEWEST_COLUMNS)
        for first in range(0, self.weight.shape[0], size):
            block = slice(first, min(first + size, self.weight.shape[0]))
            yield block, self.logits(hidden, block)

    def logits(self, hidden: torch.Tensor, block: slice) -> torch.Tensor:
        bias = None if self.bias is None else self.bias[block]
        return bend(product(hidden, self.weight[block].t(), bias), self.options)


class _Sums:
    """Running log-sum-exp of rows, and the mean of something under their softmax."""

    def __init__(self, hidden: torch.Tensor) -> None:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.top = hidden.new_full((len(hidden),), float("-inf"), dtype=dtype)
        self.total = torch.zeros_like(self.top)
        self.weighted = torch.zeros_like(self.top)

    def fold(self, x: torch.Tensor, values: torch.Tensor | None = None) -> None:
        higher = torch.maximum(self.top, x.amax(dim=1))
        # While all of a row has been -inf, its shift must be a number.
        shift = torch.where(higher.isinf(), torch.zeros_like(higher), higher)
        shrink = (self.top - shift).exp_()
        e = (x - shift[:, None]).exp_()
        self.top, self.total = higher, self.total * shrink + e.sum(dim=1)
        if values is not None:
            self.weighted = self.weighted * shrink + torch.einsum("mc,mc->m", e, values)

    @property
    def lse(self) -> torch.Tensor:
        return self.total.log() + torch.where(self.top.isinf(), torch.zeros_like(self.top), self.top)

    @property
    def mean(self) -> torch.Tensor:
        return self.weighted / self.total


class _Gradients:
    """Of hidden states, output matrix and bias, summed slice by slice; None where not needed."""

    def __init__(self, ctx: Any, hidden: torch.Tensor, head: _Head, dtype: torch.dtype) -> None:
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        self._source, self._head, self._dtype = hidden, head, dtype
        self.hidden = torch.zeros_like(hidden, dtype=dtype) if want_hidden else None
        self.weight = torch.zeros_like(ctx.whole[0]) if want_weight else None
        self.bias = torch.zeros_like(ctx.whole[1]) if want_bias else None

    def add(self, block: slice, grad: torch.Tensor, x: torch.Tensor) -> None:
        """Of the logits x of a slice; overwrites both."""
        cap, factor = self._head.options.softcap, self._head.options.factor
        if cap is not None:
            grad *= x.div_(cap * factor).square_().neg_().add_(1)
        if factor != 1.0:
            grad *= factor
        if self.bias is not None:
            self.bias[block] = grad.sum(dim=0)
        grad = grad.to(self._source.dtype)
        if self.hidden is not None:
            add_product(self.hidden, grad, self._head.weight[block])
        if self.weight is not None:
            torch.mm(grad.t(), self._source, out=self.weight[block])

    def result(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        hidden = None if self.hidden is None else self.hidden.to(self._source.dtype)
        return hidden, self.weight, self.bias


class _FullKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        head: _Head,
        teacher_hidden: torch.Tensor,
        teacher: _Head,
        kind: str,
    ) -> torch.Tensor:
        own, other = _Sums(hidden), _Sums(hidden)
        for block, x in head.slices(hidden):
            t = teacher.logits(teacher_hidden, block)
            own.fold(x, x - t if kind == "reverse" else None)
            other.fold(t, t - x if kind == "forward" else None)
        lse, teacher_lse = own.lse, other.lse
        mean = own.mean - lse + teacher_lse if kind == "reverse" else other.mean - teacher_lse + lse
        """What the gradient of a logit is compared with: the KL, or the student's to the mean of both."""
        kl = mean
        if kind == "jensen_shannon":
            mean, theirs = torch.zeros_like(lse), torch.zeros_like(lse)
            for block, x in head.slices(hidden):
                p = x.sub_(lse[:, None])
                q = teacher.logits(teacher_hidden, block).sub_(teacher_lse[:, None])
                middle = _middle(p, q)
                mean += torch.einsum("mc,mc->m", p.exp(), p - middle)
                theirs += torch.einsum("mc,mc->m", q.exp(), q - middle)
            kl = (mean + theirs) / 2
        ctx.head, ctx.teacher, ctx.kind, ctx.whole = head, teacher, kind, (weight, bias)
        ctx.save_for_backward(hidden, teacher_hidden, lse, teacher_lse, mean)
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, teacher_hidden, lse, teacher_lse, mean = ctx.saved_tensors
        sums = _Gradients(ctx, hidden, ctx.head, lse.dtype)
        for block, x in ctx.head.slices(hidden):
            t = ctx.teacher.logits(teacher_hidden, block).sub_(teacher_lse[:, None])
            own = x - lse[:, None]
            if ctx.kind == "reverse":
                grad = own.exp().mul_(own.sub_(t).sub_(mean[:, None]))
            elif ctx.kind == "jensen_shannon":
                grad = own.exp().mul_((own - _middle(own, t)).sub_(mean[:, None])).div_(2)
            else:
                grad = own.exp_().sub_(t.exp_())
            sums.add(block, grad.mul_(grad_kl[:, None]), x)
            del x, t, own, grad
        return *sums.result(), None, None, None, None


def _middle(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The log-probs of the mean of two distributions."""
    return torch.logaddexp(p, q) - math.log(2)


def _inside(tokens: torch.Tensor, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the tokens [M, k] a slice has, and their columns in it (any column for the others)."""
    index = tokens - block.start
    size = block.stop - block.start
    return (index >= 0) & (index < size), index.clamp(0, size - 1)


def _without(x: torch.Tensor, inside: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x with -inf at the columns `index` that are `inside`."""
    infinity = torch.full_like(inside, float("inf"), dtype=x.dtype)
    return x.scatter_reduce(1, index, torch.where(inside, -infinity, infinity), "amin")


class _OutcomeLogProbs(torch.autograd.Function):
    """Log-probs [M, k + 1] of the tokens [M, k] and of all others together."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        head: _Head,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        every, rest = _Sums(hidden), _Sums(hidden)
        chosen = every.top.new_zeros(tokens.shape)
        for block, x in head.slices(hidden):
            inside, index = _inside(tokens, block)
            chosen = torch.where(inside, x.gather(1, index), chosen)
            every.fold(x)
            rest.fold(_without(x, inside, index))
        lse, rest_lse = every.lse, rest.lse
        ctx.head, ctx.whole = head, (weight, bias)
        ctx.save_for_backward(hidden, tokens, lse, rest_lse)
        return torch.cat([chosen, rest_lse[:, None]], dim=1) - lse[:, None]

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, tokens, lse, rest_lse = ctx.saved_tensors
        sums = _Gradients(ctx, hidden, ctx.head, lse.dtype)
        total = grad_out.sum(dim=1, keepdim=True)
        rest_shift = torch.where(rest_lse.isinf(), torch.zeros_like(rest_lse), rest_lse)[:, None]
        for block, x in ctx.head.slices(hidden):
            inside, index = _inside(tokens, block)
            grad = _without(x, inside, index).sub_(rest_shift).exp_().mul_(grad_out[:, -1:])
            grad -= (x - lse[:, None]).exp_().mul_(total)
            grad.scatter_add_(1, index, torch.where(inside, grad_out[:, :-1], 0))
            sums.add(block, grad, x)
        return *sums.result(), None, None


def top_log_probs(
    hidden: torch.Tensor, head: OutputHead, vocabulary: int, k: int, options: HeadOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most probable tokens [M, k] and the log-probs [M, k + 1] of each and of all others together."""
    rows = _Head.of(head, vocabulary, options)
    rest, best, tokens = _Sums(hidden), None, None
    for block, x in rows.slices(hidden):
        ids = torch.arange(block.start, block.stop, device=x.device).expand_as(x)
        if best is not None and tokens is not None:
            x, ids = torch.cat([best, x], dim=1), torch.cat([tokens, ids], dim=1)
        best, index = x.topk(min(k, x.shape[1]), dim=1)
        tokens = ids.gather(1, index)
        if x.shape[1] > k:
            rest.fold(x.scatter(1, index, float("-inf")))
    assert best is not None and tokens is not None
    outcomes = torch.cat([best, rest.lse[:, None]], dim=1)
    return tokens, outcomes - outcomes.logsumexp(dim=1, keepdim=True)


@dataclass(frozen=True)
class Teacher:
    """What the student's rank has of the teacher."""

    kind: str
    """reverse, forward or jensen_shannon."""
    vocabulary: int
    """Tokens both models have rows for; further rows are padding and left out of both."""
    head: OutputHead | None = None
    """None: the teacher's most probable tokens are given instead of its hidden states."""
    clip: float | None = None
    """A token's KL counts at most so much."""
    coef: float = 0.0
    """Of the KL in the policy loss; 0: it is the policy loss."""

    def kl(
        self, hidden: torch.Tensor, head: OutputHead, given: Mapping[str, torch.Tensor], options: HeadOptions
    ) -> torch.Tensor:
        """[M], with gradient, from the student's hidden states [M, D] and the teacher's outputs at the same places."""
        kl = self._kl(hidden, head, given, options)
        return kl if self.clip is None else kl.clamp(max=self.clip)

    def _kl(
        self, hidden: torch.Tensor, head: OutputHead, given: Mapping[str, torch.Tensor], options: HeadOptions
    ) -> torch.Tensor:
        own = _Head.of(head, self.vocabulary, options)
        if self.head is not None:
            teacher = _Head.of(self.head, self.vocabulary, options)
            teacher_hidden = given[HIDDEN]
            if teacher_hidden.dtype == torch.int16:
                teacher_hidden = teacher_hidden.view(torch.bfloat16)
            kl: torch.Tensor = _FullKL.apply(
                hidden, head.weight, head.bias, own, teacher_hidden, teacher, self.kind
            )
            return kl
        log_q = given[LOG_PROBS]
        log_p = _OutcomeLogProbs.apply(hidden, head.weight, head.bias, own, given[TOKENS].long())
        if given[TOKENS].shape[1] >= self.vocabulary:  # there are no others
            log_p, log_q = log_p[:, :-1], log_q[:, :-1]
        log_q = log_q.to(log_p.dtype)
        if self.kind == "jensen_shannon":
            middle = _middle(log_p, log_q)
            return (_divergence(log_p, middle) + _divergence(log_q, middle)) / 2
        return _divergence(log_p, log_q) if self.kind == "reverse" else _divergence(log_q, log_p)


def _divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of rows; an outcome that p does not have adds nothing."""
    return torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q)).sum(dim=1)


def teacher_forward(
    model: Any, pack: Pack, vocabulary: int, top_k: int | None, options: HeadOptions
) -> dict[str, torch.Tensor]:
    """The teacher's pass: what `Teacher.kl` takes as `given`. bfloat16 travels as int16, which numpy has."""
    hidden = hidden_of_targets(model, pack)
    if top_k is None:
        return {HIDDEN: hidden.view(torch.int16) if hidden.dtype == torch.bfloat16 else hidden}
    tokens, log_probs = top_log_probs(hidden, output_head(model), vocabulary, top_k, options)
    return {TOKENS: tokens.int(), LOG_PROBS: log_probs}


def student_forward(
    model: Any, pack: Pack, options: HeadOptions, teacher: Teacher, given: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`packed_forward` with `kl` to the teacher; `given` are its outputs [M, ...] for the targets of the pack."""
    hidden = hidden_of_targets(model, pack)
    outputs = head_outputs(model, hidden, pack, options)
    return {**outputs, "kl": teacher.kl(hidden, output_head(model), given, options)}
