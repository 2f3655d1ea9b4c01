"""A pool of worker processes that call reward functions.

Every submitted task gets exactly one answer. A call that misses its deadline, crashes, exits or exceeds the memory
limit costs only its own samples their score: the worker's whole process tree is killed before a new worker starts, and
tasks that waited behind it run again. Each worker imports the functions itself, instead of being forked from one that
has: what a file opens or starts when it is imported (threads, a GPU, connections) works in every worker.

One thread runs an event loop that starts the workers and talks to them: the kernel ends a worker with the thread that
started it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import itertools
import logging
import pickle
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from verl import processes
from verl.config.sections.reward import RewardConfig
from verl.errors import RewardError
from verl.memory import MemoryCgroup, host_memory_limit
from verl.reward import sandbox
from verl.reward.base import Backend, Call, RewardResult, RewardSample, answer, fail, new_call
from verl.reward.functions import FunctionSpec, Signature, load_function
from verl.reward.scorers import register_scorer
from verl.reward.scoring import FunctionExited, load, rows_text, score
from verl.user_process import PythonProcess, Service

_log = logging.getLogger(__name__)
_output_log = logging.getLogger("verl.reward.output")

_MAX_FAILED_STARTS = 3
GRACE_S = 2.0  # an async function's own deadline fires first; this is for one that blocks its event loop
_AHEAD_S = 0.05  # so much work is sent ahead, so that a worker need not wait for us between quick calls
_MAX_AHEAD = 16
_CHECK_S = 0.1
_IDLE_CHECK_S = 1.0


def serve_functions(setup: tuple[Sequence[FunctionSpec], RewardConfig, Mapping[str, str]]) -> Service:
    """In a worker process: import the functions, and the scorers a user registered in the trainer. Its requests are
    (task id, number of the function, samples)."""
    specs, config, scorers = setup
    sandbox.configure(config)
    if config.memory_limit_mb is not None:
        limit = config.memory_limit_mb << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for data_source, target in scorers.items():
        register_scorer(data_source)(load_function(FunctionSpec(target, key="register_scorer")))
    functions = [load(spec) for spec in specs]

    async def answer_task(task: int, number: int, samples: list[RewardSample]) -> dict[str, Any]:
        try:
            results = await score(functions[number], samples, config.timeout_s)
        except FunctionExited as error:
            results = [RewardResult(None, error=str(error)) for _ in samples]
        return {"id": task, "results": [list(vars(result).values()) for result in results]}

    signatures = [function.signature for function in functions]
    concurrent = any(signature.is_async for signature in signatures)
    return Service(answer_task, [asdict(signature) for signature in signatures], concurrent)


@dataclass(eq=False)
class RewardTask:
    """One call: a function and the samples it is for, pickled."""

    id: int
    call: Call
    function: int
    rows: tuple[str, ...]
    payload: bytes
    sent_at: float = 0.0
    alone: bool = False
    """Set after a crash whose cause is unclear: the second attempt has a worker to itself."""


class Worker(PythonProcess):
    """A worker process, and the tasks it was sent. `memory_bytes` limits it with everything it starts, where a cgroup
    can; `answered` gets every answer."""

    def __init__(self, memory_bytes: int, answered: Callable[[Worker, dict[str, Any]], None]) -> None:
        self.tasks: dict[int, RewardTask] = {}
        self.ready = False
        self.last_reply_at = 0.0
        self.suspects: list[RewardTask] | None = None
        """Tasks for which it was killed, or some of them."""
        self.seen_pids: set[int] = set()
        """Of the worker and what it started, as far as `pids` met them."""
        self.cgroup = MemoryCgroup.create(memory_bytes)
        self._answered = answered
        super().__init__(_output_log, [] if self.cgroup is None else [self.cgroup.join_fd])

    def received(self, message: dict[str, Any]) -> None:
        if self.ready:
            self._answered(self, message)
        else:
            super().received(message)

    def pids(self) -> list[int]:
        """The processes of the worker and of what it started."""
        if self.cgroup is not None:
            pids = self.cgroup.pids()
        else:
            pids = [process.pid for process in processes.descendants(self.process.pid)]
        self.seen_pids.update(pids)
        return pids

    async def kill(self) -> None:
        self.pids()
        await super().kill()
        processes.remove_sysv_segments(self.seen_pids)
        if self.cgroup is not None:
            self.cgroup.close()
            self.cgroup = None


class WorkerPool(Backend):
    """Runs functions in worker processes."""

    drains_any_time = True

    def __init__(
        self,
        specs: Sequence[FunctionSpec],
        cfg: RewardConfig,
        *,
        num_workers: int = 1,
        scorers: Mapping[str, str] | None = None,
        quiet: bool = False,
    ) -> None:
        """`scorers` are those a user registered, as `module:function`; `quiet`: killed calls are expected by the caller
        and logged at level DEBUG only."""
        self.timeout_s = cfg.timeout_s
        self.num_workers = num_workers
        self.restarts = 0
        self.calls: int = 0
        self._names = ", ".join(spec.describe() for spec in specs)
        self._kill_level = logging.DEBUG if quiet else logging.WARNING
        fusion = replace(
            cfg.sandbox_fusion, max_concurrent=max(1, cfg.sandbox_fusion.max_concurrent // num_workers)
        )
        self._setup = tuple(specs), replace(cfg, sandbox_fusion=fusion), dict(scorers or {})
        # Programs in the sandbox are descendants too, and have a separate limit.
        self._memory_limit = (
            (cfg.memory_limit_mb + cfg.sandbox.memory_limit_mb) << 20
            if cfg.memory_limit_mb
            else host_memory_limit() // 2
        )
        self._per_worker = max(1, cfg.max_concurrency // num_workers)
        self.signatures: Sequence[Signature] = []
        self._concurrent = False
        self._ids = itertools.count()
        self._workers: list[Worker] = []
        self._failed_starts = 0
        self._call_s = 0.0
        # Shared between the callers' threads and the event loop's, under `_changed`.
        self._changed = threading.Condition()
        self._queue: deque[RewardTask] = deque()
        self._failure: RewardError | None = None
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        with self._changed:
            self._changed.wait_for(lambda: self.signatures or self._failure)
            failure = self._failure
        if failure is not None:
            self.close()
            raise failure

    @property
    def pids(self) -> list[int]:
        """Of the workers' supervisors."""
        return [worker.process.pid for worker in self._workers]

    def submit(self, function: int, samples: Sequence[RewardSample]) -> Call:
        task_id, samples, call = next(self._ids), list(samples), new_call(samples)
        try:
            payload = pickle.dumps((task_id, function, samples))
        except Exception as error:  # pickling calls whatever __reduce__ the data has
            text = (
                f"The row cannot be sent to a reward worker process ({type(error).__name__}: {error}); "
                f"set reward.in_process=True or drop that column."
            )
            answer(call, [RewardResult(None, error=text) for _ in samples])
            return call
        task = RewardTask(task_id, call, function, tuple(sample.row_name for sample in samples), payload)
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._queue.append(task)
            first = len(self._queue) == 1
        if first:  # otherwise the loop knows that tasks are waiting
            with contextlib.suppress(RuntimeError):  # the loop has just ended: the call says why
                self._loop.call_soon_threadsafe(self._dispatch)
        return call

    def close(self) -> None:
        """End the workers and whatever they started. Safe to call twice."""
        atexit.unregister(self.close)
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._closing.set)
        if self._thread is not threading.current_thread():
            self._thread.join()

    # ---- the event loop's thread

    def _run(self) -> None:
        failure = RewardError("The reward pool is closed.")
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except RewardError as error:
            failure = error
        except OSError as error:
            advice = ""
            if error.errno == errno.EMFILE:
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                advice = f" (this process may open {limit}; raise `ulimit -n`, or lower reward.num_workers)"
            failure = RewardError(f"A reward worker process cannot be started: {error}{advice}.")
        except Exception as error:  # nobody must wait for ever
            _log.exception("the reward pool failed")
            failure = RewardError(f"The reward pool failed: {type(error).__name__}: {error}")
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
            unanswered = [*self._queue, *(task for worker in self._workers for task in worker.tasks.values())]
        fail([task.call for task in unanswered], failure)

    async def _serve(self) -> None:
        workers = [self._keep_worker() for _ in range(self.num_workers)]
        running = [
            asyncio.ensure_future(one) for one in (self._closing.wait(), self._enforce_limits(), *workers)
        ]
        done, pending = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for future in pending:
            future.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for worker in self._workers:
            await worker.kill()
        for future in done:
            future.result()

    async def _keep_worker(self) -> None:
        """Keep one worker running until the pool closes; RewardError when it cannot be started."""
        while True:
            worker = Worker(self._memory_limit, self._take_answer)
            self._workers.append(worker)
            try:
                await self._load(worker)
                await worker.over.wait()
                problem = await worker.how_it_ended()
                if worker.suspects is None and worker.cgroup and worker.cgroup.ran_out_of_memory():
                    problem = self._memory_problem("too much")
            finally:
                await worker.kill()
            self._workers.remove(worker)
            self.restarts += 1
            if worker.ready:
                self._reassign(worker, problem)
                continue
            self._failed_starts += 1
            if not self.signatures or self._failed_starts >= _MAX_FAILED_STARTS:
                raise RewardError(
                    f"The reward function {self._names}, imported in a worker process, {problem}."
                )

    async def _load(self, worker: Worker) -> None:
        loaded = await worker.load(f"{__name__}:serve_functions", self._setup, RewardError)
        if loaded is None:
            return
        worker.ready = True
        self._failed_starts = 0
        with self._changed:
            self.signatures = [Signature(**fields) for fields in loaded]
            self._concurrent = any(signature.is_async for signature in self.signatures)
            self._changed.notify_all()
        self._dispatch()

    def _take_answer(self, worker: Worker, message: dict[str, Any]) -> None:
        task = worker.tasks.pop(message["id"])
        now = time.monotonic()
        took = now - max(worker.last_reply_at, task.sent_at)
        worker.last_reply_at = now
        self._call_s = took if self._call_s == 0.0 else 0.9 * self._call_s + 0.1 * took
        self._answer(task, [RewardResult(*row) for row in message["results"]])
        self._dispatch()

    def _answer(self, task: RewardTask, results: list[RewardResult]) -> None:
        self.calls += 1
        answer(task.call, results)

    def _dispatch(self) -> None:
        with self._changed:
            while self._queue:
                task = self._queue[0]
                free = [worker for worker in self._workers if self._can_take(worker, task)]
                if not free:
                    return
                self._queue.popleft()
                worker = min(free, key=lambda worker: len(worker.tasks))
                task.sent_at = time.monotonic()
                worker.tasks[task.id] = task
                worker.send(task.payload)

    def _can_take(self, worker: Worker, task: RewardTask) -> bool:
        if not worker.ready or worker.ended:
            return False
        if task.alone or any(other.alone for other in worker.tasks.values()):
            return not worker.tasks
        if self._concurrent:
            return len(worker.tasks) < self._per_worker
        ahead = int(_AHEAD_S / self._call_s) if self._call_s else 1
        return len(worker.tasks) <= min(ahead, _MAX_AHEAD)

    def _running(self, worker: Worker) -> list[RewardTask]:
        """The calls a worker is busy with: the oldest, or all of them with async functions."""
        tasks = list(worker.tasks.values())
        return tasks if self._concurrent else tasks[:1]

    # ---- deadlines, limits, deaths

    async def _enforce_limits(self) -> None:
        next_scan = 0.0
        while True:
            # Replies that arrived in time are handled before this continues, however long the loop was busy.
            await asyncio.sleep(_CHECK_S if any(worker.tasks for worker in self._workers) else _IDLE_CHECK_S)
            start = time.monotonic()
            for worker in self._workers:
                if not worker.ended:
                    self._enforce_deadline(worker, start)
                if not worker.ended and start >= next_scan:
                    self._enforce_memory(worker)
            if start >= next_scan:  # reading /proc may take long on a machine with very many processes
                next_scan = time.monotonic() + 20 * (time.monotonic() - start)

    def _enforce_deadline(self, worker: Worker, now: float) -> None:
        running = self._running(worker)
        # The deadline is of the call, not of the wait behind others.
        since = 0.0 if self._concurrent else worker.last_reply_at
        late = [now - max(task.sent_at, since) - self.timeout_s for task in running]
        if late and max(late) >= (GRACE_S if self._concurrent else 0.0):
            worker.suspects = [task for task, by in zip(running, late, strict=True) if by >= 0.0]
            worker.end(f"took longer than reward.timeout_s={self.timeout_s:g} s and was killed")

    def _enforce_memory(self, worker: Worker) -> None:
        pids = worker.pids()
        if worker.cgroup is not None:
            return  # the kernel does
        in_files = processes.open_memory_bytes(pids) + sum(processes.sysv_segments(worker.seen_pids).values())
        if (used := processes.resident_bytes(pids, in_files)) > self._memory_limit:
            worker.suspects = self._running(worker)
            worker.end(self._memory_problem(f"{used >> 20} MB of"))

    def _memory_problem(self, used: str) -> str:
        limit = f"limit {self._memory_limit >> 20} MB, reward.memory_limit_mb"
        return f"used {used} memory ({limit}) and was killed"

    def _reassign(self, worker: Worker, problem: str) -> None:
        """Fail the calls that ended the worker and queue the others again. A call that only may have ended it is tried
        once more, alone: it may have been a neighbour, or something an earlier call left behind."""
        certain = worker.suspects is not None and not self._concurrent
        suspects = self._running(worker) if worker.suspects is None else worker.suspects
        again = []
        for task in worker.tasks.values():
            if task in suspects and (certain or task.alone):
                name = self.signatures[task.function].name
                text = f"Reward function {name} {problem} (row {rows_text(task.rows)})"
                _log.log(self._kill_level, "%s", text)
                self._answer(task, [RewardResult(None, error=text) for _ in task.rows])
            else:
                task.alone = task.alone or task in suspects
                again.append(task)
        with self._changed:
            self._queue.extendleft(reversed(again))
        self._dispatch()
