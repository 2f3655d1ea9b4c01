"""What takes the engine's place on a rank that does not host one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from verl.errors import RolloutError
from verl.models.weight_source import Adapter, NamedTensors, WeightSource
from verl.rollout.base import BatchEngine, Request, Response
from verl.rollout.external_engine import ExternalRollout, Sample
from verl.rollout.weight_sync.probe import probe_request

if TYPE_CHECKING:
    from verl.config.schema import RolloutConfig


class RemoteEngine(BatchEngine):
    """On a trainer's rank when generation has its own processes; they are given new weights directly."""

    def run_batch(self, requests: list[Request]) -> Iterator[Response]:
        raise RolloutError("this rank only trains: actor_rollout_ref.rollout has processes of its own")

    def update_weights(self, source: WeightSource, version: int) -> None:
        """The rollout processes take the weights in a call to both sides."""


class TPFollower(ExternalRollout):
    """On the ranks of a tensor-parallel group except the first, which hosts the engine on the GPUs of all.

    Weights are gathered by all ranks together: every method makes the same collective calls as the host's."""

    def __init__(self, name: str, source: WeightSource, tokenizer: Any | None, config: RolloutConfig) -> None:
        from verl.rollout.sglang import server_arguments
        from verl.rollout.vllm.settings import engine_arguments

        super().__init__(source, tokenizer, config)
        self.name = name
        if name == "vllm":
            self.can_sleep = bool(engine_arguments(config, self.info, self.folder).get("enable_sleep_mode"))
        else:
            self.can_sleep = bool(server_arguments(config, self.info, self.folder).get("enable_memory_saver"))
        self.lora_apart = name == "vllm" and self.info.lora_rank > 0
        self.update_weights(source, 0)

    def submit(self, requests: Iterable[Request]) -> None:
        raise RolloutError(f"this rank follows the one that hosts {self.name}; requests go to that one")

    def _start(self, samples: Sequence[Sample]) -> None:
        pass

    def _advance(self, timeout_s: float | None) -> list[Response]:
        return []

    def _send_weights(self, tensors: NamedTensors) -> None:
        deque(tensors, maxlen=0)

    def _send_adapter(self, adapter: Adapter) -> None:
        deque(adapter.named_tensors, maxlen=0)

    def _reset_prefix_cache(self) -> None:
        pass

    def _sleep(self) -> None:
        pass

    def _wake(self, tags: list[str]) -> None:
        pass

    def prove(self) -> None:
        """The host compares log-probs; the trainer computes them on all ranks together."""
        self._unproven = False
        request = probe_request(self.info.vocab_size, self.max_length)
        self.source.log_probs(request.prompt_ids, [[0] * request.sampling.max_tokens] * request.n)
