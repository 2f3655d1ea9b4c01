"""What the in-process engine and the server share: weights to vLLM's workers, and the check of their reports."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from verl.errors import TrainingHalted
from verl.models.weight_source import Adapter, NamedTensors, WeightSource
from verl.rollout.external_engine import ExternalRollout
from verl.rollout.vllm.adapter import AdapterFolder
from verl.rollout.vllm.settings import engine_arguments
from verl.rollout.weight_sync.fingerprint import Manifest, compare
from verl.rollout.weight_sync.server_watchdog import ServerWatchdog
from verl.rollout.weight_sync.shared_memory import SharedMemorySender
from verl.rollout.weight_sync.stale_files import remove

if TYPE_CHECKING:
    from verl.config.schema import RolloutConfig

log = logging.getLogger(__name__)

_SHOWN = 3


class VLLMBase(ExternalRollout):
    """vLLM with a copy of the trainer's weights."""

    name = "vllm"
    watchdog: ServerWatchdog

    def __init__(self, source: WeightSource, tokenizer: Any | None, config: RolloutConfig) -> None:
        super().__init__(source, tokenizer, config)
        self.arguments = engine_arguments(config, self.info, self.folder)
        self.workers = int(self.arguments["tensor_parallel_size"])
        self.can_sleep = bool(self.arguments.get("enable_sleep_mode"))
        self.lora_apart = self.info.lora_rank > 0
        self.adapters = AdapterFolder() if self.lora_apart else None
        self.adapter: Any = None
        """What requests carry to use the newest adapter."""

    @abstractmethod
    def _call_workers(self, method: str, *args: str) -> list[str]:
        """A method of `verl.rollout.vllm.worker` on every worker."""

    @abstractmethod
    def _load_adapter(self, name: str, number: int, folder: str) -> Any:
        """Load an adapter; what requests carry to use it."""

    @abstractmethod
    def _unload_adapter(self, adapter: Any) -> None: ...

    def _send_weights(self, tensors: NamedTensors) -> None:
        """TrainingHalted unless every worker received all tensors and holds them where it computes."""
        sent = Manifest()
        reports = [json.loads(answer) for answer in self._deliver(sent.watch(tensors))]
        for report in reports:
            compare(sent, report["received"], self.version, "vllm")
            check_report(report, self.version)
        if reports and reports[0]["first"]:
            log.info("%s", _described(sent, reports[0]["inexact"]))

    def _deliver(self, tensors: NamedTensors) -> list[str]:
        """Through shared memory to workers in other processes; their reports."""
        # Longer than the watchdog that looks after this process: a hang here is noticed there first.
        timeout_s = 2 * self.watchdog.watchdog_s + 60
        with ThreadPoolExecutor(1) as pool:

            def check() -> None:
                if call.done():
                    call.result()

            with SharedMemorySender(self.workers, timeout_s, check) as sender:
                call = pool.submit(self._call_workers, "verl_receive_shared", sender.address, str(timeout_s))
                with suppress(ConnectionError):  # then the workers' answer says why
                    sender.send(self.watchdog.while_taken(tensors))
            return call.result()

    def _send_adapter(self, adapter: Adapter) -> None:
        assert self.adapters is not None
        # Running samples carry the old adapter, which vLLM would load again from its folder.
        self._require_idle("take a new LoRA adapter")
        folder = self.adapters.write(adapter, self.version)
        if self.adapter is not None:
            self._unload_adapter(self.adapter)
        number = self.adapters.number
        self.adapter = self._load_adapter(f"policy-{number}", number, str(folder))
        self.adapters.remove_old()

    def close(self) -> None:
        super().close()
        if self.adapters is not None:
            self.adapters.close()
        remove(self.folder)


def check_report(report: dict[str, Any], version: int) -> None:
    """TrainingHalted where a worker's report shows a weight that is not in use as it was sent."""
    if report["missing"]:
        raise TrainingHalted(
            f"vLLM's model has {len(report['missing'])} parameters that no weight of the trainer reached, e.g. "
            f"{', '.join(report['missing'][:_SHOWN])}; use actor_rollout_ref.rollout.name=native"
        )
    if report["wrong"]:
        lines = [f"{name}: arrived {a}, held {b}" for name, (a, b) in list(report["wrong"].items())[:_SHOWN]]
        raise TrainingHalted(
            f"vLLM holds {len(report['wrong'])} tensors that are not those of policy version {version} which it "
            "received.\n  "
            + "\n  ".join(lines)
            + "\nRestart from the last checkpoint; if it happens again, use "
            "actor_rollout_ref.rollout.name=native and report it"
        )
    if report["moved"]:
        raise TrainingHalted(
            f"loading policy version {version} moved {len(report['moved'])} of vLLM's parameters in memory, e.g. "
            f"{report['moved'][0]}; its CUDA graphs still read the old ones. Set "
            "actor_rollout_ref.rollout.enforce_eager=True, and report it"
        )


def _described(sent: Manifest, inexact: dict[str, str]) -> str:
    text = f"vllm: {len(sent) - len(inexact)} of {len(sent)} tensors are held, and compared, bit for bit"
    if not inexact:
        return text
    names = ", ".join(list(inexact)[:_SHOWN])
    return f"{text}, {len(inexact)} in a form of vLLM's own (checked by its loader and by log-probs), e.g. {names}"
