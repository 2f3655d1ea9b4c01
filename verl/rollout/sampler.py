"""The owner of all requests under way to a rollout engine, or to a pool that looks like one.

Any coroutine or thread may ask for samples at any time; one thread at a time drives the engine and answers each request
when it ends, so that nothing is handed between threads while tokens are drawn.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from verl.data.proto import DataProto
from verl.errors import RolloutError
from verl.observe.live import live
from verl.rollout.base import GenerationSettings, Request, Response, RolloutEngine
from verl.rollout.samples import (
    Finished,
    Kept,
    SampleTask,
    begin_counting,
    check_new,
    joined,
    kept_of,
    pack_responses,
    samples_beyond,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
OnFinish = Callable[[Finished], None]


class Sampler:
    """Answers every request exactly once, with all its tokens however often it was suspended, unless `abort` ends it.

    `sample`, `submit`, `add`, `cancel` and `call` may be used from any thread, also while another drives the engine;
    the rest by the thread that drives, or while none does."""

    poll_s = 0.05
    """How soon the driving thread notices what others ask of it while the engine generates."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.suspended = False
        self.idle_s = 0.0
        """Seconds in which a driving thread had no sample to generate."""
        self.ended = 0
        """Samples of prompts, since the beginning."""
        self.changed = threading.Condition()
        """Guards everything here; notified when a sample ends and when something is asked for."""
        self._driver: int | None = None
        """The thread that drives the engine."""
        self._groups: dict[str, int] = {}
        """Samples of each prompt that was added which have not ended."""
        self._tasks: dict[str, SampleTask] = {}
        self._sent: dict[str, tuple[SampleTask, dict[int, int]]] = {}
        """What the engine has to answer: by its request id the task, and the task's sample for each of its own."""
        self._submitted = 0  # samples since nothing was outstanding
        self._deliveries: list[Callable[[], None]] = []  # to be done by the driving thread
        self._calls: list[Callable[[], None]] = []  # the same, and not dropped by `abort`

    # ---- asking for samples, from any thread

    async def sample(self, request: Request) -> Response:
        """The response to a request of one sample. Cancelling the wait ends the request."""
        if request.n != 1:
            raise ValueError(f"{request.request_id!r} asks for {request.n} samples; sample() gives one")
        answer: Future[Response] = Future()
        answer.set_running_or_notify_cancel()  # so that only the engine's answer ends it
        self.submit([request], answer.set_result, fail=answer.set_exception)
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            self.post(partial(self._abandon, request.request_id))
            raise

    def _abandon(self, request_id: str) -> None:
        with suppress(NotImplementedError):  # then it runs to its end
            self.cancel([request_id])

    def submit(
        self,
        requests: Sequence[Request],
        deliver: Callable[[Response], None],
        begun: Mapping[str, dict[int, Response | None]] | None = None,
        *,
        fail: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Start requests; while suspended, with `resume`. `deliver` is called by the driving thread for each sample
        that ends; `fail` where an error ends all of them. `begun`: by request id the samples that are still needed,
        with the tokens they have, where these are not all of them from their beginning."""
        needed = begun or {}
        tasks = [
            SampleTask(r, dict(needed.get(r.request_id) or dict.fromkeys(range(r.n))), deliver, fail)
            for r in requests
        ]
        with self.changed:
            check_new([request.request_id for request in requests], self._tasks)
            if not self.suspended:
                self._send(tasks)
            self._submitted = self._submitted * bool(self._tasks) + sum(len(t.missing) for t in tasks)
            self._tasks |= {task.request.request_id: task for task in tasks}
            self.changed.notify_all()

    def _send(self, tasks: Sequence[SampleTask]) -> None:
        parts = [(part, task, samples) for task in tasks for part, samples in task.parts()]
        if parts:
            self.engine.submit([part for part, _, _ in parts])
        self._sent |= {part.request_id: (task, samples) for part, task, samples in parts}

    def add(
        self,
        prompts: DataProto,
        settings: GenerationSettings,
        on_finish: OnFinish,
        prefix: str = "",
        kept: Kept | None = None,
    ) -> None:
        """Start `settings.n` samples of each prompt; the driving thread calls `on_finish` as each ends. `prefix` goes
        before the uids in `Finished.group` and in the engine's request ids, not into the draws: prompts of two data
        sets may have the same uid at the same time. What is finished in `kept` is not generated, and what is not
        continues from its tokens."""
        missing: dict[str, dict[int, Response | None]] = {}
        ready: list[Finished] = []
        with self.changed:
            names = [f"{prefix}{uid}" for uid in prompts.non_tensor_batch["uid"]]
            check_new(names, self._groups)
            for name in names:
                missing[name] = {}
                for sample in range(settings.n):
                    result, finished = (kept or {}).get((name, sample), (None, False))
                    if finished:
                        ready.append(Finished(name, sample, result))
                    else:
                        missing[name][sample] = result
            self._start(prompts, settings, on_finish, prefix, missing)
            self._groups |= dict.fromkeys(names, settings.n)
            for each in ready:
                self.post(partial(self._end, each, on_finish))

    def _start(
        self,
        prompts: DataProto,
        settings: GenerationSettings,
        on_finish: OnFinish,
        prefix: str,
        missing: Mapping[str, dict[int, Response | None]],
    ) -> None:
        """One request for the samples of a prompt, so that they share its computation."""

        def deliver(response: Response) -> None:
            self._end(Finished(response.request_id, response.sample, response), on_finish)

        columns = prompts.non_tensor_batch
        requests = [
            Request(name, ids, settings.sampling, settings.n, settings.seed, key=str(uid) if prefix else None)
            for name, uid, ids in zip(missing, columns["uid"], columns["prompt_ids"], strict=True)
            if missing[name]
        ]
        self.submit(requests, deliver, missing)

    def _end(self, finished: Finished, on_finish: OnFinish) -> None:
        """In the driving thread: a sample of a prompt ended."""
        with self.changed:
            self.ended += 1
            self._groups[finished.group] -= 1
            if not self._groups[finished.group]:
                del self._groups[finished.group]
        live.add("responses_total")
        live.add("responses_done")
        live.observe("response_length_tokens", len(finished.result.token_ids))
        on_finish(finished)
        with self.changed:
            self.changed.notify_all()

    @property
    def outstanding(self) -> int:
        """Samples of prompts that were added and have not ended."""
        with self.changed:
            return sum(self._groups.values())

    def cancel(self, request_ids: Iterable[str] | None) -> None:
        """End requests (None: all) early: each is answered with the tokens it has. NotImplementedError: the engine
        cannot, and they run to their end."""
        with self.changed:
            names = list(self._tasks) if request_ids is None else request_ids
            tasks = {self._tasks[name] for name in names if name in self._tasks}
            sent = [name for name, (task, _) in self._sent.items() if task in tasks]
            for task in tasks - {task for task, _ in self._sent.values()}:
                name = task.request.request_id
                del self._tasks[name]
                for sample, kept in task.missing.items():
                    response = kept or Response(name, sample, [], [], "abort")
                    self.post(partial(task.deliver, replace(response, finish_reason="abort")))
            for task in tasks:
                task.cancelled = True
        if sent:
            self.engine.abort(sent)

    def collect(
        self,
        prompts: DataProto,
        settings: GenerationSettings,
        on_finish: Callable[[int, Any], None] | None = None,
        prefix: str = "",
        run: Callable[[Callable[[], bool]], None] | None = None,
    ) -> list[Any]:
        """`settings.n` samples of each prompt, in the order of the prompts whatever finished first; `on_finish` is
        called with the row of each. `run` waits where another thread generates. With `settings.over_sample_rate`
        nothing else may be outstanding."""
        n, total = settings.n, len(prompts) * settings.n
        needed = total - samples_beyond(settings.over_sample_rate, total)
        first_row = {f"{prefix}{uid}": i * n for i, uid in enumerate(prompts.non_tensor_batch["uid"])}
        rows: dict[int, Any] = {}

        def ended(finished: Finished) -> None:
            row = first_row[finished.group] + finished.sample
            if on_finish is not None:
                on_finish(row, finished.result)
            rows[row] = finished.result  # last: another thread may wait for it
            if len(rows) == needed < total:
                self.end_early()

        if not self.outstanding:
            begin_counting(0)
        live.add("responses_wanted", total)
        self.add(prompts, settings, ended, prefix)
        # The engine's answer to a request that was cancelled would reach the next owner of the engine.
        (run or self.run)(lambda: len(rows) == total and not any(t.cancelled for t, _ in self._sent.values()))
        return [rows[row] for row in range(total)]

    def end_early(self) -> None:
        """Answer all that is outstanding as it is, with reason `abort`; the driving thread calls it."""
        try:
            self.cancel(None)
        except NotImplementedError as error:
            raise RolloutError(
                f"responses cannot be ended early: {error}. Use actor_rollout_ref.rollout.name=native, vllm or "
                "sglang, or actor_rollout_ref.rollout.over_sample_rate=0"
            ) from None

    # ---- driving the engine, in one thread at a time

    def run(self, done: Callable[[], bool], *, serve: bool = False) -> None:
        """Generate until `done()`, which is asked after all that has ended is delivered. An exception, also of a
        callback, ends everything that is under way. `serve`: wait for requests while there are none."""
        with self.driving():
            try:
                while True:
                    self._do_posted()
                    if done():
                        return
                    if not self._sent:
                        self._wait(serve)
                        continue
                    started = time.monotonic()
                    responses = self.engine.poll(self.poll_s)
                    if not responses and time.monotonic() - started < self.poll_s:
                        stats = self.engine.stats()
                        if not stats.running + stats.waiting:
                            with self.changed:
                                missing = sum(len(task.missing) for task in self._tasks.values())
                            raise RolloutError(
                                f"{type(self.engine).__name__} left {missing} of {self._submitted} samples unanswered, "
                                "a defect of the engine; use actor_rollout_ref.rollout.name=hf and report it"
                            )
                    self.deliver(responses)
            except BaseException as error:
                self.abort(error)
                raise

    def _wait(self, serve: bool) -> None:
        """Until others ask for something, or answer a conversation."""
        with self.changed:
            if self._sent or self._calls or self._deliveries:
                return
            idle = not (self._tasks or self._groups)
            if idle and not serve:
                raise RolloutError("generation has ended, and samples that are needed were not asked for")
            started = time.monotonic()
            self.changed.wait(1.0)
            self.idle_s += idle * (time.monotonic() - started)

    @contextmanager
    def driving(self) -> Iterator[None]:
        """This thread, and no other, uses the engine inside this block."""
        this = threading.get_ident()
        if self._driver == this:
            yield
            return
        with self.changed:
            self.changed.wait_for(lambda: self._driver is None)
            self._driver = this
        try:
            yield
        finally:
            self._stop_driving()

    def _stop_driving(self) -> None:
        with self.changed:
            self._driver = None
            self.changed.notify_all()

    def call(self, function: Callable[[], Result]) -> Result:
        """What `function` returns. The driving thread calls it between two polls; where none drives this thread does,
        and one that would begin to waits for it."""
        answer: Future[Result] = Future()

        def work() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:  # raised where the call came from
                answer.set_exception(error)

        this = threading.get_ident()
        if self._driver == this:
            return function()
        with self.changed:
            self._calls.append(work)
            self.changed.notify_all()
            self.changed.wait_for(lambda: answer.done() or self._driver is None)
            if answer.done():
                return answer.result()
            self._calls.remove(work)
            self._driver = this
        try:
            return function()
        finally:
            self._stop_driving()

    def post(self, delivery: Callable[[], None]) -> None:
        """To be called by the driving thread; what it raises ends everything. `abort` drops it."""
        with self.changed:
            self._deliveries.append(delivery)
            self.changed.notify_all()

    def _do_posted(self) -> None:
        while True:
            with self.changed:
                posted = self._calls or self._deliveries
                if not posted:
                    return
                work = posted.pop(0)
            work()
            with self.changed:
                self.changed.notify_all()

    def deliver(self, responses: Iterable[Response]) -> None:
        """Answer with what was polled from the engine. What it ended for `suspend` is kept instead."""
        for response in responses:
            with self.changed:
                task, samples = self._sent.get(response.request_id, (None, {}))
                if task is None or response.sample not in samples:
                    raise RolloutError(
                        f"{type(self.engine).__name__} answered sample {response.sample} of request "
                        f"{response.request_id!r}, which nobody waits for, a defect of the engine; use "
                        "actor_rollout_ref.rollout.name=hf and report it"
                    )
                sample = samples.pop(response.sample)
                if not samples:
                    del self._sent[response.request_id]
                whole = replace(response, request_id=task.request.request_id, sample=sample)
                kept = task.missing[sample]
                if kept is not None:
                    whole = joined(kept, whole)
                if self.suspended and whole.finish_reason == "abort" and not task.cancelled:
                    task.missing[sample] = whole if whole.token_ids else None
                    continue
                del task.missing[sample]
                if not task.missing:
                    del self._tasks[task.request.request_id]
            task.deliver(whole)

    def suspend(self) -> None:
        """Take everything out of the engine. Unfinished samples keep their tokens; those that end at this moment are
        delivered."""
        with self.driving():
            with self.changed:
                if self.suspended:
                    return
                sent = list(self._sent)
                self.suspended = True  # what is submitted from now on waits
            if sent:
                try:
                    self.engine.abort(sent)
                except NotImplementedError as error:
                    self.suspended = False
                    raise RolloutError(
                        f"generation cannot be suspended: {error}. Use actor_rollout_ref.rollout.name=native, vllm or "
                        "sglang, or trainer.async_training.mode=off"
                    ) from None
                self.run(lambda: not self._sent)

    def suspend_if_idle(self) -> bool:
        """Suspend where nothing is outstanding, without touching the engine; whether that is so."""
        with self.changed:
            idle = not (self._tasks or self._calls or self._deliveries)
            self.suspended = self.suspended or idle
            return idle

    def resume(self) -> None:
        """Continue, with the engine's weights of now: samples that have tokens first."""
        with self.changed:
            if not self.suspended:
                return
            self.suspended = False
            tasks = list(self._tasks.values())
            self._send([task for task in tasks if task.begun])
            self._send([task for task in tasks if not task.begun])
            self.changed.notify_all()

    def abort(self, error: BaseException | None = None) -> None:
        """End everything, also after an error of the engine, which says more than what follows from it."""
        with self.changed:
            tasks, sent = list(self._tasks.values()), list(self._sent)
            self._tasks, self._sent, self._groups = {}, {}, {}
            self._deliveries, self.suspended = [], False
        for task in tasks:
            task.fail(error or RolloutError(f"request {task.request.request_id!r} was aborted"))
        if not sent:
            return
        try:
            with suppress(NotImplementedError):  # then they run to their end
                self.engine.abort(sent)
            while self.engine.poll():
                pass
        except Exception as problem:
            logger.debug("ending requests: %s", problem)

    # ---- checkpoints

    def pack(self, finished: Sequence[Finished]) -> dict[str, Any]:
        """These samples, and the tokens of unfinished ones while suspended, as plain data for a checkpoint."""
        with self.changed:
            begun = [kept for task in self._tasks.values() for kept in task.missing.values() if kept]
        ended = [sample.result for sample in finished]
        return {"finished": pack_responses(ended), "unfinished": pack_responses(begun)}

    def unpack(self, packed: dict[str, Any], groups: Iterable[str]) -> Kept:
        """What a checkpoint has of these groups, for `add`."""
        return kept_of(packed, set(groups))
