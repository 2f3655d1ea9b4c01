"""Processes started by `torchrun`: every rank runs the same program; a rank that fails or hangs ends all, named.

Rank 0 reports. A rank writes its failure into the store before it ends, so that rank 0 finds the cause of a broken
connection there; a heartbeat thread ends a rank whose main thread waits in a collective for one that never comes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from verl.errors import RESUME, ConfigError, VerlError, WorkersLost
from verl.watchdog import Heartbeat, StackWatchdog, format_hang_report
from verl.workers.local import choose_device
from verl.workers.rank import Failure, join_process_group, use_interface_of

CONNECT_S = 300.0
CAUSE_S = 30.0
"""At most, for the failure of the rank that broke a connection, and for rank 0 to report a failure."""
GRACE_S = 10.0
"""For a rank's main thread to end by itself after another has failed."""
DEAD_S = 10.0
"""A process without a heartbeat for so long does not answer at all."""
LOST_S = 300.0
"""Without a heartbeat of rank 0 for so long, the others end."""


@dataclass(frozen=True)
class Job:
    """This process among those of one `torchrun`, as its environment describes it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Job | None:
        """None where torchrun started no several processes."""
        env = os.environ if environment is None else environment
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if any(not env.get(name) for name in names) or int(env["WORLD_SIZE"]) == 1:
            return None
        world = int(env["WORLD_SIZE"])
        return cls(
            rank=int(env["RANK"]),
            world_size=world,
            local_rank=int(env["LOCAL_RANK"]),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE") or world),
            address=env["MASTER_ADDR"],
            port=int(env["MASTER_PORT"]),
        )

    @property
    def one_host(self) -> bool:
        return self.local_world_size == self.world_size

    @cached_property
    def store(self) -> Any:
        """For the process group; rank 0 starts it where the launcher has none. A restart by the launcher meets at the
        same store, so that keys carry the number of the start."""
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=CONNECT_S))))
        return dist.PrefixStore(f"verl/group/{_start_number()}", store)

    def connection(self) -> Any:
        """Another connection to that store: a thread that waits keeps its connection from others."""
        _ = self.store
        store = dist.TCPStore(
            self.address,
            self.port,
            self.world_size,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_S),
        )
        return dist.PrefixStore(f"verl/monitor/{_start_number()}", store)


def _start_number() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


class RankMonitor:
    """Watches the ranks of a job from a background thread."""

    def __init__(self, job: Job, watchdog_s: float) -> None:
        self.job, self.watchdog_s = job, watchdog_s
        self.watchdog = StackWatchdog(job.rank)
        self.on_lost: Callable[[VerlError], None] = lambda error: None
        """Called on rank 0 before it ends because of another rank, while its main thread still waits."""
        self._store = job.connection()
        self._failed_since: float | None = None
        self._explained: Exception | None = None
        self._heartbeat = Heartbeat(
            job.connection(), job.rank, job.world_size, watchdog=self.watchdog, on_beat=self._check
        )
        self._heartbeat.share()

    def close(self) -> None:
        self._heartbeat.close()

    # -- failures of this rank ----------------------------------------------------------------------------------

    def explain(self, error: Exception) -> Exception:
        """Publish a failure of this rank. On rank 0 returns the error to raise: its own, or that of the rank that
        caused it. On the others rank 0 reports; they raise only where it does not."""
        if error is not self._explained:
            self._explained = error = self._explain(error)
        return error

    def _explain(self, error: Exception) -> Exception:
        failure = Failure.of(error, self.watchdog)
        with suppress(dist.DistError):
            self._store.set(f"failure/{self.job.rank}", json.dumps(asdict(failure)))
            if self.job.rank > 0:
                # A dead rank 0 reports nothing, and torchrun kills the others 30 s after a death.
                self._wait(lambda: bool(self._failure(0)) or self._heartbeat.stale_s(0) > DEAD_S, CAUSE_S)
                return Reported() if self._failure(0) else failure.as_error()
            self._store.set("end", "")
            if failure.caused_by_another:
                found = self._cause()
                return found.as_error() if found is not None else error
        return error if isinstance(error, VerlError) else failure.as_error()

    def _failure(self, rank: int, store: Any = None) -> Failure | None:
        store = store or self._store
        key = f"failure/{rank}"
        return Failure(**json.loads(store.get(key))) if store.check([key]) else None

    def _cause(self) -> Failure | None:
        """The exception that broke a connection; None when no rank that lives has one."""
        others = range(1, self.job.world_size)
        found: dict[int, Failure] = {}

        def known() -> bool:
            found.update({rank: failure for rank in others if (failure := self._failure(rank))})
            dead = [rank for rank in others if self._heartbeat.stale_s(rank) > DEAD_S]
            return any(not f.caused_by_another for f in found.values()) or not set(others) - {*found, *dead}

        self._wait(known, min(CAUSE_S, self.watchdog_s))
        causes = [failure for rank, failure in sorted(found.items()) if not failure.caused_by_another]
        return causes[0] if causes else None

    @staticmethod
    def _wait(condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.1)

    # -- in the heartbeat's thread ------------------------------------------------------------------------------

    def _check(self) -> None:
        try:
            if self.job.rank == 0:
                self.check_others()
            elif self._heartbeat.stale_s(0) > LOST_S or self._grace_is_over(
                self._heartbeat.store.check(["end"])
            ):
                os._exit(1)
        except (RuntimeError, OSError) as error:
            where = f"the store at {self.job.address}:{self.job.port}"
            cause = (str(error).splitlines() or [""])[0][:200]
            self._end(WorkersLost(f"{where} is gone, and torchrun with it: {cause}. To continue: {RESUME}."))

    def check_others(self) -> None:
        heartbeat, others = self._heartbeat, range(1, self.job.world_size)
        failures = [f for rank in others if (f := self._failure(rank, heartbeat.store))]
        causes = [failure for failure in failures if not failure.caused_by_another]
        if self._grace_is_over(bool(causes)):
            self._end(causes[0].as_error())
        own = self.watchdog.status()
        if own.still_s <= self.watchdog_s:
            return
        statuses, quiet = {0: own}, [own.still_s]
        for rank in others:
            status, stale_s = heartbeat.status(rank), heartbeat.stale_s(rank)
            quiet.append(stale_s + (status.still_s if status is not None else 0.0))
            if status is not None and stale_s < DEAD_S:
                statuses[rank] = status
        if min(quiet) > self.watchdog_s:
            names = [heartbeat.describe(rank) for rank in range(self.job.world_size)]
            report = format_hang_report(own.call, self.watchdog_s, names, range(len(names)), statuses)
            self._end(WorkersLost(report))

    def _grace_is_over(self, failed: bool) -> bool:
        if not failed:
            return False
        self._failed_since = self._failed_since or time.monotonic()
        return time.monotonic() - self._failed_since > GRACE_S

    def _end(self, error: VerlError) -> None:
        """The main thread may never return from its collective: end the process from here."""
        if self.job.rank == 0:
            self.on_lost(error)
            sys.stderr.write(f"error: {error}\n")
            sys.stderr.flush()
            with suppress(RuntimeError, OSError):
                self._heartbeat.store.set("end", "")
        os._exit(error.exit_code)


class Reported(VerlError):
    """Rank 0 reports this failure."""


@contextmanager
def joined(job: Job, device: str, watchdog_s: float) -> Iterator[RankMonitor]:
    """Join the process group of the job, watched; at the end all ranks leave together."""
    if choose_device(device).type == "cuda":
        if job.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"torchrun started {job.local_world_size} processes on a machine with {torch.cuda.device_count()} "
                f"GPUs; give it --nproc_per_node={torch.cuda.device_count()}, or set trainer.device=cpu"
            )
        torch.cuda.set_device(job.local_rank)
    use_interface_of("127.0.0.1" if job.one_host else _address_towards(job.address))
    join_process_group(
        job.store, job.rank, job.world_size, device=choose_device(device).type, watchdog_s=watchdog_s
    )
    monitor = RankMonitor(job, watchdog_s)
    try:
        with monitor.watchdog.serving("fit"):
            yield monitor
    except Exception as error:
        explained = monitor.explain(error)
        raise explained from (None if explained is error else error)
    # Before rank 0 ends, and maybe the store with it.
    monitor.close()
    dist.all_reduce(torch.zeros(1))  # unlike a barrier it needs no device
    dist.destroy_process_group()


def _address_towards(host: str) -> str:
    """This machine's address as `host` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
