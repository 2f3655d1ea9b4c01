"""Keeps the ranks' collectives matched when one rank runs out of memory in a sharded forward or backward pass.

Every rank must issue the same all-gathers and reduce-scatters in the same order, or all of them wait for ever. A rank
whose pass fails half-way has issued some of them, and its peers are waiting in the next one. So it repeats the pass on
a dummy batch of one token: collectives it has issued already are skipped, the remaining ones are issued, and the peers
finish their pass as if nothing had happened. This works because which collectives a module issues, and when, does not
depend on the micro-batch, so it is enough to count them per FSDP module.

All-gathers of the repeated pass send this rank's true shards, so the peers' forward passes stay correct. Gradients of
the pass are garbage on every rank (the dummy batch took part in the reductions) and must be dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from verl.engines.sharding import fsdp_modules, group_modules

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
        self._parameter = _first_parameter(module)
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
        self._was_gathered = self._is_gathered()

    def _is_gathered(self) -> bool:
        if self._parameter is None:
            return False
        owner, name = self._parameter
        return not hasattr(getattr(owner, name), "to_local")

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


def _first_parameter(module: nn.Module) -> tuple[nn.Module, str] | None:
    """Owner and name of a parameter this FSDP module gathers itself."""
    for owner in group_modules(module):
        for name, _ in owner.named_parameters(recurse=False):
            return owner, name
    return None


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
