"""The trainer's end of one worker process: start it, talk to it without blocking, end it.

Nothing that comes back is believed before it has been checked: a line that is not the JSON we expect makes
the worker a broken one, to be killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from verl.reward import cgroup, processes, supervise
from verl.reward.base import RewardResult
from verl.reward.worker import HEADER, WorkerSetup, longest_line

_output_log = logging.getLogger("verl.reward.output")

_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from verl.reward.worker import main; main(*map(int, sys.argv[1].split()))"
)
_SLACK = 1 << 20
_TAIL = 2000
_SHOWN_LINES = 50


class Broken(Exception):
    """The worker sent something that is not a reply, or closed its channel."""


@dataclass
class Task:
    """One call: a function and the samples it is for, already packed for the wire."""

    number: int
    key: Hashable
    function: int
    rows: tuple[int, ...]
    payload: bytes
    sent_at: float = 0.0
    alone: bool = False
    """Set after a crash nobody could be blamed for: the next try has a worker to itself."""


class WorkerHandle:
    """A worker process and what it has been asked to do."""

    def __init__(self, setup: WorkerSetup, memory_bytes: int) -> None:
        """`memory_bytes` limits the worker with everything it starts, where a cgroup can."""
        self.outstanding: dict[int, Task] = {}
        self.ready = False
        self.retiring = False
        self.exclusive = False
        self.started_at = self.last_reply_at = time.monotonic()
        self._unread = bytearray()
        self._searched = 0
        self._unsent = bytearray()
        self._tail = self._partial = b""
        self._shown = 0
        self.group = cgroup.create(memory_bytes)
        self.channel, theirs = socket.socketpair()
        with theirs:
            inherited = [theirs.fileno(), *([] if self.group is None else [self.group.entrance])]
            worker = [sys.executable, "-c", _START, " ".join(map(str, inherited)), json.dumps(sys.path)]
            self.process = subprocess.Popen(
                supervise.command_line(worker),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=inherited,
            )
        self.channel.setblocking(False)
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._send(pickle.dumps(setup))

    @property
    def pid(self) -> int:
        """Of the supervisor, below which the worker and everything it starts is found."""
        return self.process.pid

    @property
    def wants_to_write(self) -> bool:
        return bool(self._unsent)

    def assign(self, task: Task) -> None:
        task.sent_at = time.monotonic()
        self.outstanding[task.number] = task
        self.exclusive = task.alone
        self._send(task.payload)

    def flush(self) -> None:
        """Write what the channel takes."""
        while self._unsent:
            try:
                sent = self.channel.send(memoryview(self._unsent)[: 1 << 20])
            except BlockingIOError:
                return
            except OSError:
                return  # the reading side reports it
            del self._unsent[:sent]

    def messages(self) -> Iterator[dict[str, Any]]:
        """Complete messages that have arrived. Raises Broken."""
        while True:
            try:
                data = self.channel.recv(1 << 18)
            except BlockingIOError:
                break
            except ConnectionResetError:
                # said once when the other end closed with something unread; what it sent is still there
                continue
            except OSError as error:
                raise Broken(f"broke its result channel ({error})") from error
            if not data:
                yield from self._lines()
                raise Broken("")
            self._unread += data
            if (
                len(self._unread)
                > sum(longest_line(len(task.rows)) for task in self.outstanding.values()) + _SLACK
            ):
                raise Broken("flooded its result channel")
        yield from self._lines()

    def _lines(self) -> Iterator[dict[str, Any]]:
        while (end := self._unread.find(b"\n", self._searched)) >= 0:
            self._searched = 0
            line = bytes(self._unread[:end])
            del self._unread[: end + 1]
            try:
                message = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise Broken("wrote into its result channel") from error
            if not isinstance(message, dict):
                raise Broken("wrote into its result channel")
            yield message
        self._searched = len(self._unread)

    def take_reply(self, message: dict[str, Any]) -> tuple[Task, list[RewardResult]]:
        """The task a message answers, and its results. Raises Broken."""
        task = self.outstanding.get(message.get("id"))  # type: ignore[arg-type]
        rows = message.get("results")
        if task is None or not isinstance(rows, list) or len(rows) != len(task.rows):
            raise Broken("sent a result for a task it was not given")
        results = [_result(row) for row in rows]
        del self.outstanding[task.number]
        self.last_reply_at = time.monotonic()
        if not self.outstanding:
            self.exclusive = False
        return task, results

    def read_output(self) -> bool:
        """Pass on what the functions printed; False at its end."""
        try:
            data = self.output.read(1 << 16)
        except (BlockingIOError, ValueError):
            return True
        if data is None:
            return True
        self._tail = (self._tail + data)[-_TAIL:]
        *lines, self._partial = (self._partial + data).split(b"\n")
        if not data or len(self._partial) > _TAIL:
            lines, self._partial = [*lines, self._partial], b""
        for line in filter(None, lines):
            self._shown += 1
            level = logging.INFO if self._shown <= _SHOWN_LINES else logging.DEBUG
            _output_log.log(level, "%s", line[:500].decode(errors="replace"))
            if self._shown == _SHOWN_LINES:
                _output_log.info("(further output of this worker is logged at level DEBUG)")
        return bool(data)

    def last_words(self) -> str:
        """The last line it printed, for the message about its end."""
        with contextlib.suppress(OSError, ValueError):
            self.read_output()
        lines = [line for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        return f"; last output: {lines[-1].strip()[:200]}" if lines else ""

    def exit_status(self, patience_s: float = 3.0) -> int | None:
        """How it ended by itself; None where it is still there. It closes its channel a moment before it is gone."""
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Kill it with everything it started."""
        processes.end_supervised(self.process)
        self.channel.close()
        self.output.close()
        if self.group is not None:
            self.group.close()
            cgroup.sweep()

    def _send(self, payload: bytes) -> None:
        self._unsent += HEADER.pack(len(payload)) + payload
        self.flush()


def _result(row: Any) -> RewardResult:
    if not (isinstance(row, list) and len(row) == 3):
        raise Broken("sent a malformed result")
    score, extra, error = row
    good = isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)
    if not isinstance(extra, dict) or not (good or (score is None and isinstance(error, str))):
        raise Broken("sent a malformed result")
    return RewardResult(float(score) if good else None, extra, None if good else error)
