"""Calls to the ranks and the waiting for them: nobody waits without a watch, and whoever fails is named.

What always holds: a call returns every rank's answer or raises one `VerlError` that begins with the rank at fault;
a rank that died is noticed by its connection, one that hangs by `trainer.watchdog_s` without a sign of life on any
rank that is waited for. After an error nothing more is sent to the ranks but the end.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from verl.errors import TrainingHalted, VerlError
from verl.workers.hang_report import RESUME, label, who_waits_for_whom
from verl.workers.outcome import Failure, Outcome, WorkersLost
from verl.workers.watchdog import Sign

logger = logging.getLogger(__name__)

POLL_S = 1.0
GRACE_S = 10.0
"""After a rank says that another is gone: how long to wait for the news of that other one."""
AFTERTHOUGHT_S = 1.0
"""After an exception: whether a death elsewhere explains it."""
SIGN_S = 5.0
"""How long a healthy rank takes at most to answer beside its work."""
LAST_WORDS = 12


class RankCalls:
    """The ranks of one run, or the processes of another role, by their actor handles."""

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
        """Processes of other roles that are idle while these work, and looked after meanwhile."""
        self._unanswered: dict[int, float] = {}
        self._asked_for_life: dict[Any, int] = {}
        self._looked_after = 0.0

    @classmethod
    def together(cls, *parts: RankCalls) -> RankCalls:
        """For calls that processes of several roles serve together, in this order; each keeps its name."""
        calls = cls([actor for part in parts for actor in part.actors], parts[0].watchdog_s)
        calls.names = [name for part in parts for name in part.names]
        calls.logs = [log for part in parts for log in part.logs]
        return calls

    def __len__(self) -> int:
        return len(self.actors)

    def handshake(self, patience_s: float) -> None:
        """Learn who the ranks are, so that a later message can name them. Processes may take long to come up."""
        watchdog_s, self.watchdog_s = self.watchdog_s, max(self.watchdog_s, patience_s)
        found = self.all("who")
        self.watchdog_s = watchdog_s
        for rank, who in enumerate(found):
            self.names[rank] = f"{self.role} {rank} on {who['host']} (process {who['pid']})"
            self.logs[rank] = who["log"]
            self.addresses.append(who["address"])
            self.devices.append(who["devices"])

    # -- calls --------------------------------------------------------------------------------------------------

    def all(self, call: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The same call to every rank; their values by rank."""
        return self.each(call, [args] * len(self.actors), kwargs)

    def each(
        self, call: str, args: Sequence[tuple[Any, ...]], kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """One call to every rank, with arguments of its own."""
        refs = {
            actor.serve.remote(call, *own, **(kwargs or {})): rank
            for rank, (actor, own) in enumerate(zip(self.actors, args, strict=True))
        }
        return self._collect(call, refs)

    def one(self, rank: int, call: str, *args: Any) -> Any:
        return self._collect(call, {self.actors[rank].serve.remote(call, *args): rank})[0]

    def _collect(self, call: str, refs: dict[Any, int]) -> list[Any]:
        values: dict[int, Any] = {}
        pending = dict(refs)
        while pending:
            for ref in self.ready(call, pending):
                rank = pending.pop(ref)
                try:
                    outcome = ray.get(ref)
                except RayError as error:
                    self.fail(call, rank, error, pending)
                values[rank] = self.value_of(call, rank, outcome, pending)
        return [values[rank] for rank in sorted(values)]

    def value_of(self, call: str, rank: int, outcome: Outcome, pending: Mapping[Any, int]) -> Any:
        """The value of an answer, its log lines said; a failure is raised."""
        for line in outcome.lines:
            text = line.text if label(self.names[rank]) == "rank 0" else f"{self.names[rank]}: {line.text}"
            logging.getLogger(line.logger).log(line.level, "%s", text)
        if outcome.failure is not None:
            self.fail(call, rank, outcome.failure, pending)
        return outcome.value

    # -- waiting ------------------------------------------------------------------------------------------------

    def ready(self, call: str, pending: Mapping[Any, int]) -> list[Any]:
        """Those of the awaited answers (or streams) that can be read now; at least one."""
        asked = time.monotonic()
        self._unanswered.clear()
        pause = min(POLL_S, self.watchdog_s / 4)
        while True:
            self._look_after_fellows(call)
            done, _ = ray.wait(list(pending), num_returns=1, timeout=pause, fetch_local=False)
            if done:
                return list(done)
            if time.monotonic() - asked > self.watchdog_s / 2:
                self._look_for_signs(call, sorted(set(pending.values())), asked)

    def _look_after_fellows(self, call: str) -> None:
        """A process that is not asked for anything can die too; its turn may be far off."""
        if self.peers and time.monotonic() - self._looked_after > POLL_S:
            self._looked_after = time.monotonic()
            for fellow in self.peers:
                fellow.check_alive(call)

    def check_alive(self, call: str) -> None:
        """Raise when one of these is known to be gone, while others serve `call`; waits for nobody."""
        asked = set(self._asked_for_life.values())
        for rank, actor in enumerate(self.actors):
            if rank not in asked:
                self._asked_for_life[actor.sign.remote()] = rank
        refs = list(self._asked_for_life)
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in answered:
            rank = self._asked_for_life.pop(ref)
            try:
                ray.get(ref)
            except RayError as error:
                self.fail(call, rank, error, {})

    def _look_for_signs(self, call: str, ranks: list[int], asked: float) -> None:
        """Raise when no awaited rank has moved for `watchdog_s`."""
        signs = self._signs(ranks)
        now = time.monotonic()
        for rank in ranks:
            if rank in signs:
                self._unanswered.pop(rank, None)
            else:
                self._unanswered.setdefault(rank, now - SIGN_S)
        quiet = [signs[r].still_s if r in signs else now - self._unanswered[r] for r in ranks]
        # A rank that was idle for long has not hung: only the time since it was asked counts.
        if min(*quiet, now - asked) > self.watchdog_s:
            self.broken = True
            everyone = self._signs(range(len(self.actors)))
            raise WorkersLost(who_waits_for_whom(call, self.watchdog_s, self.names, ranks, everyone))

    def _signs(self, ranks: Sequence[int]) -> dict[int, Sign]:
        asked = {self.actors[rank].sign.remote(): rank for rank in ranks}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=SIGN_S)
        found = {}
        for ref in answered:
            try:
                found[asked[ref]] = ray.get(ref)
            except RayError:
                continue  # dead: the awaited answer will say so
        return found

    # -- failing ------------------------------------------------------------------------------------------------

    def fail(self, call: str, rank: int, problem: RayError | Failure, pending: Mapping[Any, int]) -> NoReturn:
        """Hear what the others have to say for a moment, find the cause among it, raise it."""
        self.broken = True
        problems: dict[int, RayError | Failure] = {rank: problem}
        if isinstance(problem, Failure):
            problems |= self._hear(pending, GRACE_S if problem.caused_by_another else AFTERTHOUGHT_S)
        cause = min(problems, key=lambda r: (self._severity(problems[r]), r))
        raise self._error(call, cause, problems[cause], [r for r in sorted(problems) if r != cause])

    @staticmethod
    def _severity(problem: RayError | Failure) -> int:
        """A death explains exceptions elsewhere; an exception explains broken connections elsewhere."""
        if not isinstance(problem, Failure):
            return 0
        return 2 if problem.caused_by_another else 1

    def _hear(self, pending: Mapping[Any, int], seconds: float) -> dict[int, RayError | Failure]:
        heard: dict[int, RayError | Failure] = {}
        waiting = {ref: rank for ref, rank in pending.items() if isinstance(ref, ray.ObjectRef)}
        deadline = time.monotonic() + seconds
        while waiting and time.monotonic() < deadline:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=0.5)
            for ref in done:
                rank = waiting.pop(ref)
                try:
                    outcome = ray.get(ref)
                except RayError as error:
                    heard[rank] = error
                    return heard
                if outcome.failure is not None:
                    heard[rank] = outcome.failure
        return heard

    def _error(self, call: str, rank: int, problem: RayError | Failure, others: list[int]) -> VerlError:
        if isinstance(problem, Failure):
            error = problem.as_error()
            return WorkersLost(str(error)) if problem.caused_by_another else error
        if isinstance(problem, RayTaskError):
            return TrainingHalted(f"{self.names[rank]}, in {call}: {problem}")
        short = ", ".join(label(self.names[other]) for other in others)
        stopped = f" Because of it also stopped: {short}." if others else ""
        return WorkersLost(
            f"{self.names[rank]} died in {call}: {_why(problem)}.{stopped} {RESUME[0].upper()}{RESUME[1:]}."
            f"{self._log_tail(rank)}"
        )

    def _log_tail(self, rank: int) -> str:
        """The end of what the dead process wrote, where its log is on this machine."""
        if not os.path.isfile(self.logs[rank]):
            return ""
        with open(self.logs[rank], encoding="utf-8", errors="replace") as file:
            words = [line.rstrip() for line in file if line.strip() and not line.startswith(":")]
        return "\nIts last lines:\n" + "\n".join(words[-LAST_WORDS:]) if words else ""

    # -- the end ------------------------------------------------------------------------------------------------

    def shutdown(self, seconds: float) -> None:
        """Let the ranks close what they opened, for as long as that may take; whatever they answer is unheard."""
        if not self.broken:
            refs = [actor.serve.remote("close") for actor in self.actors]
            ray.wait(refs, num_returns=len(refs), timeout=seconds)


def _why(error: RayError) -> str:
    """The one sentence of Ray's report that says what happened."""
    text = str(error)
    lowered = text.lower()
    # Ray names the kernel's OOM killer among the possible causes of every kill; its own monitor is certain.
    if "node_out_of_memory" in lowered or "low on memory" in lowered or "memory usage threshold" in lowered:
        return "the node ran out of host memory and Ray ended it; lower the batch, or use more nodes"
    if "connection error code" in lowered:
        return "its process was killed or crashed (if the kernel did it for want of memory, `dmesg` there says so)"
    if (
        "node" in lowered
        and ("dead" in lowered or "died" in lowered or "unreachable" in lowered)
        and ("its node" in lowered or "node died" in lowered or "node was" in lowered)
    ):
        return "its node was lost"
    for mark in ("Worker exit detail: ", "The actor is dead because ", "cause: "):
        if mark in text:
            return text.split(mark, 1)[1].split(". ")[0].strip().rstrip(".")[:300]
    kind = "the process is gone" if isinstance(error, RayActorError) else type(error).__name__
    return f"{kind}: {text.strip().splitlines()[0][:300]}" if text.strip() else kind
