"""vLLM's engine driven from this process.

With one worker and no process group of several ranks the engine runs in this very process and takes the weights by
reference; otherwise vLLM starts its own processes and the weights cross in buckets through shared memory.

What always holds: nobody waits for vLLM's own processes longer than they live and give signs of life. vLLM itself
leaves callers waiting for ever when its engine core is killed, so every call to it goes through the guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist

from verl.errors import RESUME, EngineLost, RolloutError
from verl.rollout import WATCHDOG_S
from verl.rollout.base import FinishReason, Response
from verl.rollout.external_engine import ExternalRollout, Sample
from verl.rollout.vllm.adapter import Adapters
from verl.rollout.vllm.parent_watch import named_host
from verl.rollout.vllm.process import EngineProcesses, kept_random_state, leave_process_group, sockets_in
from verl.rollout.vllm.sending import by_buckets, reader_patience, sync_weights
from verl.rollout.vllm.settings import (
    engine_arguments,
    max_length,
    per_request_seed,
    precision,
    read_model,
    sampling_arguments,
    set_environment,
)
from verl.rollout.weight_sync.server_watchdog import Guard
from verl.rollout.weight_sync.stale_files import remember_segments, remove


class VLLMRollout(ExternalRollout):
    """Generates with vLLM from a copy of the trainer's weights. `source` is a TrainEngine or a causal model."""

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
        self._can_sleep = bool(arguments.get("enable_sleep_mode"))
        self._seeds = per_request_seed(config)
        self._ids: dict[str, str] = {}
        """vLLM's own names of the running requests."""
        self._had_group = dist.is_initialized()
        alone = not self._had_group or dist.get_world_size() == 1
        self.by_reference = self.workers == 1 and alone
        set_environment(in_this_process=self.by_reference)
        self.facts.write()
        self.llm: Any = self._start(arguments)
        self.guard: Guard | None = None if self.by_reference else self._guard(watchdog_s)
        self.adapters: Adapters | None = None
        if self.facts.lora_rank:
            sync_weights(self.source.base_tensors(), self.facts.tied, 0, self._deliver)
            self.adapters = Adapters(self._load_adapter, self._unload_adapter)
        self.take_first_weights(source)

    def _start(self, arguments: dict[str, Any]) -> Any:
        import vllm

        with (
            kept_random_state(),
            sockets_in(self.facts.folder),
            nullcontext() if self.by_reference else named_host(),
        ):
            try:
                return vllm.LLM(**arguments)
            except (ValueError, RuntimeError, TypeError, AssertionError) as error:
                remove(self.facts.folder)
                raise RolloutError(
                    f"vLLM could not start with {_shown(arguments)}: {error}\nThe keys are "
                    "actor_rollout_ref.rollout.* and actor_rollout_ref.rollout.engine_kwargs.vllm.*"
                ) from error

    def _guard(self, watchdog_s: float) -> Guard:
        own = EngineProcesses(pid for pids in self.llm.collective_rpc("verl_processes") for pid in pids)
        remember_segments(self.facts.folder, own.pids)
        return Guard(own, watchdog_s)

    def _ask(self, what: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call to vLLM, which may wait for its processes."""
        if self.guard is None:
            return call(*args, **kwargs)
        try:
            return self.guard.ask(what, partial(call, *args, **kwargs))
        except Exception as error:
            self.guard.check(what)  # a death explains every other error
            if type(error).__name__ != "EngineDeadError":  # its module is another from version to version
                raise
            raise EngineLost(
                f"vLLM's engine died in {what}: {error} Its last words are above in this process's output; {RESUME}."
            ) from error

    # -- generating ---------------------------------------------------------------------------------------------

    def _run(self, samples: list[Sample]) -> Iterator[Response]:
        engine = self.llm.llm_engine
        running = {sample.key: sample for sample in samples}
        if len(running) != len(samples):
            raise RolloutError("two samples share an id; request ids of one call must differ")
        version = self.version
        self._ids.clear()
        try:
            for sample in samples:
                self._submit(engine, sample)
            while running:
                for output in self._ask("generate", engine.step):
                    taken = running.get(output.request_id)
                    response = None if taken is None else self._take(engine, taken, output, version)
                    if response is not None:
                        del running[output.request_id]
                        yield response
                for sample in self._called_off(running.values()):
                    self._take_unfinished(engine, sample)
                    self._ask("abort", engine.abort_request, [sample.key])
                    del running[sample.key]
                    yield sample.response("abort", version)
        except EngineLost:
            running.clear()  # nobody is there to abort them
            raise
        finally:
            if running:
                self._ask("abort", engine.abort_request, list(running))

    def _called_off(self, samples: Iterable[Sample]) -> list[Sample]:
        return [sample for sample in samples if self.aborted(sample)] if self.aborting else []

    def _submit(self, engine: Any, sample: Sample) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = sample.request.sampling
        seed = sample.seed if self._seeds else None
        arguments = sampling_arguments(sampling, self.eos_ids, seed, len(sample.resumed))
        # Only stop strings are looked for here; vLLM knows every other end itself.
        kind = RequestOutputKind.DELTA if sampling.stop else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(**arguments, detokenize=False, output_kind=kind)
        lora = self.adapters.current if self.adapters else None
        prompt = {"prompt_token_ids": sample.prompt}
        self._ids[sample.key] = self._ask(
            "generate", engine.add_request, sample.key, prompt, params, lora_request=lora
        )

    def _accept(self, sample: Sample, new: Any) -> FinishReason | None:
        log_probs = [row[token].logprob for token, row in zip(new.token_ids, new.logprobs or [], strict=True)]
        return self.accept(sample, new.token_ids, log_probs)

    def _take_unfinished(self, engine: Any, sample: Sample) -> None:
        """The tokens of a sample that is about to be aborted, where vLLM would tell them only at its end."""
        from vllm.v1.engine import FinishReason as Ended

        state = engine.output_processor.request_states.get(self._ids[sample.key])
        if state is not None and not sample.request.sampling.stop:
            output = state.make_request_output([], None, Ended.ABORT, None)
            self._accept(sample, output.outputs[0])

    def _take(self, engine: Any, sample: Sample, output: Any, version: int) -> Response | None:
        new = output.outputs[0]
        reason = self._accept(sample, new)
        if reason is None and output.finished:
            reason = "length" if new.finish_reason == "length" else "abort"
        if reason is None:
            return None
        if not output.finished:
            self._ask("abort", engine.abort_request, [sample.key])
        return sample.response(reason, version)

    # -- weights ------------------------------------------------------------------------------------------------

    def _take_weights(self, new_source: bool) -> None:
        if "weights" in self.asleep:
            self._wake(["weights"])
            self.asleep.discard("weights")
        if self.adapters is not None:
            self.adapters.take(self.source, self.version)
        elif new_source:
            sync_weights(self.source.named_tensors(), self.facts.tied, self.version, self._deliver)

    def _deliver(self, pairs: Any) -> list[str]:
        if self.guard is None:
            return list(self.llm.collective_rpc("verl_receive", args=(pairs,)))
        patience = str(reader_patience(self.guard))

        def receive(folder: str) -> list[str]:
            arguments = {"args": (folder, patience)}
            return list(
                self._ask("the hand-over", self.llm.collective_rpc, "verl_receive_buckets", **arguments)
            )

        return by_buckets(pairs, self.workers, receive, self.guard)

    def _forget_prefixes(self) -> None:
        reset = self.llm.reset_prefix_cache
        # It refuses while blocks are in use: then whatever still runs is to be computed anew.
        done = self._ask("reset_prefix_cache", reset) or self._ask("reset_prefix_cache", reset, True)
        if not done:
            raise RolloutError(
                f"vLLM did not empty its prefix cache for policy version {self.version}; what it holds was computed "
                "with old weights. Set actor_rollout_ref.rollout.engine_kwargs.vllm.enable_prefix_caching=False"
            )

    def _load_adapter(self, name: str, number: int, folder: str) -> Any:
        from vllm.lora.request import LoRARequest

        adapter = LoRARequest(name, number, folder)
        if not self._ask("the hand-over", self.llm.llm_engine.add_lora, adapter):
            raise RolloutError(
                f"vLLM did not take the adapter of policy version {self.version} from {folder}"
            )
        return adapter

    def _unload_adapter(self, adapter: Any) -> None:
        self._ask("the hand-over", self.llm.llm_engine.remove_lora, adapter.lora_int_id)

    # -- memory -------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Weights to host memory, the cache away. The CPU build has nothing to give back."""
        if self._can_sleep and not self.asleep:
            self._ask("sleep", self.llm.sleep, level=1)
            self.asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        if self.asleep:
            self._wake(sorted(self.asleep, reverse=True))
        super().wake()

    def _wake(self, tags: list[str]) -> None:
        self.make_room()
        self._ask("wake", self.llm.wake_up, tags=tags)

    def close(self) -> None:
        if self.llm is None:
            return
        llm, self.llm = self.llm, None
        if self.guard is not None and self.guard.lost:
            self.guard.processes.kill()  # nobody there would hear
        llm.llm_engine.engine_core.shutdown()
        if self.guard is not None:
            self.guard.processes.kill()
            self.guard.close()
        if self.by_reference and not self._had_group:
            leave_process_group()
        if self.adapters is not None:
            self.adapters.close()
        remove(self.facts.folder)


def _shown(arguments: dict[str, Any]) -> str:
    hidden = ("model", "load_format", "worker_extension_cls", "skip_tokenizer_init", "generation_config")
    return ", ".join(f"{key}={value}" for key, value in arguments.items() if key not in hidden)
