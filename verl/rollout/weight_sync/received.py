"""The trainer's weights where the trainer is not: in a process that only generates.

What always holds: until something has arrived nothing is generated; what was received is said with its fingerprint,
and what is computed with it by a few log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from verl.errors import RolloutError
from verl.models.weight_source import Adapter, NamedTensors, Names, WeightSource
from verl.rollout.base import RolloutEngine
from verl.rollout.weight_sync.adapters import NotYet, unless_empty
from verl.rollout.weight_sync.broadcast import Link
from verl.rollout.weight_sync.fingerprint import Manifest
from verl.rollout.weight_sync.probe import probe_request
from verl.rollout.weight_sync.weights import Pairs


@dataclass(frozen=True)
class Arrival:
    """What a receiver says after a hand-over: the fingerprints, and a few log-probs to compare with the trainer's."""

    received: dict[str, str]
    prompt: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    log_probs: tuple[tuple[float, ...], ...]
    precision: str


class ReceivedWeights(WeightSource):
    """A source for engines that keep a copy: every `update_weights` takes what the trainer sends at that time.

    With an `adapter` (peft's description of it) that is the weights it sits on, the first time, and the adapter."""

    def __init__(self, model_facts: Any, lora_config: Any = None) -> None:
        self.model_facts, self.lora_config = model_facts, lora_config
        self.link: Link | None = None
        self.version = 0
        self.received = Manifest()
        self._take_base: Callable[[Pairs, int], None] | None = None

    def named_tensors(self, names: Names = "hf") -> NamedTensors:
        yield from self._arriving(Manifest())

    def base_tensors(self, names: Names = "hf") -> NotYet:  # type: ignore[override]
        def leave_word(take: Callable[[Pairs, int], None]) -> None:
            self._take_base = take

        return NotYet(leave_word)

    def adapter(self) -> Adapter | None:
        return None if self.lora_config is None else Adapter(self.lora_config, self._adapter_tensors())

    def module(self) -> AbstractContextManager[nn.Module]:
        raise RolloutError("the module is in the trainer's process")

    def structure(self) -> AbstractContextManager[nn.Module]:
        raise RolloutError("the module is in the trainer's process")

    def log_probs(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """The trainer computes them in its own process."""

    def _adapter_tensors(self) -> NamedTensors:
        """The adapter; what it sits on has reached the engine before, where that came too."""
        received = Manifest()
        base = unless_empty(self._arriving(received))
        if base is not None:
            assert self._take_base is not None
            self._take_base(base, self.version)
        yield from self._arriving(received)

    def _arriving(self, received: Manifest) -> NamedTensors:
        assert self.link is not None
        self.received = received
        yield from received.watch(self.link.receive())


def probe(
    engine: RolloutEngine, received: Manifest, *, vocab_size: int, max_length: int | None, precision: str
) -> Arrival:
    """The arrival, proven by tokens the engine draws after a fixed prompt with what it now has."""
    request = probe_request(vocab_size, max_length)
    responses = list(engine.generate([request]))
    tokens = tuple(tuple(response.token_ids) for response in responses)
    log_probs = tuple(tuple(response.log_probs) for response in responses)
    return Arrival(dict(received), tuple(request.prompt_ids), tokens, log_probs, precision)
