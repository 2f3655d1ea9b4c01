"""The part that runs inside vLLM's workers (`worker_extension_cls`): takes weights and says what it took.

What always holds: the answer names every tensor received with its fingerprint, and every parameter of the model
that no tensor reached.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.rollout.handover.buckets import read_buckets
from verl.rollout.handover.fingerprint import Manifest
from verl.rollout.handover.weights import Pairs
from verl.rollout.vllm.lifeline import end_with_host

# vLLM imports this file in each of its workers before anything else of ours runs there.
end_with_host()


class WeightReceiver:
    """Methods vLLM adds to its worker class; called through `collective_rpc`."""

    rank: int
    model_runner: Any
    reload_weights: Any

    def verl_processes(self) -> list[int]:
        """This worker and whoever started it: with one worker the engine core itself, and its host."""
        return [os.getpid(), os.getppid()]

    def verl_receive(self, pairs: Pairs) -> str:
        """Weights of the same process, by reference."""
        return self._verl_load(pairs)

    def verl_receive_buckets(self, folder: str, timeout_s: str) -> str:
        """Weights of another process, through shared memory (text arguments, as an HTTP server takes them)."""
        return self._verl_load(read_buckets(Path(folder), self.rank, float(timeout_s)))

    def _verl_load(self, pairs: Pairs) -> str:
        manifest = Manifest()
        model = self.model_runner.get_model()
        expected = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        with _watched_loading(model) as loaded:
            self.reload_weights(weights_iterator=manifest.watch(pairs))
        # A loader that does not say what it loaded cannot be checked this way; the log-probs still are.
        missing = sorted(expected - set(loaded)) if loaded else []
        return json.dumps({"received": manifest, "missing": [n for n in missing if "lora_" not in n]})


@contextmanager
def _watched_loading(model: Any) -> Iterator[list[str]]:
    """Collects what the model's own loader says it loaded."""
    loaded: list[str] = []
    original = model.load_weights

    def load_weights(weights: Any) -> Any:
        result = original(weights)
        loaded.extend(result or ())
        return result

    model.load_weights = load_weights
    try:
        yield loaded
    finally:
        del model.load_weights
