"""The KL to a teacher and its gradient against plain log_softmax in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from verl.models.distillation import HIDDEN, LOG_PROBS, TOKENS, Teacher, top_log_probs
from verl.models.fused_linear import HeadOptions
from verl.models.introspection import OutputHead

TOKENS_COUNT, VOCAB = 7, 37
HEADS = {
    "plain": ({}, {}),
    "bias": ({"bias": True}, {"bias": True}),
    "softcap": ({"softcap": 3.0}, {"softcap": 5.0, "bias": True}),
    "scale": ({"scale": 0.5, "softcap": 4.0, "bias": True}, {"scale": 2.0}),
}


def make_head(width, seed, dtype=torch.float64, vocab=VOCAB, bias=False, softcap=None, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, width, generator=generator, dtype=dtype).requires_grad_()
    vector = torch.randn(vocab, generator=generator, dtype=dtype).requires_grad_() if bias else None
    return OutputHead(weight, vector, softcap, scale)


def make_hidden(width, seed, dtype=torch.float64, tokens=TOKENS_COUNT):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, width, generator=generator, dtype=dtype).requires_grad_()


def plain_log_probs(hidden, head, temperature, vocab=VOCAB):
    logits = hidden @ head.weight[:vocab].t()
    if head.bias is not None:
        logits = logits + head.bias[:vocab]
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    return torch.log_softmax(logits * head.scale / temperature, dim=-1)


KINDS = ("reverse", "forward", "jensen_shannon")


def plain_kl(own, other, kind, top_k=None):
    """Of log-probs over the whole vocabulary; with `top_k`, the teacher's other tokens are one outcome."""
    if top_k is not None and top_k < own.shape[1]:
        tokens = other.topk(top_k, dim=1).indices
        rest = torch.ones_like(own, dtype=torch.bool).scatter(1, tokens, False)
        own, other = (
            torch.cat(
                [x.gather(1, tokens), x.masked_fill(~rest, -torch.inf).logsumexp(1, keepdim=True)], dim=1
            )
            for x in (own, other)
        )
    middle = torch.stack([own, other]).logsumexp(0) - torch.tensor(2.0).log()
    pairs = {
        "reverse": [(own, other)],
        "forward": [(other, own)],
        "jensen_shannon": [(own, middle), (other, middle)],
    }[kind]
    return sum((first.exp() * (first - second)).sum(dim=1) for first, second in pairs) / len(pairs)


def kl_to(
    teacher_hidden, teacher_head, hidden, head, *, kind, top_k=None, options=None, vocab=VOCAB, clip=None
):
    options = options or HeadOptions()
    with torch.no_grad():
        if top_k is None:
            given = {HIDDEN: teacher_hidden.detach()}
        else:
            tokens, log_probs = top_log_probs(teacher_hidden, teacher_head, vocab, top_k, options)
            given = {TOKENS: tokens.int(), LOG_PROBS: log_probs}
    teacher = Teacher(kind, vocab, teacher_head if top_k is None else None, clip=clip)
    return teacher.kl(hidden, head, given, options)


def grads(values, hidden, head):
    """With a weight of its own for every token."""
    inputs = [hidden, head.weight, *([] if head.bias is None else [head.bias])]
    return torch.autograd.grad(
        (values * torch.linspace(-1, 2, len(values), dtype=values.dtype)).sum(), inputs
    )


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("top_k", [None, 1, 5, VOCAB])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [10, VOCAB])
def test_value_and_gradient_equal_log_softmax(heads, top_k, kind, columns):
    of_student, of_teacher = HEADS[heads]
    hidden, head = make_hidden(6, 1), make_head(6, 2, **of_student)
    teacher_hidden, teacher_head = make_hidden(9, 3), make_head(9, 4, **of_teacher)
    options = HeadOptions(temperature=0.7, columns=columns)
    found = kl_to(teacher_hidden, teacher_head, hidden, head, kind=kind, top_k=top_k, options=options)
    own, other = (
        plain_log_probs(hidden, head, 0.7),
        plain_log_probs(teacher_hidden, teacher_head, 0.7).detach(),
    )
    expected = plain_kl(own, other, kind, top_k)
    assert expected.min() > 0.005
    torch.testing.assert_close(found, expected)
    for left, right in zip(grads(found, hidden, head), grads(expected, hidden, head), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_as_top_k_is_the_whole_vocabulary(kind):
    hidden, head = make_hidden(6, 1), make_head(6, 2)
    teacher = make_hidden(9, 3), make_head(9, 4)
    full = kl_to(*teacher, hidden, head, kind=kind)
    top = kl_to(*teacher, hidden, head, kind=kind, top_k=VOCAB)
    torch.testing.assert_close(top, full)
    for left, right in zip(grads(top, hidden, head), grads(full, hidden, head), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_outcomes_never_raise_the_kl(kind):
    hidden, head = make_hidden(6, 1), make_head(6, 2)
    teacher = make_hidden(9, 3), make_head(9, 4)
    found = [kl_to(*teacher, hidden, head, kind=kind, top_k=k) for k in (1, 4, 16, None)]
    assert all((less <= more + 1e-12).all() for less, more in itertools.pairwise(found))


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_student_equal_to_its_teacher_learns_nothing(kind, top_k):
    hidden, head = make_hidden(6, 1, torch.float32), make_head(6, 2, torch.float32, bias=True, softcap=4.0)
    options = HeadOptions(temperature=0.8, columns=10)
    found = kl_to(hidden, head, hidden, head, kind=kind, top_k=top_k, options=options)
    rounded = top_k is not None or kind == "jensen_shannon"  # the mean of two equal logarithms is rounded
    exact = {"rtol": 0, "atol": 1e-5 if rounded else 0}
    torch.testing.assert_close(found, torch.zeros_like(found), **exact)
    for gradient in grads(found, hidden, head):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), **exact)


def test_a_sure_teacher_leaves_a_finite_rest():
    """The probability of the rest is far below float32's rounding of 1; its logarithm is still exact."""
    hidden, head = make_hidden(6, 1, torch.float32), make_head(6, 2, torch.float32)
    bias = torch.zeros(VOCAB)
    bias[5] = 60.0
    sure = OutputHead(torch.zeros(VOCAB, 9), bias, None, 1.0)
    found = kl_to(make_hidden(9, 3, torch.float32), sure, hidden, head, kind="reverse", top_k=1)
    own = plain_log_probs(hidden, head, 1.0)[:, 5].double()
    rest = torch.log1p(-own.exp())
    other = torch.tensor(VOCAB - 1.0).log() - 60
    expected = own.exp() * own + rest.exp() * (rest - other)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert all(gradient.isfinite().all() for gradient in grads(found, hidden, head))


@pytest.mark.parametrize("top_k", [None, 5])
def test_padding_rows_of_either_matrix_do_not_count(top_k):
    hidden, head = make_hidden(6, 1), make_head(6, 2, vocab=VOCAB + 8, bias=True)
    teacher_hidden, teacher_head = make_hidden(9, 3), make_head(9, 4)
    found = kl_to(teacher_hidden, teacher_head, hidden, head, kind="reverse", top_k=top_k)
    expected = plain_kl(
        plain_log_probs(hidden, head, 1.0),
        plain_log_probs(teacher_hidden, teacher_head, 1.0),
        "reverse",
        top_k,
    )
    torch.testing.assert_close(found, expected)
    _, weight, bias = grads(found, hidden, head)
    assert weight.shape == head.weight.shape and bias.shape == head.bias.shape
    assert not weight[VOCAB:].any() and not bias[VOCAB:].any() and weight[:VOCAB].any()


@pytest.mark.parametrize("top_k", [None, 5])
def test_no_tokens_still_connect_the_graph(top_k):
    hidden, head = make_hidden(6, 1, tokens=0), make_head(6, 2)
    found = kl_to(make_hidden(9, 3, tokens=0), make_head(9, 4), hidden, head, kind="reverse", top_k=top_k)
    assert found.shape == (0,)
    assert not torch.autograd.grad(found.sum(), head.weight)[0].any()


def test_half_precision_sums_in_float32():
    hidden, head = make_hidden(16, 1, torch.float32), make_head(16, 2, torch.float32)
    teacher_hidden, teacher_head = make_hidden(16, 3, torch.float32), make_head(16, 4, torch.float32)
    low = [
        x.detach().bfloat16().requires_grad_()
        for x in (hidden, head.weight, teacher_hidden, teacher_head.weight)
    ]
    heads = [OutputHead(weight, None, None, 1.0) for weight in (low[1], low[3])]
    found = kl_to(low[2], heads[1], low[0], heads[0], kind="reverse")
    packed = Teacher("reverse", VOCAB, heads[1]).kl(
        low[0], heads[0], {HIDDEN: low[2].detach().view(torch.int16)}, HeadOptions()
    )
    assert found.dtype == torch.float32 and torch.equal(found, packed)
    exact = [x.detach().double() for x in low]
    expected = plain_kl(
        *(plain_log_probs(h, OutputHead(w, None, None, 1.0), 1.0) for h, w in (exact[:2], exact[2:])),
        "reverse",
    )
    torch.testing.assert_close(found.double(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_above_the_bound_counts_the_bound_and_learns_nothing(kind, top_k):
    hidden, head = make_hidden(6, 1), make_head(6, 2)
    teacher = make_hidden(9, 3), make_head(9, 4)
    free = kl_to(*teacher, hidden, head, kind=kind, top_k=top_k)
    bound = float(free.detach().median())
    found = kl_to(*teacher, hidden, head, kind=kind, top_k=top_k, clip=bound)
    torch.testing.assert_close(found, free.clamp(max=bound))
    (of_hidden,) = torch.autograd.grad(found.sum(), hidden, retain_graph=True)
    above = free > bound
    assert above.any() and not of_hidden[above].any() and of_hidden[free < bound].any(dim=1).all()
