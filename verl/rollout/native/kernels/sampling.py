# mypy: disable-error-code="no-untyped-def"
"""Drawing tokens on the device: one pass over the logits in chunks, then one short program per row.

The first kernel leaves for every chunk of the vocabulary its peak, the mass below it and the peak's index;
the second picks the chunk in which the row's uniform number falls and inverts the distribution inside it. It
covers temperature and greedy rows; filters and penalties go through `verl.rollout.sampling`, which this equals.

Sums that decide between tokens are float64 over weights of at least 2^-40 of the total. What any order of summation
gets wrong is far below that, so every weight that counts makes its running sum grow, and a token is drawn only where
its own weight covers the uniform number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 2048
SMALLEST = tl.constexpr(2.0**-40)
"""Weights below this part of the total are never drawn."""


@triton.jit
def _chunk_masses(
    logits_ptr, temperature_ptr, peak_ptr, mass_ptr, best_ptr, stride, vocab, chunks, CHUNK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = offsets < vocab
    values = tl.load(logits_ptr + row * stride + offsets, mask=inside, other=float("-inf")).to(tl.float32)
    values = values / tl.load(temperature_ptr + row)
    peak = tl.max(values, 0)
    # A chunk without any possible token has the peak -inf and the mass 0.
    mass = tl.sum(tl.exp(values - tl.where(peak == float("-inf"), 0.0, peak)), 0)
    best = tl.min(tl.where(values == peak, offsets, vocab), 0)
    slot = row * chunks + chunk
    tl.store(peak_ptr + slot, peak)
    tl.store(mass_ptr + slot, mass)
    tl.store(best_ptr + slot, best)


@triton.jit
def _uniform(key, position):
    """The same numbers as `verl.rollout.sampling.uniform`."""
    value = key + (position + 1) * -7046029254386353131
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    value = value ^ ((value >> 31) & 0x1FFFFFFFF)
    return ((value >> 32) & 0xFFFFFFFF).to(tl.float64) * 2.3283064365386963e-10


@triton.jit
def _invert(weights, share, index, END: tl.constexpr):
    """The index whose weight covers `share` of the weights' sum, and the share of that weight which lies before."""
    weights = weights.to(tl.float64)
    weights = tl.where(weights >= tl.sum(weights, 0) * SMALLEST, weights, 0.0)
    running = tl.cumsum(weights, 0)
    highest = tl.max(tl.where(weights > 0, running, 0.0), 0)
    target = share * highest
    # A share that rounding brought to 1 belongs to the last weight.
    covered = (weights > 0) & ((running > target) | (running == highest))
    found = tl.min(tl.where(covered, index, END), 0)
    before = tl.sum(tl.where(index < found, weights, 0.0), 0)
    here = tl.sum(tl.where(index == found, weights, 0.0), 0)
    return found, (target - before) / here


@triton.jit
def _pick(
    logits_ptr,
    temperature_ptr,
    greedy_ptr,
    keys_ptr,
    produced_ptr,
    peak_ptr,
    mass_ptr,
    best_ptr,
    token_ptr,
    log_prob_ptr,
    stride,
    vocab,
    chunks,
    CHUNKS_UP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, CHUNKS_UP)
    present = index < chunks
    peaks = tl.load(peak_ptr + row * chunks + index, mask=present, other=float("-inf"))
    masses = tl.load(mass_ptr + row * chunks + index, mask=present, other=0.0)
    top = tl.max(peaks, 0)
    weights = tl.where(present, masses * tl.exp(peaks - top), 0.0)
    total = tl.sum(weights, 0)
    share = _uniform(tl.load(keys_ptr + row), tl.load(produced_ptr + row))
    chunk, share = _invert(weights, share, index, CHUNKS_UP)
    peak = tl.max(tl.where(index == chunk, peaks, float("-inf")), 0)

    temperature = tl.load(temperature_ptr + row)
    inner_index = tl.arange(0, CHUNK)
    offsets = chunk * CHUNK + inner_index
    values = tl.load(logits_ptr + row * stride + offsets, mask=offsets < vocab, other=float("-inf"))
    inner = tl.exp(values.to(tl.float32) / temperature - peak)
    token, _ = _invert(inner, share, inner_index, CHUNK)
    token += chunk * CHUNK

    bests = tl.load(best_ptr + row * chunks + index, mask=present, other=0)
    highest = tl.min(tl.where((peaks == top) & present, bests, vocab), 0)
    token = tl.where(tl.load(greedy_ptr + row) != 0, highest, token)
    token = tl.minimum(token, vocab - 1)
    value = tl.load(logits_ptr + row * stride + token).to(tl.float32) / temperature
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(log_prob_ptr + row, value - top - tl.log(total))


def sample_plain(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    greedy: torch.Tensor,
    keys: torch.Tensor,
    produced: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [B, V]; returns token ids (int64) and log-probs (float32) of the temperature-scaled distribution."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    peak = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    mass = torch.empty_like(peak)
    best = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _chunk_masses[(rows, chunks)](
        logits, temperature, peak, mass, best, logits.stride(0), vocab, chunks, CHUNK=CHUNK, num_warps=4
    )
    pointers = (logits, temperature, greedy, keys, produced, peak, mass, best, tokens, log_probs)
    settings = {"CHUNKS_UP": triton.next_power_of_2(chunks), "CHUNK": CHUNK, "num_warps": 4}
    _pick[(rows,)](*pointers, logits.stride(0), vocab, chunks, **settings)
    return tokens, log_probs


@triton.jit
def _advance(
    sampled_ptr, sampled_log_prob_ptr, columns_ptr, stop_ptr, out_tokens_ptr, out_log_probs_ptr,
    rows, stride, out_stride, STOPS: tl.constexpr, STOPS_UP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    present = row < rows
    # The order of the integer columns of `DeviceState`.
    active_ptr = columns_ptr + row
    generated_ptr = active_ptr + stride
    tokens_ptr = generated_ptr + stride
    positions_ptr = tokens_ptr + stride
    produced_ptr = positions_ptr + stride
    last_ptr = produced_ptr + stride
    slots_ptr = last_ptr + stride
    active = (tl.load(active_ptr, mask=present, other=0) != 0) & present
    token = tl.load(sampled_ptr + row, mask=active, other=0)
    log_prob = tl.load(sampled_log_prob_ptr + row, mask=active, other=0.0)
    generated = tl.load(generated_ptr, mask=active, other=0)
    position = tl.load(positions_ptr, mask=active, other=0)
    produced = tl.load(produced_ptr, mask=active, other=0)
    last = tl.load(last_ptr, mask=active, other=0)
    stops = tl.arange(0, STOPS_UP)
    stop_ids = tl.load(
        stop_ptr + row[:, None] * STOPS + stops[None, :],
        mask=active[:, None] & (stops < STOPS)[None, :],
        other=-1,
    )
    ended = tl.max((stop_ids == token[:, None]).to(tl.int32), 1) != 0
    ended = ended | (position + 1 >= last)
    slot = tl.load(slots_ptr, mask=active, other=0)
    offset = slot.to(tl.int64) * out_stride + generated
    tl.store(out_tokens_ptr + offset, token.to(tl.int32), mask=active)
    tl.store(out_log_probs_ptr + offset, log_prob, mask=active)
    tl.store(tokens_ptr, token, mask=active)
    tl.store(generated_ptr, generated + 1, mask=active)
    tl.store(positions_ptr, position + 1, mask=active)
    tl.store(produced_ptr, produced + 1, mask=active)
    tl.store(active_ptr, 0, mask=active & ended)


def advance(
    sampled: torch.Tensor,
    log_probs: torch.Tensor,
    columns: torch.Tensor,
    stop_ids: torch.Tensor,
    out_tokens: torch.Tensor,
    out_log_probs: torch.Tensor,
) -> None:
    """Record one drawn token per active row in its slot and end the rows that stop with it, in place."""
    rows = sampled.shape[0]
    block = 64
    _advance[(triton.cdiv(rows, block),)](
        *(sampled, log_probs, columns, stop_ids, out_tokens, out_log_probs),
        rows,
        columns.stride(0),
        out_tokens.stride(0),
        STOPS=stop_ids.shape[1],
        STOPS_UP=max(2, triton.next_power_of_2(stop_ids.shape[1])),
        BLOCK=block,
        num_warps=2,
    )
