"""Counter-based noise: one uniform number for each (seed, request, sample, position), and no state.

The number depends on nothing but its key, so a request draws the same tokens whatever else is in the batch and in
whatever order it is served, also after a preemption or a resume. The same 64-bit wrapping integer arithmetic runs on
the CPU, on the GPU and inside the Triton sampler.
"""

from __future__ import annotations

import hashlib

import torch

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= _MASK64
    return value - (1 << 64) if value >= 1 << 63 else value


def mix(value: int) -> int:
    """The finaliser of splitmix64 on a Python integer; every input bit reaches every output bit."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * _MIX_A) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX_B) & _MASK64
    return value ^ (value >> 31)


def sequence_key(seed: int, request_id: str, sample: int) -> int:
    """The signed 64-bit key of one sample; stable across processes (unlike `hash`)."""
    name = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")
    return _signed(mix(mix(mix(seed + _GOLDEN) ^ name) + _GOLDEN * (sample + 1)))


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift: torch's shift of int64 is arithmetic."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def uniform(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1), float64 with 32 random bits; `keys` and `positions` are int64 of one shape."""
    value = keys + (positions + 1) * _signed(_GOLDEN)
    value = (value ^ _shift_right(value, 30)) * _signed(_MIX_A)
    value = (value ^ _shift_right(value, 27)) * _signed(_MIX_B)
    value = value ^ _shift_right(value, 31)
    return _shift_right(value, 32).to(torch.float64) * 2.0**-32
