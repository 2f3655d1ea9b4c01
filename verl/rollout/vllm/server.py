"""vLLM's HTTP server as a child process (`rollout.mode=server`), on a unix socket only this user can open.

Samples go through its completions endpoint, token ids in and out; weights to its workers through shared memory, started
by `/collective_rpc`; adapters by `/v1/load_lora_adapter`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncGenerator
from typing import Any

from verl.processes import group_members
from verl.rollout.external_engine import Sample
from verl.rollout.server_engine import TOKENS_PER_EVENT, Chunk, ServerRollout
from verl.rollout.stale_files import remember_files
from verl.rollout.vllm.base import VLLMBase
from verl.rollout.vllm.settings import SERVER_ENVIRONMENT, SOCKET_FOLDER, host_environment, sampling_arguments

_MODEL = "policy"


class VLLMServerRollout(VLLMBase, ServerRollout):
    """Generates with vLLM's OpenAI-compatible server."""

    def _start_vllm(self) -> None:
        address = str(self.folder / "socket")
        # The module and not the `vllm` command, which looks up a package name that the CPU builds do not have.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *command_line(self.arguments)]
        command += ["--stream-interval", str(TOKENS_PER_EVENT)]
        # The end of the log should hold errors, not a line for every sample.
        command += ["--served-model-name", _MODEL, "--uds", address, "--disable-uvicorn-access-log"]
        env = {**SERVER_ENVIRONMENT, SOCKET_FOLDER: str(self.folder), **host_environment()}
        self.start_server(command, env, address)
        pids = [process.pid for process in group_members(self.process.pid)]
        remember_files(self.folder, pids, self._call_workers("verl_store_file"))

    async def stream(self, sample: Sample) -> AsyncGenerator[Chunk, None]:
        seed = sample.seed if self.config.per_request_seed else None
        done = sample.produced
        body = sampling_arguments(sample.request.sampling, self.info.eos_ids, seed, done)
        body.update(
            model=self.adapter or _MODEL,
            prompt=list(sample.tokens),
            cache_salt=self.cache_salt(sample),
            stream=True,
            return_token_ids=True,
            return_tokens_as_token_ids=True,
            add_special_tokens=False,
        )
        async with contextlib.aclosing(self.client.events("/v1/completions", body)) as events:
            async for event in events:
                for choice in event.get("choices", ()):
                    log_probs = (choice.get("logprobs") or {}).get("token_logprobs") or []
                    yield choice.get("token_ids") or [], log_probs, choice.get("finish_reason")

    async def end_all(self) -> None:
        await self.client.post("/pause?mode=abort&clear_cache=false")
        await self.client.post("/resume")  # those it did not have yet are ended the next time

    def _call_workers(self, method: str, *args: str) -> list[str]:
        body = {"method": method, "args": list(args)}
        return list(self.client.call("POST", "/collective_rpc", body)["results"])

    def _try_reset_prefix_cache(self, preempt: bool) -> bool:
        query = "?reset_running_requests=true" if preempt else ""
        answer = self.client.call("POST", f"/reset_prefix_cache{query}")
        return not isinstance(answer, dict) or bool(answer.get("success", True))

    def _load_adapter(self, name: str, number: int, folder: str) -> str:
        self.client.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        return name

    def _unload_adapter(self, adapter: str) -> None:
        self.client.call("POST", "/v1/unload_lora_adapter", {"lora_name": adapter})

    def _sleep(self) -> None:
        self.client.call("POST", "/sleep?level=1")

    def _wake(self, tags: list[str]) -> None:
        for tag in tags:
            self.client.call("POST", f"/wake_up?tags={tag}")


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
