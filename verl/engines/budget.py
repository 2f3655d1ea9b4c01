"""Micro-batches: how large they are, how rows are put into them, and what follows from one that did not fit.

Where the config leaves it open, a micro-batch has as many tokens as the device is fast with, and no more than fit into
memory. The cap by throughput is a table of measurements (`best_tokens`): nothing is timed in a run, so that two runs of
a config have the same split. Memory is measured with a small pass; rounding down to a power of two keeps small
differences in free memory from changing the split.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from verl.algorithms.balance import padded_budget_batches, token_budget_batches
from verl.data.proto import DataProto
from verl.distributed import Ranks
from verl.errors import TrainingHalted
from verl.memory import free_device_bytes, free_host_bytes
from verl.models.packing import Pack, sequence_lengths
from verl.models.shared_prefixes import PrefixTree, prompt_lengths
from verl.observe.metrics import Metric

log = logging.getLogger(__name__)

PassKind = Literal["train", "forward"]

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


def fitting_tokens(free_bytes: float, fixed_bytes: float, bytes_per_token: float, cap: int) -> int:
    """The largest power of two whose estimated memory stays within `SAFETY` of what is free."""
    tokens = max(free_bytes * SAFETY - fixed_bytes, 0.0) / max(bytes_per_token, 1.0)
    return min(max(1 << max(int(tokens), 1).bit_length() - 1, SMALLEST), cap)


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


@dataclass(frozen=True)
class MicroBatchSize:
    """Sequences or tokens per micro-batch; `max_tokens` wins where both are set. A sequence above it runs alone."""

    max_sequences: int | None = None
    max_tokens: int | None = None

    def over_ranks(self, count: int) -> MicroBatchSize:
        """The size for all of `count` ranks that split a micro-batch, from what each may take."""
        return self if self.max_tokens is None else replace(self, max_tokens=self.max_tokens * count)


_MEMORY_KEYS = (
    "set model.enable_gradient_checkpointing=true, model.enable_activation_offload=true or "
    "fsdp_config.offload_policy=true"
)
_KEYS = (
    "lower ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu (data.max_token_len_per_gpu or "
    f"data.micro_batch_size_per_gpu where a file is trained on), or {_MEMORY_KEYS}"
)
_LENGTH_KEYS = "lower data.max_response_length (data.max_length where a file is trained on)"


@dataclass(frozen=True)
class OOMReport:
    """A micro-batch that did not fit into device memory; `cause` is known on the failing rank only."""

    tokens: int
    sequences: int
    cause: str = ""

    def split_notice(self, label: str, rank: int) -> str:
        return (
            f"{label}: a micro-batch of {self.tokens} tokens ({self.sequences} sequences) on rank {rank} did not fit "
            f"into device memory; it is split, results stay the same, but the failed attempt costs time: {_KEYS}"
        )

    def too_long(self, label: str, rank: int) -> str:
        """Of a micro-batch that cannot be split further."""
        what, verb = "a single sequence", "does"
        if self.sequences > 1:
            what, verb = f"{self.sequences} sequences that stay in one micro-batch (a preference pair)", "do"
        return (
            f"{label}: {what} of {self.tokens} tokens on rank {rank} {verb} not fit into device memory; "
            f"{_MEMORY_KEYS}, or {_LENGTH_KEYS}. {self.cause}"
        ).rstrip()

    def unrecoverable(self, label: str, reason: str) -> str:
        return (
            f"{label}: a micro-batch of {self.tokens} tokens does not fit into device memory, and {reason}; {_KEYS}. "
            f"{self.cause}"
        )


def rows_together(batch: DataProto) -> int:
    """How many consecutive rows stay in one micro-batch (`verl.engines.base`)."""
    return int(batch.meta_info.get("rows_together", 1))


def shared_tokens(label: str, packed: Pack, parts: int) -> dict[str, Metric]:
    """The share of a micro-batch's tokens that is not computed; `parts`: ranks that split the pack."""
    tokens = packed.repeated + packed.input_ids.numel() * parts
    return {f"perf/shared_tokens/{label}": Metric(packed.repeated / tokens, weight=tokens)}


def attention_graphs() -> int:
    """How many of cuDNN's graphs this process has; its module is loaded by the first attention that uses one."""
    module = sys.modules.get("verl.models.cudnn_attention")
    return 0 if module is None else int(module.graphs.built)


def graphs_built(before: int) -> list[dict[str, Metric]]:
    """How many were built since there were `before`; nothing where there are none."""
    now = attention_graphs()
    return [{"perf/attention_graphs_built": Metric(now - before, "max")}] if now else []


def consecutive(rows: list[int], together: int) -> list[list[int]]:
    """Units of `together` rows."""
    return [rows[at : at + together] for at in range(0, len(rows), together)]


def shared_units(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    response_mask: torch.Tensor,
    rows: list[int],
    together: int,
    most: int | None,
) -> tuple[list[list[int]], list[int]]:
    """Units of some rows of a batch, in which common beginnings are computed once: rows with one prompt, in units of at
    most `most` tokens (None: `together` consecutive rows). And the tokens that each row adds to its unit, at most."""
    ids, attended = input_ids[rows].numpy(), attention_mask[rows].numpy()
    lengths = sequence_lengths(attention_mask)
    if most is None:
        units, tree = consecutive(rows, together), PrefixTree.of(ids, attended, together)
        added = tree.costs()[tree.order.argsort()]
    else:
        prompts = prompt_lengths(attended, response_mask[rows].numpy())
        found, added = PrefixTree.of(ids, attended).units(prompts, most)
        units = [[rows[at] for at in unit] for unit in found]
    for row, count in zip(rows, added.tolist(), strict=True):
        lengths[row] = count
    return units, lengths


class MicroBatches:
    """Puts the rows of this rank into micro-batches of a size for each kind of pass."""

    def __init__(
        self,
        ranks: Ranks,
        sizes: dict[PassKind, MicroBatchSize],
        measure: Callable[[PassKind], int],
        *,
        packed: bool,
        hidden_size: int,
        label: str,
    ) -> None:
        """`measure(kind)`: tokens per micro-batch that fit, for a size that the config leaves open."""
        self.sizes, self._ranks, self._measure = sizes, ranks, measure
        self._packed, self._hidden_size, self._label = packed, hidden_size, label
        self._oom_logged = False

    def size(self, kind: PassKind) -> MicroBatchSize:
        """Measured where the config leaves it open (collective)."""
        size = self.sizes[kind]
        if size.max_sequences is None and size.max_tokens is None:
            size = MicroBatchSize(max_tokens=self._ranks.smallest(self._measure(kind)))
            self.sizes[kind] = size
        return size

    def split(self, units: list[list[int]], lengths: Sequence[int], kind: PassKind) -> list[list[int]]:
        """The rows of `units` in micro-batches, those of a unit in the same.

        As many on every rank, because every pass over sharded parameters is collective: a rank with fewer rows runs
        empty micro-batches at the end."""
        size = self.size(kind)
        own = [[lengths[row] for row in unit] for unit in units]
        batches = self._group(own, size, 1)
        count = self._ranks.largest(len(batches))
        if count > len(batches):
            batches = self._group(own, size, count)
        batches += [[] for _ in range(count - len(batches))]
        return [sorted(row for at in batch for row in units[at]) for batch in batches]

    def _group(self, units: Sequence[Sequence[int]], size: MicroBatchSize, min_count: int) -> list[list[int]]:
        """Indices of the units, of which the lengths of their rows are given."""
        if not units:
            return []
        if size.max_tokens is None:
            rows = size.max_sequences or len(units)
            return [list(range(at, min(at + rows, len(units)))) for at in range(0, len(units), rows)]
        if not self._packed:
            longest = [max(unit) for unit in units]
            return padded_budget_batches(longest, size.max_tokens, min_count, rows=len(units[0]))
        lengths = [sum(unit) for unit in units]
        if min_count <= 1 and sum(lengths) <= size.max_tokens:
            return [list(range(len(lengths)))]
        return token_budget_batches(lengths, size.max_tokens, min_count, hidden_size=self._hidden_size)

    def retry(self, oom: OOMReport | None, kind: PassKind, together: int) -> bool:
        """Whether a pass failed on any rank (collective); then what failed here is smaller from now on.

        All ranks stop where one has nothing left to split: a single sequence, or the `together` sequences that stay in
        one micro-batch. A retry therefore has smaller micro-batches until each holds one such unit, which is not let
        fail twice. (`max_sequences` counts units.)"""
        world, rank = self._ranks.world_size, self._ranks.rank
        numbers = [0] * (2 * world)
        if oom:
            numbers[2 * rank : 2 * rank + 2] = [oom.tokens, oom.sequences]
        numbers = self._ranks.total(numbers)
        reports = {
            at: OOMReport(numbers[2 * at], numbers[2 * at + 1]) for at in range(world) if numbers[2 * at]
        }
        if oom:
            reports[rank] = oom
        for at, report in reports.items():
            if report.sequences <= together:
                raise TrainingHalted(report.too_long(self._label, at))
        if reports and not self._oom_logged:
            self._oom_logged = True
            if rank == 0:
                at, report = next(iter(reports.items()))
                log.warning("%s", report.split_notice(self._label, at))
        if oom:
            size = self.sizes[kind]
            if size.max_tokens is not None:
                size = replace(size, max_tokens=max(min(size.max_tokens, oom.tokens) // 2, 1))
            else:
                size = replace(size, max_sequences=max(oom.sequences // together // 2, 1))
            self.sizes[kind] = size
        return bool(reports)
