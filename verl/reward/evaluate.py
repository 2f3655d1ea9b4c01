"""Calls reward functions on samples, in a worker process or in this one.

A function that raises, or returns what cannot be a score, costs its samples the score and nothing else: the result has
the reason, with the line of the user's file.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Hashable, Sequence
from typing import Any

from verl.errors import RewardError
from verl.reward.base import Backend, RewardResult, RewardSample
from verl.reward.functions import RewardFunction, Signature
from verl.reward.results import interpret, interpret_batch


class FunctionExited(RewardError):
    """A reward function called `sys.exit`."""


class _ExitInCoroutine(Exception):
    """Stands for SystemExit inside a coroutine, where it would end the event loop and with it every other call."""


def score(
    function: RewardFunction, samples: Sequence[RewardSample], timeout_s: float | None = None
) -> list[RewardResult]:
    """Results of one call: a batch function gets all of `samples`, any other function exactly one. Raises
    FunctionExited; the deadline applies to async functions only."""
    try:
        value = function.call(samples)
        if inspect.isawaitable(value):
            value = asyncio.run(_bounded(value, timeout_s))
        return _interpret(function, samples, value)
    except (Exception, SystemExit) as error:  # user code may raise anything
        return failed(function, samples, error, timeout_s)


async def score_async(
    function: RewardFunction, samples: Sequence[RewardSample], timeout_s: float | None = None
) -> list[RewardResult]:
    """`score` inside an event loop, so that several calls can overlap."""
    try:
        value = function.call(samples)
        if inspect.isawaitable(value):
            value = await _bounded(value, timeout_s)
        return _interpret(function, samples, value)
    except (Exception, SystemExit) as error:  # user code may raise anything
        return failed(function, samples, error, timeout_s)


def failed(
    function: RewardFunction, samples: Sequence[RewardSample], error: BaseException, timeout_s: float | None
) -> list[RewardResult]:
    """No score for any of `samples`, because of `error`."""
    if isinstance(error, _ExitInCoroutine) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, SystemExit):
        raise FunctionExited(
            f"Reward function {function.name} called sys.exit({error.code!r}){_location(error)}; it must return a "
            f"score or raise an exception."
        ) from error
    if isinstance(error, RewardError):
        text = str(error)
    elif isinstance(error, TimeoutError) and timeout_s is not None and not error.args:
        text = f"Reward function {function.name} took longer than reward.timeout_s={timeout_s:g} s"
    else:
        text = (
            f"Reward function {function.name} raised {type(error).__name__}: {error}{_location(error)} "
            f"on row {rows_text([sample.index for sample in samples])}"
        )
    return [RewardResult(None, error=text) for _ in samples]


def rows_text(rows: Sequence[int]) -> str:
    """The first few row numbers, for messages."""
    return ", ".join(map(str, rows[:4])) + (", ..." if len(rows) > 4 else "")


def _interpret(function: RewardFunction, samples: Sequence[RewardSample], value: Any) -> list[RewardResult]:
    if function.signature.is_batch:
        return interpret_batch(value, function.name, samples)
    return [interpret(value, function.name, sample) for sample in samples]


async def _bounded(value: Awaitable[Any], timeout_s: float | None) -> Any:
    async def guarded() -> Any:
        try:
            return await value
        except SystemExit as error:
            raise _ExitInCoroutine from error

    return await asyncio.wait_for(guarded(), timeout_s)


def _location(error: BaseException) -> str:
    """File and line of the innermost frame that is not ours."""
    here, trace, found = os.path.dirname(__file__), error.__traceback__, ""
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if os.path.dirname(filename) != here:
            found = f" ({os.path.basename(filename)}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return found


class InProcessBackend(Backend):
    """Calls functions in this process: for those that hold a GPU or that no other process can import.

    Nothing can be killed here, so the deadline holds for async functions only. Calls happen in `drain`, on the caller's
    thread, because such functions may depend on the thread they run on.
    """

    def __init__(
        self, functions: Sequence[RewardFunction], timeout_s: float | None, max_concurrency: int
    ) -> None:
        self.functions = list(functions)
        self.timeout_s = timeout_s
        self.max_concurrency = max_concurrency
        self.calls: int = 0
        self._tasks: list[tuple[Hashable, RewardFunction, Sequence[RewardSample]]] = []

    @property
    def signatures(self) -> list[Signature]:
        return [function.signature for function in self.functions]

    def submit(self, key: Hashable, function: int, samples: Sequence[RewardSample]) -> None:
        self._tasks.append((key, self.functions[function], samples))

    def drain(self) -> dict[Hashable, list[RewardResult]]:
        tasks, self._tasks = self._tasks, []
        self.calls += len(tasks)
        concurrent = [task for task in tasks if task[1].signature.is_async]
        results = {
            key: score(function, samples, self.timeout_s)
            for key, function, samples in tasks
            if not function.signature.is_async
        }
        return results | (asyncio.run(self._score_concurrently(concurrent)) if concurrent else {})

    async def _score_concurrently(
        self, tasks: list[tuple[Hashable, RewardFunction, Sequence[RewardSample]]]
    ) -> dict[Hashable, list[RewardResult]]:
        limit = asyncio.Semaphore(self.max_concurrency)

        async def one(function: RewardFunction, samples: Sequence[RewardSample]) -> list[RewardResult]:
            async with limit:
                return await score_async(function, samples, self.timeout_s)

        scored = await asyncio.gather(*(one(function, samples) for _, function, samples in tasks))
        return dict(zip((key for key, _, _ in tasks), scored, strict=True))

    def close(self) -> None:
        self._tasks.clear()
