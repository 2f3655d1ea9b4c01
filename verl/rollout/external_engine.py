"""What every engine with its own copy of the weights has in common: checked requests, checked hand-overs.

What always holds: a sample's seed is its own, whatever else is in the batch (an engine's sums may still differ in
the last bits with the batch); responses carry the version of the weights in use; after `update_weights` the engine
has proven, by log-probs, that it computes with them (an engine that sleeps proves it when it wakes).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from verl.errors import RolloutError
from verl.rollout.base import BatchEngine, FinishReason, Request, Response, RolloutStats
from verl.rollout.noise import mix, sequence_key
from verl.rollout.requests import Stopper, check_finite, check_requests
from verl.rollout.source import as_source
from verl.rollout.weight_sync.probe import ProbeCheck, probe_request
from verl.rollout.weight_sync.received import ReceivedWeights

_SEEDS = (1 << 63) - 1


@dataclass
class Sample:
    """One sample on its way."""

    request: Request
    number: int
    log_probs: list[float] = field(default_factory=list)
    response_ids: list[int] = field(init=False)
    """Resumed tokens and those made so far."""

    def __post_init__(self) -> None:
        self.response_ids = self.resumed

    @property
    def token_ids(self) -> list[int]:
        """The tokens made so far."""
        return self.response_ids[len(self.response_ids) - len(self.log_probs) :]

    @property
    def resumed(self) -> list[int]:
        return list(self.request.partial[self.number]) if self.request.partial else []

    @property
    def prompt(self) -> list[int]:
        """What the engine reads before it goes on."""
        return [*self.request.prompt_ids, *self.resumed]

    @property
    def key(self) -> str:
        return f"{self.request.request_id}/{self.number}"

    @property
    def seed(self) -> int:
        key = sequence_key(self.request.seed, self.request.request_id, self.number)
        # A resumed sample must not meet the noise of its first tokens again.
        return (mix(key + len(self.resumed)) if self.resumed else key) & _SEEDS

    def response(self, reason: FinishReason, version: int) -> Response:
        return Response(
            self.request.request_id,
            self.number,
            self.token_ids,
            self.log_probs,
            reason,
            policy_version=version,
        )


class ExternalRollout(BatchEngine):
    """The parts of an engine that do not depend on which one it is."""

    name: str

    def __init__(
        self,
        source: Any,
        tokenizer: Any | None,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        max_length: int | None,
        precision: str,
    ) -> None:
        self.source = as_source(source)
        self.stopper = Stopper(tokenizer, eos_ids)
        self.vocab_size, self.eos_ids = vocab_size, eos_ids
        self.max_length, self.precision = max_length, precision
        self.version = 0
        self.asleep: set[str] = set()
        """What was given back: of `weights` and `kv_cache`."""
        self._aborted: set[str] = set()
        self._abort_all = False
        self._unproven = False
        self._probes: ProbeCheck | None = None

    # -- what an engine adds ------------------------------------------------------------------------------------

    @abstractmethod
    def _run(self, samples: list[Sample]) -> Iterator[Response]:
        """Answer every sample."""

    @abstractmethod
    def _take_weights(self, new_source: bool) -> None:
        """Bring the weights (or the adapter) of `self.source` over as `self.version`, and check their arrival."""

    @abstractmethod
    def _forget_prefixes(self) -> None:
        """Drop what was cached with the old weights."""

    # -- generating ---------------------------------------------------------------------------------------------

    def run_batch(self, requests: list[Request]) -> Iterator[Response]:
        self._aborted.clear()
        self._abort_all = False
        self.stopper.check_stop_strings(requests)
        check_requests(requests, self.vocab_size, self.max_length)
        if self.asleep:
            raise RolloutError(f"{self.name}'s memory was given back; call wake() before generate()")
        return self._run([Sample(request, number) for request in requests for number in range(request.n)])

    def accept(
        self, sample: Sample, token_ids: Sequence[int], log_probs: Sequence[float]
    ) -> FinishReason | None:
        """Append new tokens up to where the sample ends; why it ends, or None while it goes on."""
        check_finite(log_probs)
        response, start = sample.response_ids, len(sample.response_ids)
        for token, log_prob in zip(token_ids, log_probs, strict=True):
            response.append(int(token))
            sample.log_probs.append(float(log_prob))
        end = self.stopper.end(response, start, sample.request.sampling)
        if end is None:
            return None
        count, reason = end
        del sample.log_probs[len(sample.log_probs) - (len(response) - count) :], response[count:]
        return reason

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        if request_ids is None:
            self._abort_all = True
        else:
            self._aborted.update(request_ids)

    @property
    def aborting(self) -> bool:
        """Whether anything was called off since `generate` began."""
        return self._abort_all or bool(self._aborted)

    def aborted(self, sample: Sample) -> bool:
        return self._abort_all or sample.request.request_id in self._aborted

    # -- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, source: Any, version: int) -> None:
        """Take the trainer's weights (or, with LoRA, its adapter) and prove that they are in use."""
        if source is not None:
            self.source = as_source(source)
        self.version = version
        self._take_weights(source is not None)
        self._forget_prefixes()
        self._unproven = True
        if not self.asleep:
            self.prove()

    def take_first_weights(self, source: Any) -> None:
        """What an engine is built with; a source whose weights come from another process has none yet."""
        if not isinstance(source, ReceivedWeights):
            self.update_weights(source, 0)

    def prove(self) -> None:
        """Compare a few log-probs with the trainer's. Where the trainer is another process, whoever holds both asks
        for them (`verl.rollout.weight_sync.received`)."""
        self._unproven = False
        if isinstance(self.source, ReceivedWeights):
            return
        request = probe_request(self.vocab_size, self.max_length)
        self._aborted.clear()
        self._abort_all = False
        responses = list(self._run([Sample(request, number) for number in range(request.n)]))
        trainer = self.source.log_probs(request.prompt_ids, [r.token_ids for r in responses])
        if trainer is not None:
            self._probes = self._probes or ProbeCheck(self.name, self.precision)
            self._probes.add(self.version, [r.log_probs for r in responses], trainer)

    def stats(self) -> RolloutStats:
        figures = {} if self._probes is None else self._probes.metrics()
        return replace(super().stats(), weight_sync=figures)

    def make_room(self) -> None:
        """Give back what torch keeps for the trainer: an engine that wakes takes its memory from the device itself."""
        if self.asleep and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self.asleep = set()
        if self._unproven:
            self.prove()
