"""Weights to processes of the same node: buckets in memory that both sides map.

On GPUs the memory is a CUDA allocation shared by its IPC handle, otherwise a file in /dev/shm. Header, handle and
acknowledgements travel as JSON over a unix socket in a folder only this user can open; nothing is unpickled. Receivers
copy a bucket out before they acknowledge it: the sender then reuses the memory while they load their copy.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl.errors import RolloutError
from verl.models.weight_source import NamedTensors
from verl.rollout.stale_files import MEMORY, new_path, remove
from verl.rollout.weight_sync.buckets import (
    BUCKET_BYTES,
    bucket_header,
    pack,
    packed_bytes,
    split_buckets,
    unpack,
)

_POLL_S = 0.25
_ACKNOWLEDGED = b"."


def shared_folder() -> Path:
    """A new folder, in memory where the system has one; only this user may read it."""
    folder = new_path("weights", MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None)
    folder.mkdir(mode=0o700)
    return folder


class SharedMemorySender:
    """Sends to `receivers` processes, which call `receive_tensors(address)`. `check` is called while waiting for them
    and may raise. ConnectionError when a receiver ends the connection."""

    def __init__(self, receivers: int, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        self._receivers, self._timeout_s, self._check = receivers, timeout_s, check
        self._connections: list[socket.socket] = []
        self._buffer: torch.Tensor | None = None
        self._files = 0
        self._stack = ExitStack()
        self.folder = shared_folder()
        self._stack.callback(remove, self.folder)
        self.address = str(self.folder / "socket")
        self._listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(self.address)
        self._listener.listen(receivers)

    def __enter__(self) -> SharedMemorySender:
        return self

    def __exit__(self, *about: object) -> None:
        """Receivers that still wait get an error."""
        on_gpu = self._buffer is not None and self._buffer.is_cuda
        self._buffer = None
        self._stack.close()
        if on_gpu:
            torch.cuda.ipc_collect()

    def send(self, tensors: NamedTensors, limit: int = BUCKET_BYTES) -> None:
        """All tensors to every receiver."""
        gpus = self._accept()
        for bucket in split_buckets(tensors, limit):
            header = bucket_header(bucket)
            size = packed_bytes(header)
            device = next(iter(bucket.values())).device
            use_ipc = device.type == "cuda" and all(_uuid(device) in seen for seen in gpus)
            new = self._buffer is None or self._buffer.numel() < size or self._buffer.is_cuda != use_ipc
            if new:
                self._buffer = self._allocate(size, device if use_ipc else None)
            assert self._buffer is not None
            pack(bucket, self._buffer)
            if device.type == "cuda":
                # Other processes read what has been written, not what is queued.
                torch.cuda.synchronize(device)
            for connection in self._connections:
                self._send_line(connection, [header, self._handle(self._buffer) if new else None])
            for connection in self._connections:
                self._wait(partial(_acknowledged, connection), "take a bucket")
        for connection in self._connections:
            self._send_line(connection, [[], None])

    def _accept(self) -> list[list[str]]:
        """Connect every receiver; the GPUs each of them sees."""
        self._listener.settimeout(_POLL_S)
        for _ in range(self._receivers):
            connection = self._wait(lambda: self._listener.accept()[0], "connect")
            self._connections.append(self._stack.enter_context(connection))
        gpus = []
        for connection in self._connections:
            connection.settimeout(self._timeout_s)
            with connection.makefile("rb") as hello:
                gpus.append(json.loads(hello.readline() or b"[]"))
            connection.settimeout(_POLL_S)
        return gpus

    def _wait(self, step: Callable[[], Any], what: str) -> Any:
        """The result of `step`, which times out every `_POLL_S`."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return step()
            except TimeoutError:
                self._check()
                if time.monotonic() > deadline:
                    raise RolloutError(
                        f"the trainer waited {self._timeout_s:g} s for the engine's workers to {what} in a weight "
                        "sync; they hang or have died (see their log)"
                    ) from None

    def _send_line(self, connection: socket.socket, message: Any) -> None:
        connection.settimeout(self._timeout_s)
        connection.sendall(json.dumps(message).encode() + b"\n")
        connection.settimeout(_POLL_S)

    def _allocate(self, size: int, device: torch.device | None) -> torch.Tensor:
        self._buffer = None  # first: at most one bucket is allocated
        if device is not None:
            return torch.empty(size, dtype=torch.uint8, device=device)
        (self.folder / f"bucket{self._files}").unlink(missing_ok=True)
        self._files += 1
        path = self.folder / f"bucket{self._files}"
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            # Reserved now: writing to a mapped file that finds no memory would kill the process.
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise RolloutError(
                f"{self.folder.parent} is too small for a bucket of {size >> 20} MiB of weights ({error.strerror}); "
                "enlarge it (docker: --shm-size)"
            ) from error
        finally:
            os.close(descriptor)
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

    def _handle(self, buffer: torch.Tensor) -> Any:
        """How another process opens the buffer; a new handle for each, since CUDA counts the openings."""
        path = str(self.folder / f"bucket{self._files}")
        return _ipc_handle(buffer) if buffer.is_cuda else [path, buffer.numel()]


def _acknowledged(connection: socket.socket) -> None:
    if connection.recv(1) != _ACKNOWLEDGED:
        raise ConnectionError("a worker of the engine ended the weight sync")


def receive_tensors(address: str, timeout_s: float) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of one `send`, in a private copy per bucket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(address)
        gpus = [_uuid(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
        connection.sendall(json.dumps(gpus).encode() + b"\n")
        buffer: torch.Tensor | None = None
        with connection.makefile("rb") as messages:
            while True:
                try:
                    line = messages.readline()
                except TimeoutError:
                    raise RolloutError(
                        f"the trainer sent no weights for {timeout_s:g} s (see its log)"
                    ) from None
                if not line:
                    raise RolloutError("the trainer broke off the weight sync (see its log)")
                header, handle = json.loads(line)
                if not header:
                    return
                if handle is not None:
                    buffer = None  # closes the old one
                    buffer = _open(handle)
                assert buffer is not None
                copy = buffer[: packed_bytes(header)].to("cuda" if buffer.is_cuda else "cpu", copy=True)
                if copy.is_cuda:
                    torch.cuda.synchronize()
                connection.sendall(_ACKNOWLEDGED)
                yield from unpack(header, copy)
                del copy


def _open(handle: Any) -> torch.Tensor:
    if isinstance(handle, dict):
        return _open_ipc(handle)
    path, size = handle
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


# -- CUDA IPC ---------------------------------------------------------------------------------------------------


def _uuid(device: torch.device) -> str:
    """A GPU's own name: its number differs between processes with different CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _ipc_handle(buffer: torch.Tensor) -> dict[str, Any]:
    from torch.multiprocessing.reductions import reduce_tensor

    fields = reduce_tensor(buffer)[1]
    # The arguments of `rebuild_cuda_tensor`, without types and the device's number.
    plain = [fields[3], *fields[7:10], *fields[11:]]
    encoded = [[base64.b64encode(field).decode()] if isinstance(field, bytes) else field for field in plain]
    return {"uuid": _uuid(buffer.device), "size": buffer.numel(), "fields": encoded}


def _open_ipc(handle: dict[str, Any]) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    device = next(device for device in devices if _uuid(device) == handle["uuid"])
    fields = [base64.b64decode(f[0]) if isinstance(f, list) else f for f in handle["fields"]]
    offset, *storage = fields[:4]
    types = (torch.storage.TypedStorage, torch.uint8, device.index)
    arguments: Any = (torch.Tensor, (handle["size"],), (1,), offset, *types, *storage, False, *fields[4:])
    tensor: torch.Tensor = rebuild_cuda_tensor(*arguments)
    return tensor
