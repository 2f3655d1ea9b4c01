"""vLLM's engine driven from this process.

With one worker and no process group of several ranks the engine runs in this very process and takes weights by
reference; otherwise vLLM starts its own processes. vLLM itself waits for ever when its engine core is killed, so every
call to those goes through the watchdog.
"""

from __future__ import annotations

import os
import random
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from verl.errors import RESUME, EngineLost, RolloutError
from verl.models.weight_source import NamedTensors, WeightSource
from verl.processes import describe, is_alive, start_time
from verl.rollout.base import FinishReason, Response
from verl.rollout.external_engine import Sample, require_engine
from verl.rollout.stale_files import remember_files
from verl.rollout.vllm.base import VLLMBase
from verl.rollout.vllm.settings import SOCKET_FOLDER, host_environment, sampling_arguments, set_environment
from verl.runtime import environment
from verl.watchdog import EngineWatchdog

if TYPE_CHECKING:
    from verl.config.schema import RolloutConfig

_HIDDEN = ("model", "load_format", "worker_extension_cls", "skip_tokenizer_init", "generation_config")
_SYNC = "the weight sync"


class VLLMRollout(VLLMBase):
    """Generates with vLLM's LLMEngine."""

    llm: Any = None

    def _start_vllm(self) -> None:
        self._new: deque[Sample] = deque()
        self._vllm_ids: dict[str, str] = {}
        """vLLM's names of the running samples."""
        self._had_group = dist.is_initialized()
        self.by_reference = self.workers == 1 and (not self._had_group or dist.get_world_size() == 1)
        set_environment(in_this_process=self.by_reference)
        self.llm = self.create_llm()
        self._watched = not self.by_reference
        pids: list[int] = []
        if self._watched:
            pids = [pid for pids in self.llm.collective_rpc("verl_processes") for pid in pids]
            self.watchdog = EngineWatchdog(VLLMProcesses(pids), self.watchdog_s)
        remember_files(self.folder, pids, self._call_workers("verl_store_file"))

    def create_llm(self) -> Any:
        """vLLM's engine with `self.arguments`."""
        import vllm

        # In the folder sockets are removed with it; vLLM itself never removes them.
        variables = {SOCKET_FOLDER: str(self.folder), **({} if self.by_reference else host_environment())}
        with kept_random_state(), environment(variables):
            try:
                return vllm.LLM(**self.arguments)
            except (ValueError, RuntimeError, TypeError, AssertionError) as error:
                shown = ", ".join(f"{k}={v}" for k, v in self.arguments.items() if k not in _HIDDEN)
                raise RolloutError(
                    f"vLLM could not start with {shown}: {error}\nThe keys are actor_rollout_ref.rollout.* and "
                    "actor_rollout_ref.rollout.engine_kwargs.vllm.*"
                ) from error

    def _call(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call to vLLM, which may wait for its processes."""
        if not self._watched:
            return function(*args, **kwargs)
        try:
            return self.watchdog.call(what, partial(function, *args, **kwargs))
        except Exception as error:
            self.watchdog.check(what)  # a death explains every other error
            if type(error).__name__ != "EngineDeadError":  # its module differs from version to version
                raise
            raise EngineLost(
                f"vLLM's engine died in {what}: {error} Its log is above in this process's output; {RESUME}."
            ) from error

    # -- generating ---------------------------------------------------------------------------------------------

    def _start(self, samples: Sequence[Sample]) -> None:
        self._new.extend(samples)

    def _interrupt(self) -> None:
        with self._lock:
            running = [sample for sample in self._outstanding.values() if sample.started]
        for sample in running:
            self._take_unfinished(sample)
        self._abort_in_vllm(running)
        self._new.clear()

    def _advance(self, timeout_s: float | None) -> list[Response]:
        """One step of vLLM's engine."""
        engine = self.llm.llm_engine
        responses = self._end_aborted()
        while self._new:
            self._add(self._new.popleft())
        if engine.has_unfinished_requests():
            for output in self._call("generate", engine.step):
                sample = self._outstanding.get(output.request_id)
                reason = None if sample is None else self._take(sample, output)
                if sample is not None and reason is not None:
                    if not output.finished:
                        self._abort_in_vllm([sample])
                    responses.append(self._finish(sample, reason))
        return responses

    def _add(self, sample: Sample) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = sample.request.sampling
        seed = sample.seed if self.config.per_request_seed else None
        arguments = sampling_arguments(sampling, self.info.eos_ids, seed, sample.produced)
        # Only stop strings are searched for here; vLLM knows every other end itself.
        kind = RequestOutputKind.DELTA if sampling.stop else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(**arguments, detokenize=False, output_kind=kind)
        prompt = {"prompt_token_ids": list(sample.tokens), "cache_salt": self.cache_salt(sample)}
        add = self.llm.llm_engine.add_request
        self._vllm_ids[sample.name] = self._call(
            "generate", add, sample.name, prompt, params, lora_request=self.adapter
        )
        sample.started = True

    def _append(self, sample: Sample, new: Any) -> FinishReason | None:
        log_probs = [row[token].logprob for token, row in zip(new.token_ids, new.logprobs or [], strict=True)]
        return sample.append(new.token_ids, log_probs, self.stopper)

    def _take(self, sample: Sample, output: Any) -> FinishReason | None:
        new = output.outputs[0]
        reason = self._append(sample, new)
        if reason is None and output.finished:
            reason = "length" if new.finish_reason == "length" else "abort"
        return reason

    def _end_aborted(self) -> list[Response]:
        with self._lock:
            aborted = [sample for sample in self._outstanding.values() if sample.aborted]
        for sample in aborted:
            if sample.started:
                self._take_unfinished(sample)
            else:
                self._new.remove(sample)
        self._abort_in_vllm([sample for sample in aborted if sample.started])
        return [self._finish(sample, "abort") for sample in aborted]

    def _take_unfinished(self, sample: Sample) -> None:
        """The tokens of a sample that is about to be aborted, where vLLM reports them only at its end."""
        from vllm.v1.engine import FinishReason as Ended

        states = self.llm.llm_engine.output_processor.request_states
        state = states.get(self._vllm_ids[sample.name])
        if state is not None and not sample.request.sampling.stop:
            self._append(sample, state.make_request_output([], None, Ended.ABORT, None).outputs[0])

    def _abort_in_vllm(self, samples: Sequence[Sample]) -> None:
        if samples:
            abort = self.llm.llm_engine.abort_request
            self._call("abort", abort, [sample.name for sample in samples])

    def _cancel(self, samples: Sequence[Sample]) -> None:
        self._new.clear()
        if not (self._watched and self.watchdog.lost):
            self._abort_in_vllm([sample for sample in samples if sample.started])

    def _finish(self, sample: Sample, reason: FinishReason) -> Response:
        self._vllm_ids.pop(sample.name, None)
        return super()._finish(sample, reason)

    # -- weights and memory -------------------------------------------------------------------------------------

    def _call_workers(self, method: str, *args: Any) -> list[str]:
        return list(self._call(_SYNC, self.llm.collective_rpc, method, args=args))

    def deliver(self, tensors: NamedTensors) -> list[str]:
        return self._call_workers("verl_receive", tensors) if self.by_reference else super().deliver(tensors)

    def _try_reset_prefix_cache(self, preempt: bool) -> bool:
        return bool(self._call("reset_prefix_cache", self.llm.reset_prefix_cache, preempt))

    def _load_adapter(self, name: str, number: int, folder: str) -> Any:
        from vllm.lora.request import LoRARequest

        adapter = LoRARequest(name, number, folder)
        if not self._call(_SYNC, self.llm.llm_engine.add_lora, adapter):
            raise RolloutError(
                f"vLLM did not load the adapter of policy version {self.version} from {folder}"
            )
        return adapter

    def _unload_adapter(self, adapter: Any) -> None:
        self._call(_SYNC, self.llm.llm_engine.remove_lora, adapter.lora_int_id)

    def _sleep(self) -> None:
        self._call("sleep", self.llm.sleep, level=1)  # weights to host memory, the KV cache is dropped

    def _wake(self, tags: list[str]) -> None:
        self._call("wake", self.llm.wake_up, tags=tags)

    def close(self) -> None:
        llm, self.llm = self.llm, None
        if llm is not None:
            if self._watched and self.watchdog.lost:
                self.watchdog.processes.kill()  # they would not answer
            llm.llm_engine.engine_core.shutdown()
            if self._watched:
                self.watchdog.processes.kill()
                self.watchdog.close()
            if self.by_reference and not self._had_group:
                destroy_process_groups()
        super().close()


class VLLMProcesses:
    """vLLM's engine core and workers, started by this process. Their output goes to this process's output."""

    name = "vLLM's engine"

    def __init__(self, pids: Iterable[int]) -> None:
        self._started = {pid: start_time(pid) for pid in sorted(set(pids) - {os.getpid()})}

    @property
    def pids(self) -> list[int]:
        return list(self._started)

    def check(self) -> None:
        ended = [str(pid) for pid, started in self._started.items() if not is_alive(pid, started)]
        if ended:
            raise EngineLost(
                f"{self.name} died: of its processes {', '.join(map(str, self.pids))} these have ended: "
                f"{', '.join(ended)}. Their log is above in this process's output; {RESUME}."
            )

    def describe(self) -> str:
        return ", ".join(map(describe, self.pids))

    def log_tail(self) -> str:
        return ""

    def kill(self) -> None:
        for pid, started in self._started.items():
            if is_alive(pid, started):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """vLLM seeds the process's generators while it starts; the trainer's are restored."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def destroy_process_groups() -> None:
    """End the process groups vLLM created here, so that another engine can start."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


def build_vllm(
    source: WeightSource, tokenizer: Any, config: RolloutConfig, *, watchdog_s: float, run_folder: Path | None
) -> VLLMBase:
    """The engine in this process, or (`rollout.mode=server`) behind its server."""
    require_engine("vllm")
    if config.mode == "server":
        from verl.rollout.vllm.server import VLLMServerRollout

        return VLLMServerRollout(source, tokenizer, config, watchdog_s=watchdog_s, run_folder=run_folder)
    return VLLMRollout(source, tokenizer, config, watchdog_s=watchdog_s, run_folder=run_folder)
