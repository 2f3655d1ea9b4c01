"""What the in-process engine and the server share: weights and adapters to vLLM's workers, and the check of their
reports."""

from __future__ import annotations

import json
import logging
import shutil
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl.errors import RolloutError, TrainingHalted
from verl.models.lora import name_in_file
from verl.models.weight_source import Adapter, NamedTensors
from verl.rollout.external_engine import ExternalRollout, Sample
from verl.rollout.vllm.settings import engine_arguments
from verl.rollout.weight_sync.fingerprint import WeightManifest, compare, fingerprint
from verl.rollout.weight_sync.shared_memory import SharedMemorySender
from verl.watchdog import EngineWatchdog

log = logging.getLogger(__name__)

_SHOWN = 3
_ADAPTER_FILE = "adapter_model.safetensors"


class VLLMBase(ExternalRollout):
    """vLLM with a copy of the trainer's weights."""

    name = "vllm"
    watchdog: EngineWatchdog
    adapter: Any = None
    """What requests carry to use the newest LoRA adapter."""
    _adapters = 0

    def _launch(self) -> None:
        self.arguments = engine_arguments(self.config, self.info, self.folder)
        self.workers = int(self.arguments["tensor_parallel_size"])
        self.separate_adapter = self.info.lora_rank > 0
        self._create_folder()
        self._start_vllm()

    @abstractmethod
    def _start_vllm(self) -> None:
        """With `self.arguments`."""

    @abstractmethod
    def _call_workers(self, method: str, *args: str) -> list[str]:
        """A method of `verl.rollout.vllm.worker` on every worker."""

    @abstractmethod
    def _load_adapter(self, name: str, number: int, folder: str) -> Any:
        """Load an adapter; what requests carry to use it."""

    @abstractmethod
    def _unload_adapter(self, adapter: Any) -> None: ...

    @abstractmethod
    def _try_reset_prefix_cache(self, preempt: bool) -> bool:
        """False where vLLM refuses, which it does while blocks are in use; with `preempt` they are freed first."""

    def _send_weights(self, tensors: NamedTensors) -> None:
        """TrainingHalted unless every worker received all tensors and holds them where it computes."""
        sent = WeightManifest()
        reports = [json.loads(answer) for answer in self.deliver(sent.watch(tensors))]
        for report in reports:
            compare(sent, report["received"], self.version, "vllm")
            check_report(report, self.version)
        if reports and reports[0]["first"]:
            log.info("%s", _described(sent, reports[0]["inexact"]))

    def deliver(self, tensors: NamedTensors) -> list[str]:
        """Through shared memory to workers in other processes; their reports."""
        # Longer than the watchdog that looks after this process: a hang here is noticed there first.
        timeout_s = 2 * self.watchdog_s + 60
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
        self._adapters += 1  # vLLM does not reload a number it knows
        folder, sent = self.folder / f"adapter{self._adapters}", WeightManifest()
        write_adapter(Adapter(adapter.config, sent.watch(adapter.named_tensors)), folder)
        compare(sent, read_adapter(folder, sent), self.version, "vllm")
        if self.adapter is not None:
            self._unload_adapter(self.adapter)
        self.adapter = self._load_adapter(f"policy-{self._adapters}", self._adapters, str(folder))
        # The last one stays: a server may run interrupted samples, which carry it, until it notices, and load it again.
        shutil.rmtree(self.folder / f"adapter{self._adapters - 2}", ignore_errors=True)

    @property
    def _keeps_cache(self) -> bool:
        """Samples continue on keys and values of earlier weights; but vLLM never uses those of another adapter."""
        return not (self.config.recompute_kv_cache or self.separate_adapter)

    def cache_salt(self, sample: Sample) -> str:
        """Only requests with the same one share cached blocks: those that started with the same weights, of which the
        interrupted ones so find the blocks they had."""
        return str(sample.first_version if self._keeps_cache else self.version)

    def _reset_prefix_cache(self) -> None:
        if self._outstanding and self._keeps_cache:
            return
        if not any(self._try_reset_prefix_cache(preempt) for preempt in (bool(self._outstanding), True)):
            raise RolloutError(
                f"vLLM did not empty its prefix cache for policy version {self.version}. Set "
                "actor_rollout_ref.rollout.engine_kwargs.vllm.enable_prefix_caching=False"
            )


def write_adapter(adapter: Adapter, folder: Path) -> None:
    """As `peft.PeftModel.from_pretrained` and vLLM open it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name_in_file(name): t.detach().cpu().contiguous().clone() for name, t in adapter.named_tensors}
    save_file(weights, folder / _ADAPTER_FILE, metadata={"format": "pt"})
    adapter.config.save_pretrained(folder)


def read_adapter(folder: Path, sent: WeightManifest) -> WeightManifest:
    """Fingerprints of a written adapter, under the names it was `sent` with."""
    from safetensors.torch import load_file

    names = {name_in_file(name): name for name in sent}
    tensors = load_file(folder / _ADAPTER_FILE)
    return WeightManifest({names.get(key, key): fingerprint(tensor) for key, tensor in tensors.items()})


def check_report(report: dict[str, Any], version: int) -> None:
    """TrainingHalted where a worker's report shows a weight that is not in use as it was sent."""
    if report["missing"]:
        raise TrainingHalted(
            f"vLLM's model has {len(report['missing'])} parameters that no weight of the trainer reached, e.g. "
            f"{', '.join(report['missing'][:_SHOWN])}; use actor_rollout_ref.rollout.name=native"
        )
    if report["wrong"]:
        lines = [
            f"{name}: arrived {a}, loaded {b}" for name, (a, b) in list(report["wrong"].items())[:_SHOWN]
        ]
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


def _described(sent: WeightManifest, inexact: dict[str, str]) -> str:
    text = f"vllm: {len(sent) - len(inexact)} of {len(sent)} tensors are loaded, and compared, bit for bit"
    if not inexact:
        return text
    names = ", ".join(list(inexact)[:_SHOWN])
    return f"{text}, {len(inexact)} in a form of vLLM's own (checked by its loader and by log-probs), e.g. {names}"
