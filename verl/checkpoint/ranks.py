"""What ranks of one training job must agree on while saving and resuming. Alone, everything is a no-op."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Ranks:
    """This process among its peers."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.joined = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.joined else 0
        self.world_size = dist.get_world_size() if self.joined else 1
        on_device = self.joined and dist.get_backend() == "nccl"
        self._device = (device or torch.device("cuda")) if on_device else torch.device("cpu")

    @property
    def first(self) -> bool:
        return self.rank == 0

    def all_true(self, here: bool) -> bool:
        """Whether it is true on every rank. Also a meeting point."""
        if not self.joined:
            return here
        flag = torch.tensor([int(here)], device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())

    def first_failed(self, here: bool) -> int | None:
        """The first rank on which it is false; None where it is true on all."""
        if not self.joined:
            return None if here else self.rank
        failed = torch.tensor([self.world_size if here else self.rank], device=self._device)
        dist.all_reduce(failed, op=dist.ReduceOp.MIN)
        return None if int(failed.item()) == self.world_size else int(failed.item())

    def from_first(self, number: int) -> int:
        """Rank 0's number, on every rank."""
        if not self.joined:
            return number
        shared = torch.tensor([number], dtype=torch.int64, device=self._device)
        dist.broadcast(shared, src=0)
        return int(shared.item())
