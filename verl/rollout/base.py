"""The contract of a rollout engine: token ids in, token ids out.

What always holds: every (request, sample) is answered exactly once, in the order of finishing; the same
request with the same weights and seed gives the same tokens, whatever else is in the batch; a request that
cannot be served raises `RolloutError` before anything is generated for it, never hangs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How to draw tokens. `temperature` 0 is greedy; `top_k` <= 0 and `top_p` 1 switch those filters off."""

    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    raw_log_probs: bool = False
    """Which distribution the log-probs of the drawn tokens belong to.

    False: softmax(logits / temperature), that is the one sampled from before top-k, top-p, min-p and the repetition
    penalty cut it. True: softmax(logits). A greedy request (temperature 0) has those of softmax(logits) either way.
    The trainer recomputes the same one: it divides its logits by the same temperature, or by 1 where this is set.
    Filters are left out on both sides, since what they keep depends on the policy and an update would have to
    differentiate through it; with filters on, both numbers therefore belong to the unfiltered policy."""


@dataclass(frozen=True)
class Request:
    """One prompt, sampled `n` times. `seed` with `request_id`'s position-free key decides every draw."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    seed: int = 0
    partial: tuple[Sequence[int], ...] = ()
    """Tokens already produced for each sample (a resumed request); generation goes on after them, and they
    count towards `max_tokens`. The response then holds only the new tokens: the caller kept the old ones."""


@dataclass
class Response:
    """One finished sample. `log_probs` is aligned with `token_ids`; the end-of-sequence token is included."""

    request_id: str
    sample: int
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    policy_version: int = 0


class RolloutEngine(ABC):
    """Generates from the policy's weights."""

    @abstractmethod
    def generate(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Yield each sample of each request as it finishes."""

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End running requests (all when None); `generate` yields what they have with reason `abort`."""
        raise NotImplementedError(f"{type(self).__name__} cannot abort requests")

    @abstractmethod
    def update_weights(self, source: Any, version: int) -> None:
        """Take the weights of `source` (a TrainEngine, or name/tensor pairs).

        Responses carry `version` from now on."""

    def metrics(self) -> dict[str, float]:
        """Figures of the last update of the weights, for the run's metrics."""
        return {}

    def sleep(self) -> None:  # noqa: B027 (most engines have nothing to do)
        """Give device memory back until `wake`."""

    def wake(self) -> None:  # noqa: B027 (most engines have nothing to do)
        """Take the memory again."""

    def close(self) -> None:  # noqa: B027 (most engines have nothing to do)
        """Release everything; the engine cannot be used afterwards."""
