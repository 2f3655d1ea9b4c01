"""Set-up of one rank process: what it is built from, its environment, its network and its process group."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist

from verl.observe.live import live
from verl.workers.rpc_server import RPCServer

if TYPE_CHECKING:
    from torch import nn


Config = TypeVar("Config")
_SIOCGIFADDR = 0x8915  # Linux


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
