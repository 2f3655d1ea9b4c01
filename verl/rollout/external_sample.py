"""One sample in an engine with its own copy of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

from verl.rollout.base import FinishReason, Request, Response, Stopper, check_finite
from verl.rollout.sampling import mix, sequence_key
from verl.rollout.versions import VersionLog

_MAX_SEED = (1 << 63) - 1


@dataclass(eq=False)
class Sample:
    """When it is interrupted, it starts again with the tokens it has as a part of its prompt."""

    request: Request
    number: int
    version: InitVar[int] = 0
    """Of the weights it starts with."""
    versions: VersionLog = field(init=False)
    log_probs: list[float] = field(default_factory=list)
    response_ids: list[int] = field(init=False)
    """Resumed and new tokens."""
    started: bool = False
    aborted: bool = False
    ended: bool = False
    """It waits for being answered, and cannot start again."""

    def __post_init__(self, version: int) -> None:
        self.versions = VersionLog(version)
        self.response_ids = list(self.request.partial[self.number]) if self.request.partial else []

    @property
    def token_ids(self) -> list[int]:
        """The new tokens."""
        return self.response_ids[len(self.response_ids) - len(self.log_probs) :]

    @property
    def prompt(self) -> list[int]:
        """What the model has seen when it starts, or starts again, here."""
        return [*self.request.prompt_ids, *self.response_ids]

    @property
    def key(self) -> str:
        return f"{self.request.request_id}/{self.number}"

    @property
    def seed(self) -> int:
        """For a start with the tokens it has now."""
        key = sequence_key(self.request.seed, self.request.draw_key, self.number)
        # A resumed sample must not repeat the noise of its first tokens.
        return (mix(key + len(self.response_ids)) if self.response_ids else key) & _MAX_SEED

    def set_version(self, version: int) -> None:
        """Its next token is drawn by this version of the weights."""
        self.versions.change(len(self.log_probs), version)

    def append(
        self, token_ids: Sequence[int], log_probs: Sequence[float], stopper: Stopper
    ) -> FinishReason | None:
        """Append new tokens up to where the sample ends; why it ends, or None."""
        check_finite(log_probs)
        response, start = self.response_ids, len(self.response_ids)
        for token, log_prob in zip(token_ids, log_probs, strict=True):
            response.append(int(token))
            self.log_probs.append(float(log_prob))
        end = stopper.end(response, start, self.request.sampling)
        if end is None:
            return None
        count, reason = end
        del self.log_probs[len(self.log_probs) - (len(response) - count) :], response[count:]
        return reason

    def response(self, reason: FinishReason) -> Response:
        return Response(
            self.request.request_id,
            self.number,
            self.token_ids,
            self.log_probs,
            reason,
            self.versions.first,
            self.versions.within(len(self.log_probs)),
        )
