"""One training rank on several processes: its shard of every engine, its part in generating, and its calls.

Where a rank's engine is depends on the config: on every rank (the trainer's own weights, gathered while generating; or
an engine with a copy), on the first of each group of ranks that share one (`rollout.tensor_model_parallel_size`), or in
processes that only generate (`rollout.n_gpus_per_node`).

Every rank gets the same calls in the same order and makes the same collective calls, with or without an engine; only
generation between `open_generation` and `close_generation` runs at each rank's own pace, on gathered weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.checkpoint import CheckpointManager, PartSettings
from verl.checkpoint.resume import Found
from verl.config.capabilities import engine_spec
from verl.config.parallelism import Layout, engine_size, layout_of, rollout_pool
from verl.models.weight_source import NamedTensors, Names, SourceLogProbs, WeightSource
from verl.observe.batch_metrics import ModelSize
from verl.observe.metrics import Metric
from verl.rollout.external_engine import RemoteEngine, TPFollower
from verl.rollout.source import ModelInfo, model_info
from verl.rollout.weight_sync.broadcast import SENDER, Broadcast
from verl.rollout.weight_sync.fingerprint import WeightManifest
from verl.runtime import environment
from verl.workers.local import LocalGroup
from verl.workers.own_loss import LossFunction
from verl.workers.rank import JoinedRank, RankSetup, collective_timeout_s
from verl.workers.rollout_rank import RolloutServer
from verl.workers.shard_batch import Arrays, from_arrays, to_arrays

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig
    from verl.rollout.base import RolloutEngine

_DEVICES = "CUDA_VISIBLE_DEVICES"


@contextmanager
def held_module(weights: WeightSource) -> Iterator[None]:
    """Gather the weights once for a whole generation: inside this block `weights.module()` is no collective."""
    with weights.module() as module:
        weights.module = lambda: nullcontext(module)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del weights.module  # type: ignore[method-assign]


class RankGroup(LocalGroup):
    """All roles of this rank. The engines shard themselves over the process group."""

    def __init__(self, setup: RankSetup[PPOConfig], rank: int) -> None:
        self._rank, self._devices = rank, setup.devices
        super().__init__(
            setup.cfg,
            setup.tokenizer,
            training_steps=setup.training_steps,
            model=setup.model,
            run_folder=None if setup.run_folder == Path() else setup.run_folder,
        )
        self._generation = ExitStack()
        self._base_sent = False

    def layout(self, role: str) -> Layout:
        """That of the engine that works as `role`."""
        return layout_of(self.section(role), self.actor_engine.info.world_size)

    # -- generating ---------------------------------------------------------------------------------------------

    def build_rollout_engine(self, tokenizer: Any) -> RolloutEngine:
        """This rank's engine, or a placeholder where another process has it."""
        rollout, size = self.cfg.actor_rollout_ref.rollout, engine_size(self.cfg)
        if rollout_pool(self.cfg):
            return RemoteEngine()
        if self._rank % size:
            return TPFollower(rollout.name, self.weights, tokenizer, rollout)
        shared = self._devices[self._rank : self._rank + size]
        visible = {_DEVICES: ",".join(shared)} if shared and size > 1 and self.device.type == "cuda" else {}
        with environment(visible):  # for the processes of the engine; this one has its own GPU already
            return super().build_rollout_engine(tokenizer)

    def sync_weights(self) -> dict[str, float]:
        copied = engine_spec(self.cfg.actor_rollout_ref.rollout.name).owns_weights
        # Where the config keeps weights in host memory they are brought for as long as copying takes, and no longer.
        with self.resident("actor", optimizer=False) if copied else nullcontext():
            self._free_cached_memory()
            return super().sync_weights()

    @contextmanager
    def waking(self) -> Iterator[None]:
        copied = engine_spec(self.cfg.actor_rollout_ref.rollout.name).owns_weights
        with nullcontext() if copied else held_module(self.weights):
            self._free_cached_memory()
            yield

    def open_generation(self) -> None:
        self._generation.enter_context(self.generating())

    def close_generation(self) -> None:
        self._generation.close()

    def _free_cached_memory(self) -> None:
        """An engine in other processes cannot use what torch caches: free it on every GPU the engine shares, before the
        rank that hosts the engine wakes it."""
        if self.device.type == "cuda" and engine_spec(self.cfg.actor_rollout_ref.rollout.name).owns_weights:
            torch.cuda.empty_cache()
            if engine_size(self.cfg) > 1:
                self.actor_engine.barrier()

    # -- for processes that only generate -----------------------------------------------------------------------

    @property
    def separate_adapter(self) -> bool:
        """Whether such a process gets LoRA adapters as adapters. SGLang does not, and eight-bit products need
        plain layers: there they arrive merged into the weights."""
        arr = self.cfg.actor_rollout_ref
        spec = engine_spec(arr.rollout.name)
        merged = not spec.adapters or (not spec.owns_weights and arr.rollout.dtype == "fp8")
        return arr.model.lora_rank > 0 and not merged

    def model_info(self) -> ModelInfo:
        """What such a process has to know of the model."""
        info = model_info(self.weights, None)
        return info if self.separate_adapter else replace(info, lora_rank=0)

    def adapter(self) -> Any:
        """peft's description of the adapter such a process gets; None where it gets full weights."""
        return self.actor_engine.info.lora_config if self.separate_adapter else None

    @contextmanager
    def outgoing(self) -> Iterator[list[NamedTensors]]:
        """Every weight, gathered one at a time by all ranks together. With a separate adapter, the base weights (once,
        they never change), then the adapter. External engines know the names of the model's files, our own those of the
        module."""
        names: Names = "hf" if engine_spec(self.cfg.actor_rollout_ref.rollout.name).owns_weights else "module"
        with self.resident("actor", optimizer=False):
            adapter = self.weights.adapter() if self.separate_adapter else None
            if adapter is not None:
                base = [] if self._base_sent else [self.weights.base_tensors(names)]
                yield [*base, adapter.named_tensors]
                self._base_sent = True
            else:
                yield [self.weights.named_tensors(names)]

    def probe(
        self, prompt: tuple[int, ...], answers: list[tuple[tuple[int, ...], ...]]
    ) -> list[SourceLogProbs | None]:
        """The trainer's own log-probs of what engines elsewhere drew after `prompt`."""
        with self.resident("actor", optimizer=False):
            return [self.weights.log_probs(prompt, rows) for rows in answers]


@dataclass(frozen=True)
class RankInfo:
    """What the driver has to know of the models of a rank."""

    size: ModelSize
    model: ModelInfo | None = None
    """For processes that only generate, with peft's description of the adapter that they get separately."""
    adapter: Any = None


class TrainRank(JoinedRank, RolloutServer):
    """One rank of reinforcement learning: all roles, and a rollout engine where there is one."""

    group: RankGroup
    checkpoints: CheckpointManager
    _broadcast: Broadcast | None = None

    def __init__(self, rank: int, world_size: int = 1) -> None:
        super().__init__(rank, world_size)
        self._profile = ExitStack()
        self._measured: dict[str, float] = {}
        self._opened: dict[Any, CheckpointManager] = {}

    def method(self, call: str) -> Callable[..., Any]:
        """One of its own, or of the group."""
        own: Callable[..., Any] | None = getattr(self, f"do_{call}", None)
        return own or getattr(self.group, call)

    def do_build(self, setup: RankSetup[PPOConfig]) -> RankInfo:
        """Join the process group and load this rank's shard of the models."""
        self.join(setup)
        self.group = RankGroup(setup, self.rank)
        self.host(self.group.rollout)
        if setup.run_folder != Path():
            self.checkpoints = CheckpointManager.from_config(setup.cfg, setup.run_folder)
        self._tokenizer = setup.tokenizer
        if not rollout_pool(setup.cfg):
            return RankInfo(self.group.model_size())
        return RankInfo(self.group.model_size(), self.group.model_info(), self.group.adapter())

    # -- forward passes and updates -----------------------------------------------------------------------------

    def do_forward(self, role: str, columns: Sequence[str], part: Arrays, meta: Mapping[str, Any]) -> Arrays:
        """Nothing where another rank answers for the same rows."""
        found = self.group.forward(role, from_arrays(part, meta), columns)
        return to_arrays(found.batch) if self.group.layout(role).reports(self.rank) else {}

    def do_train(
        self, role: str, part: Arrays, meta: Mapping[str, Any], loss: str | LossFunction | None, step: bool
    ) -> dict[str, Metric]:
        """Metrics as they are sent; none where another rank answers for the same rows."""
        metrics = self.group.train(role, from_arrays(part, meta), loss=loss, step=step)
        layout = self.group.layout(role)
        if not layout.reports(self.rank):
            return {}
        plain = {
            name: Metric(float(metric.value), metric.reduce, float(metric.weight))
            for name, metric in metrics.items()
        }
        if self.rank != layout.reporters()[0]:
            # One step was taken, not one on each rank.
            for name in ("grad_norm", "lr", "skipped_updates"):
                plain.pop(f"{role}/{name}", None)
        return plain

    def do_token_outputs(self) -> Arrays:
        kept = self.group.actor.tokens.take()()
        return to_arrays(kept) if self.group.layout("actor").reports(self.rank) else {}

    def do_update_weights(self, version: int) -> dict[str, float]:
        self.group.policy_version = version
        return self.group.sync_weights()

    def do_profile(self, step: int | None, run_folder: Path) -> dict[str, float]:
        """Trace from here on; without a step, until here, and what was measured. Calls are served by one thread, which
        the profiler needs."""
        if step is None:
            self._profile.close()
        else:
            self._measured = self._profile.enter_context(self.group.profile(step, run_folder))
        return self._measured

    # -- weights for processes that only generate ---------------------------------------------------------------

    def do_link(self, size: int) -> None:
        """Rank 0 sends to the rollout processes; the others only take part in gathering."""
        if self.rank == 0:
            watchdog_s = self.group.cfg.trainer.watchdog_s
            self._broadcast = Broadcast(
                self._store, SENDER, size, self.group.device, collective_timeout_s(watchdog_s)
            )

    def do_sync_weights(self, version: int) -> WeightManifest | None:
        """Returns what was sent, on the rank that sends."""
        self.group.policy_version = version
        sent = WeightManifest()
        with self.group.outgoing() as parts:
            for tensors in parts:
                if self._broadcast is not None:
                    sent.update(self._broadcast.send(tensors))
                else:
                    deque(tensors, maxlen=0)
        return sent if self._broadcast is not None else None

    # -- checkpoints --------------------------------------------------------------------------------------------

    def do_open_checkpoints(
        self, folder: Path, settings: dict[str, PartSettings], began: int | None, options: dict[str, Any]
    ) -> None:
        """Save to and resume from `folder` from now on. `began`: as for `CheckpointManager.start_from`."""
        key = folder, began, str(options)
        if key not in self._opened:
            self._opened[key] = CheckpointManager(folder, settings, **options)
            if began is not None:
                self._opened[key].start_from(began)
        self.checkpoints = self._opened[key]

    def do_rehearse_save(self, state: Mapping[str, Any]) -> None:
        self.checkpoints.rehearse(self.group.checkpoint_parts(), state, tokenizer=self._tokenizer)

    def do_save(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any]
    ) -> tuple[Path | None, str | None]:
        """The folder, and why the last save that failed did."""
        parts = self.group.checkpoint_parts()
        saved = self.checkpoints.save(step, parts, state, tokenizer=self._tokenizer, metrics=metrics)
        return saved, self.checkpoints.failure

    def do_find_checkpoint(self, below: int | None) -> tuple[int | None, Found | None]:
        """The step of what `CheckpointManager.find` found, and on rank 0 all of it."""
        found = self.checkpoints.find(self.group.checkpoint_parts(), below)
        return None if found is None else found[0], found if self.rank == 0 else None

    def do_load_found(self) -> bool:
        return self.checkpoints.load_found(self.group.checkpoint_parts())

    def do_wait_for_save(self) -> tuple[Path | None, str | None]:
        return self.checkpoints.wait(), self.checkpoints.failure

    def do_close(self) -> None:
        if hasattr(self, "group"):
            self.group.close()
            del self.group
