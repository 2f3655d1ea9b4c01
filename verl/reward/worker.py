"""A worker process of the pool: the trainer's end (`WorkerProcess`) and the process itself (`main`).

It imports the functions once, then scores tasks until its socket closes or it is killed. Tasks come as length-prefixed
pickles from the trainer, results go back as lines of JSON. The socket is separate from stdout, so that what a function
prints is never taken for a result. No torch is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import resource
import signal
import socket
import sys
import time
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass
from typing import BinaryIO

from verl import processes
from verl.child_process import HEADER, PythonChild
from verl.config.sections.reward import RewardConfig
from verl.errors import RewardError
from verl.reward import sandbox
from verl.reward.base import RewardResult, RewardSample
from verl.reward.functions import FunctionSpec, RewardFunction, load, load_function
from verl.reward.scorers import register_scorer
from verl.reward.scoring import FunctionExited, score, score_async

_output_log = logging.getLogger("verl.reward.output")


@dataclass(frozen=True)
class WorkerSetup:
    """The first message: what to import and under which limits."""

    specs: tuple[FunctionSpec, ...]
    config: RewardConfig
    scorers: Mapping[str, str]
    """Scorers the user registered in the trainer, as `module:function`."""


@dataclass(eq=False)
class Task:
    """One call: a function and the samples it is for, pickled."""

    id: int
    key: Hashable
    function: int
    rows: tuple[str, ...]
    payload: bytes
    sent_at: float = 0.0
    alone: bool = False
    """Set after a crash whose cause is unclear: the second attempt has a worker to itself."""


class WorkerProcess(PythonChild):
    """A worker process under its supervisor, and the tasks it was sent."""

    def __init__(self, memory_bytes: int) -> None:
        """`memory_bytes` limits the worker with everything it starts, where a cgroup can."""
        self.tasks: dict[int, Task] = {}
        self.ready = False
        self.ending = False
        self.writer: asyncio.StreamWriter | None = None
        self.started_at = self.last_reply_at = time.monotonic()
        self.kill_reason = ""
        self.suspects: list[Task] = []
        """Tasks that caused `kill_reason`, or may have."""
        self.seen_pids: set[int] = set()
        """Of the worker and what it started, as far as `pids` met them."""
        self.cgroup = processes.MemoryCgroup.create(memory_bytes)
        super().__init__(__name__, _output_log, [] if self.cgroup is None else [self.cgroup.join_fd])

    def send(self, payload: bytes) -> None:
        assert self.writer is not None
        self.writer.write(HEADER.pack(len(payload)) + payload)

    def kill(self, reason: str, suspects: list[Task]) -> None:
        """Stop talking to it; `_keep_worker` then ends it and starts another."""
        self.kill_reason, self.suspects, self.ending = reason, suspects, True
        if self.writer is not None:
            self.writer.transport.abort()

    def pids(self) -> list[int]:
        """The processes of the worker and of what it started."""
        if self.cgroup is not None:
            pids = self.cgroup.pids()
        else:
            pids = [process.pid for process in processes.descendants(self.process.pid)]
        self.seen_pids.update(pids)
        return pids

    async def end(self) -> None:
        self.ending = True
        self.pids()
        if self.writer is not None:
            self.writer.transport.abort()
        await super().end()
        processes.remove_sysv_segments(self.seen_pids)
        if self.cgroup is not None:
            self.cgroup.close()
            self.cgroup = None


def main(socket_fd: int, cgroup_fd: int | None = None) -> None:
    """Serve until the trainer closes the socket."""
    processes.die_with_parent()
    if cgroup_fd is not None:
        processes.join_cgroup(cgroup_fd)
    processes.prefer_as_oom_victim()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The trainer may be finished before this process has started.
    with (
        socket.socket(fileno=socket_fd) as channel,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        reader = channel.makefile("rb")
        if (frame := _read_frame(reader)) is not None:
            _work(channel, reader, pickle.loads(frame))


def _work(channel: socket.socket, reader: BinaryIO, setup: WorkerSetup) -> None:
    """Import the functions and score what comes."""
    config = setup.config
    sandbox.configure(config)
    if config.memory_limit_mb is not None:
        limit = config.memory_limit_mb << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        for data_source, target in setup.scorers.items():
            register_scorer(data_source)(load_function(FunctionSpec(target, key="register_scorer")))
        functions = [load(spec) for spec in setup.specs]
    except RewardError as error:
        channel.sendall(_line({"load_error": str(error)}))
        return
    channel.sendall(_line({"ready": [asdict(function.signature) for function in functions]}))
    if any(function.signature.is_async for function in functions):
        asyncio.run(_serve_async(channel, functions, config.timeout_s))
    else:
        _serve(channel, reader, functions, config.timeout_s)


def _serve(
    channel: socket.socket, reader: BinaryIO, functions: list[RewardFunction], timeout_s: float
) -> None:
    pid = os.getpid()
    while (frame := _read_frame(reader)) is not None:
        task, number, samples = pickle.loads(frame)
        try:
            results = score(functions[number], samples, timeout_s)
        except FunctionExited as error:
            results = [RewardResult(None, error=str(error)) for _ in samples]
        if os.getpid() != pid:
            os._exit(0)  # a child that the function forked and that returned: the parent answers
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm the function left must not hit the next sample
        channel.sendall(_reply(task, results))


async def _serve_async(channel: socket.socket, functions: list[RewardFunction], timeout_s: float) -> None:
    pid, running = os.getpid(), set[asyncio.Task[None]]()
    reader, writer = await asyncio.open_unix_connection(sock=channel)

    async def one(task: int, number: int, samples: list[RewardSample]) -> None:
        try:
            results = await score_async(functions[number], samples, timeout_s)
        except FunctionExited as error:
            results = [RewardResult(None, error=str(error)) for _ in samples]
        if os.getpid() != pid:
            os._exit(0)  # as in `_serve`
        writer.write(_reply(task, results))

    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            call = asyncio.create_task(one(*pickle.loads(await reader.readexactly(length))))
            running.add(call)
            call.add_done_callback(running.discard)


def _read_frame(reader: BinaryIO) -> bytes | None:
    """The next message; None where the trainer closed the socket before its end."""
    header = reader.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    frame = reader.read(length)
    return frame if len(frame) == length else None


def _line(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _reply(task: int, results: list[RewardResult]) -> bytes:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have replaced or closed it
            stream.flush()
    return _line({"id": task, "results": [[result.score, result.extra, result.error] for result in results]})
