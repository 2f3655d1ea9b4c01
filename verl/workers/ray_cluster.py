"""Joining or starting a Ray cluster, and the placement of rank processes in it.

A cluster that was there before the run is there after it; one that the run started ends with it, also when killed.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.config.parallelism import Pool, pools, rollout_pool, world_size
from verl.config.schema import GenerationConfig, OfflineConfig, PPOConfig
from verl.errors import ConfigError, RayStartError
from verl.processes import usable_cores
from verl.workers.ray_daemons import (
    children,
    kill_at_shutdown,
    kill_daemons,
    kill_new_daemons,
    on_loopback,
    ray_lost,
    remote_rank_process,
    signals_kept,
)
from verl.workers.ray_reservation import CAPACITY_S, CPUS_KEY, ClusterError, Reservation

logger = logging.getLogger(__name__)

_RESERVATIONS: dict[int, Reservation] = {}
"""Of runs in this process, by the id of their config."""


class Cluster:
    """The connection to Ray and the placement group of one pool (by default the trainer's ranks)."""

    def __init__(self, cfg: PPOConfig | OfflineConfig | GenerationConfig, key: str = "trainer") -> None:
        self.cfg = cfg
        self._key = key
        self._connected_here = False
        self.started_here = False
        """No other node can join it then."""
        self._opened = False
        """Whether this one made the run's reservation, which it then closes."""
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
        placed = self._placed()
        needed = sum(pool.per_node for pool in placed)
        cpus = settings.num_cpus or max(usable_cores(), needed)
        if cpus < needed:
            asked = " and ".join(f"{pool.key}.n_gpus_per_node={pool.per_node}" for pool in placed)
            raise ConfigError(
                f"{CPUS_KEY} is {cpus}, but {asked} processes need one each; set it to at least {needed}"
            )
        address = os.environ.get("RAY_ADDRESS", "")
        before = children()
        with signals_kept():
            try:
                if address and address != "local":
                    ray.init(address=address, **common)
                else:
                    self._start_or_join(cpus, common)
            except Exception as error:  # Ray raises various types, also plain ones
                kill_new_daemons(before)
                raise _start_error(error, address) from error
        self._connected_here = True
        if self.started_here:
            self.refuse_impossible()

    def _start_or_join(self, cpus: int, common: dict[str, Any]) -> None:
        try:
            with on_loopback():
                ray.init(num_cpus=cpus, include_dashboard=False, **common)
        except ValueError as error:
            if "existing cluster" not in str(error):
                raise
            ray.init(**common)
            return
        self.started_here = True
        kill_at_shutdown()
        address = ray.util.get_node_ip_address()
        if not ipaddress.ip_address(
            address
        ).is_loopback:  # a version of Ray without the switch of `on_loopback`
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
        """Start rank processes with `server` (module:Class), the same number on each of `nnodes` nodes. The first pool
        that starts reserves places for all of the run."""
        pool, gpus = self.pool, self.on_gpus()
        if id(self.cfg) not in _RESERVATIONS:
            # One rank that is asked for here is placed here, also where a run would be this very process.
            wanted = {placed.key: placed for placed in (*self._placed(), pool)}
            reservation = Reservation(list(wanted.values()), gpus=gpus)
            reservation.wait(timeout_s)
            _RESERVATIONS[id(self.cfg)] = reservation
            self._opened = True
        group = _RESERVATIONS[id(self.cfg)].groups[self._key]
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

    def _placed(self) -> list[Pool]:
        """The run's pools in this cluster: one rank alone is this very process, which Ray does not count."""
        alone = world_size(self.cfg) == 1 and not (isinstance(self.cfg, PPOConfig) and rollout_pool(self.cfg))
        return [pool for pool in pools(self.cfg) if pool.key != "trainer" or not alone]

    def capacity(self, wait_s: float, longest_s: float, fits: Callable[[int, int], bool]) -> tuple[int, int]:
        """Nodes and ranks per node for a restart; see `Reservation.capacity`."""
        # No other node can join a cluster that was started here.
        wait_s, longest_s = (0.0, CAPACITY_S) if self.started_here else (wait_s, longest_s)
        return Reservation(self._placed(), gpus=self.on_gpus()).capacity(self.pool, wait_s, longest_s, fits)

    # -- end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the ranks, free their resources, write the timeline, and leave (or end) the cluster. Where Ray itself is
        lost, nothing is asked of it: it would wait, and then end this process."""
        opened, self._opened = self._opened, False
        reservation = _RESERVATIONS.pop(id(self.cfg)) if opened else _RESERVATIONS.get(id(self.cfg))
        if not ray.is_initialized():
            return
        if ray_lost():
            kill_daemons()
        else:
            for actor in self.actors:
                ray.kill(actor, no_restart=True)
            timeline = self.cfg.ray_kwargs.timeline_json_file
            if opened and timeline:  # once for all pools of a run, and not by a restart that looks for places
                Path(timeline).parent.mkdir(parents=True, exist_ok=True)
                ray.timeline(str(timeline))
                logger.info("timeline of the ranks' calls: %s (open it at https://ui.perfetto.dev)", timeline)
            if reservation is not None:
                reservation.release(*(() if opened else (self._key,)))
        self.actors = []
        if self._connected_here:
            ray.shutdown()
            self._connected_here = False


def _start_error(error: Exception, address: str) -> RayStartError:
    text = str(error).strip().rstrip(".")
    if address and address != "local":
        return RayStartError(
            f"the Ray cluster at RAY_ADDRESS={address} could not be joined: {text}. Start it (ray start --head), give "
            "this process the cluster's token (RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...) if it wants one, or unset "
            "RAY_ADDRESS to start a cluster here"
        )
    return RayStartError(
        f"Ray could not be started: {text}. If it looked for a cluster that has ended, set RAY_ADDRESS=local; if it "
        f"starts more processes than this machine allows, set {CPUS_KEY}={usable_cores()}"
    )
