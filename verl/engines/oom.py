"""What is said when a micro-batch does not fit into device memory.

What always holds: every text names the rank's micro-batch by its size and the keys that make it smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KEYS = (
    "lower ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu, or set "
    "model.enable_gradient_checkpointing=true, model.enable_activation_offload=true or "
    "fsdp_config.offload_policy=true"
)


@dataclass(frozen=True)
class OOMReport:
    """A micro-batch that did not fit; `cause` is known on its own rank only."""

    tokens: int
    sequences: int
    cause: str = ""


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def batched_pairs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def split_notice(label: str, rank: int, shortage: OOMReport) -> str:
    return (
        f"{label}: a micro-batch of {shortage.tokens} tokens ({shortage.sequences} sequences) on rank {rank} did "
        "not fit into device memory; it is split and the result stays the same, but the failed attempt costs "
        f"time: {KEYS}"
    )


def too_long(label: str, rank: int, shortage: OOMReport) -> str:
    return (
        f"{label}: a single sequence of {shortage.tokens} tokens on rank {rank} does not fit into device memory; "
        f"{KEYS}, or shorten data.max_response_length. {shortage.cause}"
    ).rstrip()


def unrecoverable(label: str, shortage: OOMReport) -> str:
    return (
        f"{label}: a micro-batch of {shortage.tokens} tokens does not fit into device memory; sharded parameters "
        "and this version of torch (before 2.13) leave no way to split it and go on; "
        f"{KEYS}. {shortage.cause}"
    )
