"""What engines with their own copy of the weights have in common: a stream of samples, and checked weight updates.

After `update_weights` log-probs have shown that the engine computes with the new weights (where it sleeps, after
`wake`). `TPFollower` and `RemoteEngine` replace the engine on ranks that do not host one.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.config.capabilities import engine_spec
from verl.errors import ConfigError, RolloutError, missing_package
from verl.models.weight_source import Adapter, NamedTensors, WeightSource
from verl.requirements import installed_version, package_requirement
from verl.rollout.base import (
    BatchEngine,
    FinishReason,
    LiveStats,
    Request,
    Response,
    RolloutEngine,
    RolloutStats,
    check_requests,
)
from verl.rollout.sampling import mix
from verl.rollout.sequence import Sequence, Stopper, check_finite
from verl.rollout.source import model_info
from verl.rollout.stale_files import new_path, remove, sweep
from verl.rollout.weight_sync.broadcast import ReceivedWeights
from verl.rollout.weight_sync.probe import PROBE_ID, ProbeCheck, probe_request

if TYPE_CHECKING:
    from verl.config.schema import RolloutConfig

_MAX_SEED = (1 << 63) - 1


class Sample(Sequence):
    """When it is interrupted, it starts again with the tokens it has as a part of its prompt."""

    def __init__(self, request: Request, number: int, version: int = 0) -> None:
        """`version`: of the weights it starts with."""
        super().__init__(request, number, version)
        self.name = f"{request.request_id}/{number}"
        self.started = self.aborted = False
        self.ended = False
        """It waits for being answered, and cannot start again."""

    @property
    def seed(self) -> int:
        """For a start with the tokens it has now."""
        # A resumed sample must not repeat the noise of its first tokens.
        return (mix(self.key + self.produced) if self.produced else self.key) & _MAX_SEED

    def append(self, token_ids: Seq[int], log_probs: Seq[float], stopper: Stopper) -> FinishReason | None:
        """Append new tokens up to where the sample ends; why it ends, or None."""
        check_finite(log_probs)
        pairs = list(zip(token_ids, log_probs, strict=True))
        return self.extend([int(token) for token, _ in pairs], [float(x) for _, x in pairs], stopper)


def require_engine(name: str) -> str:
    """The installed version; MissingPackage without one, ConfigError outside the range of pyproject.toml."""
    version, required = installed_version(name), package_requirement(name)
    if version is None or util.find_spec(name) is None:
        raise missing_package(name, name, f"rollout.name={name}")
    if required is not None and not required.accepts(version):
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={name}: {name} {version} is installed, verl works with "
            f"{required.versions}; pip install '{required.requirement}', or set actor_rollout_ref.rollout.name=native"
        )
    return version


def engine_kwargs(engine: str, extra: dict[str, Any], ours: tuple[str, ...]) -> dict[str, Any]:
    """The user's `engine_kwargs`, checked against what verl sets itself."""
    taken = sorted(set(extra) & set(ours))
    if taken:
        raise ConfigError(
            f"actor_rollout_ref.rollout.engine_kwargs.{engine}.{taken[0]} is set by verl; leave it out"
        )
    return dict(extra)


class ExternalRollout(RolloutEngine):
    """The parts of an engine that do not depend on which one it is."""

    name: str
    separate_adapter = False
    """The engine takes LoRA adapters separately from their base weights."""

    def __init__(
        self,
        source: WeightSource,
        tokenizer: Any | None,
        config: RolloutConfig,
        *,
        watchdog_s: float,
        run_folder: Path | None = None,
    ) -> None:
        self.source, self.config, self.watchdog_s, self.run_folder = source, config, watchdog_s, run_folder
        self.info = (
            source.model_info if isinstance(source, ReceivedWeights) else model_info(source, tokenizer)
        )
        self.stopper = Stopper(tokenizer, self.info.eos_ids)
        self.max_length = config.max_model_len or self.info.max_positions
        self.precision = self.info.dtype if config.dtype == "auto" else config.dtype
        self.folder = new_path("rollout")
        """For the model's config and the engine's files; see `_create_folder`."""
        can_sleep = self.info.device == "cuda" and config.free_cache_engine
        extra = getattr(config.engine_kwargs, self.name)
        self.can_sleep = bool(extra.get(engine_spec(self.name).sleep_argument, can_sleep))
        self.version = 0
        self.asleep: set[str] = set()
        """What has been released: `weights`, `kv_cache`."""
        self._lock = threading.Lock()
        self._outstanding: dict[str, Sample] = {}
        self._finished: list[Response] = []
        """Finished while the probe ran; for the next `poll`."""
        self._updating = False
        """Weights are on their way: no sample runs, and those submitted now wait."""
        self._generated_tokens = 0
        self._live = LiveStats()
        self._base_sent = False
        self._unproven = False
        self._probes: ProbeCheck | None = None
        try:
            self._launch()
            if not source.remote:
                self.update_weights(source, 0)
        except BaseException:
            self.close()
            raise

    def _create_folder(self) -> None:
        """Only this user can open it. Those of killed processes are removed."""
        sweep()
        self.folder.mkdir(mode=0o700)
        (self.folder / "config.json").write_text(self.info.config_json)

    # -- what an engine adds; the rest does nothing on a rank that hosts none -----------------------------------

    @abstractmethod
    def _launch(self) -> None:
        """Check the settings, then start the engine."""

    def _start(self, samples: Seq[Sample]) -> None:
        """Queue samples; may be called from any thread, with the lock."""

    def _interrupt(self) -> None:
        """Stop all samples, with the tokens they have; `_start` lets those that have not `ended` continue."""

    @abstractmethod
    def _advance(self, timeout_s: float | None) -> list[Response]:
        """One step, or a short wait of at most `timeout_s`: what finished in it, each by `_finish`."""

    def _cancel(self, samples: Seq[Sample]) -> None:
        """These samples are no longer needed (they are marked aborted)."""

    @abstractmethod
    def _send_weights(self, tensors: NamedTensors) -> None:
        """Bring these weights over as `self.version` and check their arrival."""

    def _send_adapter(self, adapter: Adapter) -> None:
        """The same with a LoRA adapter; only where `separate_adapter`."""
        raise NotImplementedError

    def _reset_prefix_cache(self) -> None:
        """Drop what was cached with the old weights."""

    def _sleep(self) -> None:
        """Free the memory of weights and KV cache."""

    def _wake(self, tags: list[str]) -> None:
        """Allocate the memory of `weights`, of the `kv_cache`, or of both."""

    # -- generating ---------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        check_requests(requests, self.info.vocab_size, self.stopper.tokenizer, self.max_length)
        if self.asleep:
            raise RolloutError(f"{self.name} sleeps; call wake() before submit()")
        self._enqueue(requests)

    def _enqueue(self, requests: Seq[Request]) -> None:
        with self._lock:
            samples = [Sample(r, number, self.version) for r in requests for number in range(r.n)]
            self._outstanding.update({sample.name: sample for sample in samples})
            if not self._updating:
                self._start(samples)

    def poll(self, timeout_s: float | None = None) -> list[Response]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        responses, self._finished = self._finished, []
        try:
            while not responses and self._outstanding:
                left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                responses = self._advance(left)
                self._live.write(self.stats, now=not self._outstanding)
                if deadline is not None and time.monotonic() >= deadline:
                    break
        except BaseException:
            self._drop_outstanding()
            raise
        return responses

    def _finish(self, sample: Sample, reason: FinishReason) -> Response:
        with self._lock:
            del self._outstanding[sample.name]
            self._generated_tokens += len(sample.log_probs)
        return sample.response(reason)

    def _drop_outstanding(self) -> None:
        with self._lock:
            samples = list(self._outstanding.values())
            self._outstanding.clear()
        for sample in samples:
            sample.aborted = True
        self._cancel(samples)

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        wanted = None if request_ids is None else set(request_ids)
        with self._lock:
            for sample in self._outstanding.values():
                request_id = sample.request.request_id
                if request_id != PROBE_ID and (wanted is None or request_id in wanted):
                    sample.aborted = True

    def stats(self) -> RolloutStats:
        with self._lock:
            running = sum(sample.started for sample in self._outstanding.values())
            waiting = len(self._outstanding) - running
            known = [len(sample.log_probs) for sample in self._outstanding.values()]
        return RolloutStats(
            running=running,
            waiting=waiting,
            generated_tokens=self._generated_tokens,
            drawn_tokens=self._generated_tokens + sum(known),
            longest=max(known, default=0),
            weight_sync={} if self._probes is None else self._probes.metrics(),
        )

    # -- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Take the trainer's weights (or, with LoRA, its adapter) and prove that they are in use.

        Running samples are interrupted meanwhile and continue as resumed ones: exactly the tokens they had are of
        earlier weights, however far the engine runs ahead of what it reports."""
        try:
            with self._lock:
                self._updating = True
            if self._outstanding:
                self._interrupt()
            self.source, self.version = source, version
            self._receive(source)
            self._reset_prefix_cache()
        except BaseException:
            self._drop_outstanding()
            raise
        finally:
            self._continue()
        self._unproven = True
        if not self.asleep:
            self.prove()

    def _receive(self, source: WeightSource) -> None:
        if "weights" in self.asleep:
            self._wake_up(["weights"])
        if not self.separate_adapter:
            self._send_weights(source.named_tensors())
            return
        if not self._base_sent:
            self._send_weights(source.base_tensors())
            self._base_sent = True
        adapter = source.adapter()
        assert adapter is not None
        self._send_adapter(adapter)

    def _continue(self) -> None:
        """Start what was interrupted, or submitted during the update, in the order it was submitted."""
        with self._lock:
            self._updating = False
            samples = [sample for sample in self._outstanding.values() if not sample.ended]
            for sample in samples:
                sample.set_version(self.version)
                sample.started = False
            if samples:
                self._start(samples)

    def prove(self) -> None:
        """Compare a few log-probs with the trainer's, where that is not left to the trainer's process."""
        self._unproven = False
        if self.source.remote:
            return
        request = probe_request(self.info.vocab_size, self.max_length)
        responses = self._answer(request)
        trainer = self.source.log_probs(request.prompt_ids, [r.token_ids for r in responses])
        if trainer is not None:
            self._probes = self._probes or ProbeCheck(self.name, self.precision)
            self._probes.add(self.version, [r.log_probs for r in responses], trainer)

    def _answer(self, request: Request) -> list[Response]:
        """Serve one request while others may be running."""
        self._enqueue([request])
        answers: list[Response] = []
        try:
            while len(answers) < request.n:
                for response in self._advance(None):
                    ours = response.request_id == request.request_id
                    (answers if ours else self._finished).append(response)
        except BaseException:
            self._drop_outstanding()
            raise
        return answers

    # -- memory -------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        if self._outstanding:
            raise RolloutError(
                f"{self.name} cannot sleep now: {len(self._outstanding)} samples are outstanding"
            )
        if self.can_sleep and not self.asleep:
            self._sleep()
            self.asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        if self.asleep:
            self._wake_up(sorted(self.asleep, reverse=True))
        if self._unproven:
            self.prove()

    def _wake_up(self, tags: list[str]) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the engine allocates from the device, not from this process's cache
        self._wake(tags)
        self.asleep -= set(tags)

    def close(self) -> None:
        remove(self.folder)


class RemoteEngine(BatchEngine):
    """On a trainer's rank when generation has its own processes; they are given new weights directly."""

    def run_batch(self, requests: list[Request]) -> Iterator[Response]:
        raise RolloutError("this rank only trains: actor_rollout_ref.rollout runs in separate processes")

    def update_weights(self, source: WeightSource, version: int) -> None:
        """The rollout processes take the weights in a call to both sides."""


class TPFollower(ExternalRollout):
    """On the ranks of a tensor-parallel group except the first, which hosts the engine on the GPUs of all.

    Weights are gathered by all ranks together: every method makes the same collective calls as the host's."""

    def __init__(self, name: str, source: WeightSource, tokenizer: Any | None, config: RolloutConfig) -> None:
        self.name = name
        super().__init__(source, tokenizer, config, watchdog_s=0.0)

    def _launch(self) -> None:
        self.separate_adapter = engine_spec(self.name).adapters and self.info.lora_rank > 0

    def submit(self, requests: Iterable[Request]) -> None:
        raise RolloutError(f"this rank follows the one that hosts {self.name}; requests go to that one")

    def _advance(self, timeout_s: float | None) -> list[Response]:
        return []

    def _send_weights(self, tensors: NamedTensors) -> None:
        deque(tensors, maxlen=0)

    def _send_adapter(self, adapter: Adapter) -> None:
        deque(adapter.named_tensors, maxlen=0)

    def prove(self) -> None:
        """The host compares log-probs; the trainer computes them on all ranks together."""
        self._unproven = False
        request = probe_request(self.info.vocab_size, self.max_length)
        self.source.log_probs(request.prompt_ids, [[0] * request.sampling.max_tokens] * request.n)
