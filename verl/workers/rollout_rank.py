"""A process that only generates (`rollout.n_gpus_per_node`): an engine, a copy of the weights, no optimiser.

It generates from the weights of the last sync and reports their version with every response; before the first sync it
is asked for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from verl.config.capabilities import engine_spec
from verl.errors import ModelError
from verl.models.loading import cast_parameters, disable_dropout, load_causal_lm
from verl.models.lora import add_lora, plain_name
from verl.models.weight_source import WeightSource
from verl.rollout import build_rollout
from verl.rollout.base import RolloutEngine
from verl.rollout.source import as_source
from verl.rollout.weight_sync.broadcast import Broadcast, ReceivedWeights, SyncReport, load_into, report
from verl.rollout.weight_sync.fingerprint import Manifest
from verl.workers.local import choose_device
from verl.workers.rank import RankSetup, collective_timeout_s, prepare_process
from verl.workers.rollout_server import RolloutServer

if TYPE_CHECKING:
    from torch import nn

    from verl.config.schema import PPOConfig
    from verl.rollout.source import ModelInfo

ROLE = "rollout rank"


class RolloutRank(RolloutServer):
    """One engine, on one GPU or on several that share a copy of the model."""

    role = ROLE
    _engine: RolloutEngine | None = None
    _module: nn.Module | None = None
    _source: WeightSource | None = None
    _broadcast: Broadcast | None = None
    _base_loaded = False

    @property
    def engine(self) -> RolloutEngine:
        assert self._engine is not None
        return self._engine

    def rollout_engine(self) -> RolloutEngine:
        return self.engine

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
        self._engine = build_rollout(
            rollout.name,
            self._source,
            setup.tokenizer,
            rollout,
            watchdog_s=setup.cfg.trainer.watchdog_s,
            run_folder=setup.run_folder,
        )

    def _load(self) -> nn.Module:
        """The module to generate from, in the rollout's type."""
        model, wanted = (
            self._setup.cfg.actor_rollout_ref.model,
            self._setup.cfg.actor_rollout_ref.rollout.dtype,
        )
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

    def _load_received(self) -> Manifest:
        """Into the module; with a separate adapter its base weights come the first time only."""
        assert self._module is not None and self._broadcast is not None
        if self._adapter is None:
            return load_into(self._module, self._broadcast.receive())
        received = Manifest()
        if not self._base_loaded:
            received.update(
                load_into(self._module, self._broadcast.receive(), lambda name: plain_name(name) is not None)
            )
            self._base_loaded = True
        received.update(
            load_into(self._module, self._broadcast.receive(), lambda name: plain_name(name) is None)
        )
        return received

    def do_close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
