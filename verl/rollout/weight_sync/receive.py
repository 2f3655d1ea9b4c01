"""The receiving side in a process that only generates: weights that arrive by broadcast, into an engine or a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl.errors import RolloutError, TrainingHalted
from verl.models.weight_source import Adapter, Names, WeightSource
from verl.rollout.base import RolloutEngine
from verl.rollout.model_info import ModelInfo
from verl.rollout.weight_sync.broadcast import Broadcast
from verl.rollout.weight_sync.fingerprint import Manifest, fingerprint
from verl.rollout.weight_sync.probe import probe_request

_SAME_MODEL = "Both are built from actor_rollout_ref.model: is its folder the same on every node?"


class ReceivedWeights(WeightSource):
    """A source for engines that keep a copy. Each method that gives tensors takes one `Broadcast.send`."""

    remote = True

    def __init__(self, model_info: ModelInfo, lora_config: Any = None) -> None:
        self.model_info, self._lora_config = model_info, lora_config
        self.dtype, self.device = getattr(torch, model_info.dtype), torch.device(model_info.device)
        self.broadcast: Broadcast | None = None
        self.received = Manifest()
        """Of the current version."""

    def expect(self, version: int) -> None:
        """What arrives from now on is policy `version`."""
        self.version, self.received = version, Manifest()

    def named_tensors(self, names: Names = "hf") -> Iterator[tuple[str, torch.Tensor]]:
        assert self.broadcast is not None
        return self.received.watch(self.broadcast.receive())

    def base_tensors(self, names: Names = "hf") -> Iterator[tuple[str, torch.Tensor]]:
        return self.named_tensors()

    def adapter(self) -> Adapter | None:
        return None if self._lora_config is None else Adapter(self._lora_config, self.named_tensors())

    def module(self) -> AbstractContextManager[nn.Module]:
        raise RolloutError("the module is in the trainer's process")

    structure = module

    def log_probs(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """The trainer computes them in its own process."""


def load_into(module: nn.Module, tensors: Any, wanted: Callable[[str], bool] = lambda name: True) -> Manifest:
    """Copy the tensors into the module's own and fingerprint what is there afterwards.

    They must be exactly those tensors of the module whose name is `wanted`. Where dtypes differ, the fingerprint is of
    what arrived: nothing else could equal the sender's."""
    own = {name: value for name, value in module.state_dict(keep_vars=True).items() if wanted(name)}
    manifest = Manifest()
    with torch.no_grad():
        for name, tensor in tensors:
            if name not in own or own[name].shape != tensor.shape:
                found = tuple(own[name].shape) if name in own else "nothing"
                raise TrainingHalted(
                    f"the trainer sent {name} of shape {tuple(tensor.shape)}; the model that generates has {found} of "
                    f"that name. {_SAME_MODEL}"
                )
            own[name].copy_(tensor)
            manifest[name] = fingerprint(own[name] if own[name].dtype == tensor.dtype else tensor)
    missing = [name for name in own if name not in manifest]
    if missing:
        raise TrainingHalted(
            f"the trainer did not send {len(missing)} weights of the model that generates, e.g. "
            f"{', '.join(missing[:3])}. {_SAME_MODEL}"
        )
    return manifest


@dataclass(frozen=True)
class SyncReport:
    """A receiver's answer to a weight sync: fingerprints, and a few log-probs to compare with the trainer's."""

    received: dict[str, str]
    prompt: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    log_probs: tuple[tuple[float, ...], ...]
    precision: str


def report(
    engine: RolloutEngine, received: Manifest, *, vocab_size: int, max_length: int | None, precision: str
) -> SyncReport:
    """With tokens the engine draws after a fixed prompt."""
    request = probe_request(vocab_size, max_length)
    responses = list(engine.generate([request]))
    tokens = tuple(tuple(response.token_ids) for response in responses)
    log_probs = tuple(tuple(response.log_probs) for response in responses)
    return SyncReport(dict(received), tuple(request.prompt_ids), tokens, log_probs, precision)
