"""A pool of killable worker processes.

What always holds: every submitted task is answered exactly once; a call that outlives its deadline, crashes,
exits, eats memory or breeds processes costs only its own samples their score, and its whole process tree is
gone before the replacement starts; tasks that merely waited behind it are run again. Processes are started
once and kept.

One thread does all the talking, without ever blocking on a worker. It also starts them: the kernel ends a
worker when the thread that started it is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import pickle
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from verl.errors import RewardError
from verl.reward import processes
from verl.reward.base import RewardResult, RewardSample
from verl.reward.functions import Signature
from verl.reward.handle import Broken, Task, WorkerHandle
from verl.reward.loading import FunctionSpec
from verl.reward.sandbox import Settings
from verl.reward.worker import WorkerSetup

_log = logging.getLogger(__name__)

MAX_PROCESSES = 64
"""Processes one worker may have at the same time, itself included, besides those of a sandbox."""
_MAX_ZOMBIES = 128
_START_LIMIT_S = 600.0
_MAX_FAILED_STARTS = 3
_GRACE_S = 2.0  # an async function's own deadline fires first; this is for one that blocks its event loop
_AHEAD_S = (
    0.05  # so much work is sent ahead of time, so that a worker need not wait for us between quick calls
)
_MAX_AHEAD = 16
_WATCH_S = 0.1


class WorkerPool:
    """Runs functions in worker processes. `submit` from one thread, then `drain`."""

    def __init__(
        self,
        specs: Sequence[FunctionSpec],
        *,
        num_workers: int = 1,
        timeout_s: float = 30.0,
        memory_limit_mb: int | None = None,
        max_concurrency: int = 64,
        scorers: Mapping[str, str] | None = None,
        sandbox_settings: Settings | None = None,
        quiet: bool = False,
    ) -> None:
        """`quiet`: deaths are expected, and the caller answers for them; they are logged as details only."""
        self.timeout_s = timeout_s
        self.num_workers = num_workers
        self._names = ", ".join(spec.describe() for spec in specs)
        self.restarts = 0
        self.calls = 0
        self._death_level = logging.DEBUG if quiet else logging.WARNING
        self._setup = WorkerSetup(
            tuple(specs), timeout_s, memory_limit_mb, dict(scorers or {}), sandbox_settings or Settings()
        )
        # Programs in the sandbox are descendants too, and have limits of their own.
        guests = self._setup.sandbox_settings
        self._memory_limit = (
            (memory_limit_mb + guests.memory_limit_mb) << 20
            if memory_limit_mb
            else processes.memory_of_machine() // 2
        )
        self._process_limit = MAX_PROCESSES + guests.max_processes
        self._per_worker = max(1, max_concurrency // num_workers)
        self._signatures: list[Signature] | None = None
        self._numbers = itertools.count()
        self._queue: deque[Task] = deque()
        self._results: dict[Hashable, list[RewardResult]] = {}
        self._open_tasks = 0
        self._changed = threading.Condition()
        self._failure: RewardError | None = None
        self._failed_starts = 0
        self._closing = False
        self._workers: list[WorkerHandle] = []
        self._call_s = 0.0
        self._next_watch = 0.0
        self._selector = selectors.DefaultSelector()
        self._wake_here, self._wake_there = socket.socketpair()
        for end in (self._wake_here, self._wake_there):
            end.setblocking(False)
        self._selector.register(self._wake_here, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self._await_start()

    @property
    def signatures(self) -> list[Signature]:
        return self._signatures or []

    def submit(self, key: Hashable, function: int, samples: Sequence[RewardSample]) -> None:
        """Queue one call; `key` is how `drain` names its results."""
        number, samples = next(self._numbers), list(samples)
        try:
            payload = pickle.dumps((number, function, samples))
        except Exception as error:  # pickling runs whatever __reduce__ the data has
            text = (
                f"The row cannot be sent to a reward worker process ({type(error).__name__}: {error}); "
                f"set reward.in_process=True or drop that column."
            )
            with self._changed:
                self._results[key] = [RewardResult(None, error=text) for _ in samples]
            return
        task = Task(number, key, function, tuple(sample.index for sample in samples), payload)
        with self._changed:
            self._raise_failure()
            self._queue.append(task)
            self._open_tasks += 1
        self._wake()

    def drain(self) -> dict[Hashable, list[RewardResult]]:
        """Wait for everything submitted since the last drain."""
        with self._changed:
            while self._open_tasks and self._failure is None:
                self._changed.wait()
            self._raise_failure()
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """End the workers and whatever they started. Safe to call twice."""
        atexit.unregister(self.close)
        self._closing = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._closing and self._failure is None:
                self._fill()
                self._dispatch()
                for key, events in self._selector.select(self._patience()):
                    self._serve(key, events)
                self._enforce()
        except Exception as error:  # whoever waits in drain must hear of it
            _log.exception("the reward pool failed")
            self._fail(RewardError(f"The reward pool failed: {type(error).__name__}: {error}"))
        finally:
            for worker in self._workers:
                worker.end()
            self._selector.close()
            self._wake_here.close()
            if self._failure is None:
                self._fail(RewardError("The reward pool is closed."))

    def _fill(self) -> None:
        while len(self._workers) < self.num_workers and self._failure is None:
            worker = WorkerHandle(self._setup, self._memory_limit)
            self._workers.append(worker)
            self._selector.register(worker.channel, selectors.EVENT_READ, worker)
            self._selector.register(worker.output, selectors.EVENT_READ, worker)

    def _dispatch(self) -> None:
        with self._changed:
            while self._queue:
                task = self._queue[0]
                free = [worker for worker in self._workers if self._has_room(worker, task)]
                if not free:
                    return
                self._queue.popleft()
                min(free, key=lambda worker: len(worker.outstanding)).assign(task)

    def _has_room(self, worker: WorkerHandle, task: Task) -> bool:
        if not worker.ready or worker.retiring or worker.exclusive:
            return False
        if task.alone:
            return not worker.outstanding
        if self._concurrent:
            return len(worker.outstanding) < self._per_worker
        ahead = int(_AHEAD_S / self._call_s) if self._call_s else 1
        return len(worker.outstanding) <= min(ahead, _MAX_AHEAD)

    @property
    def _concurrent(self) -> bool:
        return any(signature.is_async for signature in self.signatures)

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        worker = key.data
        if worker is None:
            with contextlib.suppress(BlockingIOError):
                self._wake_here.recv(4096)
            return
        if worker not in self._workers:  # replaced earlier in this round
            return
        if key.fileobj is worker.output:
            if not worker.read_output():
                self._selector.unregister(worker.output)
            return
        if events & selectors.EVENT_READ:
            self._listen(worker)

    def _listen(self, worker: WorkerHandle) -> None:
        """Take what it has said; it may turn out to be lost."""
        try:
            worker.read_output()  # what a call printed is passed on before its result
            for message in worker.messages():
                self._hear(worker, message)
        except Broken as error:
            self._lost(worker, str(error))

    def _hear(self, worker: WorkerHandle, message: dict[str, Any]) -> None:
        if "load_error" in message:
            self._fail(RewardError(str(message["load_error"])))
        elif not worker.ready:
            try:
                signatures = [Signature.from_json(item) for item in message["ready"]]
            except (KeyError, TypeError) as error:
                raise Broken("did not say hello") from error
            worker.ready = True
            self._failed_starts = 0
            with self._changed:
                self._signatures = signatures
                self._changed.notify_all()
        else:
            before = worker.last_reply_at
            task, results = worker.take_reply(message)
            took = worker.last_reply_at - max(before, task.sent_at)
            self._call_s = took if self._call_s == 0.0 else 0.9 * self._call_s + 0.1 * took
            self._answer(task, results)

    def _answer(self, task: Task, results: list[RewardResult]) -> None:
        with self._changed:
            self._results[task.key] = results
            self.calls += 1
            self._open_tasks -= 1
            if not self._open_tasks:
                self._changed.notify_all()

    # ---- deadlines, limits, deaths

    def _patience(self) -> float | None:
        """Seconds until something must be looked at."""
        for worker in self._workers:
            self._watch_writes(worker)
        if all(worker.ready and not worker.outstanding for worker in self._workers):
            return None
        now = time.monotonic()
        moments = [self._next_watch, now + 1.0]
        moments += [deadline for worker in self._workers if (deadline := self._deadline(worker)) is not None]
        return max(0.0, min(moments) - now)

    def _watch_writes(self, worker: WorkerHandle) -> None:
        worker.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.wants_to_write else 0)
        self._selector.modify(worker.channel, events, worker)

    def _deadline(self, worker: WorkerHandle) -> float | None:
        if not worker.ready:
            return worker.started_at + _START_LIMIT_S
        if not worker.outstanding:
            return None
        first = next(iter(worker.outstanding.values()))
        if self._concurrent:
            return first.sent_at + self.timeout_s + _GRACE_S
        return max(first.sent_at, worker.last_reply_at) + self.timeout_s

    def _enforce(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            deadline = self._deadline(worker)
            if deadline is not None and now >= deadline:
                # It may have answered in time, while this thread was busy with another one.
                self._listen(worker)
                if worker not in self._workers:
                    continue
                deadline = self._deadline(worker)
            if deadline is None or now < deadline:
                if worker.retiring and not worker.outstanding:
                    self._replace(worker)
            elif not worker.ready:
                self._start_failed(worker, f"did not finish importing within {_START_LIMIT_S:g} s")
            else:
                late = [
                    task
                    for task in worker.outstanding.values()
                    if not self._concurrent or now >= task.sent_at + self.timeout_s
                ]
                guilty = late if self._concurrent else late[:1]
                what = f"took longer than reward.timeout_s={self.timeout_s:g} s and was killed"
                self._blame(worker, guilty, what, certain=not self._concurrent)
        if now >= self._next_watch:
            self._watch(now)

    def _watch(self, now: float) -> None:
        """Look at the process trees: often while a call is long, seldom otherwise."""
        busy = [worker for worker in self._workers if worker.outstanding or not worker.ready]
        seen = processes.trees([worker.pid for worker in busy])
        for worker in busy:
            tree = seen[worker.pid]
            used = 0 if worker.group is not None else processes.memory(tree.pids)
            if worker.process.poll() is not None:  # a child of it still holds the channel open
                self._lost(worker, "")
            elif len(tree.pids) > self._process_limit:
                text = (
                    f"started {len(tree.pids) - 1} processes (at most {self._process_limit - 1}) and was killed "
                    f"with them"
                )
                self._blame_running(worker, text)
            elif used > self._memory_limit:
                self._blame_running(worker, self._too_much_memory(f"{used >> 20} MB of"))
            elif tree.zombies > _MAX_ZOMBIES:
                worker.retiring = True
        done = time.monotonic()
        slow = any(now - max(w.last_reply_at, w.started_at) > _WATCH_S for w in busy if w.outstanding)
        self._next_watch = done + max(_WATCH_S if slow else 10 * _WATCH_S, 20 * (done - now))

    def _too_much_memory(self, used: str) -> str:
        return (
            f"used {used} memory (limit {self._memory_limit >> 20} MB, reward.memory_limit_mb) and was killed"
        )

    def _blame_running(self, worker: WorkerHandle, what: str) -> None:
        if not worker.ready:
            self._start_failed(worker, what)
        else:
            self._blame(worker, self._running(worker), what, certain=not self._concurrent)

    def _running(self, worker: WorkerHandle) -> list[Task]:
        """The calls that may be the cause of what a worker does: one in a serial worker, all in a concurrent
        one."""
        tasks = list(worker.outstanding.values())
        return tasks if self._concurrent else tasks[:1]

    def _lost(self, worker: WorkerHandle, reason: str) -> None:
        """The channel broke: find out how the worker ended."""
        if reason:
            what = reason + " and was killed"
        elif worker.group is not None and worker.group.ran_out_of_memory():
            what = self._too_much_memory("too much")
        elif (status := worker.exit_status()) is None:
            what = "closed its result channel and was killed"
        else:
            what = processes.describe_end(status)
        what += worker.last_words()
        if not worker.ready:
            self._start_failed(worker, what)
        else:
            self._blame(worker, self._running(worker), what)

    def _blame(self, worker: WorkerHandle, suspects: list[Task], what: str, certain: bool = False) -> None:
        """Replace the worker. Who is not certainly guilty is tried once more, with a worker to himself: it
        may have been a neighbour, or something an earlier call left behind."""
        others = [task for task in worker.outstanding.values() if task not in suspects]
        self._replace(worker)
        again = list(others)
        for task in suspects:
            if certain or task.alone:
                rows = ", ".join(map(str, task.rows[:4])) + (", ..." if len(task.rows) > 4 else "")
                text = f"Reward function {self.signatures[task.function].name} {what} (row {rows})"
                _log.log(self._death_level, "%s", text)
                self._answer(task, [RewardResult(None, error=text) for _ in task.rows])
            else:
                task.alone = True
                again.append(task)
        with self._changed:
            self._queue.extendleft(reversed(again))

    def _replace(self, worker: WorkerHandle) -> None:
        self._workers.remove(worker)
        for source in (worker.channel, worker.output):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(source)
        worker.end()
        self.restarts += 1

    def _start_failed(self, worker: WorkerHandle, what: str) -> None:
        self._replace(worker)
        self._failed_starts += 1
        if self._signatures is None or self._failed_starts >= _MAX_FAILED_STARTS:
            self._fail(
                RewardError(f"The reward function {self._names}, imported in a worker process, {what}.")
            )

    def _fail(self, error: RewardError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _await_start(self) -> None:
        with self._changed:
            while self._signatures is None and self._failure is None:
                self._changed.wait()
            failure = self._failure
        if failure is not None:
            self.close()
            raise failure

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_there.send(b".")
