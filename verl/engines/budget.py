"""Tokens per micro-batch: as many as the device is fast with, and no more than fit into memory.

The cap by throughput is a table of measurements (`best_tokens`): nothing is timed in a run, so that two runs of a
config have the same split. Memory is measured with a small pass; rounding down to a power of two keeps small
differences in free memory from changing the split.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch

from verl.memory import free_device_bytes, free_host_bytes

log = logging.getLogger(__name__)

SMALLEST = 256
CAP_CPU = 8192
SAFETY = 0.8

BEST_TOKENS: dict[float, int] = {
    3.5e6: 131072,  # SmolLM2-135M
    46.8e6: 16384,  # Qwen2.5-1.5B
    233e6: 16384,  # Qwen2.5-7B
}
"""On a GPU: weights a token is multiplied with in one decoder layer -> tokens per micro-batch; the nearest row applies.

The smallest budget within 3 % of the best throughput of an update, measured on one H200 by
`python -m benchmarks.train --token-budgets`, whose last lines are these rows (benchmarks/results). Larger
micro-batches cost memory and gain nothing."""


def best_tokens(layer_weights: float) -> int:
    """For a model with this many weights in each decoder layer that every token is multiplied with."""
    nearest = min(BEST_TOKENS, key=lambda known: abs(math.log(known / max(layer_weights, 1.0))))
    return BEST_TOKENS[nearest]


def power_of_two_below(tokens: float) -> int:
    return 1 << max(int(tokens), 1).bit_length() - 1


def fitting_tokens(free_bytes: float, fixed_bytes: float, bytes_per_token: float, cap: int) -> int:
    """The largest power of two whose estimated memory stays within `SAFETY` of what is free."""
    tokens = max(free_bytes * SAFETY - fixed_bytes, 0.0) / max(bytes_per_token, 1.0)
    return min(max(power_of_two_below(tokens), SMALLEST), cap)


def free_bytes(device: torch.device) -> int:
    """Memory a pass may take: on CUDA what the driver has left plus what torch's cache holds unused."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free_device_bytes(device) + cached
    return free_host_bytes()


def measure(
    probe: Callable[[int], None], device: torch.device, *, cap: int, reserve_bytes: int = 0, label: str = ""
) -> int:
    """Tokens per micro-batch, at most `cap`. `probe(n)` runs one pass over n tokens; `reserve_bytes` will be needed
    besides what the probe takes."""
    try:
        fixed, slope = _cuda_cost(probe, device) if device.type == "cuda" else _host_cost(probe)
    except torch.OutOfMemoryError:
        return smallest(label)
    tokens = fitting_tokens(free_bytes(device) - reserve_bytes, fixed, slope, cap)
    log.info(
        "%s: micro-batches of up to %d tokens (measured: %.1f KiB per token, %.2f GiB free)",
        label,
        tokens,
        slope / 1024,
        (free_bytes(device) - reserve_bytes) / 2**30,
    )
    return tokens


def smallest(label: str) -> int:
    """The size to try when not even the probe fits."""
    log.warning("%s: the probe does not fit into device memory; micro-batches of %d tokens", label, SMALLEST)
    return SMALLEST


def _cuda_cost(probe: Callable[[int], None], device: torch.device) -> tuple[float, float]:
    """Peak memory as a line over tokens: (fixed, per token). The first run allocates workspaces."""
    few, many = 512, 2048
    probe(few)
    peaks = []
    for tokens in (few, many):
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        probe(tokens)
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    slope = max(peaks[1] - peaks[0], 1) / (many - few)
    return max(peaks[0] - slope * few, 0.0), slope


def _host_cost(probe: Callable[[int], None]) -> tuple[float, float]:
    """What autograd saves for the backward pass, each storage once: (0, per token)."""
    tokens = 128
    seen: dict[int, int] = {}

    def count(x: torch.Tensor) -> torch.Tensor:
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        probe(tokens)
    return 0.0, sum(seen.values()) / tokens
