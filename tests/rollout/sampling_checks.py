"""Rows made to break a sampler: sums that disagree, equal weights, chunks without any token. `kernel_checks` runs
these against the Triton kernels (in the interpreter or on a CUDA device), `test_sampling` against plain torch."""

from __future__ import annotations

import torch

MASK64 = (1 << 64) - 1
GOLDEN, MIX_A, MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def key_of(uniform: int) -> int:
    """The key whose number at position 0 is `uniform` * 2^-32: the mixing of `verl.rollout.sampling`, backwards."""

    def undo_shift(value: int, bits: int) -> int:
        found = value
        for _ in range(64 // bits):
            found = value ^ (found >> bits)
        return found

    value = undo_shift(uniform << 32, 31)
    value = undo_shift(value * pow(MIX_B, -1, 1 << 64) & MASK64, 27)
    value = undo_shift(value * pow(MIX_A, -1, 1 << 64) & MASK64, 30)
    value = (value - GOLDEN) & MASK64
    return value - (1 << 64) if value >= 1 << 63 else value


def boundary_rows(vocab: int, chunk: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [B, V], uniform numbers [B] (integers of 32 bits) and which tokens [V] may be drawn by them.

    A few dozen tokens of each chunk hold all the mass; between and behind them lies a sea of tokens that one draw in
    10^20 may hit. The numbers lie at the ends of chunks, where sums in float32 disagree by their last bits, and at the
    end of all (1 - 2^-32 is 1 in float32)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.full((vocab,), -60.0)
    starts = range(0, vocab, chunk)
    for start in starts:
        width = min(chunk, vocab - start)
        chosen = start + torch.randperm(width - 1, generator=generator)[:37]
        logits[chosen] = torch.randn(len(chosen), generator=generator)
    likely = logits > -50
    share = torch.softmax(logits.double(), -1).cumsum(-1)
    ends = [int(float(share[min(start + chunk, vocab) - 1]) * 2**32) for start in starts]
    near = [end + step for end in ends for step in (-300, -64, -9, -1, 0, 1, 9, 64, 300)]
    numbers = sorted({min(max(number, 0), 2**32 - 1) for number in [0, 1, *near, 2**32 - 256, 2**32 - 128]})
    return logits.expand(len(numbers), vocab), torch.tensor(numbers), likely


def selection_rows(vocab: int) -> torch.Tensor:
    """[B, V] weights of at most 1: random, with ties, uniform, certain, floats next to each other, many zeros."""
    generator = torch.Generator().manual_seed(vocab)
    values = torch.randn(8, vocab, generator=generator) * torch.tensor(
        [[3.0], [0.3], [8], [1], [1], [1], [1], [2]]
    )
    weights = (values - values.amax(-1, keepdim=True)).exp()
    weights[1] = (weights[1] * 16).round() / 16
    weights[3] = 1.0
    weights[4] = 0.0
    weights[4, vocab // 2] = 1.0
    one = torch.tensor(0x3F800000, dtype=torch.int32)
    weights[5] = (one - torch.arange(vocab, dtype=torch.int32).flip(0)).view(torch.float32)
    weights[6] = torch.where(torch.rand(vocab, generator=generator) < 0.3, 0.25, 0.0)
    weights[6, 3] = 1.0
    return weights


def kept_by_definition(weights: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """[V]: which of one row's weights stay, by sorting and by integers of any size."""
    order = weights.sort(descending=True).values.tolist()
    floor = order[min(top_k, len(order)) - 1] if top_k > 0 else 0.0
    if top_p >= 1:
        return weights >= floor
    left = [value for value in order if value >= floor]
    mass = [int(value * 2**44) for value in left]
    goal = float(torch.tensor(top_p, dtype=torch.float32)) * sum(mass)
    strictly_above = so_far = 0
    for place, value in enumerate(left):
        if place and value < left[place - 1]:
            strictly_above = so_far
        if strictly_above >= goal:
            break
        floor, so_far = value, so_far + mass[place]
    return weights >= floor
