"""The part that runs inside vLLM's workers (`worker_extension_cls`): loads weights and reports what it loaded.

A report names every tensor received with its fingerprint, every parameter that no tensor reached, every tensor that
is held otherwise than it arrived, and every parameter that moved away from where captured graphs read it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from verl.models.weight_source import NamedTensors
from verl.rollout.vllm.loaded_weights import EXACT, Arriving, HeldCheck, HeldPlaces, without_lora_layers
from verl.rollout.vllm.process import end_with_host
from verl.rollout.weight_sync.shared_memory import receive_tensors

# vLLM imports this file in each of its workers before it calls anything of ours.
end_with_host()


class WeightReceiver:
    """Methods vLLM adds to its worker class; called through `collective_rpc`."""

    rank: int
    vllm_config: Any
    model_runner: Any
    reload_weights: Any

    def verl_processes(self) -> list[int]:
        """This worker and its parent: with one worker the engine core and its host."""
        return [os.getpid(), os.getppid()]

    def verl_receive(self, tensors: NamedTensors) -> str:
        """Weights of the same process, by reference."""
        return self._verl_load(tensors)

    def verl_receive_shared(self, address: str, timeout_s: str) -> str:
        """Weights of another process, through shared memory (arguments are text: they may come over HTTP)."""
        return self._verl_load(receive_tensors(address, float(timeout_s)))

    def _verl_load(self, tensors: NamedTensors) -> str:
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        model = self.model_runner.get_model()
        held: HeldCheck = self.__dict__.setdefault("verl_held", HeldCheck())
        first = not held.forms
        with without_lora_layers(model):
            weights = HeldPlaces(
                model, get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
            )
            arriving = Arriving(tensors, weights)
            held.remember_addresses(model)
            with _watched_loading(model) as loading:
                self.reload_weights(weights_iterator=iter(arriving))
            report = {
                "received": arriving.received,
                # A loader that does not return what it loaded is checked by log-probs only.
                "missing": sorted(loading.expected - loading.loaded) if loading.loaded else [],
                "wrong": held.wrong(arriving),
                "moved": held.moved(model) if self._verl_has_graphs() else [],
                "first": first,
                "inexact": {name: form for name, form in held.forms.items() if form != EXACT},
            }
        return json.dumps(report)

    def _verl_has_graphs(self) -> bool:
        return self.vllm_config.device_config.device_type == "cuda" and not (
            self.vllm_config.model_config.enforce_eager
        )


@dataclass
class _Loading:
    """Parameters by name: those to be loaded, and those the model's own loader says it loaded."""

    expected: set[str]
    loaded: set[str] = field(default_factory=set)


@contextmanager
def _watched_loading(model: Any) -> Iterator[_Loading]:
    loading = _Loading({name for name, _ in model.named_parameters()})
    original = model.load_weights

    def load_weights(weights: Any) -> Any:
        # While it loads, the model has the parameters of its files: the scales of quantised ones are not among them.
        loading.expected &= {name for name, _ in model.named_parameters()}
        result = original(weights)
        loading.loaded.update(result or ())
        return result

    model.load_weights = load_weights
    try:
        yield loading
    finally:
        del model.load_weights
