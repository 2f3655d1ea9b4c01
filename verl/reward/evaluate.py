"""Run loaded reward functions on samples. The same code runs in this process and in a worker process.

A function that raises, or returns what cannot be a score, costs its sample the score and nothing else: the
result carries the reason, with the line of the user's file where it happened.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from verl.errors import RewardError
from verl.reward.base import RewardResult, RewardSample
from verl.reward.functions import RewardFunction, Signature
from verl.reward.loading import FunctionSpec, load_function
from verl.reward.results import interpret, interpret_batch
from verl.reward.scorers import get_scorer

SCORERS = "<scorers>"
"""As the path of a FunctionSpec: the scorer registered for each row's data_source."""


class ScorerFunction:
    """Looks like a `RewardFunction`; hands each sample to the scorer of its data source."""

    def __init__(self, kwargs: Mapping[str, Any] | None = None) -> None:
        self.kwargs = dict(kwargs or {})
        self.signature = Signature(name="scorer", takes_any=True)
        self._bound: dict[str, RewardFunction] = {}

    @property
    def name(self) -> str:
        return self.signature.name

    def bound(self, data_source: str) -> RewardFunction:
        if data_source not in self._bound:
            function = RewardFunction(get_scorer(data_source), name=f"scorer of {data_source!r}")
            accepts = function.signature
            if accepts.is_batch:
                raise RewardError(
                    f"The scorer of {data_source!r} takes a whole batch ({', '.join(accepts.names)}); a "
                    f"scorer gets one "
                    f"sample. Give it as reward.custom_reward_function instead."
                )
            # One set of reward_kwargs serves several scorers: each takes what it knows.
            function.kwargs = {
                key: value for key, value in self.kwargs.items() if accepts.takes_any or key in accepts.names
            }
            self._bound[data_source] = function
        return self._bound[data_source]

    def call(self, sample: RewardSample) -> Any:
        return self.bound(sample.data_source).call(sample)

    def call_batch(self, samples: Sequence[RewardSample]) -> Any:
        raise RewardError("scorers take one sample at a time")

    def check(self, data_sources: Sequence[str], columns: Sequence[str] | None, key: str) -> None:
        used: set[str] = set()
        for data_source in data_sources:
            function = self.bound(data_source)
            function.signature.check(function.kwargs, columns, key)
            used |= set(function.kwargs)
        surplus = [name for name in self.kwargs if name not in used]
        if surplus and data_sources:
            raise RewardError(
                f"{key}.reward_kwargs has {', '.join(map(repr, surplus))}, which none of the scorers of "
                f"{', '.join(map(repr, sorted(set(data_sources))))} takes."
            )


Function = RewardFunction | ScorerFunction


def load(spec: FunctionSpec) -> Function:
    """The function of a spec, ready to be called."""
    if spec.path == SCORERS:
        return ScorerFunction(spec.kwargs)
    function = load_function(spec)
    name = getattr(function, "__qualname__", None) or spec.describe()
    return RewardFunction(function, spec.kwargs, f"{name} ({spec.path.rpartition(':')[0] or spec.path})")


class ExitCalled(Exception):
    """`sys.exit` inside a coroutine; SystemExit would end the event loop, and with it everybody else's call."""


def score(
    function: Function, samples: Sequence[RewardSample], timeout: float | None = None
) -> list[RewardResult]:
    """Results of one task: a batch function sees all of `samples`, any other function each of them."""
    try:
        if function.signature.is_batch:
            return _believe_batch(function, samples, _settle(function.call_batch(samples), timeout))
        return [interpret(_settle(function.call(s), timeout), function.name, s) for s in samples]
    except Exception as error:  # a stranger's code may raise anything; the sample pays, not the run
        return failed(function, samples, error, timeout)


async def score_async(
    function: Function,
    samples: Sequence[RewardSample],
    timeout: float | None = None,
    *,
    exits: bool = False,
) -> list[RewardResult]:
    """The same inside an event loop, so that several can be under way. `exits`: raise where the function exits."""
    try:
        if function.signature.is_batch:
            return _believe_batch(function, samples, await _maybe(function.call_batch(samples), timeout))
        return [interpret(await _maybe(function.call(s), timeout), function.name, s) for s in samples]
    except Exception as error:  # as above
        if exits and isinstance(error, ExitCalled) and error.__cause__ is not None:
            raise exited(function, error.__cause__) from error
        return failed(function, samples, error, timeout)


def exited(function: Function, error: BaseException) -> RewardError:
    """What to raise where a function of this process asks the process to end."""
    return RewardError(
        f"Reward function {function.name} called sys.exit({getattr(error, 'code', '')!r}){_location(error)}, which "
        "would end the run: a reward must return a score or raise an exception."
    )


def failed(
    function: Function, samples: Sequence[RewardSample], error: BaseException, timeout: float | None
) -> list[RewardResult]:
    """No score for any of `samples`, because of `error`."""
    if isinstance(error, ExitCalled) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, RewardError):
        text = str(error)
    elif isinstance(error, TimeoutError) and timeout is not None and not error.args:
        text = f"Reward function {function.name} took longer than reward.timeout_s={timeout:g} s"
    else:
        rows = ", ".join(str(sample.index) for sample in samples[:4]) + (", ..." if len(samples) > 4 else "")
        text = f"Reward function {function.name} raised {type(error).__name__}: {error}{_location(error)} on row {rows}"
    return [RewardResult(None, error=text) for _ in samples]


def _believe_batch(function: Function, samples: Sequence[RewardSample], value: Any) -> list[RewardResult]:
    results = []
    for sample, item in zip(samples, interpret_batch(value, function.name, samples), strict=True):
        try:
            results.append(interpret(item, function.name, sample))
        except RewardError as error:  # one bad score does not spoil its neighbours
            results.append(RewardResult(None, error=str(error)))
    return results


def _settle(value: Any, timeout: float | None) -> Any:
    return asyncio.run(_maybe(value, timeout)) if inspect.isawaitable(value) else value


async def _maybe(value: Any, timeout: float | None) -> Any:
    return await asyncio.wait_for(_as_coroutine(value), timeout) if inspect.isawaitable(value) else value


async def _as_coroutine(value: Awaitable[Any]) -> Any:
    try:
        return await value
    except SystemExit as error:
        raise ExitCalled from error


def _location(error: BaseException) -> str:
    """File and line of the innermost frame that is not ours."""
    here, trace, found = os.path.dirname(__file__), error.__traceback__, ""
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if os.path.dirname(filename) != here:
            found = f" ({os.path.basename(filename)}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return found
