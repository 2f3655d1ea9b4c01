"""Attention sinks in packs: forward and gradients are those of transformers' attention, sequence by sequence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from verl.models import attention
from verl.models.attention import (
    AttentionCall,
    PackedAttention,
    RaggedBounds,
    dense_attention,
    ragged_attention,
)
from verl.models.shared_prefixes import SharedPrefixAttention

HEADS, KV, SIZE = 6, 2, 8
SCALE = 0.3


def make(tokens, keys=None, dtype=torch.float64, value_size=SIZE):
    """q, k, v and the sinks; those of the first two heads are too small and too large to leave both terms."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, HEADS, tokens, SIZE), (1, KV, keys or tokens, SIZE), (1, KV, keys or tokens, value_size)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    sinks = torch.randn(HEADS, generator=generator, dtype=torch.float64)
    sinks[:2] = torch.tensor([-40.0, 40.0])
    return [x.to(dtype).requires_grad_() for x in (*tensors, sinks)]


def band(queries, keys, window):
    """Of [queries, keys]: -inf where a query does not see a key; the last sees the last."""
    behind = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    hidden = (behind < 0) | (behind >= (window or keys))
    return torch.zeros(queries, keys, dtype=torch.float64).masked_fill(hidden, float("-inf"))


def of_transformers(q, k, v, sink, rows, window):
    """`rows`: the numbers of queries and keys of each sequence; [1, N, H, D]."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    module = SimpleNamespace(sinks=sink, num_key_value_groups=HEADS // KV, training=False)
    queries, keys = ([row[side] for row in rows] for side in (0, 1))
    parts = zip(q.split(queries, 2), k.split(keys, 2), v.split(keys, 2), rows, strict=True)
    found = []
    for *tensors, (count, length) in parts:
        mask = band(count, length, window).to(q.dtype)
        found.append(eager_attention_forward(module, *tensors, mask, SCALE)[0])
    return torch.cat(found, dim=1)


def same(found, wanted, inputs, tolerance=1e-12):
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((each * weights.to(each.dtype)).sum(), inputs) for each in (found, wanted)
    )
    for own, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, right, atol=tolerance, rtol=tolerance)


LENGTHS = [[5, 1, 9, 3], [40], [1], [4, 4, 4]]
WINDOWS = pytest.mark.parametrize("window", [None, 1, 3, 100])


@WINDOWS
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_a_pack_with_sinks_equals_transformers(lengths, window, dtype, tolerance):
    q, k, v, sink = inputs = make(sum(lengths), dtype=dtype)
    packed = PackedAttention.from_lengths(lengths, "cpu")
    found = packed.attend(AttentionCall(q, k, v, SCALE, window, sink=sink))
    same(found, of_transformers(*inputs, [(n, n) for n in lengths], window), inputs, tolerance)


@WINDOWS
def test_scores_are_in_memory_for_some_queries_at_a_time(monkeypatch, window):
    monkeypatch.setattr(attention, "_FEWEST_QUERIES", 4)
    kernel, seen = attention.written_attention, []
    monkeypatch.setattr(
        attention, "written_attention", lambda call, mask: (seen.append(mask.numel()), kernel(call, mask))[1]
    )
    q, k, v, sink = inputs = make(30, 40)
    found = dense_attention(AttentionCall(q, k, v, SCALE, window, sink=sink)).transpose(1, 2)
    same(found, of_transformers(*inputs, [(30, 40)], window), inputs)
    assert len(seen) == (1 if window == 100 else 8)
    assert max(seen) <= {None: 4 * 40, 1: 4 * 4, 3: 4 * 6, 100: 30 * 40}[window]


def test_half_precision_is_rounded_once():
    """The weights are float32; transformers' are rounded."""
    q, k, v, sink = make(40, dtype=torch.bfloat16)
    exact = of_transformers(*(x.double() for x in (q, k, v, sink)), [(40, 40)], 7)
    found = PackedAttention.from_lengths([40], "cpu").attend(AttentionCall(q, k, v, SCALE, 7, sink=sink))
    theirs = of_transformers(q, k, v, sink, [(40, 40)], 7)
    assert found.dtype == torch.bfloat16
    errors = [float((each.detach().double() - exact.detach()).norm()) for each in (found, theirs)]
    assert errors[0] <= errors[1]


@WINDOWS
def test_shared_beginnings_see_the_sinks(window):
    """Two rows of 3 and 2 tokens behind a beginning of 4."""
    q, k, v, sink = inputs = make(9)
    key_index = torch.tensor([*range(4), *range(7), *range(4), 7, 8])
    shared = SharedPrefixAttention([(4, 4), (3, 7), (2, 6)], key_index.numpy(), torch.device("cpu"))
    found = shared.attend(AttentionCall(q, k, v, SCALE, window, sink=sink))
    rows = [x[:, :, key_index] for x in (k, v)]
    same(found, of_transformers(q, *rows, sink, [(4, 4), (3, 7), (2, 6)], window), inputs)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_gated_by_its_log_sum_exp(monkeypatch):
    """Without its backward pass, which needs a GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attention, "compiled_flex", lambda: flex_attention)
    lengths = [60, 1, 80]
    q, k, v, sink = inputs = [x.detach() for x in make(sum(lengths), dtype=torch.float32)]
    packed = PackedAttention.from_lengths(lengths, "cpu", "flex")
    found = packed.attend(AttentionCall(q, k, v, SCALE, 9, sink=sink))
    wanted = of_transformers(*inputs, [(n, n) for n in lengths], 9)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.fixture
def flash(monkeypatch):
    """torch's flash kernel of CPUs, sequence by sequence, in place of that of GPUs: the same passes, and a backward one
    that knows the output and the log-sum-exp alone."""
    import torch.utils.flop_counter

    aten = torch.ops.aten

    def rows(q, k, cu_q, cu_k, causal, options):
        left = options["window_size_left"]
        assert options["window_size_right"] == 0 and causal == (left == -1)
        for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
            mask = band(int(b - a), int(d - c), None if left == -1 else left + 1).to(q.dtype)
            yield slice(a, b), slice(c, d), {"attn_mask": mask, "scale": options["scale"]}

    def headed(x, groups=1):
        return x.transpose(0, 1).repeat_interleave(groups, 0)[None]

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **options):
        assert (dropout, debug) == (0.0, False) and q.shape[-1] == v.shape[-1]
        assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
        groups, out = q.shape[1] // k.shape[1], []
        for at, key_at, more in rows(q, k, cu_q, cu_k, causal, options):
            given = headed(q[at]), headed(k[key_at], groups), headed(v[key_at], groups)
            out.append(aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, False, **more))
        found, lse = (torch.cat([x[part][0] for x in out], 1) for part in (0, 1))
        return found.transpose(0, 1), lse, torch.zeros(2), torch.zeros(2), torch.empty(0)

    def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, seed, offset, **options):
        groups = q.shape[1] // k.shape[1]
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for at, key_at, more in rows(q, k, cu_q, cu_k, causal, options):
            given = headed(grad[at]), headed(q[at]), headed(k[key_at], groups), headed(v[key_at], groups)
            parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *given, headed(out[at]), lse[None, :, at].contiguous(), 0.0, False, **more
            )
            dq[at] += parts[0][0].transpose(0, 1)
            for total, part in ((dk, parts[1]), (dv, parts[2])):
                total[key_at] += part[0].unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
        return dq, dk, dv

    monkeypatch.setattr(aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(aten, "_flash_attention_backward", backward)


@WINDOWS
@pytest.mark.parametrize("value_size", [8, 4])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_varlen_kernel_is_gated_forward_and_backward(flash, lengths, value_size, window):
    q, k, v, sink = inputs = make(sum(lengths), value_size=value_size)
    packed = PackedAttention.from_lengths(lengths, "cpu", "varlen")
    found = packed.attend(AttentionCall(q, k, v, SCALE, window, sink=sink))
    assert found.shape == (1, sum(lengths), HEADS, value_size)
    same(found, of_transformers(*inputs, [(n, n) for n in lengths], window), inputs)


@WINDOWS
def test_the_varlen_kernel_with_keys_before_the_first_query(flash, window):
    queries, keys = [3, 1, 5], [9, 14, 5]
    q, k, v, sink = inputs = make(sum(queries), sum(keys))
    sides = [torch.tensor([0, *each]).cumsum(0).int() for each in (queries, keys)]
    bounds = RaggedBounds(sides[0], 5, sides[1], 14)
    found = ragged_attention("varlen", AttentionCall(q, k, v, SCALE, window, sink=sink), bounds)
    same(found, of_transformers(*inputs, list(zip(queries, keys, strict=True)), window), inputs)


def test_sinks_in_another_precision_keep_it(flash):
    """FSDP may keep them in float32 beside queries in half precision."""
    q, k, v, sink = make(6, dtype=torch.bfloat16)
    sink = sink.detach().float().requires_grad_()
    out = PackedAttention.from_lengths([4, 2], "cpu", "varlen").attend(AttentionCall(q, k, v, sink=sink))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert sink.grad.dtype == torch.float32 and bool(sink.grad[2:].any())
