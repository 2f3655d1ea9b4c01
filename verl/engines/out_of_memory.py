"""What is said about a micro-batch that did not fit into device memory."""

from __future__ import annotations

from dataclasses import dataclass

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
