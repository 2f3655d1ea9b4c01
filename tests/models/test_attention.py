"""Packed attention against a dense score matrix with everything written out."""

from __future__ import annotations

import inspect

import pytest
import torch

from verl.models import attention
from verl.models.attention import AttentionCall, PackedAttention, choose_backend


def dense(q, k, v, lengths, scaling=None, window=None, softcap=None):
    """[1,H,N,D] -> [1,N,H,D] with one mask for the whole pack."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * (scaling if scaling is not None else q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    at = torch.arange(len(document))
    seen = (document[:, None] == document[None, :]) & (at[:, None] >= at[None, :])
    if window is not None:
        seen &= at[:, None] - at[None, :] < window
    scores = scores.masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def make(lengths, heads=4, kv_heads=2, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return [
        torch.randn(1, n, total, size, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    ]


OPTIONS = [
    {},
    {"scaling": 0.7},
    {"window": 3},
    {"window": 100},
    {"softcap": 2.0},
    {"softcap": 2.0, "window": 2, "scaling": 0.3},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", [[5, 1, 9, 3], [4, 4, 4], [1], [1, 1], [7]])
def test_packed_equals_dense(lengths, options):
    q, k, v = make(lengths)
    packed = PackedAttention.from_lengths(lengths, "cpu")
    out = packed.attend(AttentionCall(q, k, v, **options))
    window = options.get("window")
    expected = dense(q, k, v, lengths, options.get("scaling"), window, options.get("softcap"))
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    own = torch.autograd.grad((out * weights).sum(), (q, k, v))
    want = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for left, right in zip(own, want, strict=True):
        torch.testing.assert_close(left, right)


def test_a_pack_of_the_wrong_size_is_refused():
    q, k, v = make([3, 4])
    with pytest.raises(RuntimeError, match="lengths"):
        PackedAttention.from_lengths([3, 5], "cpu").attend(AttentionCall(q, k, v))


def test_a_model_called_without_context_says_what_to_do():
    with pytest.raises(RuntimeError, match="set_attn_implementation"):
        attention._attention(None, *make([3]), None)


def _varlen_like(q, k, v, cu_seqlens, causal, scale, window):
    """What torch's kernel computes, by `dense`, from [N,H,D]."""
    lengths = cu_seqlens.diff().tolist()
    assert causal
    left = None if window is None else window + 1
    out = dense(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), lengths, scale, left)
    return out[0]


def _newer(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    assert enable_gqa or q.shape[1] == k.shape[1]
    window = None if window_size[0] == -1 else window_size[0]
    return _varlen_like(q, k, v, cu_q, window_size[1] == 0, scale, window)


def _older(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False):
    return _varlen_like(q, k, v, cu_q, is_causal, None, None)


@pytest.mark.parametrize("kernel", [_newer, _older])
def test_both_signatures_of_the_varlen_kernel_are_served(monkeypatch, kernel):
    """The kernel itself runs on GPUs only; what is passed to it can be wrong on any machine."""
    import torch.nn.attention.varlen as module

    monkeypatch.setattr(module, "varlen_attn", kernel)
    lengths = [5, 1, 6]
    q, k, v = make(lengths)
    packed = PackedAttention.from_lengths(lengths, "cpu", backend="varlen")
    torch.testing.assert_close(
        packed.attend(AttentionCall(q, k, v, scaling=0.4)), dense(q, k, v, lengths, 0.4)
    )
    if kernel is _newer:
        out = packed.attend(AttentionCall(q, k, v, window=3))
        torch.testing.assert_close(out, dense(q, k, v, lengths, window=3))


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "sizes", "uniform", "window", "kernel"),
    [
        (BF16, (128, 128), True, None, "varlen"),
        (BF16, (192, 128), False, 4096, "varlen"),
        (BF16, (512, 512), True, None, "flex"),
        (FP32, (128, 128), True, 4096, "flex"),
    ],
)
def test_sinks_go_to_a_kernel_that_returns_the_log_sum_exp(dtype, sizes, uniform, window, kernel):
    assert choose_backend(True, dtype, sizes, uniform, window, None, has_sinks=True) == kernel
    assert choose_backend(False, dtype, sizes, uniform, window, None, has_sinks=True) == "sdpa"


@pytest.mark.parametrize(
    ("dtype", "sizes", "uniform", "window", "softcap", "kernel"),
    [
        (BF16, (128, 128), True, None, None, "sdpa"),
        (BF16, (128, 128), True, 4096, None, "varlen"),
        (BF16, (128, 128), False, None, None, "varlen"),
        (BF16, (128, 128), False, 4096, None, "varlen"),
        (BF16, (192, 128), True, None, None, "varlen"),
        (BF16, (128, 128), True, 4096, 50.0, "flex"),
        (BF16, (512, 512), True, 4096, None, "sdpa"),
        (FP32, (128, 128), True, 4096, None, "sdpa"),
    ],
)
def test_on_a_gpu_a_window_never_asks_for_a_dense_mask_where_a_kernel_knows_windows(
    dtype, sizes, uniform, window, softcap, kernel
):
    assert choose_backend(True, dtype, sizes, uniform, window, softcap) == kernel
    assert choose_backend(False, dtype, sizes, uniform, window, softcap) == "sdpa"


def test_the_compiled_kernel_is_left_out_inside_a_dispatch_mode():
    from torch.utils._python_dispatch import TorchDispatchMode

    with TorchDispatchMode():
        assert choose_backend(True, FP32, (64, 64), True, None, 50.0) == "sdpa"


@pytest.mark.parametrize("window", [2, 5])
def test_windows_are_served_block_by_block(monkeypatch, window):
    monkeypatch.setattr(attention, "_FEWEST_QUERIES", 4)
    asked = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def noting(q, k, v, attn_mask=None, **options):
        asked.append(attn_mask.numel())
        return plain(q, k, v, attn_mask=attn_mask, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", noting)
    lengths = [40]
    q, k, v = make(lengths)
    out = PackedAttention.from_lengths(lengths, "cpu").attend(AttentionCall(q, k, v, window=window))
    torch.testing.assert_close(out, dense(q, k, v, lengths, window=window))
    assert len(asked) >= 8
    assert max(asked) <= 2 * max(window, 4) ** 2, "a mask as large as the square of the length"


@pytest.mark.parametrize(("size", "value_size"), [(8, 8), (12, 12), (24, 12), (10, 16)])
@pytest.mark.parametrize("kernel", [_newer, _older])
def test_head_sizes_the_flash_kernels_do_not_know_are_filled_up(monkeypatch, kernel, size, value_size):
    import torch.nn.attention.varlen as module

    def only_one_size(q, k, v, *args, **options):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
        return kernel(q, k, v, *args, **options)

    only_one_size.__signature__ = inspect.signature(kernel)
    monkeypatch.setattr(module, "varlen_attn", only_one_size)
    lengths = [5, 1, 6]
    q, k, _ = make(lengths, size=size)
    v = make(lengths, size=value_size, seed=1)[2]
    packed = PackedAttention.from_lengths(lengths, "cpu", backend="varlen")
    torch.testing.assert_close(packed.attend(AttentionCall(q, k, v)), dense(q, k, v, lengths))
    torch.testing.assert_close(
        packed.attend(AttentionCall(q, k, v, scaling=0.3)), dense(q, k, v, lengths, 0.3)
    )


@pytest.mark.parametrize(("length", "compiled"), [(127, False), (128, True)])
def test_short_packs_are_not_worth_compiling_another_kernel(monkeypatch, length, compiled):
    monkeypatch.setattr(attention, "choose_backend", lambda *_: "flex")
    asked = []
    monkeypatch.setattr(PackedAttention, "_flex", lambda self, call: asked.append(call.q.shape[2]))
    q, k, v = make([length])
    PackedAttention.from_lengths([length], "cpu").attend(AttentionCall(q, k, v, softcap=2.0))
    assert asked == ([length] if compiled else [])
