"""The worker process: loads the functions once, then scores tasks until its channel closes or it is killed.

Tasks come as length-prefixed pickles from the trainer, which we trust; results go back as lines of JSON,
because the trainer must never unpickle what a process that ran a stranger's code has sent. The channel is a
socket of its own, so that what a function prints cannot be taken for a result. No torch is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.errors import RewardError
from verl.reward import cgroup, processes, sandbox
from verl.reward.base import RewardResult, RewardSample
from verl.reward.evaluate import Function, failed, load, score, score_async
from verl.reward.loading import FunctionSpec, load_function
from verl.reward.scorers import register_scorer

HEADER = struct.Struct(">I")


def longest_line(samples: int) -> int:
    """How long the reply about so many samples may be."""
    return (1 << 20) + samples * (64 << 10)


Task = tuple[int, int, list[RewardSample]]


@dataclass(frozen=True)
class WorkerSetup:
    """The first message: what to load and under which limits."""

    specs: tuple[FunctionSpec, ...]
    timeout_s: float
    memory_limit_mb: int | None = None
    scorers: Mapping[str, str] = field(default_factory=dict)
    """Scorers the user registered in the trainer, as `module:function`."""
    sandbox_settings: sandbox.Settings = field(default_factory=sandbox.Settings)


def main(channel_fd: int, group_fd: int | None = None) -> None:
    """Serve the channel; never returns to the caller's code with work undone."""
    processes.die_with_parent()
    if group_fd is not None:
        cgroup.join(group_fd)
    processes.die_first_when_memory_is_short()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = socket.socket(fileno=channel_fd)
    _keep_from_children(channel)
    reader = channel.makefile("rb")
    setup: WorkerSetup = pickle.loads(_read_frame(reader) or b"")
    sandbox.configure(setup.sandbox_settings)
    if setup.memory_limit_mb is not None:
        limit = setup.memory_limit_mb << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        for data_source, target in setup.scorers.items():
            register_scorer(data_source)(load_function(FunctionSpec(target, key="register_scorer")))
        functions = [load(spec) for spec in setup.specs]
    except RewardError as error:
        _send(channel, {"load_error": str(error)})
        return
    _send(channel, {"ready": [function.signature.to_json() for function in functions]})
    if any(function.signature.is_async for function in functions):
        asyncio.run(_serve_async(channel, functions, setup.timeout_s))
    else:
        _serve(channel, reader, functions, setup.timeout_s)


def _serve(
    channel: socket.socket, reader: io.BufferedReader, functions: list[Function], timeout: float
) -> None:
    own_pid = os.getpid()
    while (frame := _read_frame(reader)) is not None:
        number, index, samples = _task(frame)
        try:
            results = score(functions[index], samples, timeout)
        except BaseException as error:  # sys.exit() in a function must not end the worker
            results = failed(functions[index], samples, error, None)
        if os.getpid() != own_pid:
            # the function forked and the child came back here: it has no business with the channel
            os._exit(0)
        _flush()
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm the function forgot must not hit the next sample
        _reply(channel, number, functions[index].name, results)


async def _serve_async(channel: socket.socket, functions: list[Function], timeout: float) -> None:
    own_pid = os.getpid()
    running: set[asyncio.Task[None]] = set()

    async def one(number: int, index: int, samples: list[RewardSample]) -> None:
        try:
            results = await score_async(functions[index], samples, timeout)
        except (SystemExit, KeyboardInterrupt) as error:
            results = failed(functions[index], samples, error, None)
        if os.getpid() != own_pid:
            os._exit(0)
        _flush()
        _reply(channel, number, functions[index].name, results)

    # The socket itself stays blocking for `_reply`; the stream works on a duplicate of it.
    stream, _ = await asyncio.open_connection(sock=_nonblocking_twin(channel))
    while True:
        try:
            header = await stream.readexactly(HEADER.size)
            frame = await stream.readexactly(HEADER.unpack(header)[0])
        except asyncio.IncompleteReadError:
            break
        task = asyncio.get_running_loop().create_task(one(*_task(frame)))
        running.add(task)
        task.add_done_callback(running.discard)


def _nonblocking_twin(channel: socket.socket) -> socket.socket:
    """O_NONBLOCK belongs to the open file, which a duplicate shares: `_send` waits by select where needed."""
    twin = channel.dup()
    twin.setblocking(False)
    return twin


def _keep_from_children(channel: socket.socket) -> None:
    descriptor = channel.fileno()
    os.set_inheritable(descriptor, False)

    def in_child() -> None:
        processes.die_with_parent()
        with contextlib.suppress(OSError):
            # Not close(): the number would be given to the next file the child opens.
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor, inheritable=False)

    os.register_at_fork(after_in_child=in_child)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have replaced or closed it
            stream.flush()


def _task(frame: bytes) -> Task:
    return pickle.loads(frame)


def _read_frame(reader: io.BufferedReader) -> bytes | None:
    header = reader.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length = HEADER.unpack(header)[0]
    frame = reader.read(length)
    return frame if len(frame) == length else None


def _reply(channel: socket.socket, number: int, name: str, results: list[RewardResult]) -> None:
    message = {"id": number, "results": [[r.score, r.extra, r.error] for r in results]}
    text = json.dumps(message)
    limit = longest_line(len(results))
    if len(text) > limit:
        error = f"Reward function {name}: its extra values take {len(text)} characters; at most {limit} fit"
        message["results"] = [[None, {}, error] for _ in results]
        text = json.dumps(message)
    _write(channel, text.encode() + b"\n")


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    _write(channel, json.dumps(message).encode() + b"\n")


def _write(channel: socket.socket, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[channel.send(view) :]
        except BlockingIOError:
            select.select([], [channel], [])
