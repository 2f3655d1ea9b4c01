"""Calls a reward function on samples, checks what it returned, and adds up several rewards.

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
from collections.abc import Awaitable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from verl.config.sections.reward import OverlongBufferConfig
from verl.errors import ConfigError, RewardError
from verl.reward import sandbox
from verl.reward.base import (
    Backend,
    Call,
    LocalBackend,
    RewardManager,
    RewardResult,
    RewardSample,
    answer,
    causes,
)
from verl.reward.functions import FunctionSpec, RewardFunction, ScorerFunction, Signature, load_function
from verl.reward.scorers import check_data_sources, uses_sandbox
from verl.user_code import error_line
from verl.user_process import Steps

_EXTRA_DEPTH = 16  # levels of nesting; scores are also in checkpoints, whose JSON has a limit
_EXTRA_LIMIT = 2000  # characters kept of an extra value that is not a number, and of its name


class FunctionExited(RewardError):
    """A reward function called `sys.exit` or, in the trainer's process, `os._exit`."""


class _OSExit(SystemExit):
    """What `os._exit` raises instead of ending the process."""


def load(spec: FunctionSpec) -> RewardFunction:
    """Import the function of a spec."""
    if spec.is_scorers:
        return ScorerFunction(spec.kwargs)
    function = load_function(spec)
    name = getattr(function, "__qualname__", None) or spec.describe()
    name = f"{name} ({spec.path.rpartition(':')[0] or spec.path})"
    if spec.manager is not None:
        from verl.reward.manager_function import ManagerFunction

        return ManagerFunction(function, spec.manager, name)
    return RewardFunction(function, spec.kwargs, name)


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
            value = await asyncio.wait_for(_without_sys_exit(value), timeout_s)
        if function.signature.is_batch:
            return interpret_batch(value, function.name, samples)
        return [interpret(value, function.name, sample) for sample in samples]
    except (Exception, SystemExit) as error:  # user code may raise anything
        return _failed(function, samples, error, timeout_s)


async def _without_sys_exit(value: Awaitable[Any]) -> Any:
    try:
        return await value
    except SystemExit as error:  # it would end the event loop and with it every other call
        raise RuntimeError(f"sys.exit({error.code!r}) in a coroutine") from error


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
        self.signatures = [function.signature for function in functions]
        self.timeout_s = timeout_s
        self.max_concurrency = max_concurrency
        self.calls: int = 0

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


def interpret(value: Any, function: str, sample: RewardSample) -> RewardResult:
    """The result for one sample, from what `function` returned for it."""
    tokens = None
    if isinstance(value, RewardResult):
        if value.score is None and value.error:
            return value
        tokens = value.token_scores
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
    return RewardResult(score, extra, token_scores=tokens)


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


# ---- the manager behind all built-in names


def wait(calls: Sequence[Call]) -> list[RewardResult]:
    """The results of these calls. The last is waited for first: so the thread is woken about once, not by each."""
    answered = [call.result() for call in reversed(calls)]
    return [result for results in reversed(answered) for result in results]


@dataclass
class RewardTerm:
    """One reward of the sum; `spec` is None for a model or a judge."""

    backend: Backend
    label: str
    weight: float = 1.0
    function: int = 0
    spec: FunctionSpec | None = None

    @property
    def signature(self) -> Signature:
        return self.backend.signatures[self.function]


class FunctionRewardManager(RewardManager):
    """One score per sample: the weighted sum of one or several rewards. Each single score is in `extra` under the
    reward's name, and a sample that one of them could not score has no score. `overlong` adds DAPO's penalty for
    responses near `max_response_length`."""

    def __init__(
        self,
        terms: Sequence[RewardTerm],
        overlong: OverlongBufferConfig | None = None,
        max_response_length: int = 0,
    ) -> None:
        if overlong is not None and not 0 < overlong.len <= max_response_length:
            raise ConfigError(
                f"reward.overlong_buffer.len is {overlong.len}; it must be between 1 and "
                f"data.max_response_length={max_response_length}."
            )
        self.terms = list(terms)
        self.signatures = [term.signature for term in terms]
        self.reads_tokens = any(term.spec is not None and term.spec.manager is not None for term in terms)
        self._backends = list(dict.fromkeys(term.backend for term in terms))
        self._overlong, self._max_response_length = overlong, max_response_length
        self._lock = threading.Lock()
        self._samples: dict[int, tuple[RewardSample, list[Call | None]]] = {}
        self._calls_taken = 0

    def check(self, data_sources: Collection[str] = (), columns: Collection[str] | None = None) -> None:
        sources = sorted({str(name) for name in data_sources})
        for term in self.terms:
            if term.spec is not None and not term.spec.is_scorers:
                term.signature.check(term.spec.kwargs, columns, term.spec.key)
            elif term.spec is not None:
                check_data_sources(sources)
                ScorerFunction(term.spec.kwargs).check(sources, columns, term.spec.key)
                if any(uses_sandbox(name) for name in sources):
                    sandbox.require()

    def preflight(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Score a few rows before anything expensive; RewardError when none of them gets a score."""
        for sample in samples:
            self.submit(sample)
        by_index = self.collect()
        results = [by_index[sample.index] for sample in samples]
        if results and all(result.score is None for result in results):
            raise RewardError(
                f"The reward gave no score for any of {len(results)} rows tried before training. "
                + causes([result.error or "" for result in results])
            )
        return results

    def submit(self, sample: RewardSample) -> None:
        calls = [
            None if term.signature.is_batch else term.backend.submit(term.function, [sample])
            for term in self.terms
        ]
        with self._lock:
            # One that an interrupted batch left goes, with its place in the order.
            self._samples.pop(sample.index, None)
            self._samples[sample.index] = (sample, calls)

    def collect(self, indices: Collection[int] | None = None) -> dict[int, RewardResult]:
        taken = self._take(indices)
        if not taken:
            return {}
        samples = [sample for sample, _ in taken]
        columns: list[list[Call]] = []
        for position, term in enumerate(self.terms):
            single = [call for _, row in taken if (call := row[position]) is not None]
            columns.append(single or [term.backend.submit(term.function, samples)])
        for backend in self._backends:
            pairs = zip(self.terms, columns, strict=True)
            backend.run([call for term, calls in pairs if term.backend is backend for call in calls])
        results = [self._sum(row) for row in zip(*map(wait, columns), strict=True)]
        if self._overlong is not None:
            results = self._penalized(self._overlong, samples, results)
        return {sample.index: result for sample, result in zip(samples, results, strict=True)}

    def _take(self, indices: Collection[int] | None) -> list[tuple[RewardSample, list[Call | None]]]:
        """Remove these samples from those submitted; returns them with their calls (None: of the whole batch)."""
        with self._lock:
            wanted = list(self._samples) if indices is None else sorted(set(indices))
            if unknown := [index for index in wanted if index not in self._samples]:
                raise RewardError(
                    f"rewards of samples that were not submitted, or were collected before, were asked for: "
                    f"{rows_text([str(index) for index in unknown])}"
                )
            return [self._samples.pop(index) for index in wanted]

    def scores_singly(self) -> bool:
        return all(term.backend.drains_any_time and not term.signature.is_batch for term in self.terms)

    def take_calls(self) -> int | None:
        known = [backend.calls for backend in self._backends if backend.calls is not None]
        if not known:
            return None
        before, self._calls_taken = self._calls_taken, sum(known)
        return self._calls_taken - before

    def close(self) -> None:
        for backend in self._backends:
            backend.close()

    def _sum(self, results: Sequence[RewardResult]) -> RewardResult:
        pairs = list(zip(self.terms, results, strict=True))
        errors = [result.error for result in results if result.score is None]
        score = None if errors else sum(term.weight * (result.score or 0.0) for term, result in pairs)
        if len(results) == 1:
            return replace(results[0], score=score)
        extra: dict[str, Any] = {}
        for term, result in pairs:
            for key, value in result.extra.items():
                extra[f"{term.label}/{key}" if key in extra else key] = value
        extra |= {term.label: result.score for term, result in pairs if result.score is not None}
        return RewardResult(score, extra, errors[0] if errors else None)

    def _penalized(
        self, buffer: OverlongBufferConfig, samples: Sequence[RewardSample], results: list[RewardResult]
    ) -> list[RewardResult]:
        import torch  # worker processes import this package and need no torch

        from verl.algorithms.groups import overlong_penalty

        lengths = torch.tensor([sample.response_length for sample in samples], dtype=torch.long)
        longest = self._max_response_length
        penalties = overlong_penalty(lengths, longest, buffer.len, buffer.penalty_factor).tolist()
        for number, (result, penalty) in enumerate(zip(results, penalties, strict=True)):
            if result.score is not None:
                log = {"overlong_reward": penalty, "overlong": float(penalty < 0)} if buffer.log else {}
                extra = {**result.extra, **log}
                results[number] = replace(result, score=result.score + penalty, extra=extra)
        return results
