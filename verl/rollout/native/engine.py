"""The native engine: continuous batching from the trainer's own weights, in the trainer's process.

`poll` applies what was submitted, aborted and released since the last call, then runs scheduling iterations (schedule,
run, collect what finished) until something has. While requests are outstanding the module is in generation mode, with
gathered weights; when none is, it is as it was before, and of the KV cache only prefixes that a conversation keeps
stay, for as long as the weights do not change.

The CPU runner computes prompts and decoding rows in one pass over long pages; the device runner separates them, since
its decode steps are captured graphs. Both use one scheduler, and the device runner also runs on the CPU (tests).
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

from verl.errors import RolloutError
from verl.models.introspection import is_exact
from verl.rollout.base import (
    FinishReason,
    LiveStats,
    Request,
    Response,
    RolloutStats,
    check_requests,
)
from verl.rollout.native.engine_state import (
    CacheLayout,
    CPUState,
    EngineState,
    GPUState,
    Limits,
    Workload,
    cache_layout,
    uses_graphs,
    weight_signature,
)
from verl.rollout.native.scheduler import Scheduler
from verl.rollout.sampling import Kinds
from verl.rollout.sequence import Sequence, check_finite, sequences_of
from verl.rollout.source import ModuleEngine, generation_mode, verify

log = logging.getLogger(__name__)

Command = tuple[Literal["submit", "abort", "release"], Any]


class NativeRollout(ModuleEngine):
    """Continuous batching over the module of `source`.

    `on_device` chooses the path for devices; None: where the weights are on one. (It also runs on the CPU.) A model is
    compared with its own forward before it generates for the first time, unless `verify` is False."""

    def __init__(
        self,
        source: Any,
        tokenizer: Any | None,
        config: Any | None = None,
        on_device: bool | None = None,
        verify: bool = True,
    ) -> None:
        super().__init__(source, tokenizer)
        self.limits = Limits.of(config)
        self.on_device = on_device
        self._verify = verify
        self._known: tuple[weakref.ref[Any], CacheLayout] | None = None
        """The model that was verified last, and the shape of its cache."""
        self._lock = threading.Lock()
        """Guards what other threads touch: the commands and the counts of outstanding samples."""
        self._commands: list[Command] = []
        self._outstanding: dict[str, int] = {}
        """Samples without a response, by request."""
        self._finished: list[Response] = []
        """To be returned by the next `poll`."""
        self._suspended = False
        """Sequences wait for an engine state."""
        self._stats = RolloutStats()
        self._live: LiveStats | None = LiveStats()
        self._module: ExitStack | None = None
        """Open while requests are outstanding: gathered weights, generation mode."""
        self._model: Any = None
        self.state: EngineState | None = None
        self._scheduler: Scheduler | None = None
        self._cached_weights: Any = None
        """`_weight_state` of the weights that the cache was computed with."""
        self.graphs_refused: tuple[int, str] | None = None
        """The version at which a decode step could not be captured last, and why."""

    # Called from any thread

    def submit(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        if not requests:
            return
        with self._lock:
            if not self._outstanding:
                self._read_model()
                self.limits.check_dtype(self.source.dtype)
            lengths = [x for x in (self.limits.max_model_len, self.limits.cache_tokens) if x is not None]
            most = min(lengths, default=None)
            check_requests(requests, self._vocab_size, self.tokenizer, most, self._position_limit)
            self._outstanding.update({request.request_id: request.n for request in requests})
            self._commands.append(("submit", requests))

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        with self._lock:
            named = list(self._outstanding) if request_ids is None else list(request_ids)
            self._commands.append(("abort", frozenset(named)))

    def release(self, prefix_ids: Iterable[str]) -> None:
        with self._lock:
            self._commands.append(("release", list(prefix_ids)))

    def stats(self) -> RolloutStats:
        with self._lock:
            outstanding = sum(self._outstanding.values())
        scheduler = self._scheduler
        if scheduler is None:
            return replace(self._stats, waiting=outstanding)
        blocks, running = scheduler.blocks, len(scheduler.running)
        return replace(
            self._stats,
            running=running,
            waiting=max(outstanding - running, 0),
            kv_blocks=blocks.num_blocks,
            kv_blocks_used=blocks.num_blocks - blocks.free,
            longest=max((sequence.produced for sequence in scheduler.running), default=0),
        )

    # Generating

    def poll(self, timeout_s: float | None = None) -> list[Response]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while True:
                self._apply_commands()
                if not self._finished:
                    if self._scheduler is None or self._scheduler.idle:
                        break
                    self._open_module()
                    assert self.state is not None
                    runner, scheduler = self.state.runner, self._scheduler
                    step = runner.schedule(scheduler)
                    runner.run(scheduler, step)
                    self._answer(runner.finished(scheduler))
                    self._note_refused_graph()
                    if self._live is not None:
                        self._live.write(self.stats)
                if self._finished or (deadline is not None and time.monotonic() >= deadline):
                    break
            return self._hand_out()
        except BaseException:
            self._drop_everything()
            raise

    def progress(self, request_ids: Iterable[str]) -> list[Response]:
        named = frozenset(request_ids)
        everything = [] if self._scheduler is None else self._scheduler.everything()
        return [sequence.response("abort") for sequence in everything if sequence.request.request_id in named]

    def _hand_out(self) -> list[Response]:
        responses, self._finished = self._finished, []
        with self._lock:
            for response in responses:
                self._outstanding[response.request_id] -= 1
                if not self._outstanding[response.request_id]:
                    del self._outstanding[response.request_id]
                self._stats.generated_tokens += len(response.token_ids)
            idle = not self._outstanding
            if idle:
                self._close_module()
                # Kept prefixes stay, and a device's state with its graphs.
                if self._scheduler is not None and not self._scheduler.blocks.kept:
                    self._scheduler = None
                    if isinstance(self.state, CPUState):
                        self.state = None
        if idle and self._live is not None:
            self._live.write(self.stats, now=True)
        return responses

    def _apply_commands(self) -> None:
        """In the order they came: what is aborted or released after being submitted never starts."""
        with self._lock:
            commands, self._commands = self._commands, []
        arrived: list[Sequence] = []
        for name, argument in commands:
            if name == "submit":
                # Prompts of like length side by side: decoding rows then need little padding.
                for request in sorted(argument, key=lambda r: len(r.prompt_ids)):
                    arrived += sequences_of(request, self.version)
            elif name == "abort":
                arrived = self._abort(argument, arrived)
            elif self._scheduler is not None:
                self._scheduler.blocks.release_kept(argument)
        if arrived or self._suspended:
            self._prepare(arrived)

    def _abort(self, request_ids: frozenset[str], arrived: list[Sequence]) -> list[Sequence]:
        """Answer these requests with what they have; those of `arrived` that stay."""
        stay: list[Sequence] = []
        aborted: list[Sequence] = []
        for leader in arrived:
            (aborted if leader.request.request_id in request_ids else stay).append(leader)
        aborted += [sibling for leader in aborted for sibling in leader.siblings]
        if self._scheduler is not None:
            named = [s for s in self._scheduler.everything() if s.request.request_id in request_ids]
            # A row whose end was drawn on the device is finished, not cut off.
            ended = self.state.runner.evict(named) if self.state is not None else []
            self._answer(ended)
            done = {id(sequence) for sequence, _ in ended}
            for sequence in named:
                sequence.siblings = []
            self._scheduler.finish_all(named)
            aborted += [sequence for sequence in named if id(sequence) not in done]
        self._answer([(sequence, "abort") for sequence in aborted])
        return stay

    def _answer(self, ended: list[tuple[Sequence, FinishReason]]) -> None:
        for sequence, reason in ended:
            check_finite(sequence.log_probs)
            self._finished.append(sequence.response(reason))

    # The module, the cache and the runner

    def _prepare(self, arrived: list[Sequence]) -> None:
        """A state that serves what is outstanding and what has arrived.

        When they outgrow a state at work, its rows are preempted, which loses nothing but time, and continue in a
        larger one; kept prefixes are lost, as when memory is short."""
        self._open_module()
        unfinished = [] if self._scheduler is None else self._scheduler.everything()
        requests = list({id(s.request): s.request for s in [*unfinished, *arrived]}.values())
        last, busy = self.state, bool(unfinished)
        if not requests:
            return
        if last is not None and last.serves(self._model, requests, busy):
            state = last
            state.runner.configure(self._stopper, Kinds.of([request.sampling for request in requests]))
        else:
            self._suspend()
            self.state = None
            stream = busy or any(request.prefix_id is not None for request in requests)
            layout = self._layout(self._model)
            work = Workload(self._model, layout, requests, self.limits, self._stopper, stream)
            self.state = state = self._build_state(last, work)
        if self._scheduler is None or state is not last:
            scheduler = state.scheduler(self._stats)
            if self._scheduler is not None:
                scheduler.add(self._scheduler.waiting)
            self._scheduler = scheduler
        self._scheduler.add(arrived)
        self._suspended = False

    def _build_state(self, last: EngineState | None, work: Workload) -> EngineState:
        if not self._uses_device(work.model):
            return CPUState(work)
        sizes = None
        if isinstance(last, GPUState):
            sizes = last.sizes
            last.release()  # the new one may need its memory
        state = GPUState(work, sizes)
        state.runner.use_graphs = self._allows_graphs(state)
        state.runner.compile_kernels()
        return state

    def _open_module(self) -> None:
        """Enter generation mode, with the weights of now. A cache computed with others is not used."""
        if self._module is not None:
            return
        with ExitStack() as stack:
            module = stack.enter_context(self.source.module())
            model = stack.enter_context(generation_mode(module, "verl"))
            layout = self._layout(model)
            self._module, self._model = stack.pop_all(), model
        weights = self._weight_state()
        if self._scheduler is not None and weights != self._cached_weights:
            self._scheduler.set_version(self.version)
        self._cached_weights = weights
        state = self.state
        if state is None:
            return
        if (state.layout, state.device) != (layout, model.get_input_embeddings().weight.device):
            self._suspend()
            self.state = None
            return
        if state.signature != weight_signature(model):
            state.signature = weight_signature(model)
            state.runner.rebind(model)
        if isinstance(state, GPUState):
            state.runner.refresh(self._allows_graphs(state))

    def _close_module(self) -> None:
        module, self._module, self._model = self._module, None, None
        if module is not None:
            module.close()

    def _suspend(self) -> None:
        """Every running sequence waits again, with the tokens it has; nothing of the cache is used any more."""
        if self._scheduler is not None and self.state is not None:
            self._finish(self.state.runner.evict(list(self._scheduler.running)))
            self._scheduler.preempt_all()
            self._scheduler.blocks.invalidate()
            self._suspended = not self._scheduler.idle

    def _finish(self, ended: list[tuple[Sequence, FinishReason]]) -> None:
        """Running sequences were found to have ended."""
        assert self._scheduler is not None
        self._scheduler.finish_all([sequence for sequence, _ in ended])
        self._answer(ended)

    def _drop_everything(self) -> None:
        with self._lock:
            self._commands, self._finished = [], []
            self._outstanding.clear()
            self._suspended = False
            self._scheduler = self.state = None
            self._close_module()

    def _uses_device(self, model: Any) -> bool:
        if self.on_device is not None:
            return self.on_device
        # On the CPU only the device path has fp8, emulated.
        on_gpu = model.get_input_embeddings().weight.device.type != "cpu"
        return on_gpu or self.limits.fp8 or self.limits.kv_cache_dtype == "fp8"

    def _layout(self, model: Any) -> CacheLayout:
        """The shape of the model's cache; a model not seen before is compared with its own forward."""
        if self._known is None or self._known[0]() is not model:
            layout = cache_layout(model)
            if self._verify:
                on_device = self._uses_device(model)
                verify(model, "native", lambda requests: _small_run(model, requests, on_device))
                self._verify_exact(model)
            if self.limits.kv_cache_dtype == "fp8":
                from verl.rollout.native.model import FP8_TYPE, require_fp8_device

                require_fp8_device(model.get_input_embeddings().weight.device, "rollout.kv_cache_dtype")
                layout = layout.stored_as(FP8_TYPE)
            self._known = (weakref.ref(model), layout)
        return self._known[1]

    def _verify_exact(self, model: Any) -> None:
        if not is_exact(model):
            return
        if self._uses_device(model):
            raise RolloutError(
                "trainer.exact=True has no kernels for devices and none for fp8; set it to False, or generate on the "
                "CPU with rollout.dtype=auto and rollout.kv_cache_dtype=auto"
            )
        from verl.rollout.native.exact_check import self_test

        self_test(model)

    def _weight_state(self) -> tuple[Any, ...]:
        """Differs when a weight was replaced or changed in place (torch counts that), with or without
        `update_weights`."""
        parameters = [p for p in self._model.parameters() if not p.is_inference()]
        return (self.version, self.source.version, [(p.data_ptr(), p._version) for p in parameters])

    def _allows_graphs(self, state: GPUState) -> bool:
        refused = self.graphs_refused is not None and self.graphs_refused[0] == self.version
        return uses_graphs(state.device, self.limits) and not refused

    def _note_refused_graph(self) -> None:
        """A step that cannot be captured runs without graphs until the next weight update, when it is tried again: the
        cause may have been temporary. The same cause is logged once."""
        if not isinstance(self.state, GPUState):
            return
        runner, error = self.state.runner, self.state.runner.graph_error
        if error is None:
            return
        runner.graph_error = None
        if self.graphs_refused is None or self.graphs_refused[1] != error:
            log.warning(
                "%s cannot be captured as a CUDA graph, its decode steps run without one and slower: %s",
                type(runner.backbone.model).__name__,
                error,
            )
        self.graphs_refused = (self.version, error)

    # Weights and memory

    def update_weights(self, source: Any, version: int) -> None:
        """Continue with the weights of `source` (None: the same, changed in place) from the next step on.

        Running sequences keep the keys and values they have, or are prefilled again (`recompute_kv_cache`); nothing
        else of the cache is used again."""
        super().update_weights(source, version)
        if self.limits.recompute_kv_cache:
            self._suspend()
        elif self._scheduler is not None and self.state is not None:
            self._finish(self.state.runner.settle())
        if self._scheduler is not None:
            self._scheduler.set_version(version)
        # The next poll enters again: weights gathered from shards are those of the moment they were gathered.
        self._close_module()

    def sleep(self) -> None:
        """Free the cache. Captured graphs stay, where it can be restored at its address."""
        self._suspend()
        self._close_module()
        if self.state is not None and not self.state.sleep():
            self.state = None
        if self._scheduler is not None and self._scheduler.idle:
            self._scheduler = None

    def close(self) -> None:
        self._drop_everything()


def _small_run(model: Any, requests: list[Request], on_device: bool) -> list[Response]:
    """What a small engine generates: prompts in chunks and with a shared beginning, then decode steps."""
    budget = max(len(request.prompt_ids) for request in requests) - 4
    limits = Limits(max_num_batched_tokens=max(budget, 4), cache_tokens=1024, enforce_eager=True)
    engine = NativeRollout(model, None, limits, on_device, verify=False)
    engine._live = None  # no part of the run
    return list(engine.generate(requests))
