"""What every process of a run does before it loads a model."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from verl.workers.rank import RankSetup

_SIOCGIFADDR = 0x8915  # Linux


def prepare(setup: RankSetup, address: str) -> None:
    """Find the controller's modules and files, import plugins, take the share of threads; `address` is this node's."""
    from verl.config.load import import_plugins
    from verl.runtime import quiet_transformers

    quiet_transformers()
    sys.path += [folder for folder in setup.search_path if folder not in sys.path]
    if os.path.isdir(setup.folder):
        os.chdir(setup.folder)
    import_plugins(setup.cfg)
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    # Left alone, gloo takes the address of the host's name, which is often one that others cannot reach.
    interface = interface_of("127.0.0.1" if setup.one_host else address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def patience(watchdog_s: float) -> float:
    """How long a collective may take. The controller notices a hang first and says who waits for whom; this is for
    when it is gone."""
    return 2 * watchdog_s + 60


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
