"""Places in a Ray cluster for the processes of a run: for all of its pools, or for none.

A pool takes the same number of places on each of several nodes, by a placement group of its own. Pools are reserved
one after another; what is incomplete is held for a few seconds only, since two runs that each hold a part would wait
for each other.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from verl.config.parallelism import Pool
from verl.errors import VerlError

logger = logging.getLogger(__name__)

CPUS_KEY = "ray_kwargs.ray_init.num_cpus"
CAPACITY_S = 30.0
"""How long to wait for resources that no node of the cluster has; Ray counts a node as lost after half of it."""
HOLD_S = 10.0
"""How long places of one pool are held at most while another pool has none."""
_PROGRESS_S = 10.0
_SIGNAL_S = 1
"""Ray's wait for a placement group handles no signals, and takes whole seconds: wait in slices of this."""


class ClusterError(VerlError):
    """Ray has not enough resources for the ranks."""


class Reservation:
    """The placement groups of a run's pools, by their keys."""

    def __init__(self, pools: Sequence[Pool], *, gpus: bool) -> None:
        self._pools = sorted(pools, key=lambda pool: -pool.per_node)  # those that fit on fewer nodes first
        self._gpus = gpus
        self.groups: dict[str, PlacementGroup] = {}
        self._logged = 0.0

    def wait(self, timeout_s: float) -> None:
        """Reserve all; waits `timeout_s` for other jobs to end, at most CAPACITY_S for nodes the cluster lacks."""
        pauses = random.Random()  # not the seeded one: two runs with one config must not pause alike
        started = time.monotonic()
        held_since, hold_s = started, HOLD_S
        with ExitStack() as on_error:
            on_error.callback(self.release)
            while (pool := self._first_missing(self._pools)) is not None:
                now, fitting = time.monotonic(), self._fitting(pool)
                limit = timeout_s if fitting >= pool.nodes else min(CAPACITY_S, timeout_s)
                if now - started + 0.1 >= limit:
                    raise ClusterError(self.too_small(pool))
                text = f"waiting for the Ray cluster: {pool.asked}; {fitting} nodes are large enough"
                self._log(text, now - started, limit)
                if pool is self._pools[0]:
                    held_since = now
                elif now - held_since > hold_s:
                    self.release()
                    time.sleep(pauses.uniform(0, HOLD_S))
                    held_since, hold_s = time.monotonic(), pauses.uniform(HOLD_S / 2, HOLD_S)
            on_error.pop_all()

    def capacity(
        self, pool: Pool, wait_s: float, longest_s: float, fits: Callable[[int, int], bool]
    ) -> tuple[int, int]:
        """Nodes and ranks per node that `pool` can have besides the others: all it asks for, or after `wait_s`, in
        which a node may come back, the most for which `fits`; where there is none, the wait goes on to `longest_s`."""
        others = [each for each in self._pools if each.key != pool.key]
        started = time.monotonic()
        try:
            while (missing := self._first_missing([*others, pool])) is not None:
                waited = time.monotonic() - started
                sizes = self._smaller(pool) if missing is pool else []
                chosen = next((size for size in sizes if fits(*size)), None)
                limit = max(wait_s, longest_s) if chosen is None else wait_s
                if chosen == (pool.nodes, pool.per_node):  # other jobs use it
                    limit = max(wait_s, CAPACITY_S)
                if waited >= limit and chosen is None:
                    raise ClusterError(self.too_small(missing))
                if waited >= limit and chosen is not None:
                    return chosen
                self._log(f"waiting for a node to come back: {missing.asked}", waited, limit)
        finally:
            self.release()
        return pool.nodes, pool.per_node

    def release(self, *keys: str) -> None:
        """The places of these pools; without keys, of all."""
        for key in keys or tuple(self.groups):
            group = self.groups.pop(key, None)
            if group is not None:
                remove_placement_group(group)

    def _first_missing(self, pools: Sequence[Pool]) -> Pool | None:
        """The first pool that does not get its places in a second; those after it have none. None: all are there."""
        for pool in pools:
            if pool.key not in self.groups:
                bundles: list[dict[str, float]] = [dict(self._bundle(pool)) for _ in range(pool.nodes)]
                self.groups[pool.key] = placement_group(bundles, strategy="STRICT_SPREAD")
            if not self.groups[pool.key].wait(_SIGNAL_S):
                return pool
        return None

    def _bundle(self, pool: Pool) -> dict[str, int]:
        """What the ranks of one node need."""
        return {"CPU": pool.per_node, **({"GPU": pool.per_node} if self._gpus else {})}

    def _fitting(self, pool: Pool) -> int:
        return sum(count >= pool.per_node for count in self._ranks_by_node(pool))

    def _smaller(self, pool: Pool) -> list[tuple[int, int]]:
        """Nodes and ranks per node that the nodes there are could hold, the most first."""
        largest = min(max(self._ranks_by_node(pool), default=0), pool.per_node - 1)
        fewer_nodes = range(min(self._fitting(pool), pool.nodes), 0, -1)
        return [(count, pool.per_node) for count in fewer_nodes] + [
            (1, count) for count in range(largest, 0, -1)
        ]

    def _ranks_by_node(self, pool: Pool) -> list[int]:
        """How many ranks of `pool` each node that is alive could hold besides the run's other pools, if no other job
        used it."""
        taken: Counter[str] = Counter()
        for other in self._pools:
            if other.key != pool.key and other.key in self.groups:
                placed: dict[int, str] = placement_group_table(self.groups[other.key])["bundles_to_node_id"]
                taken.update(dict.fromkeys(placed.values(), other.per_node))
        return [
            max(
                int(min(node["Resources"].get(name, 0) for name in self._bundle(pool)))
                - taken[node["NodeID"]],
                0,
            )
            for node in _alive()
        ]

    def _log(self, text: str, waited: float, limit: float) -> None:
        if time.monotonic() - self._logged >= _PROGRESS_S:
            self._logged = time.monotonic()
            logger.info("%s (%.0f of at most %.0f s)", text, waited, limit)

    def too_small(self, pool: Pool) -> str:
        """What was asked for, what each node has, and how much of it is free."""
        bundle, nodes = self._bundle(pool), _alive()
        asked = ", ".join(f"{count} {name}" for name, count in bundle.items())
        free: dict[str, dict[str, float]] = available_resources_per_node()
        there = "; ".join(
            f"{node['NodeManagerHostname']}: "
            + ", ".join(
                f"{free.get(node['NodeID'], {}).get(name, 0):g} of {node['Resources'].get(name, 0):g} {name} free"
                for name in bundle
            )
            for node in nodes
        )
        needed = f"{pool.key}.nnodes={pool.nodes} nodes with {asked} each are needed"
        needed = f"{needed}, and there are {len(nodes)} ({there})"
        lower = f"{pool.key}.nnodes or {pool.key}.n_gpus_per_node"
        if self._fitting(pool) >= pool.nodes:
            return f"the cluster is in use by other jobs: {needed}. Wait for them to end, or lower {lower}"
        no_gpu = "GPU" in bundle and not any(node["Resources"].get("GPU") for node in nodes)
        on_cpus = ", set trainer.device=cpu for CPU processes (the cluster has no GPU)" if no_gpu else ""
        return (
            f"the cluster is too small for the run: {needed}. Lower {lower}{on_cpus}, add nodes (ray start "
            f"--address=...), or raise {CPUS_KEY}"
        )


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]
