"""What stands in the engine's place on a rank that generates nothing itself.

What always holds: sharded weights are gathered by all ranks in step, so a rank that shares an engine with others takes
part in everything the engine's host does with the trainer, and keeps none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from verl.errors import RolloutError
from verl.rollout.base import BatchEngine, Request, Response
from verl.rollout.external_engine import ExternalRollout, Sample
from verl.rollout.weight_sync.probe import probe_request


class RemoteEngine(BatchEngine):
    """On a trainer's rank when generation has processes of its own; those are told of new weights by themselves."""

    def run_batch(self, requests: list[Request]) -> Iterator[Response]:
        raise RolloutError("this rank only trains: actor_rollout_ref.rollout has processes of its own")

    def update_weights(self, source: Any, version: int) -> None:
        """Nothing: the hand-over is a call of its own."""


class TPFollower(ExternalRollout):
    """On the ranks of a tensor-parallel group but its first, which hosts the engine (in the others' GPUs too).

    `name` is that engine's (vllm, sglang); every method mirrors the collectives of the host's."""

    def __init__(self, name: str, source: Any, tokenizer: Any | None, config: Any) -> None:
        from verl.rollout.sglang import server_arguments
        from verl.rollout.vllm.settings import engine_arguments, max_length, read_model

        facts = read_model(source, tokenizer)
        super().__init__(
            source,
            tokenizer,
            vocab_size=facts.vocab_size,
            eos_ids=facts.eos_ids,
            max_length=max_length(config, facts),
            precision=facts.dtype,
        )
        self.name = name
        if name == "vllm":
            self._can_sleep = bool(engine_arguments(config, facts).get("enable_sleep_mode"))
        else:
            self._can_sleep = bool(server_arguments(config, facts).get("enable_memory_saver"))
        # SGLang gets adapters merged into the weights, vLLM gets them apart.
        self._adapters = name == "vllm" and facts.lora_rank > 0
        if self._adapters:
            _take_part(self.source.base_tensors())
        self.update_weights(source, 0)

    def _run(self, samples: list[Sample]) -> Iterator[Response]:
        raise RolloutError(f"this rank follows the one that hosts {self.name}; requests go to that one")

    def _take_weights(self, new_source: bool) -> None:
        if self._adapters:
            adapter = self.source.adapter()
            assert adapter is not None
            _take_part(adapter.named_tensors)
        elif new_source:
            _take_part(self.source.named_tensors())
        if new_source or self.name == "vllm":
            self.asleep.discard("weights")

    def _forget_prefixes(self) -> None:
        pass

    def prove(self) -> None:
        """The host compares log-probs; the trainer computes them on all ranks together."""
        self._unproven = False
        request = probe_request(self.vocab_size, self.max_length)
        self.source.log_probs(request.prompt_ids, [[0] * request.sampling.max_tokens] * request.n)

    def sleep(self) -> None:
        if self._can_sleep and not self.asleep:
            self.asleep = {"weights", "kv_cache"}


def _take_part(pairs: Iterable[Any]) -> None:
    for _ in pairs:
        pass
