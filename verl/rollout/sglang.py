"""SGLang as a rollout engine: its HTTP server as a child process on loopback, with a key only we know.

Samples go through `/generate` (token ids in and out, streamed in pieces), weights through `/update_weights_from_disk`
from a folder in shared memory, which needs space for one copy of the model meanwhile; LoRA adapters are merged into
them. After every update small weights are read back (`/get_weights_by_name`) and log-probs compared. Log-probs are
SGLang's own: of the temperature-scaled distribution. Tests use a fake server with the interface of SGLang 0.5.17; the
real package needs a GPU.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.errors import ConfigError, RolloutError, TrainingHalted
from verl.http_server import free_port
from verl.models.weight_source import NamedTensors, WeightSource
from verl.rollout.external_engine import Sample, engine_kwargs, require_engine
from verl.rollout.server_engine import TOKENS_PER_EVENT, Chunk, ServerRollout
from verl.rollout.source import ModelInfo
from verl.rollout.stale_files import remove
from verl.rollout.weight_sync.buckets import split_buckets
from verl.rollout.weight_sync.shared_memory import shared_folder

if TYPE_CHECKING:
    from verl.config.schema import RolloutConfig

FILE_BYTES = 1 << 30
_READ_BACK = 4
_READ_NUMBERS = 64
_OURS = ("model_path", "load_format", "skip_tokenizer_init", "host", "port", "api_key")


def server_arguments(config: RolloutConfig, info: ModelInfo, folder: Path) -> dict[str, Any]:
    """Our config keys as SGLang's server arguments; `engine_kwargs.sglang` overrides all but `_OURS`."""
    if config.repetition_penalty != 1:
        # It applies the penalty to the logits before it computes log-probs of either kind.
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=sglang cannot give log-probs before "
            f"repetition_penalty={config.repetition_penalty:g}: SGLang has them with the penalty applied. Set "
            "actor_rollout_ref.rollout.repetition_penalty=1, or use actor_rollout_ref.rollout.name=native"
        )
    fp8 = config.dtype == "fp8"
    dtype = info.dtype if config.dtype in ("auto", "fp8") else config.dtype
    cuda = info.device == "cuda"
    arguments: dict[str, Any] = {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16" if fp8 and dtype == "float32" else dtype,
        "tp_size": config.tensor_model_parallel_size,
        "max_running_requests": config.most_sequences,
        "chunked_prefill_size": config.max_num_batched_tokens,
        "context_length": config.max_model_len or info.max_positions,
        "random_seed": config.seed,
        "device": info.device,
    }
    if config.per_request_seed:
        # Seeds of single requests have an effect in this mode only.
        arguments["enable_deterministic_inference"] = True
    if fp8:
        arguments["quantization"] = "fp8"
    if config.enforce_eager or not cuda:
        arguments["disable_cuda_graph"] = True
    if cuda:
        arguments["mem_fraction_static"] = config.gpu_memory_utilization
        if config.free_cache_engine:
            arguments.update(enable_memory_saver=True, enable_weights_cpu_backup=True)
    return {**arguments, **engine_kwargs("sglang", config.engine_kwargs.sglang, _OURS)}


def request_name(sample: Sample, version: int) -> str:
    """A sample starts again with other weights; the server may still be ending the start before that by its name."""
    return f"{sample.name}@{version}"


def generate_body(
    sample: Sample, eos_ids: frozenset[int], version: int, *, per_request_seed: bool = True
) -> dict[str, Any]:
    """The body of `/generate` for one sample, started with policy `version`."""
    sampling = sample.request.sampling
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_ids))
    return {
        "input_ids": list(sample.tokens),
        "rid": request_name(sample, version),
        "stream": True,
        "incremental_streaming_output": True,
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": sampling.max_tokens - sample.produced,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "min_p": sampling.min_p,
            "stop_token_ids": sorted(stops),
            "ignore_eos": True,  # the server has no tokenizer: end tokens are among the stop tokens
            "sampling_seed": sample.seed if per_request_seed else None,
            "stream_interval": TOKENS_PER_EVENT,
        },
    }


class SGLangRollout(ServerRollout):
    """Generates with an SGLang server."""

    name = "sglang"

    def _launch(self) -> None:
        arguments = server_arguments(self.config, self.info, self.folder)
        env = {"HF_HUB_OFFLINE": "1"}
        if self.config.raw_log_probs:
            env["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1"
        key, port = secrets.token_hex(16), free_port()
        self._create_folder()
        arguments |= {"host": "127.0.0.1", "port": port, "api_key": key}
        # In a file: every user of the machine could read a key on the command line.
        settings = self.folder / "server.yaml"
        settings.touch(mode=0o600)
        values = {name.replace("_", "-"): value for name, value in arguments.items() if value is not None}
        settings.write_text(json.dumps(values, indent=1))
        command = [sys.executable, "-m", "sglang.launch_server", "--config", str(settings)]
        self.start_server(command, env, f"127.0.0.1:{port}", key)

    async def stream(self, sample: Sample) -> AsyncGenerator[Chunk, None]:
        seeded = self.config.per_request_seed
        body = generate_body(sample, self.info.eos_ids, self.version, per_request_seed=seeded)
        count = 0
        async with contextlib.aclosing(self.client.events("/generate", body)) as events:
            async for event in events:
                if "error" in event:
                    raise RolloutError(f"sglang's server refused {sample.name}: {event['error']}")
                meta = event["meta_info"]
                rows = meta.get("output_token_logprobs") or []
                reason = (meta.get("finish_reason") or {}).get("type")
                new = meta.get("completion_tokens", count) - count  # only an abort in its queue has no count
                if new > len(rows) and reason != "abort":
                    raise RolloutError(
                        f"sglang's server sent {len(rows)} of {new} new tokens of {sample.name} with log-probs"
                    )
                # A version may repeat the log-probs of the whole answer.
                rows = rows[max(0, len(rows) - new) :]
                count += len(rows)
                yield [int(row[1]) for row in rows], [float(row[0]) for row in rows], reason

    async def end_all(self) -> None:
        await self.client.post("/abort_request", {"rid": "", "abort_all": True})

    async def end(self, sample: Sample) -> None:
        await self.client.post("/abort_request", {"rid": request_name(sample, self.version)})

    # -- weights and memory -------------------------------------------------------------------------------------

    def _send_weights(self, tensors: NamedTensors) -> None:
        folder = shared_folder()
        try:
            small = self._write_weights(tensors, folder)
            body = {
                "model_path": str(folder),
                "load_format": "safetensors",
                "flush_cache": True,
                # It may not know yet that interrupted samples are not wanted any more; it waits for their end.
                "abort_all_requests": True,
                "weight_version": str(self.version),
            }
            answer = self.client.call("POST", "/update_weights_from_disk", body)
            if not answer.get("success"):
                raise RolloutError(
                    f"sglang did not load policy version {self.version}: {answer.get('message')}"
                )
        finally:
            remove(folder)
        self._read_back(small)

    def _write_weights(self, tensors: NamedTensors, folder: Path) -> dict[str, torch.Tensor]:
        """A Hugging Face folder with these weights; the first numbers of a few small ones are returned."""
        from safetensors.torch import save_file

        small: dict[str, torch.Tensor] = {}
        own = getattr(torch, self.info.dtype)
        for number, bucket in enumerate(split_buckets(tensors, FILE_BYTES)):
            host = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in bucket.items()}
            save_file(host, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
            for name, tensor in host.items():
                # Every worker has norm vectors whole and unchanged, where they are of the policy's type.
                if tensor.dim() == 1 and name.endswith("norm.weight") and tensor.dtype == own:
                    small[name] = tensor[:_READ_NUMBERS]
        (folder / "config.json").write_text(self.info.config_json)
        return dict(list(small.items())[-_READ_BACK:])

    def _read_back(self, sent: dict[str, torch.Tensor]) -> None:
        for name, values in sent.items():
            body = {"name": name, "truncate_size": len(values)}
            there = torch.tensor(self.client.call("POST", "/get_weights_by_name", body), dtype=torch.float64)
            if there.shape != values.shape or not torch.equal(there.to(values.dtype), values):
                raise TrainingHalted(
                    f"the weights sglang has for policy version {self.version} are not those the trainer sent: {name} "
                    f"begins with {there.flatten()[:4].tolist()} there and {values[:4].tolist()} here; restart from "
                    "the last checkpoint"
                )

    def _reset_prefix_cache(self) -> None:
        self.client.call("POST", "/flush_cache")

    def _sleep(self) -> None:
        self.client.call("POST", "/release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    def _wake(self, tags: list[str]) -> None:
        self.client.call("POST", "/resume_memory_occupation", {"tags": tags})


def build_sglang(
    source: WeightSource, tokenizer: Any, config: RolloutConfig, *, watchdog_s: float, run_folder: Path | None
) -> SGLangRollout:
    require_engine("sglang")
    return SGLangRollout(source, tokenizer, config, watchdog_s=watchdog_s, run_folder=run_folder)
