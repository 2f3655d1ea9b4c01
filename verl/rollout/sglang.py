"""SGLang behind the rollout contract: its HTTP server as a child process on loopback, with a key only we know.

Samples go through `/generate` (token ids in and out, streamed), weights through `/update_weights_from_disk` from a
folder in shared memory, which needs room for one copy of the model while it lasts; LoRA adapters are merged into them.

What always holds: what the server has is checked after every hand-over, by reading small weights back
(`/get_weights_by_name`) and by log-probs. Log-probs are SGLang's own: of the temperature-scaled distribution.
Tests drive this file against a server of ours with the same interface, made from SGLang 0.5.23's own definitions; the
real package needs a GPU.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch

from verl.errors import ConfigError, RolloutError, TrainingHalted, missing_package
from verl.rollout import WATCHDOG_S
from verl.rollout.external_engine import Sample
from verl.rollout.http_server import Chunk, Client, ServerProcess, ServerRollout, free_port
from verl.rollout.vllm.settings import ModelFacts, max_length, own_devices, read_model
from verl.rollout.weight_sync.buckets import cut, shared_folder
from verl.rollout.weight_sync.stale_files import remove
from verl.rollout.weight_sync.weights import Pairs, with_tied_head

OLDEST, BEFORE = (0, 5), (0, 6)
FILE_BYTES = 1 << 30
_READ_BACK = 4
_READ_NUMBERS = 64
_OURS = ("model_path", "load_format", "skip_tokenizer_init", "host", "port", "api_key")


def require_sglang() -> str:
    """The installed version; MissingPackage without one, ConfigError outside the range."""
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise missing_package("sglang", "sglang", "rollout.name=sglang") from None
    parts = re.match(r"(\d+)\.(\d+)", version)
    if parts is None or not OLDEST <= (int(parts[1]), int(parts[2])) < BEFORE or not util.find_spec("sglang"):
        wanted = f">={OLDEST[0]}.{OLDEST[1]},<{BEFORE[0]}.{BEFORE[1]}"
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=sglang: SGLang {version} is installed, this version of verl works with "
            f"{wanted}; install one of those, or set actor_rollout_ref.rollout.name=native"
        )
    return version


def server_arguments(config: Any, facts: ModelFacts) -> dict[str, Any]:
    """Our keys as SGLang's server arguments; `engine_kwargs.sglang` has the last word but for what we stand on."""
    kind = getattr(config, "dtype", "auto")
    dtype = facts.dtype if kind in ("auto", "fp8") else kind
    cuda = facts.device == "cuda"
    arguments: dict[str, Any] = {
        "model_path": str(facts.folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16" if kind == "fp8" and dtype == "float32" else dtype,
        "tp_size": int(getattr(config, "tensor_model_parallel_size", 1)),
        "max_running_requests": int(getattr(config, "max_num_seqs", 256)),
        "chunked_prefill_size": int(getattr(config, "max_num_batched_tokens", 8192)),
        "context_length": max_length(config, facts),
        "random_seed": int(getattr(config, "seed", 0)),
        # Seeds of single requests are heeded in this mode only.
        "enable_deterministic_inference": True,
        "device": facts.device,
    }
    if kind == "fp8":
        arguments["quantization"] = "fp8"
    if getattr(config, "enforce_eager", False) or not cuda:
        arguments["disable_cuda_graph"] = True
    if cuda:
        arguments["mem_fraction_static"] = float(getattr(config, "gpu_memory_utilization", 0.5))
        if getattr(config, "free_cache_engine", True):
            arguments.update(enable_memory_saver=True, enable_weights_cpu_backup=True)
    extra = dict(getattr(getattr(config, "engine_kwargs", None), "sglang", None) or {})
    taken = sorted(set(extra) & set(_OURS))
    if taken:
        raise ConfigError(
            f"actor_rollout_ref.rollout.engine_kwargs.sglang.{taken[0]} is decided by verl (the server is its child, "
            "and the weights come from the trainer); leave it out"
        )
    return {**arguments, **extra}


def generate_body(sample: Sample, eos_ids: frozenset[int]) -> dict[str, Any]:
    """The body of `/generate` for one sample."""
    sampling = sample.request.sampling
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_ids))
    return {
        "input_ids": sample.prompt,
        "rid": sample.key,
        "stream": True,
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": sampling.max_tokens - len(sample.resumed),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": sorted(stops),
            "ignore_eos": True,  # ends are among the stop tokens: the server has no tokenizer to know them from
            "sampling_seed": sample.seed,
        },
    }


class SGLangRollout(ServerRollout):
    """Generates with an SGLang server from a copy of the trainer's weights."""

    name = "sglang"

    def __init__(
        self,
        source: Any,
        tokenizer: Any | None,
        config: Any | None = None,
        *,
        watchdog_s: float = WATCHDOG_S,
    ) -> None:
        require_sglang()
        self.facts = read_model(source, tokenizer)
        kind = getattr(config, "dtype", "auto")
        super().__init__(
            source,
            tokenizer,
            vocab_size=self.facts.vocab_size,
            eos_ids=self.facts.eos_ids,
            max_length=max_length(config, self.facts),
            precision=self.facts.dtype if kind == "auto" else kind,
        )
        arguments = server_arguments(config, self.facts)
        self.connections = int(arguments["max_running_requests"])
        self._can_sleep = bool(arguments.get("enable_memory_saver"))
        environment = {"HF_HUB_OFFLINE": "1", **own_devices(config, self.facts)}
        self.facts.write()
        key, port = secrets.token_hex(16), free_port()
        settings = self._write_settings({**arguments, "host": "127.0.0.1", "port": port, "api_key": key})
        self.client = Client(f"127.0.0.1:{port}", self.name, key)
        if getattr(config, "raw_log_probs", False):
            environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1"
        command = [sys.executable, "-m", "sglang.launch_server", "--config", str(settings)]
        self.process = ServerProcess(command, self.facts.folder / "server.txt", self.name, environment)
        try:
            self.open(watchdog_s)
            self.take_first_weights(source)
        except BaseException:
            self.close()
            raise

    def _write_settings(self, arguments: dict[str, Any]) -> Path:
        """Arguments in a file: a key on the command line could be read by every user of the machine."""
        path = self.facts.folder / "server.yaml"
        given = {name.replace("_", "-"): value for name, value in arguments.items() if value is not None}
        path.touch(mode=0o600)
        path.write_text(json.dumps(given, indent=1))
        return path

    def _stream(self, sample: Sample) -> Iterator[Chunk]:
        told = 0
        for event in self.client.events("/generate", generate_body(sample, self.eos_ids)):
            if "error" in event:
                raise RolloutError(f"sglang's server refused {sample.key}: {event['error']}")
            meta = event["meta_info"]
            # Every event holds the answer from its beginning.
            new = (meta.get("output_token_logprobs") or [])[told:]
            told += len(new)
            reason = (meta.get("finish_reason") or {}).get("type")
            yield [int(row[1]) for row in new], [float(row[0]) for row in new], reason

    # -- weights ------------------------------------------------------------------------------------------------

    def _take_weights(self, new_source: bool) -> None:
        if not new_source:
            return
        if "weights" in self.asleep:
            self.make_room()
            self.client.call("POST", "/resume_memory_occupation", {"tags": ["weights"]})
            self.asleep.discard("weights")
        folder = shared_folder()
        try:
            small = self._write_weights(with_tied_head(self.source.named_tensors(), self.facts.tied), folder)
            body = {
                "model_path": str(folder),
                "load_format": "safetensors",
                "flush_cache": True,
                "weight_version": str(self.version),
            }
            answer = self.client.call("POST", "/update_weights_from_disk", body)
            if not answer.get("success"):
                raise RolloutError(
                    f"sglang did not take policy version {self.version}: {answer.get('message')}"
                )
        finally:
            remove(folder)
        self._read_back(small)

    def _write_weights(self, pairs: Pairs, folder: Path) -> dict[str, torch.Tensor]:
        """A Hugging Face folder with these weights; the beginnings of a few small ones are returned."""
        from safetensors.torch import save_file

        small: dict[str, torch.Tensor] = {}
        for number, bucket in enumerate(cut(pairs, FILE_BYTES)):
            host = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in bucket.items()}
            save_file(host, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
            for name, tensor in host.items():
                # Vectors of a norm are whole on every worker and kept as they are.
                if tensor.dim() == 1 and name.endswith("norm.weight"):
                    small[name] = tensor[:_READ_NUMBERS]
        (folder / "config.json").write_text(self.facts.config_json)
        return dict(list(small.items())[-_READ_BACK:])

    def _read_back(self, sent: dict[str, torch.Tensor]) -> None:
        for name, values in sent.items():
            body = {"name": name, "truncate_size": len(values)}
            there = torch.tensor(self.client.call("POST", "/get_weights_by_name", body), dtype=torch.float64)
            here = values.double()
            if there.shape != here.shape or not torch.equal(there.to(values.dtype), values):
                raise TrainingHalted(
                    f"the weights sglang has for policy version {self.version} are not those the trainer sent: {name} "
                    f"begins with {there.flatten()[:4].tolist()} there and {here[:4].tolist()} here. Going on would "
                    "train on responses of another policy; restart from the last checkpoint"
                )

    def _forget_prefixes(self) -> None:
        self.client.call("POST", "/flush_cache")

    # -- memory -------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        if self._can_sleep and not self.asleep:
            self.client.call("POST", "/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
            self.asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        if self.asleep:
            self.make_room()
            tags = sorted(self.asleep, reverse=True)
            self.client.call("POST", "/resume_memory_occupation", {"tags": tags})
        super().wake()

    def close(self) -> None:
        super().close()
        remove(self.facts.folder)
