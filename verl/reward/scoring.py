"""Calls a reward function on samples and checks what it returned.

A function that raises, or returns what cannot be a score, costs its samples the score and nothing else: the result has
the reason, with the line of the user's file. Every accepted score is a finite float with plain extra values.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import threading
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from verl.errors import RewardError
from verl.reward.base import Call, LocalBackend, RewardResult, RewardSample, answer
from verl.reward.functions import RewardFunction, Signature
from verl.user_code import error_line
from verl.user_process import Steps

_EXTRA_DEPTH = 16  # levels of nesting; scores are also in checkpoints, whose JSON has a limit
_EXTRA_LIMIT = 2000  # characters kept of an extra value that is not a number, and of its name


class FunctionExited(RewardError):
    """A reward function called `sys.exit` or, in the trainer's process, `os._exit`."""


class _OSExit(SystemExit):
    """What `os._exit` raises instead of ending the process."""


async def score(
    function: RewardFunction, samples: Sequence[RewardSample], timeout_s: float | None = None
) -> list[RewardResult]:
    """Results of one call: a batch function gets all of `samples`, any other function exactly one. Raises
    FunctionExited; the deadline applies to async functions only. What a plain function does comes before the first
    await (`verl.user_process.Steps`)."""
    try:
        value = function.call(samples)
        if inspect.isawaitable(value):
            await asyncio.sleep(0)
            value = await _bounded(value, timeout_s)
        return _interpret(function, samples, value)
    except (Exception, SystemExit) as error:  # user code may raise anything
        return _failed(function, samples, error, timeout_s)


async def _bounded(value: Awaitable[Any], timeout_s: float | None) -> Any:
    async def no_exit() -> Any:
        try:
            return await value
        except SystemExit as error:  # it would end the event loop and with it every other call
            raise RuntimeError(f"sys.exit({error.code!r}) in a coroutine") from error

    return await asyncio.wait_for(no_exit(), timeout_s)


def _failed(
    function: RewardFunction, samples: Sequence[RewardSample], error: BaseException, timeout_s: float | None
) -> list[RewardResult]:
    if isinstance(error.__cause__, SystemExit):
        error = error.__cause__
    rows = rows_text([sample.row_name for sample in samples])
    if isinstance(error, RewardError):
        text = str(error)
    elif isinstance(error, SystemExit):
        call = "os._exit" if isinstance(error, _OSExit) else "sys.exit"
        text = (
            f"Reward function {function.name} called {call}({error.code!r}){error_line(error)} on row {rows}"
        )
        raise FunctionExited(text) from error
    elif isinstance(error, TimeoutError) and timeout_s is not None and not error.args:
        text = f"Reward function {function.name} took longer than reward.timeout_s={timeout_s:g} s"
    else:
        what = f"{type(error).__name__}: {error}{error_line(error)}"
        text = f"Reward function {function.name} raised {what} on row {rows}"
    return [RewardResult(None, error=text) for _ in samples]


def rows_text(rows: Sequence[str]) -> str:
    """The first few rows, for messages."""
    between = "; " if any("," in row for row in rows) else ", "
    return between.join([*rows[:4], *(["..."] if len(rows) > 4 else [])])


class InProcessBackend(LocalBackend):
    """Calls functions in this process: for those that hold a GPU or that no other process can import.

    Nothing can be killed here, so the deadline holds for async functions only. Calls happen on the thread that waits
    for them, because such functions may depend on the thread they run on.
    """

    drains_any_time = True

    def __init__(
        self, functions: Sequence[RewardFunction], timeout_s: float | None, max_concurrency: int
    ) -> None:
        super().__init__()
        self.functions = list(functions)
        self.timeout_s = timeout_s
        self.max_concurrency = max_concurrency
        self.calls: int = 0

    @property
    def signatures(self) -> list[Signature]:
        return [function.signature for function in self.functions]

    def run(self, calls: Sequence[Call]) -> None:
        tasks = [(call, self.functions[number], samples) for call, number, samples in self.take(calls)]
        self.calls += len(tasks)
        with _without_os_exit(), contextlib.closing(Steps()) as steps:
            for call, function, samples in tasks:
                if not function.signature.is_async:
                    answer(call, steps.run(score(function, samples, self.timeout_s)))
            if concurrent := [task for task in tasks if task[1].signature.is_async]:
                asyncio.run(self._score_concurrently(concurrent))

    async def _score_concurrently(
        self, tasks: list[tuple[Call, RewardFunction, Sequence[RewardSample]]]
    ) -> None:
        limit = asyncio.Semaphore(self.max_concurrency)

        async def one(call: Call, function: RewardFunction, samples: Sequence[RewardSample]) -> None:
            async with limit:
                answer(call, await score(function, samples, self.timeout_s))

        await asyncio.gather(*(one(*task) for task in tasks))


@contextlib.contextmanager
def _without_os_exit() -> Iterator[None]:
    """`os._exit` in this thread raises: it would end the run at once, with the function's exit code and no word. Other
    threads (a watchdog) and forked children end as ever."""
    exit_now, pid, thread = os._exit, os.getpid(), threading.get_ident()

    def raise_exit(status: int) -> NoReturn:
        if (os.getpid(), threading.get_ident()) == (pid, thread):
            raise _OSExit(status)
        exit_now(status)

    os._exit = raise_exit
    try:
        yield
    finally:
        os._exit = exit_now


# ---- checking what a function returned


def _interpret(function: RewardFunction, samples: Sequence[RewardSample], value: Any) -> list[RewardResult]:
    if function.signature.is_batch:
        return interpret_batch(value, function.name, samples)
    return [interpret(value, function.name, sample) for sample in samples]


def interpret(value: Any, function: str, sample: RewardSample) -> RewardResult:
    """The result for one sample, from what `function` returned for it."""
    if isinstance(value, RewardResult):
        if value.score is None and value.error:
            return value
        value = {**value.extra, "score": value.score}
    number, extra = value, {}
    if isinstance(value, Mapping):
        number = value.get("score")
        extra = {_clip(str(key)): plain(item) for key, item in value.items() if key != "score"}
    try:  # also numpy scalars, 0-d tensors, Decimal, Fraction
        score = math.nan if isinstance(number, str | bytes) else float(number)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise RewardError(
            f"Reward function {function} returned {_show(value)} (a {type(value).__name__}) for row {sample.row_name} "
            f"(response {_show(sample.response)}). Return a finite number, or a dict with it under 'score', on every "
            f"path."
        )
    return RewardResult(score, extra)


def interpret_batch(value: Any, function: str, samples: Sequence[RewardSample]) -> list[RewardResult]:
    """The results from what a batch function returned: a sequence of scores or dicts, or a dict of sequences. One bad
    score does not spoil the others."""
    count = len(samples)
    if isinstance(value, Mapping) and "score" in value:
        columns = {key: _as_list(items) for key, items in value.items()}
        fits = all(items is not None and len(items) == count for items in columns.values())
        rows: list[Any] | None = None
        if fits:
            rows = [{key: items[row] for key, items in columns.items() if items} for row in range(count)]
    else:
        rows = _as_list(value)
    if rows is None or len(rows) != count:
        raise RewardError(
            f"Reward function {function} was given {count} completions and returned {_show(value)}; it must return one "
            f"score (or dict with 'score') per completion, in order."
        )
    results = []
    for sample, item in zip(samples, rows, strict=True):
        try:
            results.append(interpret(item, function, sample))
        except RewardError as error:
            results.append(RewardResult(None, error=str(error)))
    return results


def plain(value: Any, depth: int = 0) -> Any:
    """What JSON can carry: numbers as Python numbers, text and small collections as they are, anything else as repr."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _clip(value)
    if isinstance(value, int):
        # str() of a longer one may be refused by Python
        return int(value) if abs(value) < 2**63 else "a very large integer"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, list | tuple) and len(value) <= 64 and depth < _EXTRA_DEPTH:
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, Mapping) and len(value) <= 64 and depth < _EXTRA_DEPTH:
        return {_clip(str(key)): plain(item, depth + 1) for key, item in value.items()}
    try:  # numpy scalars and tensors with one element; others raise
        return plain(value.item(), depth)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return _clip(repr(value))


def _as_list(value: Any) -> list[Any] | None:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(value)
    listed = value.tolist() if callable(getattr(value, "tolist", None)) else None
    return listed if isinstance(listed, list) else None


def _show(value: Any) -> str:
    try:
        return _clip(repr(value), 80)
    except Exception as error:  # a user's __repr__ may raise anything
        return f"<unprintable {type(value).__name__}: {type(error).__name__}>"


def _clip(text: str, limit: int = _EXTRA_LIMIT) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
