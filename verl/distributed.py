"""This process among the ranks of the default process group, and the small collectives they agree by."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """The default process group, or a group of one where there is none; alone, every collective is a no-op."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: where this rank computes; default: the current CUDA device under NCCL, else the CPU."""
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.world_size = dist.get_world_size() if distributed else 1
        nccl = distributed and dist.get_backend() == "nccl"
        self.device = device or torch.device("cuda" if nccl else "cpu")
        self._collective_device = self.device if nccl else torch.device("cpu")

    def _reduce(self, numbers: list[int], op: Any) -> list[int]:
        if self.world_size == 1:
            return numbers
        values = torch.tensor(numbers, dtype=torch.int64, device=self._collective_device)
        dist.all_reduce(values, op=op)
        return [int(value) for value in values.tolist()]

    def total(self, numbers: list[int]) -> list[int]:
        """Sum of each number over ranks."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def largest(self, number: int) -> int:
        return self._reduce([number], dist.ReduceOp.MAX)[0]

    def smallest(self, number: int) -> int:
        return self._reduce([number], dist.ReduceOp.MIN)[0]

    def all_true(self, here: bool) -> bool:
        """Whether it is true on every rank."""
        return bool(self.smallest(int(here)))

    def first_failed(self, here: bool) -> int | None:
        """The first rank on which it is false; None where it is true on all."""
        failed = self.smallest(self.world_size if here else self.rank)
        return None if failed == self.world_size else failed

    def from_first(self, number: int) -> int:
        """Rank 0's number, on every rank."""
        return self.total([number if self.rank == 0 else 0])[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """All-reduce one number: unlike `dist.barrier` it needs no device index on any backend."""
        self.largest(0)


def with_timeout(group: Any) -> Any:
    """The group, with the timeout of the default one: torch gives a later group one of its own, which may end a
    collective before the watchdog has said who hangs."""
    default = dist.group.WORLD
    assert default is not None
    cpu = torch.device("cpu")
    if group is not default and "gloo" in str(dist.get_backend_config(default)):
        timeout = default._get_backend(cpu).options._timeout
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    return group
