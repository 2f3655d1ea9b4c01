"""The fused head against plain log_softmax, its gradients, and the memory it may hold."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from verl.models import fused_linear
from verl.models.fused_linear import HeadOptions, VocabularyShard, fused_head, slice_columns


def plain(hidden, weight, bias, target, options):
    """The same numbers with the whole [tokens, vocabulary] matrix."""
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    logs = torch.log_softmax(logits * options.scale / options.temperature, dim=-1)
    return (
        logs.gather(1, target[:, None]).squeeze(1),
        -(logs.exp() * logs).sum(-1),
        logs.exp().square().sum(-1),
    )


def inputs(tokens=9, hidden_size=6, vocab=37, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, hidden_size, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, hidden_size, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.randn(vocab, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, vocab, (tokens,), generator=generator)


CASES = [
    HeadOptions(with_entropy=True, with_sum_pi_squared=True, columns=10),
    HeadOptions(temperature=0.6, with_entropy=True, with_sum_pi_squared=True, columns=37),
    HeadOptions(temperature=1.7, softcap=3.0, with_entropy=True, with_sum_pi_squared=True, columns=8),
    HeadOptions(scale=0.25, softcap=5.0, with_entropy=True, with_sum_pi_squared=True, columns=1),
]


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_answers_equal_plain_log_softmax(options, with_bias):
    hidden, weight, bias, target = inputs()
    bias = bias if with_bias else None
    found = fused_head(hidden, weight, target, bias=bias, options=options)
    log_probs, entropy, squares = plain(hidden, weight, bias, target, options)
    torch.testing.assert_close(found.log_probs, log_probs)
    torch.testing.assert_close(found.entropy, entropy)
    torch.testing.assert_close(found.sum_pi_squared, squares)
    assert not found.sum_pi_squared.requires_grad


@pytest.mark.parametrize("options", CASES)
def test_gradients_by_finite_differences(options):
    hidden, weight, bias, target = inputs(tokens=4, vocab=11)

    def both(h, w, b):
        found = fused_head(h, w, target, bias=b, options=options)
        return found.log_probs, found.entropy

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


def test_float32_gradients_equal_plain():
    options = HeadOptions(temperature=0.8, with_entropy=True, columns=16)
    hidden, weight, bias, target = inputs(tokens=40, hidden_size=16, vocab=50, dtype=torch.float32)
    coefficient = torch.linspace(-1, 1, 40)
    found = fused_head(hidden, weight, target, bias=bias, options=options)
    own = torch.autograd.grad(
        (found.log_probs * coefficient + 0.2 * found.entropy).sum(), (hidden, weight, bias)
    )
    log_probs, entropy, _ = plain(hidden, weight, bias, target, options)
    expected = torch.autograd.grad((log_probs * coefficient + 0.2 * entropy).sum(), (hidden, weight, bias))
    for left, right in zip(own, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_half_precision_stays_close_to_float32():
    """Products in bfloat16, reductions in float32: no worse than rounding the inputs."""
    hidden, weight, _, target = inputs(tokens=30, hidden_size=32, vocab=200, dtype=torch.float32)
    low = fused_head(hidden.bfloat16(), weight.bfloat16(), target, options=HeadOptions(columns=64))
    exact = plain(hidden.bfloat16().float(), weight.bfloat16().float(), None, target, HeadOptions())[0]
    assert low.log_probs.dtype == torch.float32
    assert (low.log_probs - exact).abs().max() < 0.1


def test_a_frozen_output_matrix_gets_no_gradient():
    hidden, weight, _, target = inputs()
    fused_head(hidden, weight.detach(), target).log_probs.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_no_tokens_at_all():
    hidden, weight, _, target = inputs()
    found = fused_head(hidden[:0], weight, target[:0], options=HeadOptions(with_entropy=True))
    assert found.log_probs.shape == (0,)
    (found.log_probs.sum() + found.entropy.sum()).backward()
    assert weight.grad is not None and not weight.grad.any()


def test_extreme_logits_stay_finite():
    hidden, weight, _, target = inputs(dtype=torch.float32)
    found = fused_head(hidden * 1e4, weight * 1e3, target, options=HeadOptions(with_entropy=True, columns=5))
    assert torch.isfinite(found.log_probs).all() and torch.isfinite(found.entropy).all()


def head_of_rank(rank, world, store, options):
    """One rank's part of the vocabulary as Megatron cuts it: equal parts, the last ones shorter or empty."""
    hidden, weight, bias, target = inputs()
    each = -(-weight.shape[0] // world)
    first = min(rank * each, weight.shape[0])
    weight, bias = (x.detach()[first : first + each].requires_grad_() for x in (weight, bias))
    shard = VocabularyShard(first, weight.shape[0], dist.ProcessGroupGloo(store, rank, world))
    found = fused_head(hidden, weight, target, bias=bias, options=options, shard=shard)
    return found, torch.autograd.grad(loss_of(found), (hidden, weight, bias)), shard.rows


def loss_of(found):
    loss = (found.log_probs * torch.arange(9)).sum()
    return loss if found.entropy is None else loss + (found.entropy * torch.arange(9).flip(0)).sum()


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, CASES[0]),
        (2, HeadOptions(with_sum_pi_squared=True)),
        (3, CASES[2]),
        (3, HeadOptions(temperature=0.5)),
        (9, HeadOptions(with_entropy=True, columns=3)),
    ],
)
def test_a_vocabulary_split_over_ranks_gives_the_same(world, options):
    """Each rank in a thread, with its own gloo process group; of nine the last has no tokens."""
    hidden, weight, bias, target = inputs()
    expected = fused_head(hidden, weight, target, bias=bias, options=options)
    gradients = torch.autograd.grad(loss_of(expected), (hidden, weight, bias))
    store = dist.HashStore()
    with ThreadPoolExecutor(world) as threads:
        ranks = list(
            threads.map(lambda rank: head_of_rank(rank, world, store, options), range(world), timeout=600)
        )
    assert sum(rows for *_, rows in ranks) == 37 and (ranks[-1][2] == 0) == (world == 9)
    exact = {"rtol": 1e-9, "atol": 1e-9}
    for found, *_ in ranks:
        torch.testing.assert_close(found.log_probs, expected.log_probs, **exact)
        for name in ("entropy", "sum_pi_squared"):
            own, whole = getattr(found, name), getattr(expected, name)
            assert (own is None) == (whole is None)
            if whole is not None:
                torch.testing.assert_close(own, whole, **exact)
    hidden_parts, weight_parts, bias_parts = zip(*(parts for _, parts, _ in ranks), strict=True)
    torch.testing.assert_close(sum(hidden_parts), gradients[0], **exact)
    torch.testing.assert_close(torch.cat(weight_parts), gradients[1], **exact)
    torch.testing.assert_close(torch.cat(bias_parts), gradients[2], **exact)


def test_padding_of_a_part_of_the_vocabulary_is_refused():
    hidden, weight, _, target = inputs()
    with pytest.raises(ValueError, match="has 37 rows, its shard 36"):
        fused_head(hidden, weight, target, shard=VocabularyShard(0, 36, None))


class LargestAllocation(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the elements of every tensor any operation returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.untyped_storage().nbytes() // value.element_size())
        return out


def test_the_whole_logits_matrix_never_exists():
    tokens, vocab, columns = 64, 5000, 256
    hidden, weight, _, target = inputs(tokens, 8, vocab, torch.float32)

    def largest(call):
        with LargestAllocation() as counter:
            call().sum().backward()
        return counter.largest

    options = HeadOptions(temperature=0.9, with_entropy=True, with_sum_pi_squared=True, columns=columns)

    def fused():
        found = fused_head(hidden, weight, target, options=options)
        return found.log_probs + found.entropy

    # The largest thing is the weight itself (and its gradient), not tokens x vocabulary.
    assert largest(fused) == vocab * 8
    # The same counter does see the matrix where it is made: a counter that sees nothing proves nothing.
    assert largest(lambda: plain(hidden, weight, None, target, HeadOptions())[0]) >= tokens * vocab


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "with_entropy": True}])
def test_kept_logits_change_no_number_and_stay_within_their_memory(monkeypatch, options):
    """None, three of eight slices, and all of them."""
    hidden, weight, bias, target = inputs(6, 5, 2000, torch.float32)
    counted, computed = fused_linear.product, []

    def product(*args):
        computed.append(args)
        return counted(*args)

    monkeypatch.setattr(fused_linear, "product", product)
    gradients = []
    for room, products in ((0, 16), (3 * 6 * 256 * 4, 13), (1 << 30, 8)):
        computed.clear()
        monkeypatch.setattr(fused_linear, "_kept_bytes", lambda device, room=room: room)
        out = fused_head(hidden, weight, target, bias=bias, options=HeadOptions(0.7, columns=256, **options))
        loss = out.log_probs.sum() if out.entropy is None else (out.log_probs + out.entropy).sum()
        gradients.append((loss, *torch.autograd.grad(loss, (hidden, weight, bias))))
        assert len(computed) == products
    for found in gradients[1:]:
        for left, right in zip(gradients[0], found, strict=True):
            assert torch.equal(left, right)


def test_without_gradient_no_logits_are_kept(monkeypatch):
    monkeypatch.setattr(fused_linear, "_kept_bytes", lambda device: pytest.fail("asked for memory"))
    hidden, weight, _, target = inputs(6, 5, 2000, torch.float32)
    with torch.no_grad():
        fused_head(hidden, weight, target)
    fused_head(hidden, weight, target, options=HeadOptions(keeps_logits=False)).log_probs.sum().backward()


def test_slices_are_bounded_whatever_the_number_of_tokens():
    for device, budget in (("cpu", 16 << 20), ("cuda", 512 << 20)):
        for tokens in (1, 100, 4096, 16384):
            columns = slice_columns(tokens, torch.device(device))
            assert columns % 256 == 0 and tokens * columns * 4 <= budget


INTERPRETED = """
import torch
from verl.models.fused_linear import HeadOptions, VocabularyShard, fused_head
torch.manual_seed(0)
for softcap in (None, 4.0):
    for entropy in (False, True):
        h = torch.randn(5, 6, requires_grad=True)
        w = torch.randn(150, 6, requires_grad=True)
        b = torch.randn(150, requires_grad=True)
        # of a vocabulary of 230 tokens, with targets below, within and above the part
        t = torch.tensor([3, 30, 100, 179, 229])
        shard = VocabularyShard(30, 150, None)
        found = []
        for kernel in ("torch", "triton"):
            o = HeadOptions(temperature=0.7, softcap=softcap, with_entropy=entropy, with_sum_pi_squared=True,
                            columns=64, kernel=kernel)
            a = fused_head(h, w, t, bias=b, options=o, shard=shard)
            loss = (a.log_probs * torch.arange(1, 6)).sum()
            if entropy:
                loss = loss + (a.entropy * torch.arange(5).flip(0)).sum()
            found.append([a.log_probs, a.sum_pi_squared, loss, *torch.autograd.grad(loss, (h, w, b))])
        for left, right in zip(*found):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.timeout(900)
@pytest.mark.slow(seconds=4)
def test_triton_kernels_equal_torch_in_the_interpreter():
    pytest.importorskip("triton")
    import os

    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
