"""Ranks that gather and reduce together stay in step when one of them cannot finish a pass.

A rank that runs out of memory leaves its pass in the middle, while the others wait in the next collective for it.
It therefore repeats the pass over a single token: what it has sent already is left out, what it still owes is
sent, and the others finish theirs as if nothing had happened. Which micro-batch a rank works on has no influence
on what it sends and when (a rank without rows relies on the same), so counting per sharded module is enough.

What always holds: the weights a rank hands over while it repeats are its true shards, so the others' forward
passes stay right; the gradients of such a pass are worth nothing and must be thrown away on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from verl.engines.sharding import own_modules, sharded_parts

# Older versions of torch know the two under their former names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Counted:
    """One kind of collective of one sharded module: how often it was sent in this pass, how often to leave it out."""

    def __init__(self) -> None:
        self.sent = 0
        self.left_out = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def is_due(self) -> bool:
        if self.left_out:
            self.left_out -= 1
            return False
        return True


class _Gather(_Counted):
    """Stands where FSDP2 expects an all-gather (`set_custom_all_gather`)."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        if not self.is_due():
            output_tensor.zero_()  # nobody reads what is computed from it, but it must be computable
            return None
        work = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        self.sent += 1
        return work


class _Scatter(_Counted):
    """Stands where FSDP2 expects a reduce-scatter (`set_custom_reduce_scatter`)."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if not self.is_due():
            output_tensor.zero_()
            return None
        work = _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self.sent += 1
        return work


class _Part:
    """A sharded module and its collectives. Replicas (hybrid sharding) add an all-reduce that FSDP2 sends itself:
    it is counted by the hook behind it and left out by asking for none."""

    def __init__(self, module: Any, replicated: bool) -> None:
        self.module, self.replicated = module, replicated
        self._sample = _own_parameter(module)
        self._was_whole = False
        self.gather, self.scatter = _Gather(), _Scatter()
        self.reduced = 0
        module.set_custom_all_gather(self.gather)
        module.set_custom_reduce_scatter(self.scatter)
        if replicated:
            module.set_all_reduce_hook(self._count_reduction)

    def _count_reduction(self, _: torch.Tensor) -> None:
        self.reduced += 1

    def begin(self) -> None:
        for kind in (self.gather, self.scatter):
            kind.sent = kind.left_out = 0
        self.reduced = 0
        self._was_whole = self._is_whole()

    def _is_whole(self) -> bool:
        if self._sample is None:
            return False
        owner, name = self._sample
        return not hasattr(getattr(owner, name), "to_local")

    def leave_out_what_was_sent(self) -> None:
        # A part that was whole when the pass began did not gather; the repeated pass, which begins with shards, does.
        self.gather.left_out = self.gather.sent + int(self._was_whole)
        self.scatter.left_out = self.scatter.sent
        if self.replicated:
            self.module.set_requires_all_reduce(self.reduced == 0, recurse=False)

    def leave_out_nothing(self) -> None:
        self.gather.left_out = self.scatter.left_out = 0
        if self.replicated:
            self.module.set_requires_all_reduce(True, recurse=False)


def _own_parameter(module: nn.Module) -> tuple[nn.Module, str] | None:
    """Where one parameter of this part lives, not of a part inside it."""
    for owner in own_modules(module):
        for name, _ in owner.named_parameters(recurse=False):
            return owner, name
    return None


class CollectiveReplay:
    """Counts what a sharded model sends in a pass, so that a broken pass can be brought to its end."""

    def __init__(self, model: nn.Module, replicated: bool) -> None:
        self.model: Any = model
        self.can_recover = hasattr(model, "reset_iter_state")
        """Whether this version of torch can forget a pass that broke off (2.13 can). If not, nothing is counted."""
        sharded = sharded_parts(model) if self.can_recover else []
        self.parts = [_Part(module, replicated) for module in sharded]

    def begin(self) -> None:
        """A pass begins: nothing of it is sent yet."""
        for part in self.parts:
            part.begin()

    def forget(self) -> None:
        """Parameters back to shards, nothing pending, after a pass that broke off."""
        self.model.reset_iter_state()

    @contextmanager
    def owing(self) -> Iterator[None]:
        """Inside, a pass over one token, begun after `forget`, sends only what the broken one has not sent.

        Parameters stay whole where a finished pass leaves them so, as they are on the other ranks, but they are
        not the true ones: nothing but passes over one token may follow until all ranks are back to shards."""
        for part in self.parts:
            part.leave_out_what_was_sent()
        try:
            yield
        finally:
            for part in self.parts:
                part.leave_out_nothing()
