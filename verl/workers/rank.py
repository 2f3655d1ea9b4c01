"""One rank process: what it is built from, its environment, its network and process group, and the calls it serves.

No exception leaves `RPCServer.serve` or `stream`: it is sent to the driver as text, with the rank and host it belongs
to, and with what the rank logged.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist

from verl import errors
from verl.errors import TrainingHalted, VerlError
from verl.observe.live import Snapshot, live
from verl.watchdog import RankStatus, StackWatchdog

if TYPE_CHECKING:
    from torch import nn


Config = TypeVar("Config")
_SIOCGIFADDR = 0x8915  # Linux
# How the heartbeat reports that a connection to another rank broke (`verl.watchdog`).
_OF_ANOTHER_RANK = ("died or stopped answering", "communication failed although")
# How torch.distributed reports it outside of an engine (while saving, while resuming).
_BROKEN = re.compile(r"connection (closed|reset|refused)|broken pipe|remote worker crashing", re.IGNORECASE)


@dataclass
class RankSetup(Generic[Config]):
    """What every rank is built from; `Config` is that of the command (PPOConfig, OfflineConfig, GenerationConfig)."""

    cfg: Config
    tokenizer: Any
    training_steps: int | None
    run_folder: Path
    repeat_to: int | None = None
    """The last step of `verl replay`, where every rank runs the loop."""
    store: tuple[str, int] | None = None
    """Address of rank 0's store; None: a single rank."""
    threads: int | None = None
    """Of a CPU rank; None: torch's default."""
    one_host: bool = True
    search_path: tuple[str, ...] = ()
    """The driver's `sys.path`, for plugins."""
    folder: str = ""
    """The driver's working directory, for relative paths in the config."""
    model: nn.Module | None = None
    devices: tuple[str, ...] = ()
    """The GPU each rank sees, by rank."""


def prepare_process(setup: RankSetup[Any], address: str) -> None:
    """Before a model is loaded: module paths, plugins, threads, and gloo's network interface for `address`."""
    from verl.config.load import import_plugins_of
    from verl.runtime import quiet_transformers

    quiet_transformers()
    sys.path += [folder for folder in setup.search_path if folder not in sys.path]
    if os.path.isdir(setup.folder):
        os.chdir(setup.folder)
    import_plugins_of(setup.cfg)
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    use_interface_of("127.0.0.1" if setup.one_host else address)
    if setup.run_folder != Path():  # a command without a run, such as generation, has none
        live.record_phases(setup.run_folder / "phases" / f"{live.process}.jsonl", live.process)


def record_rank_phases(run_folder: Path, rank: int) -> None:
    """For a process of torchrun."""
    live.record_phases(run_folder / "phases" / f"rank_{rank}.jsonl", f"rank_{rank}")


def use_interface_of(address: str) -> None:
    """By default gloo takes the address of the host's name, which others often cannot reach."""
    interface = interface_of(address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def collective_timeout_s(watchdog_s: float) -> float:
    """Longer than the watchdog, which reports who waits for whom; this is for when the watchdog itself is gone."""
    return 2 * watchdog_s + 60


def join_process_group(store: Any, rank: int, world_size: int, *, device: str, watchdog_s: float) -> None:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=collective_timeout_s(watchdog_s)),
    )


def interface_of(address: str) -> str | None:
    """The network interface that carries an IPv4 address; None where it cannot be found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


@dataclass(frozen=True)
class Failure:
    """An exception on a rank."""

    rank: int
    host: str
    pid: int
    call: str
    kind: str
    message: str
    traceback: str
    role: str = "rank"

    @classmethod
    def of(cls, error: BaseException, watchdog: StackWatchdog) -> Failure:
        text = "".join(traceback.format_exception(error))
        kind, message = type(error).__name__, str(error)
        return cls(
            watchdog.rank, watchdog.host, os.getpid(), watchdog.call, kind, message, text, watchdog.role
        )

    @property
    def caused_by_another(self) -> bool:
        """A rank that stops because its connection to another broke."""
        if self.kind == TrainingHalted.__name__:
            return any(text in self.message for text in _OF_ANOTHER_RANK)
        return "torch/distributed/" in self.traceback and _BROKEN.search(self.message) is not None

    def as_error(self) -> VerlError:
        """To raise on the driver: the same class for what a user can correct, with the rank first."""
        where = f"{self.role} {self.rank} on {self.host} (process {self.pid}), in {self.call}"
        known = getattr(errors, self.kind, None)
        if isinstance(known, type) and issubclass(known, VerlError):
            return known(f"{where}: {self.message}")
        if self.caused_by_another:
            return TrainingHalted(
                f"{where}: the connection to another rank broke: most likely that rank died; look at its log for the "
                "reason, then resume from the last checkpoint (trainer.resume_mode=auto). "
                f"First error: {self.message.strip().splitlines()[0][:200]}"
            )
        return TrainingHalted(f"{where}: {self.kind}: {self.message}\n\n{self.traceback}")


@dataclass
class CallOutcome:
    """The answer to a call."""

    value: Any = None
    failure: Failure | None = None
    logs: list[tuple[str, int, str]] = field(default_factory=list)
    """Logger, level and text of what was logged meanwhile, repeated by the driver."""


class LogBuffer(logging.Handler):
    """Keeps what a rank logs until its next answer: everything from rank 0, warnings from the others."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.INFO if rank == 0 else logging.WARNING)
        self._records: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append((record.name, record.levelno, record.getMessage()))

    def take(self) -> list[tuple[str, int, str]]:
        self.acquire()
        try:
            taken, self._records = self._records, []
        finally:
            self.release()
        return taken


class RPCServer:
    """Serves its methods `do_<call>` one at a time, and `control_<call>` concurrently from another thread. The driver
    names them by reference (`RankCalls.all(TrainRank.do_save, ...)`).

    Independent of how calls arrive (Ray, or a test that starts processes itself)."""

    role = "rank"
    """What messages call this process, before its number."""

    def __init__(self, rank: int, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.watchdog = StackWatchdog(rank, self.role)
        self.address = "127.0.0.1"
        live.process = f"{self.role} {rank}".replace(" ", "_")
        self._logs = LogBuffer(rank)
        root = logging.getLogger()
        root.addHandler(self._logs)
        root.setLevel(logging.INFO)

    def method(self, call: str) -> Callable[..., Any]:
        """What serves a call."""
        method: Callable[..., Any] = getattr(self, f"do_{call}")
        return method

    def serve(self, call: str, *args: Any, label: str = "") -> CallOutcome:
        """The answer of `do_<call>`. `label`: what messages and phases call it."""
        value, failure, label = None, None, label or call
        try:
            with self.watchdog.serving(label), live.phase(label):
                value = self.method(call)(*args)
        # SystemExit would end this process, or its thread, without a message.
        except (Exception, SystemExit) as error:
            failure = Failure.of(error, self.watchdog)
        return CallOutcome(value, failure, self._logs.take())

    def stream(self, call: str, *args: Any) -> Iterator[CallOutcome]:
        """Like `serve`, for a call that yields several values."""
        try:
            with self.watchdog.serving(call), live.phase(call):
                for value in self.method(call)(*args):
                    yield CallOutcome(value, None, self._logs.take())
        except (Exception, SystemExit) as error:
            yield CallOutcome(None, Failure.of(error, self.watchdog), self._logs.take())

    def control_status(self) -> RankStatus:
        return self.watchdog.status()

    def control_live(self) -> Snapshot:
        return live.snapshot()

    def do_handshake(self, address: str = "127.0.0.1", log: str = "") -> dict[str, Any]:
        self.address = address
        return {
            "host": self.watchdog.host,
            "pid": os.getpid(),
            "address": address,
            "log": log,
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        }

    def do_close(self) -> None:
        """Free what was built."""


class JoinedRank(RPCServer):
    """A rank that joins the others in a process group."""

    _store: Any = None

    def do_open_store(self, address: str) -> tuple[str, int]:
        """On rank 0: the store, on a free port of this address only."""
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            address,
            port,
            self.world_size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return address, port

    def join(self, setup: RankSetup[Any]) -> None:
        """Prepare this process and join the process group."""
        from verl.runtime import seed_everything

        prepare_process(setup, self.address)
        trainer = setup.cfg.trainer
        if self.world_size > 1:
            if self._store is None:
                assert setup.store is not None
                self._store = dist.TCPStore(*setup.store, self.world_size, is_master=False)
            join_process_group(
                self._store,
                self.rank,
                self.world_size,
                device=trainer.device,
                watchdog_s=trainer.watchdog_s,
            )
        seed_everything(trainer.seed)
