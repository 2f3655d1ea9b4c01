"""FSDP2 (`fully_shard`) around a Hugging Face model: one group per decoder layer, the rest in the root.

Trained parameters are sharded in float32: each rank's shard is its slice of the master weights. Parameters are gathered
in the configured precision; gradients are reduced and accumulated in float32. Names stay those of the model.

Every rank must issue the same all-gathers and reduce-scatters in the same order, or all of them wait for ever. A rank
whose pass fails half-way (out of memory) has issued some of them, and its peers are waiting in the next one. So it
repeats the pass on a dummy batch of one token (`CollectiveReplay`): collectives it has issued already are skipped, the
remaining ones are issued, and the peers finish their pass as if nothing had happened. This works because which
collectives a module issues, and when, does not depend on the micro-batch: counting them per FSDP module is enough.
All-gathers of the repeated pass send this rank's true shards, so the peers' forward passes stay correct. Gradients of
the pass are garbage on every rank (the dummy batch took part in the reductions) and must be dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from verl import distributed
from verl.config.parallelism import divisors
from verl.config.sections.actor import FSDPConfig
from verl.engines.adamw import local
from verl.errors import ConfigError
from verl.models.introspection import decoder_layers
from verl.models.lora import plain_name
from verl.models.packing import FORWARD_METHODS
from verl.watchdog import Heartbeat

if TYPE_CHECKING:
    from verl.models.meta_init import ParameterIndex
    from verl.models.ulysses import SequenceGroup


class EngineRanks(distributed.Ranks):
    """The ranks that train together, their mesh, and the heartbeat by which a dead one is noticed."""

    def __init__(self, device: torch.device, fsdp_size: int | None = -1) -> None:
        """`fsdp_size`: None where FSDP shards nothing, and there is no mesh."""
        super().__init__(device)
        self.mesh: DeviceMesh | None = None
        self._heartbeat: Heartbeat | None = None
        if self.world_size > 1:
            self.mesh = None if fsdp_size is None else self._make_mesh(fsdp_size)
            self._heartbeat = Heartbeat.start()

    def _make_mesh(self, fsdp_size: int) -> DeviceMesh:
        world = self.world_size
        shards = world if fsdp_size in (-1, 0) or fsdp_size >= world else fsdp_size
        self._check_divides("fsdp_config.fsdp_size", shards, "-1 (all), ")
        if shards == world:
            return init_device_mesh(self.device.type, (world,), mesh_dim_names=("shard",))
        mesh = init_device_mesh(
            self.device.type, (world // shards, shards), mesh_dim_names=("replicate", "shard")
        )
        for group in mesh.get_all_groups():
            distributed.with_timeout(group)
        return mesh

    def _check_divides(self, key: str, size: int, also: str = "") -> None:
        if self.world_size % size:
            allowed = ", ".join(map(str, divisors(self.world_size)))
            raise ConfigError(
                f"{key}={size} does not divide the {self.world_size} ranks; allowed: {also}{allowed}"
            )

    def sequence_group(self, size: int) -> SequenceGroup | None:
        """The ranks, neighbours, that split sequences with this one (collective); None where `size` is 1."""
        if size == 1:
            return None
        from verl.models.ulysses import SIZE_KEY, SequenceGroup

        self._check_divides(SIZE_KEY, size)
        mesh = _sequence_mesh(dist.group.WORLD, self.device.type, size)
        # FSDP averages gradients over all ranks.
        group = distributed.with_timeout(mesh.get_group("sequence"))
        return SequenceGroup(group, mesh.get_local_rank("sequence"), size, float(size))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Turn a broken connection to a dead rank into a message that names it."""
        with nullcontext() if self._heartbeat is None else self._heartbeat.naming_dead_peers():
            yield


@lru_cache(maxsize=8)
def _sequence_mesh(world: Any, device: str, size: int) -> DeviceMesh:
    """Once for all engines of a process: every group of a GPU has its own buffers."""
    shape = (world.size() // size, size)
    return init_device_mesh(device, shape, mesh_dim_names=("data", "sequence"))


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    options: FSDPConfig,
    compute_dtype: torch.dtype,
    float32_masters: bool = True,
) -> None:
    """Shard in place over the mesh (one dimension: all ranks; two: replicate, shard)."""
    policy = MixedPrecisionPolicy()
    if compute_dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    common: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy() if options.offload_policy else OffloadPolicy(),
    }
    for layer in decoder_layers(model):
        if float32_masters:
            _trained_to_float32(layer)
        fully_shard(layer, reshard_after_forward=options.reshard_after_forward, **common)
    if float32_masters:
        _trained_to_float32(model)
    fully_shard(model, **common)
    for method in FORWARD_METHODS:
        register_fsdp_forward_method(model, method)


def _trained_to_float32(module: nn.Module) -> None:
    """Layer by layer, so that a rank never holds the whole model in float32."""
    for param in module.parameters():
        if param.requires_grad and not hasattr(param, "to_local"):
            param.data = param.data.float()


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules whose parameters FSDP2 gathers together, in the same order on every rank."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def group_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The modules one FSDP module gathers itself: without those of an FSDP module inside it."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from group_modules(child)


def reshard(model: nn.Module) -> None:
    """After passes without a backward: parameters back to shards (the root's stay gathered), prefetch order cleared.

    FSDP2 records the order of forwards and clears it in a backward only, where the last recorded forward is prefetched
    first. Ranks whose records differ (one generated, another did not) would gather different parameters and wait for
    ever."""
    for module in fsdp_modules(model):
        module.reshard()
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None and group._post_forward_indices:  # without a forward there is no record yet
            group.comm_ctx.post_forward_order.clear()
            group._post_forward_indices.clear()


@contextmanager
def unsharded(model: nn.Module, options: FSDPConfig) -> Iterator[nn.Module]:
    """Every parameter gathered on every rank, also through forward passes, until the context ends."""
    modules = fsdp_modules(model)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield model
    finally:
        for module in modules:
            again = options.reshard_after_forward and module is not model
            module.set_reshard_after_forward(again, recurse=False)
        reshard(model)


# -- loading --------------------------------------------------------------------------------------------------------


def row_range(rows: int, replica: int, replicas: int) -> tuple[int, int]:
    """Which of `rows` rows a replica or shard holds: equal chunks, rounded up, so that the last may have fewer."""
    each = -(-rows // replicas)
    return min(replica * each, rows), min((replica + 1) * each, rows)


@torch.no_grad()
def load_shards(model: nn.Module, mesh: DeviceMesh, index: ParameterIndex, device: torch.device) -> None:
    """Fill a sharded model whose parameters are on the meta device: each rank reads the rows of its shards.

    Parameters that were real before (adapters, a critic's head) and buffers keep their values; parameters stay the
    same objects. `device` is where shards live: the rank's device, or the host when they are offloaded."""
    real = {name: local(param).clone() for name, param in model.named_parameters() if not param.is_meta}
    buffers = [
        (owner, name, buffer)
        for owner in model.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    model.to_empty(device=device)
    for owner, name, buffer in buffers:
        setattr(owner, name, buffer)
    for name, param in model.named_parameters():
        if name in real:
            local(param).copy_(real[name])
            continue
        last = mesh.ndim - 1
        start, stop = row_range(param.shape[0], mesh.get_local_rank(last), mesh.size(last))
        if stop > start:
            index.read_rows(plain_name(name) or name, start, stop, local(param))


# Names before torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _CountedCollective:
    """One kind of collective of one FSDP module: how often it was issued in this pass, how often to skip it. What
    `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter` take."""

    def __init__(self, collective: Callable[..., Any]) -> None:
        self._collective = collective
        self.issued = 0
        self.skip = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> Any:
        if self.skip:
            self.skip -= 1
            # Nothing computed from it is used, but it must not be NaN or out of range for the rest of the pass to run.
            output_tensor.zero_()
            return None
        work = self._collective(output_tensor, input_tensor, **options)
        self.issued += 1
        return work


class _ModuleCollectives:
    """An FSDP module and its collectives. Hybrid sharding adds an all-reduce over replicas that FSDP2 issues itself:
    it is counted by the hook FSDP2 calls after it, and skipped by switching it off."""

    def __init__(self, module: Any, replicated: bool) -> None:
        self.module, self.replicated = module, replicated
        # Owner and name of a parameter this module gathers itself.
        owned = ((o, n) for o in group_modules(module) for n, _ in o.named_parameters(recurse=False))
        self._parameter = next(owned, None)
        self._was_gathered = False
        self.all_gather = _CountedCollective(_all_gather)
        self.reduce_scatter = _CountedCollective(_reduce_scatter)
        self.all_reduces = 0
        module.set_custom_all_gather(self.all_gather)
        module.set_custom_reduce_scatter(self.reduce_scatter)
        if replicated:
            module.set_all_reduce_hook(self._count_all_reduce)

    def _count_all_reduce(self, _: torch.Tensor) -> None:
        self.all_reduces += 1

    def start_pass(self) -> None:
        for collective in (self.all_gather, self.reduce_scatter):
            collective.issued = collective.skip = 0
        self.all_reduces = 0
        if self._parameter is not None:
            owner, name = self._parameter
            self._was_gathered = not hasattr(getattr(owner, name), "to_local")

    def skip_issued(self) -> None:
        # A module whose parameters were gathered when the pass began issued no all-gather for them. The repeated pass
        # starts from shards and would issue one the peers do not expect.
        self.all_gather.skip = self.all_gather.issued + int(self._was_gathered)
        self.reduce_scatter.skip = self.reduce_scatter.issued
        if self.replicated:
            self.module.set_requires_all_reduce(self.all_reduces == 0, recurse=False)

    def skip_nothing(self) -> None:
        self.all_gather.skip = self.reduce_scatter.skip = 0
        if self.replicated:
            self.module.set_requires_all_reduce(True, recurse=False)


class CollectiveReplay:
    """Counts the collectives of a sharded model's pass, so that a failed pass can be completed for the peers."""

    def __init__(self, model: nn.Module, replicated: bool) -> None:
        self._model: Any = model
        self.can_recover = hasattr(model, "reset_iter_state")
        """Whether this torch can reset FSDP2 after a pass that failed (2.13 can). If not, nothing is counted."""
        modules = fsdp_modules(model) if self.can_recover else []
        self._modules = [_ModuleCollectives(module, replicated) for module in modules]

    def start_pass(self) -> None:
        for module in self._modules:
            module.start_pass()

    def reset(self) -> None:
        """After a pass that failed: parameters back to shards, nothing pending."""
        self._model.reset_iter_state()

    @contextmanager
    def replay_remaining(self) -> Iterator[None]:
        """Inside, a pass over a dummy batch, started after `reset`, issues only what the failed one has not issued.

        Parameters stay gathered where a finished pass leaves them so, as they are on the peers, but with zeros where
        an all-gather was skipped: until all ranks are back to shards only dummy batches may follow."""
        for module in self._modules:
            module.skip_issued()
        try:
            yield
        finally:
            for module in self._modules:
                module.skip_nothing()
