"""A copy of a sharded model for generating: whole weights, the model's own classes, none of FSDP's hooks.

The copy is made without weights before the model is sharded. For generating, its parameters are filled from the
shards; afterwards their memory is released, but not their addresses.

Invariants: between two fills the copy computes with the weights of the last one; all ranks fill it together and then
use it each on its own; parameters and buffers keep their addresses (captured CUDA graphs and fused layers stay valid);
while nothing generates, the copy takes no memory beyond its buffers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from verl.engines.sharding import own_modules, sharded_parts
from verl.errors import RolloutError
from verl.rollout.native.vmm_buffer import Parkable, reserve_tensors

log = logging.getLogger(__name__)


def copy_without_weights(model: nn.Module) -> nn.Module | None:
    """The same module with parameters on the meta device; None where it cannot be copied. Call it before sharding."""
    memo: dict[int, Any] = {
        id(param): nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)
        for param in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo).eval()
    except Exception as error:  # a model's own code decides what its attributes are
        log.warning(
            "%s cannot be copied (%s: %s): generation runs through the sharded module, without fused layers that keep "
            "their CUDA graphs from step to step, and slower",
            type(model).__name__,
            type(error).__name__,
            str(error).split("\n")[0][:200],
        )
        return None


class WholeCopy:
    """`module` is the copy; it may be used inside `hold` only."""

    def __init__(
        self, model: nn.Module, module: nn.Module, device: torch.device, compute_dtype: torch.dtype
    ) -> None:
        """`model` is sharded by now; `module` is what `copy_without_weights` made of it."""
        self.module = module
        self._device, self._compute_dtype = device, compute_dtype
        self._pairs = list(zip(model.modules(), module.modules(), strict=True))
        self._parts = sharded_parts(model)
        self._memory: Parkable | None = None
        self._fills: list[tuple[list[torch.Tensor], list[tuple[nn.Module, str]]]] = []
        self._users = 0

    @contextmanager
    def hold(self) -> Iterator[nn.Module]:
        """The copy with the weights the shards have now. All ranks enter together; inside, none waits for another."""
        self._users += 1
        try:
            if self._users == 1:
                self._fill()
            yield self.module
        finally:
            self._users -= 1
            if self._users == 0 and self._memory is not None:
                self._memory.park()

    @torch.no_grad()
    def _fill(self) -> None:
        try:
            if self._memory is None:
                self._place()
            else:
                self._memory.unpark()
        except RuntimeError as error:
            raise RolloutError(
                "each rank needs the whole model for generating, and it does not fit beside what the rank holds: "
                f"{str(error).splitlines()[0]}; set actor.fsdp_config.optimizer_offload=true or param_offload=true"
            ) from error
        for part, (targets, sources) in zip(self._parts, self._fills, strict=True):
            part.unshard()
            if targets:
                torch._foreach_copy_(targets, [getattr(owner, name).detach() for owner, name in sources])
            part.reshard()
        for owner, own in self._pairs:
            for name, buffer in owner.named_buffers(recurse=False):
                held = own._buffers.get(name)
                if held is not None and held.shape == buffer.shape:
                    held.copy_(buffer)
                else:
                    own._buffers[name] = buffer.to(self._device, copy=True)

    def _place(self) -> None:
        """Give every parameter of the copy its place in one block of memory."""
        counterpart = {id(owner): own for owner, own in self._pairs}
        waiting: dict[int, tuple[torch.Size, torch.dtype]] = {}
        plan: list[tuple[list[int], list[tuple[nn.Module, str]]]] = []
        for part in self._parts:
            keys, sources = [], []
            for owner in own_modules(part):
                for name, param in owner.named_parameters(recurse=False):
                    key = id(counterpart[id(owner)]._parameters[name])
                    if key not in waiting:  # a tied weight has several names
                        waiting[key] = (param.shape, self._computed(param.dtype))
                        keys.append(key)
                        sources.append((owner, name))
            plan.append((keys, sources))
        memory, views = reserve_tensors(waiting.values(), self._device)
        placed = dict(zip(waiting, views, strict=True))
        params = {key: nn.Parameter(view, requires_grad=False) for key, view in placed.items()}
        for _, own in self._pairs:
            for name, waiting_param in own._parameters.items():
                if waiting_param is not None:
                    own._parameters[name] = params[id(waiting_param)]
            for name, buffer in own._buffers.items():
                if buffer is not None:
                    own._buffers[name] = buffer.to(self._device)
        self._fills = [([placed[key] for key in keys], sources) for keys, sources in plan]
        self._memory = memory

    def _computed(self, dtype: torch.dtype) -> torch.dtype:
        """The type FSDP2 gathers a parameter in (see `shard`)."""
        half = self._compute_dtype != torch.float32 and dtype.is_floating_point
        return self._compute_dtype if half else dtype
