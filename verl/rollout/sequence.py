"""One sample in the engine: its tokens, how many of them are in the KV cache, and in which blocks.

`computed` tokens have their keys and values in the cache; the model has to see the other `remaining`, and after the
last of them it draws one more. A decoding sequence has one remaining token; so may a prompt that was cut before its
last token, which is why `decoding` is a separate state.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from verl.rollout.base import FinishReason, Request, Response, Stopper, VersionLog
from verl.rollout.sampling import sequence_key


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """`table` lists the cache blocks of its first tokens; `chain` the content ids of its full hash blocks."""

    def __init__(self, request: Request, sample: int, version: int) -> None:
        partial = request.partial[sample] if request.partial else ()
        self.request = request
        self.sample = sample
        self.versions = VersionLog(version)
        self.key = sequence_key(request.seed, request.draw_key, sample)
        self.tokens = [*request.prompt_ids, *partial]
        self.log_probs: list[float] = []
        self.prompt_length = len(request.prompt_ids)
        self.resumed_length = len(self.tokens)
        self.max_length = self.prompt_length + request.sampling.max_tokens
        self.computed = 0
        self.decoding = False
        """It has drawn a token since its tokens were last prefilled: the runner has it as a row."""
        self.on_device = 0
        """Tokens generated on the device and not yet copied to the host; none of those on the host ends it."""
        self.stale = False
        """Some of its cached keys and values come from earlier weights: no other sequence may use them."""
        self.table: list[int] = []
        self.chain: list[int] = []
        self.siblings: list[Sequence] = []
        """Samples of the same prompt that start from this one's blocks once its prompt is computed."""
        self.status = Status.WAITING

    @property
    def length(self) -> int:
        return len(self.tokens) + self.on_device

    @property
    def remaining(self) -> int:
        return self.length - self.computed

    @property
    def produced(self) -> int:
        """Tokens after the prompt, resumed ones included: the position that keys the next draw."""
        return self.length - self.prompt_length

    def extend(
        self, token_ids: Iterable[int], log_probs: Iterable[float], stopper: Stopper, only_last: bool = False
    ) -> FinishReason | None:
        """Add drawn tokens up to the first that ends it; why that one does, or None. `only_last`: apart from stop
        strings, no token before the last can end it."""
        start, sampling = len(self.tokens), self.request.sampling
        self.tokens += token_ids
        self.log_probs += log_probs
        if only_last and not sampling.stop:
            start = max(len(self.tokens) - 1, start)
        end = stopper.end(self.tokens, start, sampling, self.prompt_length)
        if end is None:
            return None
        count, reason = end
        beyond = len(self.tokens) - count
        del self.tokens[count:], self.log_probs[len(self.log_probs) - beyond :]
        return reason

    def set_version(self, version: int) -> None:
        """Its next token is drawn by this version of the weights."""
        self.versions.change(self.length - self.resumed_length, version)

    def response(self, reason: FinishReason) -> Response:
        token_ids = self.tokens[self.resumed_length :]
        return Response(
            self.request.request_id,
            self.sample,
            token_ids,
            list(self.log_probs),
            reason,
            self.versions.first,
            self.versions.within(len(token_ids)),
        )

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id!r}/{self.sample}, {self.status.value}, "
            f"{self.computed} of {self.length} computed)"
        )


def sequences_of(request: Request, version: int = 0) -> list[Sequence]:
    """The sequences to queue for a request: a leader carrying its siblings, or all samples when resumed
    (their partial tokens differ, so that they share blocks only as far as the prompt goes)."""
    samples = [Sequence(request, index, version) for index in range(request.n)]
    if request.partial:
        return samples
    samples[0].siblings = samples[1:]
    return samples[:1]
