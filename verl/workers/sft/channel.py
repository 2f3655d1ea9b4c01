"""Messages between the processes that `torchrun` started, through the store they meet at.

What always holds: what travels is plain values and arrays, never code, so that whoever else can reach the store's
port cannot make us run anything; every message is taken once and then gone from the store; waiting for one never
keeps another thread from using the store, because each has a connection of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load, save

from verl.checkpoint.pytree_json import decode, encode
from verl.workers.outcome import Failure, Line, Outcome
from verl.workers.rpc_server import RPCServer
from verl.workers.watchdog import Sign

CONNECT_S = 300.0
SIGN_EVERY_S = 1.0
STOP_S = 5.0
PIECE_BYTES = 1 << 20
_TREE = "tree"


@dataclass(frozen=True)
class Job:
    """This process among those of one `torchrun`, as its environment says."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Job | None:
        """None where nobody started several processes for us."""
        env = os.environ if environment is None else environment
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if any(not env.get(name) for name in names):
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
        """For the process group; rank 0 starts it where the launcher has none."""
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=CONNECT_S))))
        return dist.PrefixStore(f"verl/group/{_start_number()}", store)

    def connection(self) -> Any:
        """Another connection to that store, for one thread."""
        _ = self.store
        store = dist.TCPStore(
            self.address,
            self.port,
            self.world_size,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_S),
        )
        return dist.PrefixStore(f"verl/calls/{_start_number()}", store)


def _start_number() -> str:
    """A restart by the launcher meets at the same store: what the start before left there is not for us."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


class Channel:
    """Calls from rank 0 to each other rank, numbered, and their answers."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._store = job.connection()
        self._number = 0

    # -- on rank 0 ----------------------------------------------------------------------------------------------

    def send(self, call: str, args: Sequence[tuple[Any, ...]]) -> None:
        """The next call, to every other rank with its own of the arguments (those of rank 0 stay here)."""
        self._number += 1
        for rank in range(1, self.job.world_size):
            self._put(self._key("call", rank), {"call": call, "args": list(args[rank])})

    def answer_of(self, rank: int) -> Outcome | None:
        """To the last call; None while there is none."""
        key = self._key("answer", rank)
        return _outcome(self._take(key)) if self._store.check([key]) else None

    def end(self) -> None:
        """Whatever they wait for, there will be no more."""
        self._store.set("end", "")

    # -- on any -------------------------------------------------------------------------------------------------

    def sign_of(self, rank: int) -> tuple[int, Sign] | None:
        """The rank's newest sign of life and its number; None before the first."""
        key = f"sign/{rank}"
        if not self._store.check([key]):
            return None
        found = json.loads(self._store.get(key))
        return found["number"], Sign(**found["sign"])

    # -- on the others ------------------------------------------------------------------------------------------

    def next_call(self) -> tuple[str, list[Any]] | None:
        """The next call and its arguments; None when there will be no more."""
        key = f"call/{self._number + 1}/{self.job.rank}"
        started = time.monotonic()
        # The store could wait for us, but says on stderr each time that nothing came.
        while not self._store.check([key]):
            if self.ended():
                return None
            time.sleep(pause_s(time.monotonic() - started))
        self._number += 1
        message = self._take(key)
        return message["call"], message["args"]

    def ended(self) -> bool:
        return bool(self._store.check(["end"]))

    def answer(self, outcome: Outcome) -> None:
        value = str(outcome.value) if isinstance(outcome.value, Path) else outcome.value
        message = {
            "value": value,
            "failure": asdict(outcome.failure) if outcome.failure else None,
            "lines": [asdict(line) for line in outcome.lines],
        }
        self._put(self._key("answer", self.job.rank), message)

    def _key(self, kind: str, rank: int) -> str:
        return f"{kind}/{self._number}/{rank}"

    def _put(self, key: str, message: Any) -> None:
        """In pieces, because the store takes no large values; the key itself comes last and says how many."""
        content = pack(message)
        pieces = range(0, len(content), PIECE_BYTES)
        for number, at in enumerate(pieces):
            self._store.set(f"{key}/{number}", content[at : at + PIECE_BYTES])
        self._store.set(key, str(len(pieces)))

    def _take(self, key: str) -> Any:
        names = [f"{key}/{number}" for number in range(int(self._store.get(key)))]
        content = b"".join(self._store.get(name) for name in names)
        for name in (key, *names):
            self._store.delete_key(name)
        return unpack(content)


class Signs:
    """Tells everybody, from beside the work, what this process is doing."""

    def __init__(self, job: Job, server: RPCServer) -> None:
        self._store = job.connection()
        self._key = f"sign/{job.rank}"
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="verl-signs", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def _tell(self) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            message = {"number": number, "sign": asdict(self._server.sign())}
            try:
                self._store.set(self._key, json.dumps(message))
            except (RuntimeError, OSError):
                return  # the store is gone, and with it whoever would read this
            self._over.wait(SIGN_EVERY_S)

    def stop(self) -> None:
        """A thread that is inside the store when Python ends would take the whole process down."""
        self._over.set()
        self._thread.join(STOP_S)
        atexit.unregister(self.stop)


class Freshness:
    """How long ago a rank's sign last changed, as seen from here."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}

    def age_s(self, rank: int, number: int) -> float:
        last, since = self._seen.get(rank, (-1, 0.0))
        if number != last:
            since = time.monotonic()
            self._seen[rank] = (number, since)
        return time.monotonic() - since


def pause_s(waited_s: float) -> float:
    """Between two looks at the store: short at first, because what is waited for mostly comes at once."""
    return min(max(waited_s / 20, 0.001), 0.05)


def pack(tree: Any) -> bytes:
    """Plain values, tensors and arrays as one compressed safetensors file in memory."""
    text, tensors = encode(tree)
    # Token ids and masks are mostly zeros, and the store is slower than this.
    return zlib.compress(save(tensors, metadata={_TREE: text}), level=1)


def unpack(packed: bytes) -> Any:
    content = zlib.decompress(packed)
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    return decode(header["__metadata__"][_TREE], load(content))


def _outcome(message: Mapping[str, Any]) -> Outcome:
    failure = Failure(**message["failure"]) if message["failure"] else None
    return Outcome(message["value"], failure, [Line(**line) for line in message["lines"]])
