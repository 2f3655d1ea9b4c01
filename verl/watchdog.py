"""Notices ranks and engines in other processes that died or hang, and says what each was doing.

A rank counts as moving while its stack changes or while processes it waits for do something (`beat`). Observing needs
no cooperation of the observed thread, so that it works while that thread hangs. An engine counts as moving while it
answers, sends tokens or takes weights; calls that wait for one that does not are released, and it is killed.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, Protocol, TypeVar

from verl.errors import RESUME, EngineLost, RolloutError, TrainingHalted

SAMPLE_S = 0.25
BEAT_S = 0.5
MISSING_S = 6.0
"""How long a rank's heartbeat may stop before it counts as dead, once a connection to it broke."""
CLOSE_S = 5.0
POLL_S = 0.25
"""How often an engine's processes are checked while a call waits for them."""
DYING_S = 10.0
"""How long an engine may take to end after it failed."""
_PREFIX = "verl/heartbeat"
_SHOWN_FRAMES = 12
_COLLECTIVE_FILES = (
    "torch/distributed/",
    "torch/_C/_distributed",
    "verl/distributed.py",
    "verl/rollout/weight_sync/broadcast.py",
)
_TRANSPORT = re.compile(
    r"connection (closed|reset|refused)|broken pipe|gloo|nccl|socket|timed out|timeout|recv|store",
    re.IGNORECASE,
)

Result = TypeVar("Result")
Item = TypeVar("Item")
Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]

beats = 0


def beat() -> None:
    """Something this process waits for (a server, an engine's processes) made progress."""
    global beats
    beats += 1


@dataclass(frozen=True)
class RankStatus:
    """What a rank is doing at this moment; durations in seconds."""

    rank: int
    host: str
    pid: int
    call: str
    call_s: float
    still_s: float
    """Since its stack last changed."""
    waits_for_others: bool
    """Its stack is inside a collective."""
    where: str
    stack: str
    role: str = "rank"

    @property
    def name(self) -> str:
        return f"{self.role} {self.rank} on {self.host} (process {self.pid})"


class StackWatchdog:
    """Samples the stack of the thread that serves calls."""

    def __init__(self, rank: int, role: str = "rank") -> None:
        self.rank, self.role = rank, role
        self.host = socket.gethostname()
        self.call = ""
        """The call that runs, or the one that failed last."""
        self._lock = threading.Lock()
        self._serving: tuple[tuple[int, str], ...] = ()
        """Thread and call of everything that runs, oldest first."""
        self._since = self._moved = time.monotonic()
        self._last: tuple[object, ...] = ()
        threading.Thread(target=self._watch, name="verl-watchdog", daemon=True).start()

    @contextmanager
    def serving(self, call: str) -> Iterator[None]:
        """Around the body of a call, in the thread that runs it. Calls may nest; where two threads serve, the later one
        waits for the other, and the status is that of the first."""
        entry = threading.get_ident(), call
        with self._lock:
            self._since = self._moved = time.monotonic()
            self._show((*self._serving, entry))
        failed = True
        try:
            yield
            failed = False
        finally:
            with self._lock:
                shown, first = self.call, self._serving[0][0] == entry[0]
                self._show(tuple(one for one in self._serving if one is not entry))
                if failed:
                    self.call = shown if first else call  # of nested calls the inner one

    def _show(self, serving: tuple[tuple[int, str], ...]) -> None:
        self._serving = serving
        self.call = next((call for thread, call in reversed(serving) if thread == serving[0][0]), "")

    def _watch(self) -> None:
        while True:
            time.sleep(SAMPLE_S)
            self._sample(self._frame())

    def _sample(self, frame: FrameType | None) -> None:
        seen = (beats, *((id(f.f_code), f.f_lasti) for f in _outwards(frame)))
        if seen != self._last:
            self._last, self._moved = seen, time.monotonic()

    def _frame(self) -> FrameType | None:
        serving = self._serving
        return sys._current_frames().get(serving[0][0]) if serving else None

    def status(self) -> RankStatus:
        frame = self._frame()
        self._sample(frame)
        now = time.monotonic()
        frames = list(_outwards(frame))
        lines = traceback.format_stack(frame)[-_SHOWN_FRAMES:] if frame is not None else []
        return RankStatus(
            rank=self.rank,
            host=self.host,
            pid=os.getpid(),
            call=self.call,
            call_s=now - self._since,
            still_s=now - self._moved,
            waits_for_others=any(part in f.f_code.co_filename for f in frames for part in _COLLECTIVE_FILES),
            where=_location(frames[0]) if frames else "between calls",
            stack="".join(lines),
            role=self.role,
        )


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _location(frame: FrameType) -> str:
    parts = frame.f_code.co_filename.split(os.sep)
    return f"{'/'.join(parts[-3:])}:{frame.f_lineno} ({frame.f_code.co_name})"


def short_name(name: str) -> str:
    """Role and number out of the full name of a process."""
    return name.split(" on ")[0]


def format_hang_report(
    call: str,
    watchdog_s: float,
    names: Sequence[str],
    awaited: Sequence[int],
    statuses: Mapping[int, RankStatus],
    asked: int | None = None,
) -> str:
    """Which ranks are stuck where, and which wait for them. `names`: all ranks; `asked`: how many of them, the first
    ones, were asked for `call` (default: all); `awaited`: those that have not answered it; `statuses`: of the ranks
    that report one."""
    short = [short_name(name) for name in names]
    asked = len(names) if asked is None else asked
    others = [rank for rank in range(asked, len(names)) if rank in statuses]
    if all(rank in statuses and statuses[rank].waits_for_others for rank in awaited):
        # They wait for others in a call that these serve too.
        joint = {statuses[rank].call for rank in awaited}
        awaited = [*awaited, *(rank for rank in others if statuses[rank].call in joint)]
    silent = [rank for rank in range(len(names)) if rank not in statuses]
    stuck = [rank for rank in awaited if rank in statuses and not statuses[rank].waits_for_others]
    waiting = [rank for rank in awaited if rank in statuses and statuses[rank].waits_for_others]
    finished = [rank for rank in range(asked) if rank not in awaited and rank not in silent]
    lines = [f"no progress for {watchdog_s:g} s (trainer.watchdog_s) in {call}."]
    lines += [f"{names[rank]} does not answer at all." for rank in silent]
    in_call = {rank: f", in {seen.call}" for rank, seen in statuses.items() if seen.call not in ("", call)}
    lines += [
        f"{statuses[rank].name} is stuck at {statuses[rank].where}{in_call.get(rank, '')}." for rank in stuck
    ]
    culprits = ", ".join(short[rank] for rank in sorted(silent + stuck)) or "one another"
    lines += [
        f"{statuses[rank].name} waits for {culprits} at {statuses[rank].where}{in_call.get(rank, '')}."
        for rank in waiting
    ]
    for status in (statuses[rank] for rank in others if rank not in awaited):
        at = f"is at {status.where}, in {status.call}"
        lines.append(f"{status.name} {at if status.call else f'waits for {call} of {culprits}'}.")
    if finished and not (silent or stuck):
        lines.append(f"Finished it: {', '.join(short[rank] for rank in finished)}.")
    lines.append(f"The run ends here; {RESUME}. If the work really takes longer, raise trainer.watchdog_s.")
    stacks = [f"\nStack of {short[rank]}:\n{statuses[rank].stack}" for rank in stuck or waiting[:1]]
    return "\n".join(lines + stacks)


class Heartbeat:
    """Counts up in the process group's store, one per process whatever the number of engines.

    A rank that stops because of another leaves a note first, so that its own end is not taken for the cause."""

    _current: tuple[Any, Heartbeat] | None = None
    """The store of the process group it is for, and the heartbeat."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        watchdog: StackWatchdog | None = None,
        on_beat: Callable[[], None] | None = None,
    ) -> None:
        """With `watchdog`, its status is published too; `on_beat` is called in the heartbeat's thread."""
        self.store, self.rank, self.world_size = store, rank, world_size
        self._watchdog, self._on_beat = watchdog, on_beat
        self._seen: dict[int, tuple[bytes, float]] = {}
        self.store.set(f"{_PREFIX}/who/{rank}", f"on {socket.gethostname()} (process {os.getpid()})")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verl-heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @classmethod
    def start(cls) -> Heartbeat:
        """The heartbeat of the default process group: the one that was given to `share`, or a new one."""
        import torch.distributed as dist

        store = dist.distributed_c10d._get_default_store()
        if cls._current is None or cls._current[0] is not store:
            if cls._current is not None:
                cls._current[1].close()
            cls(store, dist.get_rank(), dist.get_world_size()).share()
        assert cls._current is not None
        return cls._current[1]

    def share(self) -> None:
        """Let `start` return this one for the default process group of now."""
        import torch.distributed as dist

        Heartbeat._current = dist.distributed_c10d._get_default_store(), self

    def close(self) -> None:
        """Stop. A thread that is inside the store when Python ends would abort the process."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)
        atexit.unregister(self.close)

    def _run(self) -> None:
        count = 0
        while not self._stop.wait(BEAT_S):
            count += 1
            try:
                self.store.set(f"{_PREFIX}/beat/{self.rank}", str(count))
                if self._watchdog is not None:
                    status = json.dumps(asdict(self._watchdog.status()))
                    self.store.set(f"{_PREFIX}/status/{self.rank}", status)
            except (RuntimeError, OSError):
                break  # the store is gone, and with it the process group
            if self._on_beat is not None:
                self._on_beat()
        if self._on_beat is not None and not self._stop.is_set():
            self._on_beat()  # once more: it sees that the store is gone

    def _get(self, key: str) -> bytes:
        return bytes(self.store.get(f"{_PREFIX}/{key}")) if self.store.check([f"{_PREFIX}/{key}"]) else b""

    def stale_s(self, rank: int) -> float:
        """Seconds since this process first saw the rank's latest beat."""
        found, now = self._get(f"beat/{rank}"), time.monotonic()
        if self._seen.get(rank, (None,))[0] != found:
            self._seen[rank] = found, now
        return now - self._seen[rank][1]

    def status(self, rank: int) -> RankStatus | None:
        """As the rank published it last; None where it publishes none."""
        found = self._get(f"status/{rank}")
        return RankStatus(**json.loads(found)) if found else None

    def missing(self) -> list[int]:
        """Ranks whose heartbeat has stopped and that left no note. Leaves this rank's note."""
        self.store.set(f"{_PREFIX}/note/{self.rank}", "1")
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        first = {rank: self._get(f"beat/{rank}") for rank in others}
        deadline = time.monotonic() + MISSING_S
        while others and time.monotonic() < deadline:
            time.sleep(BEAT_S)
            others = [rank for rank in others if self._get(f"beat/{rank}") == first[rank]]
        return [rank for rank in others if not self._get(f"note/{rank}")]

    def describe(self, rank: int) -> str:
        with suppress(RuntimeError, OSError):
            return f"rank {rank} {self.store.get(f'{_PREFIX}/who/{rank}').decode()}"
        return f"rank {rank}"

    @contextmanager
    def naming_dead_peers(self) -> Iterator[None]:
        """Turn a broken connection to a dead rank into a `TrainingHalted` that names it."""
        import torch

        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not _TRANSPORT.search(str(error)):
                raise
            cause = str(error).strip().split("\n")[0][:200]
            try:
                missing = self.missing()
            except (RuntimeError, OSError):
                missing = [0]  # the store lives with rank 0 and does not answer
            names = ", ".join(self.describe(rank) for rank in missing)
            raise TrainingHalted(
                f"rank {self.rank} stops because {names} died or stopped answering; look at its log for the reason, "
                f"then resume from the last checkpoint (trainer.resume_mode=auto). First error: {cause}"
                if missing
                else f"rank {self.rank}: communication failed although every rank still answers: {cause}"
            ) from error


class EngineProcesses(Protocol):
    """The processes of a rollout engine."""

    name: str

    def check(self) -> None:
        """EngineLost when one of them has ended."""

    def describe(self) -> str:
        """What each of them does now."""

    def log_tail(self) -> str:
        """The end of their log after a heading; empty without a log."""

    def kill(self) -> None:
        """Kill all of them."""


class EngineWatchdog:
    """Waits for an engine's processes for as long as they make progress."""

    def __init__(
        self, processes: EngineProcesses, watchdog_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.processes, self.watchdog_s, self._clock = processes, watchdog_s, clock
        self.lost: EngineLost | None = None
        """Why it is of no use any more."""
        self._last_beat = clock()
        self._busy_here = 0
        self._lock = threading.Lock()
        self._calls: Calls = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls,), name="verl-engine", daemon=True).start()

    def beat(self) -> None:
        """The engine made progress."""
        self._last_beat = self._clock()
        beat()

    def while_taken(self, items: Iterable[Item]) -> Iterator[Item]:
        """Items the engine waits for: producing one is our time, asking for the next is its progress."""
        iterator = iter(items)
        while True:
            self._busy_here += 1
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._busy_here -= 1
                self.beat()
            yield item

    def check(self, what: str) -> None:
        """EngineLost when the engine has died, or made no progress for too long in `what`."""
        with self._lock:
            if self.lost is not None:
                raise self.lost
            try:
                self.processes.check()
            except EngineLost as error:
                self.lost = error
                raise
            if self._busy_here or self._clock() - self._last_beat <= self.watchdog_s:
                return
            beat()  # tells this process's own watcher at once
            self._give_up(
                f"made no progress for {self.watchdog_s:g} s (trainer.watchdog_s) while the trainer (process "
                f"{os.getpid()}) waited for it in {what}: {self.processes.describe()}. It was killed; {RESUME}. If "
                "the work takes longer, raise trainer.watchdog_s."
            )

    def _give_up(self, reason: str) -> None:
        self.lost = EngineLost(f"{self.processes.name} {reason}{self.processes.log_tail()}")
        self.processes.kill()
        raise self.lost

    def call(self, what: str, function: Callable[..., Result], *args: Any) -> Result:
        """`function(*args)` in a thread, which may never return; one at a time."""
        answer: Future[Result] = Future()
        self._last_beat = self._clock()
        self._calls.put((answer, lambda: function(*args)))
        while not wait([answer], POLL_S).done:
            self.check(what)
        self.beat()
        return answer.result()

    def explain(self, error: RolloutError, is_well: Callable[[], bool]) -> None:
        """After an error: raise EngineLost if the engine is dying, which may take it a moment."""
        deadline = time.monotonic() + DYING_S
        while not is_well():
            self.check("its last answer")
            if time.monotonic() > deadline:
                self._give_up(f"does not work any more: {error}; {RESUME}.")
            time.sleep(POLL_S)

    def close(self) -> None:
        """End the thread."""
        self._calls.put(None)


def _serve(calls: Calls) -> None:
    while (call := calls.get()) is not None:
        answer, function = call
        try:
            answer.set_result(function())
        except BaseException as error:  # re-raised in the calling thread
            answer.set_exception(error)
        del call, answer, function
