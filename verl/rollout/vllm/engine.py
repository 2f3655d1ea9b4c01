"""vLLM's engine driven from this process.

With one worker and no process group of several ranks the engine runs in this very process and takes the weights by
reference; otherwise vLLM starts its own processes and the weights cross in buckets through shared memory.

What always holds: a sample's seed is its own, whatever else is in the batch (vLLM's sums may still differ in the
last bits with the batch, as `docs` of vLLM say); responses carry the version of the weights in use.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from verl.errors import RolloutError, TrainingHalted
from verl.rollout.base import FinishReason, Request, Response, RolloutEngine, SamplingParams
from verl.rollout.handover import (
    Manifest,
    base_weights,
    check_probe,
    compare,
    probe_prompt,
    trainer_log_probs,
    weights_of,
    with_tied_head,
)
from verl.rollout.handover.buckets import remove, shared_folder, write_buckets
from verl.rollout.handover.probe import RESPONSE_TOKENS
from verl.rollout.noise import mix, sequence_key
from verl.rollout.requests import Stopper, check_finite, check_requests
from verl.rollout.vllm.adapter import Adapters
from verl.rollout.vllm.process import kept_random_state, leave_process_group
from verl.rollout.vllm.settings import (
    engine_arguments,
    max_length,
    precision,
    read_model,
    sampling_arguments,
    set_environment,
)

log = logging.getLogger(__name__)

NAME = "vllm"
HANDOVER_TIMEOUT_S = 300.0
_SEEDS = (1 << 63) - 1


@dataclass
class _Sample:
    """One sample on its way."""

    request: Request
    number: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def resumed(self) -> list[int]:
        return list(self.request.partial[self.number]) if self.request.partial else []

    @property
    def key(self) -> str:
        return f"{self.request.request_id}/{self.number}"

    @property
    def seed(self) -> int:
        key = sequence_key(self.request.seed, self.request.request_id, self.number)
        return (mix(key + len(self.resumed)) if self.resumed else key) & _SEEDS


class VLLMRollout(RolloutEngine):
    """Generates with vLLM from a copy of the trainer's weights. `source` is a TrainEngine or a causal model."""

    def __init__(self, source: Any, tokenizer: Any | None, config: Any | None = None) -> None:
        self.source, self.tokenizer = source, tokenizer
        self.facts = read_model(source, tokenizer)
        self.precision = precision(config, self.facts)
        arguments = engine_arguments(config, self.facts)
        self.workers = int(arguments["tensor_parallel_size"])
        self.max_length = max_length(config, self.facts)
        self.stopper = Stopper(tokenizer, self.facts.eos_ids)
        self.version = 0
        self._aborted: set[str] = set()
        self._abort_all = False
        self._asleep: set[str] = set()
        self._unproven = False
        self._can_sleep = bool(arguments.get("enable_sleep_mode"))
        self._had_group = dist.is_initialized()
        alone = not self._had_group or dist.get_world_size() == 1
        self.by_reference = self.workers == 1 and alone
        set_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0" if self.by_reference else "1")
        self.llm: Any = self._start(arguments)
        self.adapters = Adapters(self.llm.llm_engine) if self.facts.lora_rank else None
        self._hand_over_weights(base_weights(source) if self.adapters else weights_of(source))
        self.update_weights(None, 0)

    def _start(self, arguments: dict[str, Any]) -> Any:
        import vllm

        with kept_random_state():
            try:
                return vllm.LLM(**arguments)
            except (ValueError, RuntimeError, TypeError, AssertionError) as error:
                remove(self.facts.folder)
                raise RolloutError(
                    f"vLLM could not start with {_shown(arguments)}: {error}\nThe keys are "
                    "actor_rollout_ref.rollout.* and actor_rollout_ref.rollout.engine_kwargs.vllm.*"
                ) from error

    # -- generating ---------------------------------------------------------------------------------------------

    def generate(self, requests: Iterable[Request]) -> Iterator[Response]:
        requests = list(requests)
        self._aborted.clear()
        self._abort_all = False
        self.stopper.check_stop_strings(requests)
        check_requests(requests, self.facts.vocab_size, self.max_length)
        if self._asleep:
            raise RolloutError("vLLM's memory was given back; call wake() before generate()")
        return self._run([_Sample(request, number) for request in requests for number in range(request.n)])

    def _run(self, samples: list[_Sample]) -> Iterator[Response]:
        engine = self.llm.llm_engine
        running = {sample.key: sample for sample in samples}
        if len(running) != len(samples):
            raise RolloutError("two samples share an id; request ids of one call must differ")
        version = self.version
        try:
            for sample in samples:
                self._submit(engine, sample)
            while running:
                for output in engine.step():
                    sample_ = running.get(output.request_id)
                    reason = None if sample_ is None else self._take(sample_, output)
                    if sample_ is not None and reason is not None:
                        if not output.finished:
                            engine.abort_request([sample_.key])
                        del running[sample_.key]
                        yield _response(sample_, reason, version)
                for sample in self._to_abort(running):
                    engine.abort_request([sample.key])
                    del running[sample.key]
                    yield _response(sample, "abort", version)
        finally:
            if running:
                engine.abort_request(list(running))

    def _submit(self, engine: Any, sample: _Sample) -> None:
        from vllm import SamplingParams as VLLMSampling
        from vllm.sampling_params import RequestOutputKind

        resumed = sample.resumed
        arguments = sampling_arguments(sample.request.sampling, self.facts.eos_ids, sample.seed, len(resumed))
        params = VLLMSampling(**arguments, detokenize=False, output_kind=RequestOutputKind.DELTA)
        prompt = {"prompt_token_ids": [*sample.request.prompt_ids, *resumed]}
        lora = self.adapters.current if self.adapters else None
        engine.add_request(sample.key, prompt, params, lora_request=lora)

    def _take(self, sample: _Sample, output: Any) -> FinishReason | None:
        """Append what is new; why the sample ended, or None while it goes on."""
        new = output.outputs[0]
        for token, row in zip(new.token_ids, new.logprobs or [], strict=True):
            sample.token_ids.append(int(token))
            sample.log_probs.append(float(row[token].logprob))
            check_finite(sample.log_probs[-1:])
            reason = self.stopper.reason([*sample.resumed, *sample.token_ids], sample.request.sampling)
            if reason is not None:
                return reason
        if not output.finished:
            return None
        return "length" if new.finish_reason == "length" else "abort"

    def _to_abort(self, running: dict[str, _Sample]) -> list[_Sample]:
        if self._abort_all:
            return list(running.values())
        return [sample for sample in running.values() if sample.request.request_id in self._aborted]

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        if request_ids is None:
            self._abort_all = True
        else:
            self._aborted.update(request_ids)

    # -- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, source: Any, version: int) -> None:
        """Take the trainer's weights (or, with LoRA, its adapter) and prove that they are in use."""
        if source is not None:
            self.source = source
        self.version = version
        if self._asleep and "weights" in self._asleep:
            self.llm.wake_up(tags=["weights"])
            self._asleep.discard("weights")
        if self.adapters is not None:
            self.adapters.take(self.source, version)
        elif source is not None:
            self._hand_over_weights(weights_of(self.source))
        self.llm.reset_prefix_cache()
        self._unproven = True
        if not self._asleep:
            self._prove()

    def _hand_over_weights(self, pairs: Any) -> None:
        sent = Manifest()
        leaving = sent.watch(with_tied_head(pairs, self.facts.tied))
        answers = self._by_reference(leaving) if self.by_reference else self._by_buckets(leaving)
        for answer in answers:
            report = json.loads(answer)
            compare(sent, report["received"], self.version, NAME)
            if report["missing"]:
                raise TrainingHalted(
                    f"vLLM's model has {len(report['missing'])} parameters that no weight of the trainer reached, "
                    f"e.g. {', '.join(report['missing'][:3])}; this model's two forms differ: use "
                    "actor_rollout_ref.rollout.name=native"
                )

    def _by_reference(self, pairs: Any) -> list[str]:
        return list(self.llm.collective_rpc("verl_receive", args=(pairs,)))

    def _by_buckets(self, pairs: Any) -> list[str]:
        folder = shared_folder()
        try:
            with ThreadPoolExecutor(1) as pool:
                call = pool.submit(
                    self.llm.collective_rpc,
                    "verl_receive_buckets",
                    None,
                    (str(folder), str(HANDOVER_TIMEOUT_S)),
                )

                def alive() -> None:
                    if call.done():
                        call.result()

                write_buckets(pairs, folder, self.workers, timeout_s=HANDOVER_TIMEOUT_S, check=alive)
                return list(call.result(timeout=HANDOVER_TIMEOUT_S))
        finally:
            remove(folder)

    def _prove(self) -> None:
        """Compare a few log-probs with the trainer's."""
        self._unproven = False
        prompt = probe_prompt(self.facts.vocab_size)
        sampling = SamplingParams(max_tokens=RESPONSE_TOKENS, ignore_eos=True)
        (response,) = self._run([_Sample(Request("verl-probe", prompt, sampling), 0)])
        trainer = trainer_log_probs(self.source, prompt, response.token_ids)
        if trainer is not None:
            difference = check_probe(response.log_probs, trainer, self.precision, self.version, NAME)
            log.debug("vllm has policy version %d; log-probs differ by %.2g", self.version, difference)

    # -- memory -------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Weights to host memory, the cache away. The CPU build has nothing to give back."""
        if self._can_sleep and not self._asleep:
            self.llm.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        if self._asleep:
            self.llm.wake_up(tags=sorted(self._asleep, reverse=True))
            self._asleep = set()
        if self._unproven:
            self._prove()

    def close(self) -> None:
        if self.llm is None:
            return
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        if self.by_reference and not self._had_group:
            leave_process_group()
        if self.adapters is not None:
            self.adapters.close()
        remove(self.facts.folder)


def _response(sample: _Sample, reason: FinishReason, version: int) -> Response:
    return Response(
        sample.request.request_id,
        sample.number,
        sample.token_ids,
        sample.log_probs,
        reason,
        policy_version=version,
    )


def _shown(arguments: dict[str, Any]) -> str:
    hidden = ("model", "load_format", "worker_extension_cls", "skip_tokenizer_init", "generation_config")
    return ", ".join(f"{key}={value}" for key, value in arguments.items() if key not in hidden)
