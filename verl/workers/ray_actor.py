"""A call server as a Ray actor: calls one at a time, and a second lane on which it can always be asked for a sign.

What always holds: an actor ends with the daemon of its node. Ray asks it to and waits until its call is done, which
for a call that hangs is never.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import ray

from verl.workers.outcome import Outcome
from verl.workers.rpc_server import RPCServer
from verl.workers.watchdog import Sign

PARENT_S = 1.0


def _end_with(parent: int) -> None:
    """A process whose parent ended has another one."""
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    os._exit(1)


class RankProcess:
    """Delegates to the server of its role. Ray wants its methods on the class it is given."""

    def __init__(self, rank: int, world_size: int, threads: int | None) -> None:
        if threads is not None:
            # Ray gives a worker one thread. The pools read this once, when torch is loaded: so before it is.
            os.environ["OMP_NUM_THREADS"] = str(threads)
        threading.Thread(target=_end_with, args=(os.getppid(),), name="verl-parent", daemon=True).start()
        self._worker = self.server(rank, world_size)

    def server(self, rank: int, world_size: int) -> RPCServer:
        """What serves the calls; torch may be loaded here, not before."""
        raise NotImplementedError

    def serve(self, call: str, *args: Any, **kwargs: Any) -> Outcome:
        if call == "who":
            kwargs["address"] = ray.util.get_node_ip_address()
            kwargs["log"] = os.path.realpath("/proc/self/fd/2")
        return self._worker.serve(call, *args, **kwargs)

    def stream(self, call: str, *args: Any) -> Iterator[Outcome]:
        yield from self._worker.stream(call, *args)

    @ray.method(concurrency_group="control")
    def sign(self) -> Sign:
        return self._worker.sign()


class RankActor(RankProcess):
    """A rank of the trainer."""

    def server(self, rank: int, world_size: int) -> RPCServer:
        from verl.workers.rank import RankWorker

        return RankWorker(rank, world_size)


def remote_class(actor: type[RankProcess] = RankActor) -> Any:
    remote: Any = ray.remote  # its annotations do not know concurrency groups
    return remote(concurrency_groups={"control": 1}, max_restarts=0, max_task_retries=0)(actor)
