"""The trainer's weights where the trainer is not: in a process that only generates.

What always holds: what is fingerprinted is what the engine has, not what was meant to arrive; a weight that nothing
reached stops the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl.errors import TrainingHalted
from verl.rollout.base import Request, RolloutEngine, SamplingParams
from verl.rollout.handover.collective import Link
from verl.rollout.handover.fingerprint import Manifest, fingerprint
from verl.rollout.handover.probe import RESPONSE_TOKENS, probe_prompt
from verl.rollout.handover.weights import Pairs


@dataclass(frozen=True)
class Arrival:
    """What a receiver says after a hand-over: the fingerprints, and a few log-probs to compare with the trainer's."""

    received: dict[str, str]
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    precision: str


class ArrivingWeights:
    """A source for engines that keep a copy: every `update_weights` takes what the trainer sends at that time."""

    arrives_later = True
    """There is nothing to take when the engine is built."""

    def __init__(self, model_facts: Any) -> None:
        self.model_facts = model_facts
        self.link: Link | None = None
        self.received = Manifest()

    def export_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.link is not None
        self.received = Manifest()
        yield from self.received.watch(self.link.receive())


def load_into(module: nn.Module, pairs: Pairs) -> Manifest:
    """Write every pair into the module's own tensors (in their type) and fingerprint what then stands there.

    Where the types differ, the fingerprint is of what arrived: there is nothing else the sender's could equal."""
    held = module.state_dict(keep_vars=True)
    manifest = Manifest()
    with torch.no_grad():
        for name, tensor in pairs:
            if name not in held or held[name].shape != tensor.shape:
                there = tuple(held[name].shape) if name in held else "nothing"
                raise TrainingHalted(
                    f"the trainer sent {name} of shape {tuple(tensor.shape)}; the model that generates has {there} of "
                    "that name. Both are built from actor_rollout_ref.model: is its folder the same on every node?"
                )
            held[name].copy_(tensor)
            manifest[name] = fingerprint(held[name] if held[name].dtype == tensor.dtype else tensor)
    missing = [name for name in held if name not in manifest]
    if missing:
        raise TrainingHalted(
            f"{len(missing)} weights of the model that generates were not among those the trainer sent, e.g. "
            f"{', '.join(missing[:3])}. Both are built from actor_rollout_ref.model: is its folder the same on every "
            "node?"
        )
    return manifest


def probe(
    engine: RolloutEngine, received: Manifest, *, vocab_size: int, max_length: int | None, precision: str
) -> Arrival:
    """The arrival, proven by tokens the engine draws after a fixed prompt with what it now has."""
    tokens = min(RESPONSE_TOKENS, (max_length or RESPONSE_TOKENS + 1) - 1)
    prompt = probe_prompt(vocab_size)
    prompt = prompt[: max_length - tokens] if max_length else prompt
    request = Request("verl-probe", prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
    (response,) = engine.generate([request])
    return Arrival(
        dict(received), tuple(prompt), tuple(response.token_ids), tuple(response.log_probs), precision
    )
