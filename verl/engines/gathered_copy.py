"""A copy of a sharded model for generating: gathered weights, the model's own classes, none of FSDP's hooks.

The copy is made on the meta device before the model is sharded. For generating, its parameters are filled from the
shards; afterwards their memory is released but their addresses stay reserved, so captured CUDA graphs and fused layers
stay valid. All ranks fill it together and then use it each on its own.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from verl.engines.sharding import fsdp_modules, group_modules
from verl.errors import RolloutError
from verl.models.vmm_buffer import Parkable, reserve_tensors

log = logging.getLogger(__name__)


def copy_to_meta(model: nn.Module) -> nn.Module | None:
    """The same module with parameters on the meta device; None where it cannot be copied. Call it before sharding."""
    memo: dict[int, Any] = {
        id(param): nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)
        for param in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo).eval()
    except Exception as error:  # a model's own code decides what its attributes are
        log.warning(
            "%s cannot be copied (%s: %s): generation runs through the sharded module, which is slower",
            type(model).__name__,
            type(error).__name__,
            str(error).split("\n")[0][:200],
        )
        return None


class GatheredCopy:
    """`module` is the copy; it may be used inside `gathered` only."""

    def __init__(
        self, model: nn.Module, module: nn.Module, device: torch.device, compute_dtype: torch.dtype
    ) -> None:
        """`model` is sharded; `module` is what `copy_to_meta` made of it before."""
        self.module = module
        self._device, self._compute_dtype = device, compute_dtype
        self._pairs = list(zip(model.modules(), module.modules(), strict=True))
        self._fsdp_modules = fsdp_modules(model)
        self._memory: Parkable | None = None
        self._fills: list[tuple[list[torch.Tensor], list[tuple[nn.Module, str]]]] = []
        self._users = 0

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The copy with the current weights. Entering is collective; inside, no rank waits for another."""
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
                self._allocate()
            else:
                self._memory.unpark()
        except RuntimeError as error:
            raise RolloutError(
                f"the gathered model for generating does not fit into device memory: {str(error).splitlines()[0]}; "
                "set actor.fsdp_config.optimizer_offload=true or param_offload=true"
            ) from error
        for module, (targets, sources) in zip(self._fsdp_modules, self._fills, strict=True):
            module.unshard()
            if targets:
                torch._foreach_copy_(targets, [getattr(owner, name).detach() for owner, name in sources])
            module.reshard()
        for owner, copied in self._pairs:
            for name, buffer in owner.named_buffers(recurse=False):
                target = copied._buffers.get(name)
                if target is not None and target.shape == buffer.shape:
                    target.copy_(buffer)
                else:
                    copied._buffers[name] = buffer.to(self._device, copy=True)

    def _allocate(self) -> None:
        """One block of memory for all parameters of the copy."""
        counterpart = {id(owner): copied for owner, copied in self._pairs}
        shapes: dict[int, tuple[torch.Size, torch.dtype]] = {}
        plan: list[tuple[list[int], list[tuple[nn.Module, str]]]] = []
        for module in self._fsdp_modules:
            keys, sources = [], []
            for owner in group_modules(module):
                for name, param in owner.named_parameters(recurse=False):
                    key = id(counterpart[id(owner)]._parameters[name])
                    if key not in shapes:  # a tied weight has several names
                        shapes[key] = (param.shape, self._gathered_dtype(param.dtype))
                        keys.append(key)
                        sources.append((owner, name))
            plan.append((keys, sources))
        memory, tensors = reserve_tensors(shapes.values(), self._device)
        views = dict(zip(shapes, tensors, strict=True))
        params = {key: nn.Parameter(view, requires_grad=False) for key, view in views.items()}
        for _, copied in self._pairs:
            for name, meta in copied._parameters.items():
                if meta is not None:
                    copied._parameters[name] = params[id(meta)]
            for name, buffer in copied._buffers.items():
                if buffer is not None:
                    copied._buffers[name] = buffer.to(self._device)
        self._fills = [([views[key] for key in keys], sources) for keys, sources in plan]
        self._memory = memory

    def _gathered_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type FSDP2 gathers a parameter in (see `shard`)."""
        half = self._compute_dtype != torch.float32 and dtype.is_floating_point
        return self._compute_dtype if half else dtype
