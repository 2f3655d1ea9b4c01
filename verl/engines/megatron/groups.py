"""The process groups of one layout of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch.distributed as dist

from verl.config.parallelism import Layout
from verl.distributed import with_timeout

Group = Any
"""A process group; None where it would have this rank alone."""


class OneRank:
    """A group of this rank alone, as far as Megatron's layers ask for one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class ParallelGroups:
    """Groups of this rank. Creating them is collective; `groups_of` keeps one object per layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.rank = dist.get_rank()
        self.tp_rank = self._tp(self.rank)
        self.cp_rank = self.rank // layout.tp % layout.cp
        self.dp_rank = layout.data_rank(self.rank)
        self.stage = layout.stage(self.rank)
        self.first, self.last = self.stage == 0, self.stage == layout.pp - 1
        at = self._replica(self.rank)
        self.replica, self.replicas = at, layout.dp * layout.cp
        """Index and number of the ranks that hold the same dense weights."""
        within = self._in_stage(self.rank)
        self.ep_rank, self.expert_replica = within % layout.ep, within // layout.ep
        self.expert_replicas = layout.stage_ranks // layout.ep
        place, ranks = self._tp, range(layout.world_size)
        self.tp = self._split(lambda rank: rank // layout.tp, layout.tp)
        """Ranks that split each matrix."""
        self.megatron_tp = self.tp or OneRank()
        self.cp = self._split(
            lambda rank: (place(rank), layout.data_rank(rank), layout.stage(rank)), layout.cp
        )
        """Ranks that split each sequence."""
        self.pp = self._split(lambda rank: rank % (len(ranks) // layout.pp), layout.pp)
        """One rank of each stage, in order."""
        self.data = self._split(lambda rank: (place(rank), layout.stage(rank)), self.replicas)
        """Ranks with the same dense weights: all of dp and cp."""
        self.model = self._split(lambda rank: layout.data_rank(rank), layout.model_ranks)
        """Ranks that work on the same rows."""
        self.ep = self._split(lambda rank: (layout.stage(rank), self._in_stage(rank) // layout.ep), layout.ep)
        """Ranks that split the experts; of all ranks of a stage, so that each expert is whole on one of them."""
        self.expert_data = self._split(
            lambda rank: (layout.stage(rank), self._in_stage(rank) % layout.ep), self.expert_replicas
        )
        """Ranks with the same experts."""
        ends = {0, layout.pp - 1}
        self.embedding = (
            self._split(
                lambda rank: (rank % (len(ranks) // layout.pp)) if layout.stage(rank) in ends else None, 2
            )
            if layout.pp > 1
            else None
        )
        """First and last stage, which share a tied embedding; None on stages between."""

    def _tp(self, rank: int) -> int:
        return rank % self.layout.tp

    def _replica(self, rank: int) -> int:
        """Within a stage and a tensor-parallel rank: cp inside dp."""
        return rank // self.layout.tp % (self.layout.dp * self.layout.cp)

    def _in_stage(self, rank: int) -> int:
        return rank % self.layout.stage_ranks

    def _split(self, key: Callable[[int], Any], size: int) -> Group:
        """This rank's group of those with an equal key (None: in no group). All ranks create all groups, in order."""
        if size == 1:
            return None
        members: dict[Any, list[int]] = {}
        for rank in range(self.layout.world_size):
            if (value := key(rank)) is not None:
                members.setdefault(value, []).append(rank)
        mine = None
        for ranks in members.values():
            group = dist.new_group(ranks)
            if self.rank in ranks:
                mine = with_timeout(group)
        return mine

    def stage_rank(self, stage: int) -> int:
        """The rank of another stage with this rank's place in it."""
        per_stage = self.layout.world_size // self.layout.pp
        return stage * per_stage + self.rank % per_stage


def groups_of(layout: Layout) -> ParallelGroups:
    """Shared by the roles of this process that have the same layout."""
    if not dist.is_initialized():  # Megatron's layers ask for one even where they never communicate
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return _groups(layout, dist.group.WORLD)


@lru_cache(maxsize=8)
def _groups(layout: Layout, world: Group) -> ParallelGroups:
    return ParallelGroups(layout)
