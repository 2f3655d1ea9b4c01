"""Calls to rank processes on Ray: returns every rank's answer, or raises one error that names the rank at fault.

A dead rank is noticed by its connection, a hung one when no awaited rank has moved for `trainer.watchdog_s`. After an
error nothing more is sent to the ranks. Several threads may wait for ranks, each for its own calls.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar, TypeVarTuple

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from verl.errors import RESUME, TrainingHalted, VerlError, WorkersLost
from verl.observe.live import live
from verl.watchdog import RankStatus, format_hang_report, short_name
from verl.workers.rank import CallOutcome, Failure, RPCServer
from verl.workers.ray_daemons import ClusterHealth

POLL_S = 1.0
STATUS_S = 5.0
"""How long a healthy rank takes at most to answer a control call."""
LOG_TAIL_LINES = 12
UNKNOWN_S = 30.0
"""Until Ray knows what became of a process that it cannot reach; twice its time for a silent node."""
NODE_LOST = "its node was lost"
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STACK = re.compile(r"\s*(\*\*\*|PC:\s*@|@\s+0x)|\[[^\]]*\] \(\w+\) |.*::.*\(.*\) \[0x|/\S+\.so\S*\(")
"""Stacks and reports of Ray's C++ code, which say nothing of what the rank did."""

Problem: TypeAlias = "RayError | Failure"
Args = TypeVarTuple("Args")
Value = TypeVar("Value")
Method: TypeAlias = Callable[[Any, *Args], Value]
"""A method of the server in the rank processes, e.g. `TrainRank.do_save`."""


def name_of(call: Callable[..., Any]) -> str:
    """What a method is called between processes and in messages."""
    return call.__name__.removeprefix("do_").removeprefix("control_")


class _Wait(threading.local):
    """One thread's wait for progress."""

    def __init__(self) -> None:
        self.asked = 0.0
        self.no_status: dict[int, float] = {}
        """Since when ranks have not answered, of those awaited since `asked`."""


class RankCalls:
    """The rank processes of one role, by their actor handles."""

    def __init__(self, actors: Sequence[Any], watchdog_s: float, role: str = "rank") -> None:
        self.actors = list(actors)
        self.watchdog_s = watchdog_s
        self.role = role
        self.names = [f"{role} {rank}" for rank in range(len(self.actors))]
        self.logs = [""] * len(self.actors)
        self.addresses: list[str] = []
        self.devices: list[str] = []
        self.broken = False
        self.peers: list[RankCalls] = []
        """Processes of other roles, checked while these work."""
        self._lanes = ["serve"] * len(self.actors)
        self._wait = _Wait()
        self._status_lock = threading.Lock()
        self._status_refs: dict[Any, int] = {}
        self._checked = 0.0
        self._health = ClusterHealth()

    @classmethod
    def together(cls, *parts: RankCalls) -> RankCalls:
        """For calls that processes of several roles serve together, in this order."""
        calls = cls([actor for part in parts for actor in part.actors], parts[0].watchdog_s)
        calls.names = [name for part in parts for name in part.names]
        calls.logs = [log for part in parts for log in part.logs]
        calls._lanes = [lane for part in parts for lane in part._lanes]
        return calls

    def between_polls(self) -> RankCalls:
        """For calls that these processes serve while a stream runs, between two polls of its engine."""
        calls = copy.copy(self)
        calls._lanes, calls._wait = ["serve_between_polls"] * len(self), _Wait()
        return calls

    def __len__(self) -> int:
        return len(self.actors)

    def handshake(self, timeout_s: float) -> None:
        """Learn hosts, process ids and logs, so that a later message can name them."""
        watchdog_s, self.watchdog_s = self.watchdog_s, max(self.watchdog_s, timeout_s)
        found = self.each(RPCServer.do_handshake, [()] * len(self))
        self.watchdog_s = watchdog_s
        for rank, who in enumerate(found):
            self.names[rank] = f"{self.role} {rank} on {who['host']} (process {who['pid']})"
            self.logs[rank] = who["log"]
            self.addresses.append(who["address"])
            self.devices.append(who["devices"])

    # -- calls --------------------------------------------------------------------------------------------------

    def all(self, call: Method[*Args, Value], *args: *Args) -> list[Value]:
        """The same call to every rank; their values by rank."""
        return self.each(call, [args] * len(self.actors))

    def each(
        self, call: Callable[..., Value], args: Sequence[tuple[Any, ...]], label: str = ""
    ) -> list[Value]:
        """One call to every rank, each with its own arguments. `label`: what messages and phases call it."""
        label = label or name_of(call)
        refs = {
            getattr(actor, lane).remote(live.step, label, name_of(call), *own): rank
            for rank, (actor, lane, own) in enumerate(zip(self.actors, self._lanes, args, strict=True))
        }
        return self._collect(label, refs)

    def one(self, rank: int, call: Method[*Args, Value], *args: *Args) -> Value:
        value: Value = self._collect(name_of(call), {self.start(rank, call, *args): rank})[0]
        return value

    def start(self, rank: int, call: Method[*Args, Any], *args: *Args) -> Any:
        """A call whose answer is read when it is `ready`."""
        return self.actors[rank].serve.remote(live.step, name_of(call), name_of(call), *args)

    def control(self, rank: int, call: Method[*Args, Any], *args: *Args) -> Any:
        """The reference of a `control_` call, which is served whatever else the rank does."""
        return self.actors[rank].control.remote(name_of(call), *args)

    def answers(self, asked: dict[Any, int], call: Method[Any], timeout_s: float) -> list[tuple[int, Any]]:
        """The ranks that answer a `control_` call in time, with the references of their answers. `asked`, which is kept
        from call to call, has the others: they are not asked again."""
        for rank in sorted(set(range(len(self))) - set(asked.values())):
            asked[self.control(rank, call)] = rank
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
        return [(asked.pop(ref), ref) for ref in answered]

    def open_stream(self, rank: int, call: Method[*Args, Iterator[Any]], *args: *Args) -> Any:
        """A call that answers several times."""
        stream = self.actors[rank].stream.options(num_returns="streaming")
        return stream.remote(live.step, name_of(call), *args)

    def read(self, call: str, ref: Any, pending: dict[Any, int]) -> list[Any]:
        """The value of an answer that is `ready`, or the next of a stream, in a list; empty at the end of a stream.
        What has no more to say leaves `pending`."""
        rank, is_stream = pending[ref], not isinstance(ref, ray.ObjectRef)
        if not is_stream:
            del pending[ref]
        try:
            outcome: CallOutcome = ray.get(next(ref) if is_stream else ref)
        except StopIteration:
            del pending[ref]
            return []
        except RayError as error:
            self.fail(call, rank, error, pending)
        source = "" if short_name(self.names[rank]) == "rank 0" else f"{self.names[rank]}: "
        for logger, level, text in outcome.logs:
            logging.getLogger(logger).log(level, "%s", source + text)
        if outcome.failure is not None:
            self.fail(call, rank, outcome.failure, pending)
        return [outcome.value]

    def stream_all(self, call: Method[*Args, Iterator[Value]], *args: *Args) -> Iterator[tuple[int, Value]]:
        """The values of a streaming call to every rank, with the rank, as they come."""
        pending = {self.open_stream(rank, call, *args): rank for rank in range(len(self))}
        since = time.monotonic()
        while pending:
            for stream in self.ready(name_of(call), pending, since=since):
                since, rank = time.monotonic(), pending[stream]
                for value in self.read(name_of(call), stream, pending):
                    yield rank, value

    def _collect(self, call: str, pending: dict[Any, int]) -> list[Any]:
        values: dict[int, Any] = {}
        while pending:
            for ref in self.ready(call, pending):
                rank = pending[ref]
                (values[rank],) = self.read(call, ref, pending)
        return [values[rank] for rank in sorted(values)]

    # -- waiting ------------------------------------------------------------------------------------------------

    def ready(
        self,
        call: str,
        pending: Mapping[Any, int],
        timeout_s: float | None = None,
        since: float | None = None,
    ) -> list[Any]:
        """Those of the awaited answers (or streams) that can be read now; at least one, unless `timeout_s` is over.
        `since`: when the wait for progress began (default: now)."""
        started = time.monotonic()
        asked = started if since is None else since
        if asked != self._wait.asked:
            self._wait.asked = asked
            self._wait.no_status.clear()
        pause = min(POLL_S, self.watchdog_s / 4)
        while True:
            self._check_others(call)
            left = pause if timeout_s is None else min(pause, max(started + timeout_s - time.monotonic(), 0))
            done, _ = ray.wait(list(pending), num_returns=1, timeout=left, fetch_local=False)
            if done:
                return list(done)
            if time.monotonic() - asked > self.watchdog_s / 2:
                self.check_progress(call, sorted(set(pending.values())), asked)
            if timeout_s is not None and time.monotonic() - started >= timeout_s:
                return []

    def _check_others(self, call: str) -> None:
        """A process that is asked for nothing can die too, Ray's own or one of another role; its next call may be far
        off."""
        if time.monotonic() - self._checked > POLL_S:
            self._checked = time.monotonic()
            self._check_ray(call)
            first, last = short_name(self.names[0]), short_name(self.names[-1])
            for peer in self.peers:
                peer.check_alive(f"{call} of {first}" + (f" to {last}" if last != first else ""))

    def _check_ray(self, call: str) -> None:
        problem = self._health.problem()
        if problem:
            self.broken = True
            raise WorkersLost(f"{problem}, in {call}: the run's cluster is lost. To continue: {RESUME}.")

    def check_alive(self, call: str) -> None:
        """Raise when one of these is known to be dead, while others serve `call`; does not wait."""
        with self._status_lock:
            answered = self.answers(self._status_refs, RPCServer.control_status, 0)
        for rank, ref in answered:
            try:
                ray.get(ref)
            except RayError as error:
                self.fail(call, rank, error, {})

    def check_progress(self, call: str, ranks: list[int], asked: float) -> None:
        """Raise when no awaited rank has moved for `watchdog_s`."""
        statuses, _ = self._statuses(ranks)
        now, no_status = time.monotonic(), self._wait.no_status
        for rank in ranks:
            if rank in statuses:
                no_status.pop(rank, None)
            else:
                no_status.setdefault(rank, now - STATUS_S)
        quiet = [statuses[r].still_s if r in statuses else now - no_status[r] for r in ranks]
        # A rank that was idle for long has not hung: only the time since it was asked counts.
        if min(*quiet, now - asked) > self.watchdog_s:
            self.broken = True
            # With what processes of other roles do at this moment: these may wait for them, or they for these.
            everyone = RankCalls.together(self, *self.peers)
            statuses, _ = everyone._statuses(range(len(everyone)))
            names = everyone.names
            raise WorkersLost(format_hang_report(call, self.watchdog_s, names, ranks, statuses, len(self)))

    def _statuses(self, ranks: Sequence[int]) -> tuple[dict[int, RankStatus], dict[int, Problem]]:
        """Statuses of the ranks that answer in time, and errors of those known to be dead."""
        asked = {self.control(rank, RPCServer.control_status): rank for rank in ranks}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=STATUS_S) if asked else ([], [])
        found: dict[int, RankStatus] = {}
        dead: dict[int, Problem] = {}
        for ref in answered:
            try:
                found[asked[ref]] = ray.get(ref)
            except RayError as error:
                dead[asked[ref]] = error
        return found, dead

    # -- failing ------------------------------------------------------------------------------------------------

    def fail(self, call: str, rank: int, problem: Problem, pending: Mapping[Any, int]) -> NoReturn:
        """Raise the cause of `problem`, which may be another rank's death or exception, or the end of Ray itself."""
        self.broken = True
        if not isinstance(problem, Failure):
            self._check_ray(call)
        problems = {rank: problem}
        if isinstance(problem, Failure):
            problems |= self._other_problems(rank, problem, pending)
        cause = min(problems, key=lambda r: (_severity(problems[r]), r))
        raise self._error(call, cause, problems[cause], [r for r in sorted(problems) if r != cause])

    def _other_problems(self, rank: int, failure: Failure, pending: Mapping[Any, int]) -> dict[int, Problem]:
        """What the other ranks report. An exception is final once the others are known to be alive; a broken
        connection is another rank's doing, which is waited for until it is known, at most `watchdog_s`."""
        found: dict[int, Problem] = {}
        waiting = dict(pending)
        others = [r for r in range(len(self)) if r != rank]
        deadline = time.monotonic() + self.watchdog_s
        while True:
            alive, dead = self._statuses([r for r in others if r not in found])
            found |= dead
            refs = list(waiting)
            done = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0] if refs else []
            for ref in done:
                is_stream = not isinstance(ref, ray.ObjectRef)
                try:
                    problem = ray.get(next(ref) if is_stream else ref).failure
                except StopIteration:
                    del waiting[ref]
                    continue
                except RayError as error:
                    problem = error
                if problem is not None:
                    found[waiting[ref]] = problem
                if problem is not None or not is_stream:
                    del waiting[ref]
            known = not failure.caused_by_another or any(_severity(p) < 2 for p in found.values())
            if known and (dead or len(alive) + len(found) >= len(others)):
                return found
            idle = all(r in found or not alive[r].call for r in others if r in alive)
            if (not waiting and idle and not known and len(alive) + len(found) >= len(others)) or (
                time.monotonic() > deadline
            ):
                return found
            time.sleep(min(0.2, self.watchdog_s / 20))

    def _error(self, call: str, rank: int, problem: Problem, others: list[int]) -> VerlError:
        if isinstance(problem, Failure):
            error = problem.as_error()
            return WorkersLost(str(error)) if problem.caused_by_another else error
        if isinstance(problem, RayTaskError):
            return TrainingHalted(f"{self.names[rank]}, in {call}: {problem}")
        short = ", ".join(short_name(self.names[other]) for other in others)
        stopped = f" Because of it also stopped: {short}." if others else ""
        cause = _death_cause(self._known(rank, problem))
        return WorkersLost(
            f"{self.names[rank]} died in {call}: {cause}.{stopped} {RESUME[0].upper()}{RESUME[1:]}."
            f"{self._log_tail(rank) if cause != NODE_LOST else ''}"
        )

    def _known(self, rank: int, problem: RayError) -> RayError:
        """The death of a process whose connection is broken, once Ray knows of it: a silent node is lost after some
        seconds."""
        deadline = time.monotonic() + UNKNOWN_S
        while isinstance(problem, ActorUnavailableError) and time.monotonic() < deadline:
            time.sleep(0.2)
            try:
                ray.get(self.control(rank, RPCServer.control_status), timeout=STATUS_S)
            except RayError as error:
                if not isinstance(error, GetTimeoutError):
                    problem = error
        return problem

    def _log_tail(self, rank: int) -> str:
        """The end of what the dead process wrote, where its log is on this machine."""
        if not os.path.isfile(self.logs[rank]):
            return ""
        with open(self.logs[rank], encoding="utf-8", errors="replace") as file:
            plain = (_ESCAPE.sub("", line).rstrip() for line in file)
            lines = [line for line in plain if line and not line.startswith(":") and not _STACK.match(line)]
        return "\nIts last lines:\n" + "\n".join(lines[-LOG_TAIL_LINES:]) if lines else ""

    def shutdown(self, seconds: float) -> None:
        """Let the ranks close what they opened, for at most `seconds`."""
        if not self.broken:
            refs = [self.start(rank, RPCServer.do_close) for rank in range(len(self))]
            ray.wait(refs, num_returns=len(refs), timeout=seconds)


def _severity(problem: Problem) -> int:
    """A death explains exceptions elsewhere; an exception explains broken connections elsewhere."""
    if not isinstance(problem, Failure):
        return 0
    return 2 if problem.caused_by_another else 1


def _death_cause(error: RayError) -> str:
    """The one sentence of Ray's report that says what happened."""
    text = str(error)
    lowered = text.lower()
    # Ray names the kernel's OOM killer among the possible causes of every kill; its own monitor is certain.
    if "node_out_of_memory" in lowered or "low on memory" in lowered or "memory usage threshold" in lowered:
        return "the node ran out of host memory and Ray ended it; lower the batch, or use more nodes"
    if "connection error code" in lowered:
        return "its process was killed or crashed (if the kernel did it for want of memory, `dmesg` there says so)"
    dead_node = "dead" in lowered or "died" in lowered or "unreachable" in lowered
    if dead_node and ("its node" in lowered or "node died" in lowered or "node was" in lowered):
        return NODE_LOST
    for mark in ("Worker exit detail: ", "The actor is dead because ", "cause: "):
        if mark in text:
            return text.split(mark, 1)[1].split(". ")[0].strip().rstrip(".")[:300]
    kind = "the process is gone" if isinstance(error, RayActorError) else type(error).__name__
    return f"{kind}: {text.strip().splitlines()[0][:300]}" if text.strip() else kind
