"""The roles of one rank: its shards of every model, and its part in generating.

Where a rank's engine is depends on the config: on every rank (the trainer's own weights, whole while generating; or an
engine with a copy), on the first of each group of ranks that share one (`rollout.tensor_model_parallel_size`), or in
processes that only generate (`rollout.n_gpus_per_node`).

Every rank makes the same collective calls in the same order, with or without an engine of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from verl.config.parallelism import EXTERNAL_ENGINES, engine_size, rollout_pool
from verl.models.weight_source import Adapter, NamedTensors, Names, SourceLogProbs, WeightSource
from verl.rollout import build_rollout
from verl.rollout.external_engine import RemoteEngine, TPFollower
from verl.rollout.model_info import ModelInfo, model_info
from verl.runtime import environment
from verl.workers.local import LocalGroup

if TYPE_CHECKING:
    from torch import nn

    from verl.config.schema import PPOConfig
    from verl.rollout.base import RolloutEngine
    from verl.workers.rank import RankSetup

_DEVICES = "CUDA_VISIBLE_DEVICES"


class GatheredWeights(WeightSource):
    """The actor's weights, gathered once for a whole generation: inside `hold`, `module` is no collective."""

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights
        self._module: nn.Module | None = None
        self.dtype, self.device = weights.dtype, weights.device

    @contextmanager
    def hold(self) -> Iterator[None]:
        with self._weights.module() as module:
            self._module = module
            try:
                yield
            finally:
                self._module = None

    def module(self) -> AbstractContextManager[nn.Module]:
        return self._weights.module() if self._module is None else nullcontext(self._module)

    def structure(self) -> AbstractContextManager[nn.Module]:
        return self._weights.structure()

    def named_tensors(self, names: Names = "hf") -> NamedTensors:
        return self._weights.named_tensors(names)

    def base_tensors(self, names: Names = "hf") -> NamedTensors:
        return self._weights.base_tensors(names)

    def adapter(self) -> Adapter | None:
        return self._weights.adapter()

    def log_probs(
        self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]
    ) -> SourceLogProbs | None:
        return self._weights.log_probs(prompt_ids, responses)


class RankGroup(LocalGroup):
    """All roles of this rank. The engines shard themselves over the process group."""

    def __init__(self, setup: RankSetup[PPOConfig], rank: int) -> None:
        self._rank, self._devices = rank, setup.devices
        super().__init__(
            setup.cfg,
            setup.tokenizer,
            training_steps=setup.training_steps,
            model=setup.model,
            bad_batch_dir=setup.run_folder / "bad_batches",
        )
        self._generation: ExitStack | None = None
        self._base_sent = False

    # -- generating ---------------------------------------------------------------------------------------------

    def rollout_engine(self, tokenizer: Any) -> RolloutEngine:
        """This rank's engine, or what stands in its place."""
        rollout, size = self.cfg.actor_rollout_ref.rollout, engine_size(self.cfg)
        self.held = GatheredWeights(self.actor_engine.weights())
        if rollout_pool(self.cfg):
            return RemoteEngine()
        if self._rank % size:
            return TPFollower(rollout.name, self.held, tokenizer, rollout)
        shared = self._devices[self._rank : self._rank + size]
        visible = {_DEVICES: ",".join(shared)} if shared and size > 1 and self.device.type == "cuda" else {}
        with environment(visible):  # for the processes of the engine; this one has its own GPU already
            watchdog_s = self.cfg.trainer.watchdog_s
            return build_rollout(rollout.name, self.held, tokenizer, rollout, watchdog_s=watchdog_s)

    def sync_weights(self) -> None:
        copied = self.cfg.actor_rollout_ref.rollout.name in EXTERNAL_ENGINES
        # Where the config keeps weights in host memory they are brought for as long as copying takes, and no longer.
        with self._resident("actor", optimizer=False) if copied else nullcontext():
            self._make_room()
            self.rollout.engine.update_weights(self.held, self.policy_version)

    def open_generation(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._resident("actor", optimizer=False))
            if self.cfg.actor_rollout_ref.rollout.name not in EXTERNAL_ENGINES:
                stack.enter_context(self.held.hold())
            self._make_room()
            self.rollout.engine.wake()
            if self.cfg.actor_rollout_ref.rollout.free_cache_engine:
                stack.callback(self.rollout.engine.sleep)
            self._generation = stack.pop_all()

    def close_generation(self) -> None:
        if self._generation is not None:
            self._generation.close()
            self._generation = None

    def _make_room(self) -> None:
        """What torch keeps for later is not free to an engine in other processes: given back on every GPU that the
        engine shares, before its host wakes it."""
        if self.device.type == "cuda" and self.cfg.actor_rollout_ref.rollout.name in EXTERNAL_ENGINES:
            torch.cuda.empty_cache()
            if engine_size(self.cfg) > 1:
                self.actor_engine.barrier()

    # -- for processes that only generate -----------------------------------------------------------------------

    @property
    def _adapters_apart(self) -> bool:
        """Whether such a process gets LoRA adapters as adapters. SGLang does not, and eight-bit products are made of
        plain layers: there they arrive merged into the weights."""
        arr = self.cfg.actor_rollout_ref
        merged = arr.rollout.name == "sglang" or (arr.rollout.name == "native" and arr.rollout.dtype == "fp8")
        return arr.model.lora_rank > 0 and not merged

    def model_info(self) -> ModelInfo:
        """What such a process has to know of the model."""
        info = model_info(self.actor_engine.weights(), None)
        return info if self._adapters_apart else replace(info, lora_rank=0)

    def adapter(self) -> Any:
        """peft's description of the adapter such a process gets; None where it gets whole weights."""
        return self.actor_engine.info.lora_config if self._adapters_apart else None

    @contextmanager
    def outgoing(self) -> Iterator[list[NamedTensors]]:
        """Every weight, gathered one at a time by all ranks together. With adapters apart, the base weights (once: they
        never change) and then the adapter. External engines know the names of the model's files, our own those of the
        module."""
        weights = self.actor_engine.weights()
        names: Names = "hf" if self.cfg.actor_rollout_ref.rollout.name in EXTERNAL_ENGINES else "module"
        with self._resident("actor", optimizer=False):
            adapter = weights.adapter() if self._adapters_apart else None
            if adapter is not None:
                base = [] if self._base_sent else [weights.base_tensors(names)]
                yield [*base, adapter.named_tensors]
                self._base_sent = True
            else:
                yield [weights.named_tensors(names)]

    def probe(
        self, prompt: tuple[int, ...], answers: list[tuple[tuple[int, ...], ...]]
    ) -> list[SourceLogProbs | None]:
        """The trainer's own log-probs of what engines elsewhere drew after `prompt`."""
        with self._resident("actor", optimizer=False):
            return [self.actor_engine.weights().log_probs(prompt, rows) for rows in answers]
