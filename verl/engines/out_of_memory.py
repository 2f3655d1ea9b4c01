"""What is said about a micro-batch that did not fit into device memory."""

from __future__ import annotations

from dataclasses import dataclass

_KEYS = (
    "lower ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu, or set "
    "model.enable_gradient_checkpointing=true, model.enable_activation_offload=true or "
    "fsdp_config.offload_policy=true"
)


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
        return (
            f"{label}: a single sequence of {self.tokens} tokens on rank {rank} does not fit into device memory; "
            f"{_KEYS}, or lower data.max_response_length. {self.cause}"
        ).rstrip()

    def unrecoverable(self, label: str, reason: str) -> str:
        return (
            f"{label}: a micro-batch of {self.tokens} tokens does not fit into device memory, and {reason}; {_KEYS}. "
            f"{self.cause}"
        )
