"""Generation in several processes: which of them runs which request; in each a `Sampler` over its engine, for the
driver, which may send more meanwhile; and processes that only generate (`rollout.n_gpus_per_node`).

Requests and aborts arrive from a control thread; the thread of the stream generates, and takes new weights between two
polls. After a stream ends its engine generates nothing. A process that only generates does so from the weights of the
last sync and reports their version with every response; before the first sync it is asked for nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from verl.config.capabilities import engine_spec
from verl.errors import ModelError
from verl.models.loading import cast_parameters, disable_dropout, load_causal_lm
from verl.models.lora import add_lora, plain_name
from verl.models.weight_source import WeightSource
from verl.rollout import build_rollout
from verl.rollout.base import Request, Response, RolloutEngine, RolloutStats
from verl.rollout.sampler import Sampler
from verl.rollout.source import as_source
from verl.rollout.weight_sync.broadcast import Broadcast, ReceivedWeights, SyncReport, load_into, report
from verl.rollout.weight_sync.fingerprint import WeightManifest
from verl.workers.local import choose_device
from verl.workers.rank import CallOutcome, RankSetup, RPCServer, collective_timeout_s, prepare_process

if TYPE_CHECKING:
    from torch import nn

    from verl.config.schema import PPOConfig
    from verl.rollout.source import ModelInfo

FLUSH_S = 0.02
"""Responses that finish this soon after others were sent are sent together: sending costs a quarter of a millisecond
in which nothing is generated."""


class RequestScheduler:
    """Which of several engines runs which request: an engine is given as many samples as it runs at once and a few
    more; the rest waits here, so that whichever engine is free first takes it.

    Not for several threads at once: the caller holds a lock where it has them."""

    def __init__(self, ranks: Iterable[int], max_num_seqs: int) -> None:
        self.loads = dict.fromkeys(ranks, 0)
        """Samples each engine has to answer."""
        # A quarter more than it runs: the engine refills its batch while the next chunk is on its way.
        self._limit = max_num_seqs + max(1, max_num_seqs // 4)
        self._waiting: deque[Request] = deque()
        self._prefix_rank: dict[str, int] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)

    def dispatch(self) -> dict[int, list[Request]]:
        """What to send to each engine now; least loaded first."""
        chosen: dict[int, list[Request]] = {}
        later: deque[Request] = deque()
        while self._waiting:
            request = self._waiting.popleft()
            # A conversation continues on the rank that has its KV blocks.
            fixed = self._prefix_rank.get(request.prefix_id) if request.prefix_id is not None else None
            rank = min(self.loads, key=lambda r: self.loads[r]) if fixed is None else fixed
            if self.loads[rank] and self.loads[rank] + request.n > self._limit:
                later.append(request)
                if fixed is None:
                    break
                continue
            if request.prefix_id is not None:
                self._prefix_rank[request.prefix_id] = rank
            self.loads[rank] += request.n
            chosen.setdefault(rank, []).append(request)
        self._waiting.extendleft(reversed(later))
        return chosen

    def answered(self, rank: int, samples: int) -> None:
        self.loads[rank] -= samples

    def cancel(self, request_ids: Collection[str] | None) -> list[Request]:
        """Drop requests that wait (None: all), and return them."""
        waiting, self._waiting = self._waiting, deque()
        dropped: list[Request] = []
        for request in waiting:
            named = request_ids is None or request.request_id in request_ids
            (dropped if named else self._waiting).append(request)
        return dropped

    def release(self, prefix_ids: Collection[str]) -> dict[int, list[str]]:
        """Forget conversations; by the rank that has their KV blocks."""
        released: dict[int, list[str]] = {}
        for name in prefix_ids:
            if name in self._prefix_rank:
                released.setdefault(self._prefix_rank.pop(name), []).append(name)
        return released

    def forget_prefixes(self) -> None:
        """New weights: no KV block is valid."""
        self._prefix_rank.clear()

    def clear(self) -> None:
        """Drop everything, after an error."""
        self._waiting.clear()
        self.loads = dict.fromkeys(self.loads, 0)

    @property
    def waiting(self) -> int:
        """Samples that no engine has."""
        return sum(request.n for request in self._waiting)

    @property
    def idle(self) -> bool:
        return not self._waiting and not any(self.loads.values())


class RolloutServer(RPCServer):
    """A process that generates: the calls `RayRollout` makes."""

    engine: RolloutEngine
    sampler: Sampler
    """Suspended while no stream runs."""

    def __init__(self, rank: int, world_size: int = 1) -> None:
        super().__init__(rank, world_size)
        self._received = 0
        """Calls of `control_submit`."""
        self._finished: list[Response] = []

    def do_close(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()
            del self.engine

    def host(self, engine: RolloutEngine) -> None:
        """Generate with this engine."""
        self.engine, self.sampler = engine, Sampler(engine)
        self.sampler.suspended = True

    def do_generate(self, submissions: int) -> Iterator[list[Response]]:
        """Yield responses, those that finish close together in one list, until the first `submissions` calls of
        `control_submit`, and those that come meanwhile, are answered."""
        sampler, sent, ended = self.sampler, 0.0, False

        def ends_or_sends() -> bool:
            nonlocal ended
            ended = self._received >= submissions and sampler.suspend_if_idle()
            return ended or (bool(self._finished) and time.monotonic() - sent > FLUSH_S)

        with sampler.driving():
            try:
                sampler.resume()
                while not ended:
                    sampler.run(ends_or_sends, serve=True)
                    if self._finished:
                        finished, self._finished = self._finished, []
                        yield finished
                        sent = time.monotonic()
            except BaseException as error:
                sampler.abort(error)
                self._finished = []
                raise
            finally:
                sampler.suspended = True

    def serve_between_polls(self, call: str, *args: Any) -> CallOutcome:
        """`serve` that does not wait for the end of a stream: the stream's thread does it between two polls."""
        return self.sampler.call(lambda: self.serve(call, *args))

    def control_submit(self, requests: list[Request]) -> None:
        with self.sampler.changed:
            try:
                self.sampler.submit(requests, lambda response: self._finished.append(response))
            except Exception as error:  # reported by the stream
                self.sampler.post(partial(_raise, error))
            self._received += 1

    def control_abort(self, request_ids: list[str] | None) -> bool:
        """Abort requests (None: all). False: the engine cannot abort what it has started."""
        try:
            self.sampler.cancel(request_ids)
        except NotImplementedError:
            return False
        return True

    def control_stats(self) -> RolloutStats:
        return self.engine.stats()

    def control_release(self, prefix_ids: list[str]) -> None:
        self.engine.release(prefix_ids)


def _raise(error: Exception) -> NoReturn:
    raise error


class RolloutRank(RolloutServer):
    """A process that only generates: one engine, on one GPU or on several that share a copy of the model."""

    role = "rollout rank"
    _module: nn.Module | None = None
    _source: WeightSource | None = None
    _broadcast: Broadcast | None = None
    _base_loaded = False

    def do_build(self, setup: RankSetup[PPOConfig], info: ModelInfo, adapter: Any) -> None:
        """Start the engine; its weights come with the first sync. `adapter` is peft's description of the LoRA
        adapter where that is sent separately."""
        from verl.runtime import seed_everything

        prepare_process(setup, self.address)
        seed_everything(setup.cfg.trainer.seed)
        self._setup, self._info, self._adapter = setup, info, adapter
        rollout = setup.cfg.actor_rollout_ref.rollout
        # The GPUs this process sees are its own: a server it starts needs no others, and no other process needs
        # their memory while the trainer trains.
        rollout.n_gpus_per_node = rollout.nnodes = 0
        rollout.free_cache_engine = False
        self._device = choose_device(setup.cfg.trainer.device)
        if engine_spec(rollout.name).owns_weights:
            self._source = ReceivedWeights(info, adapter)
        else:
            self._module = self._with_adapter(self._load())
            self._source = as_source(self._module)
        self.host(
            build_rollout(
                rollout.name,
                self._source,
                setup.tokenizer,
                rollout,
                watchdog_s=setup.cfg.trainer.watchdog_s,
                run_folder=setup.run_folder,
            )
        )

    def _load(self) -> nn.Module:
        """The module to generate from, in the rollout's type."""
        section = self._setup.cfg.actor_rollout_ref
        model, wanted = section.model, section.rollout.dtype
        dtype = getattr(torch, self._info.dtype if wanted in ("auto", "fp8") else wanted)
        given = self._setup.model
        if given is not None:
            given = given.get_base_model() if hasattr(given, "get_base_model") else given  # type: ignore[operator]
            disable_dropout(given)
            cast_parameters(given, dtype)
            return given.to(device=self._device)
        if not model.path:
            raise ModelError(
                "no model is given; set actor_rollout_ref.model.path to a Hugging Face folder or name"
            )
        return load_causal_lm(
            model.path,
            dtype=dtype,
            device=self._device,
            trust_remote_code=bool(model.trust_remote_code),
            override_config=dict(model.override_config),
        )

    def _with_adapter(self, module: nn.Module) -> nn.Module:
        adapter = self._adapter
        if adapter is not None:
            dtype = next(module.parameters()).dtype
            targets = sorted(adapter.target_modules)
            add_lora(module, rank=adapter.r, alpha=adapter.lora_alpha, target_modules=targets)
            cast_parameters(module, dtype)
        return module.requires_grad_(False)

    def do_link(self, size: int) -> None:
        """Join the group of the trainer's sending rank and all rollout ranks."""
        assert self._setup.store is not None
        wait_s = collective_timeout_s(self._setup.cfg.trainer.watchdog_s)
        store = dist.TCPStore(*self._setup.store, None, is_master=False)
        self._broadcast = Broadcast(store, 1 + self.rank, size, self._device, wait_s)
        if isinstance(self._source, ReceivedWeights):
            self._source.broadcast = self._broadcast

    def do_sync_weights(self, version: int) -> SyncReport:
        """Take the weights the trainer sends now, and report what is computed with them; samples may be running
        (`serve_between_polls`)."""
        assert self._source is not None
        rollout = self._setup.cfg.actor_rollout_ref.rollout
        if isinstance(self._source, ReceivedWeights):
            self._source.expect(version)
            self.engine.update_weights(self._source, version)
            received = self._source.received
        else:
            received = self._load_received()
            self.engine.update_weights(self._source, version)
        return report(self.engine, received, self._info, rollout, self.sampler.deliver)

    def _load_received(self) -> WeightManifest:
        """Into the module; with a separate adapter its base weights come the first time only."""
        assert self._module is not None and self._broadcast is not None
        if self._adapter is None:
            return load_into(self._module, self._broadcast.receive())
        received, receive = WeightManifest(), self._broadcast.receive
        if not self._base_loaded:
            received.update(load_into(self._module, receive(), lambda name: plain_name(name) is not None))
            self._base_loaded = True
        received.update(load_into(self._module, receive(), lambda name: plain_name(name) is None))
        return received
