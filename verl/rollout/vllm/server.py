"""vLLM's own HTTP server as a child process (`rollout.mode=server`), on a socket file only this user can open.

Samples go through its completions endpoint, token ids in and out; weights go to its workers in buckets through
shared memory, announced by its `/collective_rpc`; adapters by its `/v1/load_lora_adapter`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from verl.rollout import WATCHDOG_S
from verl.rollout.external_engine import Sample
from verl.rollout.http_server import Chunk, Client, ServerProcess, ServerRollout
from verl.rollout.vllm.adapter import Adapters
from verl.rollout.vllm.parent_watch import host_of_children
from verl.rollout.vllm.process import SOCKET_FOLDER
from verl.rollout.vllm.sending import by_buckets, reader_patience, sync_weights
from verl.rollout.vllm.settings import (
    SERVER_ENVIRONMENT,
    engine_arguments,
    max_length,
    own_devices,
    per_request_seed,
    precision,
    read_model,
    sampling_arguments,
)
from verl.rollout.weight_sync.processes import members
from verl.rollout.weight_sync.stale_files import remember_segments, remove

_MODEL = "policy"


class VLLMServerRollout(ServerRollout):
    """Generates with a vLLM server from a copy of the trainer's weights."""

    name = "vllm"

    def __init__(
        self,
        source: Any,
        tokenizer: Any | None,
        config: Any | None = None,
        *,
        watchdog_s: float = WATCHDOG_S,
    ) -> None:
        self.facts = read_model(source, tokenizer)
        super().__init__(
            source,
            tokenizer,
            vocab_size=self.facts.vocab_size,
            eos_ids=self.facts.eos_ids,
            max_length=max_length(config, self.facts),
            precision=precision(config, self.facts),
        )
        arguments = engine_arguments(config, self.facts)
        self.workers = int(arguments["tensor_parallel_size"])
        self.connections = int(arguments["max_num_seqs"])
        self._can_sleep = bool(arguments.get("enable_sleep_mode"))
        self._seeds = per_request_seed(config)
        address = str(self.facts.folder / "socket")
        # The module and not the `vllm` command: the builds for CPU have another package name, which that looks up.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *command_line(arguments)]
        # A line for every sample would drown the last lines that matter.
        command += ["--served-model-name", _MODEL, "--uds", address, "--disable-uvicorn-access-log"]
        self.client = Client(address, self.name)
        environment = {
            **SERVER_ENVIRONMENT,
            SOCKET_FOLDER: str(self.facts.folder),
            **host_of_children(),
            **own_devices(config, self.facts),
        }
        self.facts.write()
        self.process = ServerProcess(command, self.facts.folder / "server.txt", self.name, environment)
        self.adapters: Adapters | None = None
        try:
            self.open(watchdog_s)
            remember_segments(self.facts.folder, [process.pid for process in members(self.process.pid)])
            if self.facts.lora_rank:
                sync_weights(self.source.base_tensors(), self.facts.tied, 0, self._deliver)
                self.adapters = Adapters(self._load_adapter, self._unload_adapter)
            self.take_first_weights(source)
        except BaseException:
            self.close()
            raise

    def _stream(self, sample: Sample) -> Iterator[Chunk]:
        seed = sample.seed if self._seeds else None
        body = sampling_arguments(sample.request.sampling, self.eos_ids, seed, len(sample.resumed))
        body.update(
            model=self.adapters.current if self.adapters else _MODEL,
            prompt=sample.prompt,
            stream=True,
            return_token_ids=True,
            return_tokens_as_token_ids=True,
            add_special_tokens=False,
        )
        for event in self.client.events("/v1/completions", body):
            for choice in event.get("choices", ()):
                log_probs = (choice.get("logprobs") or {}).get("token_logprobs") or []
                yield choice.get("token_ids") or [], log_probs, choice.get("finish_reason")

    # -- weights ------------------------------------------------------------------------------------------------

    def _take_weights(self, new_source: bool) -> None:
        if "weights" in self.asleep:
            self.make_room()
            self.client.call("POST", "/wake_up?tags=weights")
            self.asleep.discard("weights")
        if self.adapters is not None:
            self.adapters.take(self.source, self.version)
        elif new_source:
            sync_weights(self.source.named_tensors(), self.facts.tied, self.version, self._deliver)

    def _deliver(self, pairs: Any) -> list[str]:
        return by_buckets(pairs, self.workers, self._receive_buckets, self.guard)

    def _receive_buckets(self, folder: str) -> list[str]:
        body = {"method": "verl_receive_buckets", "args": [folder, str(reader_patience(self.guard))]}
        return list(self.client.call("POST", "/collective_rpc", body)["results"])

    def _forget_prefixes(self) -> None:
        self.client.call("POST", "/reset_prefix_cache")

    def _load_adapter(self, name: str, number: int, folder: str) -> str:
        self.client.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        return name

    def _unload_adapter(self, adapter: str) -> None:
        self.client.call("POST", "/v1/unload_lora_adapter", {"lora_name": adapter})

    # -- memory -------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        if self._can_sleep and not self.asleep:
            self.client.call("POST", "/sleep?level=1")
            self.asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        self.make_room()
        for tag in sorted(self.asleep, reverse=True):
            self.client.call("POST", f"/wake_up?tags={tag}")
        super().wake()

    def close(self) -> None:
        super().close()
        if self.adapters is not None:
            self.adapters.close()
        remove(self.facts.folder)


def command_line(arguments: dict[str, Any]) -> list[str]:
    """Engine arguments as flags of vLLM's server."""
    flags: list[str] = []
    for key, value in arguments.items():
        name = key.replace("_", "-")
        if value is True:
            flags.append(f"--{name}")
        elif value is False:
            flags.append(f"--no-{name}")
        elif value is not None:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            flags += [f"--{name}", text]
    return flags
