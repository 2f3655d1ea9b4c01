"""Prompts whose beginning is cached: every way to compute them equals plain attention, with a fixed number of calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from verl.models.attention import AttentionCall, RaggedBounds, use_verl_attention
from verl.rollout.base import Request, SamplingParams
from verl.rollout.native import device_attention
from verl.rollout.native.block_manager import Copy
from verl.rollout.native.device_attention import (
    ContinuedAttention,
    DecodeAttention,
    PromptAttention,
    prompt_inputs,
)
from verl.rollout.native.device_state import DeviceCache
from verl.rollout.native.engine_state import CacheLayout, LayerShape
from verl.rollout.native.model import Backbone, FusedDecoder
from verl.rollout.native.ops import TorchOps
from verl.rollout.native.scheduler import Chunk
from verl.rollout.sequence import Sequence

HEADS, KV, DIM = 4, 2, 8


def tensors(counts: list[int], lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, HEADS, sum(counts), DIM, generator=generator)
    k, v = (torch.randn(1, KV, sum(lengths), DIM, generator=generator) for _ in range(2))
    return q, k, v


def by_definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: list[int],
    lengths: list[int],
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Token by token: the keys of its own sequence up to its own, within the window."""
    out = []
    first_q = first_k = 0
    for count, length in zip(counts, lengths, strict=True):
        for at in range(count):
            end = length - count + at + 1
            start = max(end - window, 0) if window else 0
            keys, values = (
                x[0, :, first_k + start : first_k + end].repeat_interleave(HEADS // KV, 0) for x in (k, v)
            )
            scores = (q[0, :, first_q + at, None] * keys).sum(-1) * (scaling or DIM**-0.5)
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            out.append((scores.softmax(-1)[..., None] * values).sum(1))
        first_q, first_k = first_q + count, first_k + length
    return torch.stack(out)[None]


def flash_like(backend: str, call: AttentionCall, bounds: RaggedBounds) -> torch.Tensor:
    """What torch documents of its varlen kernel (which needs a GPU): a causal mask aligned to the end."""
    cu_q, (cu_k, longest_keys) = bounds.queries, bounds.key_side
    counts, lengths = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert (cu_q.dtype, cu_k.dtype, cu_q[0], cu_k[0]) == (torch.int32, torch.int32, 0, 0)
    assert (bounds.longest, longest_keys) == (max(counts), max(lengths))
    return by_definition(*call[:3], counts, lengths, call.scaling, call.window, None)


CHUNKS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(chunks=CHUNKS, window=st.sampled_from([None, 1, 3, 40]), softcap=st.sampled_from([None, 2.0]))
def test_padded_batches_equal_plain_attention(
    chunks: list[tuple[int, int]], window: int | None, softcap: float | None
) -> None:
    counts, lengths = [c for c, _ in chunks], [c + before for c, before in chunks]
    q, k, v = tensors(counts, lengths)
    ours = ContinuedAttention(counts, lengths, lambda x: x)
    wanted = by_definition(q, k, v, counts, lengths, 0.3, window, softcap)
    for _ in range(2):  # the second layer uses what the first has made
        found = ours.attend(AttentionCall(q, k, v, 0.3, window, softcap))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("window", [None, 3])
def test_the_flash_kernel_is_given_queries_and_keys_of_their_own_lengths(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, lengths = [3, 1, 5], [9, 14, 5]
    q, k, v = tensors(counts, lengths)
    monkeypatch.setattr(device_attention, "ragged_attention", flash_like)
    found = ContinuedAttention(counts, lengths, lambda x: x).ragged(AttentionCall(q, k, v, 0.3, window))
    torch.testing.assert_close(found, by_definition(q, k, v, counts, lengths, 0.3, window, None))


@pytest.mark.parametrize("window", [None, 3])
def test_capped_scores_are_in_memory_for_some_chunks_at_a_time(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, lengths = [3, 4, 3, 4], [9, 14, 5, 20]
    q, k, v = tensors(counts, lengths)
    seen = []
    whole = device_attention.dot_product_attention
    monkeypatch.setattr(
        device_attention, "dot_product_attention", lambda c, mask: (seen.append(len(c.q)), whole(c, mask))[1]
    )
    monkeypatch.setattr(device_attention, "_SCORES", 3 * HEADS * 4 * 20)
    found = ContinuedAttention(counts, lengths, lambda x: x).attend(AttentionCall(q, k, v, 0.3, window, 2.0))
    assert seen == [3, 1]
    torch.testing.assert_close(found, by_definition(q, k, v, counts, lengths, 0.3, window, 2.0))


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def calls_of_a_layer(prompts: int, flash: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """ATen calls of the second layer of a prompt pass, in which every prompt shares its first 16 tokens."""
    counts, lengths = [10] * prompts, [26] * prompts
    q, k, v = tensors(counts, counts)
    layers = [tuple(torch.zeros(2, 2 * prompts, KV, 16, DIM)) for _ in range(2)]
    cache: Any = SimpleNamespace(block_size=16, layers=layers)
    inner = ContinuedAttention(counts, lengths, lambda x: x)
    kernel_calls: list[int] = []
    if flash:

        def kernel(backend: str, call: AttentionCall, bounds: Any) -> torch.Tensor:
            kernel_calls.append(1)
            return torch.empty_like(call.q.transpose(1, 2))

        monkeypatch.setattr(device_attention, "ragged_attention", kernel)
        monkeypatch.setattr(inner, "padded", inner.ragged)
    context = PromptAttention(TorchOps(), cache, torch.arange(sum(counts)), torch.arange(sum(lengths)), inner)
    context.attend(AttentionCall(q, k, v, layer=0))
    with Calls() as calls:
        context.attend(AttentionCall(q, k, v, layer=1))
    assert len(kernel_calls) == 2 * flash, "one kernel for each layer"
    return calls.count


@pytest.mark.parametrize("flash", [False, True])
def test_a_layer_makes_as_many_calls_for_many_prompts_as_for_few(
    flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (calls_of_a_layer(prompts, flash, monkeypatch) for prompts in (2, 32))
    assert many == few < 60


def test_a_decode_step_computes_its_cache_slots_once(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.rollout import Request, SamplingParams
    from verl.rollout.native import Limits, NativeRollout

    slots, made, used = device_attention.decode_slots, [], []
    attend = DecodeAttention.attend

    def counting(*args: Any) -> torch.Tensor:
        made.append(1)
        return slots(*args)

    def noting(self: DecodeAttention, *args: Any, **kwargs: Any) -> torch.Tensor:
        used.append(1)
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(device_attention, "decode_slots", counting)
    monkeypatch.setattr(DecodeAttention, "attend", noting)
    engine = NativeRollout(tiny("gemma"), None, Limits(), on_device=True, verify=False)
    list(engine.generate([Request("a", [5, 6], SamplingParams(max_tokens=4, ignore_eos=True))]))
    assert len(made) == 3 and len(used) == 2 * len(made), "two layers, three decode steps"


@pytest.mark.parametrize("alike", [True, False])
def test_blocks_are_copied_in_every_layer(alike: bool) -> None:
    """More copies than one call takes; layers of several shapes, one of them without attention."""
    other = (LayerShape(2, 3, 3),) if alike else (LayerShape(), LayerShape(1, 4, 2, torch.float64))
    cache = DeviceCache(CacheLayout((LayerShape(2, 3, 3), *other)), 600, 4, torch.device("cpu"))
    tensors = [tensor for layer in cache.layers for tensor in layer]
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    wanted = [torch.cat([x[:300], x[:300].flip(0), x[600:]]) for x in tensors]
    cache.copy([Copy(block, 599 - block, 4) for block in range(300)], lambda x: x)
    assert all(map(torch.equal, tensors, wanted))


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_prompt_pass_equals_the_module(name: str, dtype: torch.dtype, tiny: Any) -> None:
    """Chunks that begin and chunks that continue their prompts, in blocks out of order."""
    model = tiny(name).to(dtype)
    assert use_verl_attention(model)
    fused, ops = FusedDecoder.match(model, 64), TorchOps()
    assert fused is not None
    dim = model.model.layers[0].self_attn.head_dim
    layout = CacheLayout((LayerShape(2, dim, dim, dtype),) * 2)
    sequences = []
    for index, length in enumerate((23, 5, 40)):
        sequence = Sequence(
            Request(str(index), [(7 * index + i) % 97 for i in range(length)], SamplingParams()), 0, 0
        )
        sequence.table = [(5 * block + index) % 31 for block in range(-(-length // 4))]
        sequences.append(sequence)
    passes = [
        [Chunk(sequences[0], 0, 9), Chunk(sequences[1], 0, 5)],
        [Chunk(sequences[0], 9, 14), Chunk(sequences[2], 0, 33)],
        [Chunk(sequences[2], 33, 7)],
    ]
    caches = [DeviceCache(layout, 31, 4, torch.device("cpu")) for _ in range(2)]
    for chunks in passes:
        inputs, attention = prompt_inputs(chunks, ops, caches[0], lambda x: x)
        module = prompt_inputs(chunks, ops, caches[1], lambda x: x)[1]
        ours = fused.prompt(ops, inputs, attention)
        theirs = Backbone(model).hidden(inputs.tokens, inputs.positions, module)
        assert inputs.last.tolist() == [sum(c.count for c in chunks[: i + 1]) - 1 for i in range(len(chunks))]
        torch.testing.assert_close(
            ours, theirs, **({"rtol": 0, "atol": 2e-5} if dtype == torch.float32 else {})
        )
        slots = inputs.slots
        for ours_layer, their_layer in zip(caches[0].layers, caches[1].layers, strict=True):
            for ours_cache, their_cache in zip(ours_layer, their_layer, strict=True):
                written = [x[slots // 4, :, slots % 4] for x in (ours_cache, their_cache)]
                torch.testing.assert_close(*written)
