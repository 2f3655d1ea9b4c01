"""Joining or starting a Ray cluster, and the placement of rank processes in it.

A cluster that was there before the run is there after it; one that the run started ends with it, also when killed.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from ray._private import ray_constants
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.config.parallelism import Pool, pools, rollout_pool, world_size
from verl.config.schema import GenerationConfig, OfflineConfig, PPOConfig
from verl.errors import ConfigError, VerlError
from verl.workers.rank_process import remote_rank_process

logger = logging.getLogger(__name__)

CPUS_KEY = "ray_kwargs.ray_init.num_cpus"
CAPACITY_S = 30.0
"""How long to wait for resources that no node of the cluster has; Ray counts a node as lost after half of it."""
_PROGRESS_S = 10.0
_SIGNAL_S = 1.0
"""Ray's wait for a placement group handles no signals: wait in slices of this."""


class ClusterError(VerlError):
    """Ray could not be started or joined, or has not enough resources for the ranks."""


def usable_cpus() -> int:
    """What this process may use: a batch system's share, not all the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Cluster:
    """The connection to Ray and the placement group of one pool (by default the trainer's ranks)."""

    def __init__(self, cfg: PPOConfig | OfflineConfig | GenerationConfig, key: str = "trainer") -> None:
        self.cfg = cfg
        self._key = key
        self._connected_here = False
        self.started_here = False
        """No other node can join it then."""
        self._group: PlacementGroup | None = None
        self.actors: list[Any] = []

    @property
    def pool(self) -> Pool:
        """As the config says now: a restart may have lowered it."""
        return next(pool for pool in pools(self.cfg) if pool.key == self._key)

    def connect(self) -> None:
        """Use the connection there is, join `RAY_ADDRESS` or what `ray start` started, or start a cluster here."""
        if ray.is_initialized():
            return
        settings = self.cfg.ray_kwargs.ray_init
        common: dict[str, Any] = {
            "runtime_env": dict(settings.runtime_env) or None,
            "log_to_driver": False,
            "logging_level": logging.ERROR,
        }
        # One rank alone is this very process, which Ray does not count.
        alone = world_size(self.cfg) == 1 and not (isinstance(self.cfg, PPOConfig) and rollout_pool(self.cfg))
        placed = [pool for pool in pools(self.cfg) if pool.key != "trainer" or not alone]
        needed = sum(pool.per_node for pool in placed)
        cpus = settings.num_cpus or max(usable_cpus(), needed)
        if cpus < needed:
            asked = " and ".join(f"{pool.key}.n_gpus_per_node={pool.per_node}" for pool in placed)
            raise ConfigError(
                f"{CPUS_KEY} is {cpus}, but {asked} processes need one each; set it to at least {needed}"
            )
        address = os.environ.get("RAY_ADDRESS", "")
        with _keep_sigterm_handler():
            try:
                if address and address != "local":
                    ray.init(address=address, **common)
                else:
                    self._start_or_join(cpus, common)
            except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
                raise _start_error(error, address) from error
        self._connected_here = True
        if self.started_here:
            self.refuse_impossible()

    def _start_or_join(self, cpus: int, common: dict[str, Any]) -> None:
        try:
            with _on_loopback():
                ray.init(num_cpus=cpus, include_dashboard=False, **common)
        except ValueError as error:
            if "existing cluster" not in str(error):
                raise
            ray.init(**common)
            return
        self.started_here = True
        address = ray.util.get_node_ip_address()
        if not ipaddress.ip_address(
            address
        ).is_loopback:  # a version of Ray without the switch of `_on_loopback`
            logger.warning(
                "Ray %s, started for this run, listens on %s and not on the loopback address: keep it behind a "
                "firewall",
                ray.__version__,
                address,
            )

    # -- placement ----------------------------------------------------------------------------------------------

    def on_gpus(self) -> bool:
        """`trainer.device`: with auto several processes are on GPUs, one is where the cluster has a GPU."""
        wanted = self.cfg.trainer.device
        if wanted != "auto":
            return wanted == "cuda"
        several = sum(pool.processes for pool in pools(self.cfg)) > 1
        return several or bool(ray.cluster_resources().get("GPU", 0))

    def refuse_impossible(self) -> None:
        """Refuse at once what is too large for a cluster started here."""
        wanted = pools(self.cfg)
        there = int(ray.cluster_resources().get("GPU", 0))
        gpus = sum(pool.per_node for pool in wanted) if self.on_gpus() else 0
        several = [pool.key for pool in wanted if pool.nodes > 1]
        if not several and gpus <= there:
            return
        asked = " and ".join(pool.asked for pool in wanted)
        need = "several nodes" if several else f"{gpus} GPUs"
        fix = f"Set {several[0]}.nnodes=1" if several else "Lower one of them, set trainer.device=cpu"
        raise ClusterError(
            f"the cluster is too small for the run: {asked} need {need}, and there is 1 node, started here, with "
            f"{there} GPUs. {fix}, or join a larger cluster (RAY_ADDRESS=...)"
        )

    def threads(self) -> int:
        """For each rank on CPUs: its share of what this process would use."""
        return max(1, torch.get_num_threads() // self.pool.per_node)

    def start_actors(self, timeout_s: float, server: str) -> list[Any]:
        """Start rank processes with `server` (module:Class), the same number on each of `nnodes` nodes."""
        pool = self.pool
        group = self._wait_for_capacity(timeout_s)
        gpus = self.on_gpus()
        actor_class = remote_rank_process()
        threads = None if gpus else self.threads()
        self.actors = [
            actor_class.options(
                num_cpus=pool.gpus_per_process,
                num_gpus=pool.gpus_per_process if gpus else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank * pool.gpus_per_process // pool.per_node
                ),
            ).remote(server, rank, pool.processes, threads)
            for rank in range(pool.processes)
        ]
        return self.actors

    def _bundle(self) -> dict[str, int]:
        """What the ranks of one node need."""
        per_node = self.pool.per_node
        return {"CPU": per_node, **({"GPU": per_node} if self.on_gpus() else {})}

    def _reserve(self, timeout_s: float) -> bool:
        """Reserve the resources of all nodes, or none."""
        if self._group is None:
            bundles: list[dict[str, float]] = [dict(self._bundle()) for _ in range(self.pool.nodes)]
            self._group = placement_group(bundles, strategy="STRICT_SPREAD")
        return bool(self._group.wait(timeout_s))

    def _wait_for_capacity(self, timeout_s: float) -> PlacementGroup:
        """Reserve; waits `timeout_s` for other jobs to end, at most CAPACITY_S for nodes the cluster does not have."""
        pool, started, logged = self.pool, time.monotonic(), 0.0
        while not self._reserve(min(_SIGNAL_S, timeout_s)):
            waited = time.monotonic() - started
            fitting = sum(count >= pool.per_node for count in self._ranks_by_node())
            limit = timeout_s if fitting >= pool.nodes else min(CAPACITY_S, timeout_s)
            if waited + 0.1 >= limit:
                raise ClusterError(self._too_small())
            if logged and waited - logged < _PROGRESS_S:
                continue
            logged = waited
            logger.info(
                "waiting for the Ray cluster: %s; %d nodes are large enough (%.0f of at most %.0f s)",
                pool.asked,
                fitting,
                waited,
                limit,
            )
        assert self._group is not None
        return self._group

    def capacity(self) -> tuple[int, int]:
        """Nodes and ranks per node available now: what the config asks for, or what the other pools leave."""
        nodes, per_node = self.cfg.trainer.nnodes, self.cfg.trainer.n_gpus_per_node
        others = [Cluster(self.cfg, pool.key) for pool in pools(self.cfg) if pool.key != self._key]
        try:
            for other in others:
                if not other._reserve(CAPACITY_S):
                    raise ClusterError(other._too_small())
            deadline = time.monotonic() + CAPACITY_S
            fitting = nodes
            while fitting >= nodes and time.monotonic() < deadline:
                if self._reserve(_SIGNAL_S):
                    return nodes, per_node
                ranks = self._ranks_by_node(others)
                fitting = sum(count >= per_node for count in ranks)
        finally:
            for other in others:
                other._release()
        if fitting:
            return min(fitting, nodes), per_node
        if not max(ranks, default=0):
            raise ClusterError(self._too_small())
        return 1, max(ranks)

    def _ranks_by_node(self, others: Sequence[Cluster] = ()) -> list[int]:
        """How many ranks each node that is alive could hold besides what others have reserved there."""
        taken: Counter[str] = Counter()
        for other in others:
            for node in placement_group_table(other._group)["bundles_to_node_id"].values():
                taken[node] += other.pool.per_node
        return [
            max(
                int(min(node["Resources"].get(name, 0) for name in self._bundle())) - taken[node["NodeID"]], 0
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def _too_small(self) -> str:
        """What was asked for and what each node has."""
        bundle = self._bundle()
        asked = ", ".join(f"{count} {name}" for name, count in bundle.items())
        alive = [node for node in ray.nodes() if node["Alive"]]
        there = "; ".join(
            f"{node['NodeManagerHostname']}: "
            + ", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in bundle)
            for node in alive
        )
        no_gpu = "GPU" in bundle and not any(node["Resources"].get("GPU") for node in alive)
        on_cpus = ", set trainer.device=cpu for CPU processes (the cluster has no GPU)" if no_gpu else ""
        return (
            f"the cluster is too small for the run: {self._key}.nnodes={self.pool.nodes} nodes with {asked} each "
            f"are needed, and there are {len(alive)} ({there}). Lower {self._key}.nnodes or "
            f"{self._key}.n_gpus_per_node{on_cpus}, add nodes (ray start --address=...), or raise {CPUS_KEY}"
        )

    # -- end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the ranks, free their resources, write the timeline, and leave (or end) the cluster."""
        if not ray.is_initialized():
            return
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        self.actors = []
        if self.cfg.ray_kwargs.timeline_json_file:
            path = Path(self.cfg.ray_kwargs.timeline_json_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            ray.timeline(str(path))
            logger.info("timeline of the ranks' calls: %s (open it at https://ui.perfetto.dev)", path)
        self._release()
        if self._connected_here:
            ray.shutdown()
            self._connected_here = False

    def _release(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


@contextmanager
def _on_loopback() -> Iterator[None]:
    """A cluster that is started meanwhile has the node address 127.0.0.1, to which all its processes then bind. Ray
    replaces that address by the network's when it is given by `_node_ip_address`, except where clusters of several
    nodes are switched off, as they are by default on macOS."""
    several_nodes = getattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = several_nodes


def _start_error(error: Exception, address: str) -> ClusterError:
    text = str(error).strip()
    if address:
        return ClusterError(
            f"the Ray cluster at RAY_ADDRESS={address} could not be joined: {text}. Start it (ray start --head), give "
            "this process the cluster's token (RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...) if it wants one, or unset "
            "RAY_ADDRESS to start a cluster here"
        )
    return ClusterError(
        f"Ray could not be started: {text}. If it looked for a cluster that has ended, set RAY_ADDRESS=local; if it "
        f"starts more processes than this machine allows, set {CPUS_KEY}={usable_cpus()}"
    )


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Connecting to Ray installs handlers that write C++ stacks; restore ours."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
