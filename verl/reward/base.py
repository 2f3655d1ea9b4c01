"""Interfaces of the reward package: samples, results, managers, the backends that call functions or models, and the
account of samples without a score."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.errors import RewardError, TrainingHalted
from verl.observe.live import live

if TYPE_CHECKING:
    from verl.reward.functions import Signature


@dataclass
class RewardSample:
    """One response with everything a reward function may ask for by parameter name."""

    index: int
    """Names the sample among those that were submitted and not collected: usually its row of the batch."""
    prompt: str
    response: str
    ground_truth: Any = None
    data_source: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the dataset's row, by name."""
    response_length: int = 0
    """In tokens; with several turns those of tools included, and with history=split those of the longest turn."""
    truncated: bool = False
    messages: list[dict[str, Any]] | None = None
    """The conversation before the response, where the data had messages; with several turns, all of it."""
    turns: list[dict[str, Any]] | None = None
    """With several turns: each as {role, content, tool_calls, reward}; None otherwise."""
    tool_calls: list[dict[str, Any]] | None = None
    """With several turns: each call as {name, arguments, result, failure}; None otherwise."""
    uid: str = ""
    """Of its prompt."""
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    """Where the manager `reads_tokens`; with several turns those of tools included."""
    label: str = ""
    """Its row in messages, such as `3, response 1`; default: `index`."""

    @property
    def row_name(self) -> str:
        return self.label or str(self.index)


@dataclass
class RewardResult:
    """A score, or the reason there is none. `extra` holds the other keys of a dict result."""

    score: float | None
    extra: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    token_scores: list[float] | None = None
    """Where rewards are of single tokens: what each of the response gets. The last gets the rest of the score."""


UNFINISHED = "generation ended before the response did (actor_rollout_ref.rollout.over_sample_rate)"
"""Why a sample that was aborted has no score: nothing has failed."""


class RewardManager(ABC):
    """Scores samples: `submit` takes each as it finishes, `collect` returns exactly one result for each of them."""

    reads_tokens = False
    """Whether samples must have the tokens of prompt and response."""

    @abstractmethod
    def submit(self, sample: RewardSample) -> None:
        """Queue a finished sample; must return soon."""

    @abstractmethod
    def collect(self, indices: Collection[int] | None = None) -> dict[int, RewardResult]:
        """Wait for these samples (None: for all submitted so far) and return their results by `sample.index`; those of
        others stay. `submit` may be called from another thread meanwhile. A function of several samples is called once
        with exactly these, by ascending index (None: in the order of `submit`)."""

    def take_calls(self) -> int | None:
        """Calls of reward functions since the last `take_calls` (`reward/calls`); a function of the whole batch counts
        once. None: there is no function to call, or the manager does not count."""
        return None

    def scores_singly(self) -> bool:
        """Whether the result of a sample depends on nothing else, so that it may be collected at any time."""
        return False

    def check(  # noqa: B027 - a manager may have nothing to check
        self, data_sources: Collection[str] = (), columns: Collection[str] | None = None
    ) -> None:
        """Raise RewardError at start for what could only fail later. `columns` are those of the dataset; None where
        they are not known."""

    def close(self) -> None:  # noqa: B027 - a manager without processes has nothing to end
        """End worker processes."""


_answered = threading.Condition()
"""Held while a call or the live counts change: backends answer from threads of their own."""


@dataclass(eq=False, slots=True)
class Call:
    """A call of a function or a model, with one result per sample. Lighter than a `concurrent.futures.Future`, because
    there is one for every response."""

    results: list[RewardResult] | None = None
    failure: Exception | None = None
    waited: bool = False

    def result(self) -> list[RewardResult]:
        """Wait for the results; raises what the backend failed with."""
        with _answered:
            self.waited = True
            _answered.wait_for(lambda: self.results is not None or self.failure is not None)
        if self.results is None:
            assert self.failure is not None
            raise self.failure
        return self.results


def new_call(samples: Sequence[RewardSample]) -> Call:
    """So many rewards are asked for (`verl.observe.live`)."""
    with _answered:
        live.add("rewards_waiting", len(samples))
    return Call()


def answer(call: Call, results: list[RewardResult]) -> None:
    with _answered:
        live.add("rewards_waiting", -len(results))
        live.add("rewards_total", len(results))
        live.add("rewards_failed_total", sum(result.score is None for result in results))
        call.results = results
        if call.waited:
            _answered.notify_all()


def fail(calls: Iterable[Call], failure: Exception) -> None:
    """There will be no results."""
    with _answered:
        for call in calls:
            call.failure = failure
        _answered.notify_all()


class Backend(ABC):
    """Runs reward functions, by number, or one model."""

    signatures: Sequence[Signature]
    """What each function takes."""
    calls: int | None = None
    """Calls of functions so far, failed ones included; None for a model or a judge."""
    drains_any_time = False
    """Whether calls may be waited for earlier than a batch is needed, at no cost and with the same results."""

    @abstractmethod
    def submit(self, function: int, samples: Sequence[RewardSample]) -> Call:
        """Queue one call. Other threads may submit and wait at the same time."""

    def run(self, calls: Sequence[Call]) -> None:  # noqa: B027 - most run by themselves
        """Run these calls, on the caller's thread; before they are waited for."""

    @abstractmethod
    def close(self) -> None:
        """Release processes and memory. Safe to call twice."""


class LocalBackend(Backend):
    """Calls that happen in this process, when their results are wanted."""

    def __init__(self) -> None:
        self._waiting: dict[Call, tuple[int, Sequence[RewardSample]]] = {}

    def submit(self, function: int, samples: Sequence[RewardSample]) -> Call:
        call = new_call(samples)
        self._waiting[call] = (function, samples)
        return call

    def take(self, calls: Sequence[Call]) -> list[tuple[Call, int, Sequence[RewardSample]]]:
        return [(call, *self._waiting.pop(call)) for call in calls]

    def close(self) -> None:
        self._waiting.clear()


@dataclass
class FailureAccount:
    """Counts samples without a score, which are masked from the loss, and stops the run when too many of a batch have
    none: training on the rest would be training on whatever happens not to crash."""

    max_failure_ratio: float
    scored: int = 0
    failed: int = 0

    def add(self, results: Collection[RewardResult]) -> dict[str, float]:
        """Count a batch and return its metrics. When too much of it failed: RewardError if the function has never
        returned a score, TrainingHalted if it has."""
        results = [result for result in results if result.error != UNFINISHED]
        errors = [result.error or "no reason given" for result in results if result.score is None]
        self.scored += len(results) - len(errors)
        self.failed += len(errors)
        ratio = len(errors) / len(results) if results else 0.0
        if ratio > self.max_failure_ratio:
            text = (
                f"{len(errors)} of {len(results)} responses got no score ({ratio:.0%}; reward.max_failure_ratio allows "
                f"{self.max_failure_ratio:.0%}). {causes(errors)}"
            )
            if self.scored == 0:
                raise RewardError(
                    f"{text} `verl reward test --fn FILE --data FILE` tries a reward function alone."
                )
            raise TrainingHalted(
                f"{text} Correct what fails (the reward function, an environment or a simulated user), or raise "
                "reward.max_failure_ratio or reward.timeout_s, and resume."
            )
        return {"reward/failed": float(len(errors)), "reward/failed_ratio": ratio}


def causes(errors: Collection[str], limit: int = 3) -> str:
    """The most frequent reasons; row numbers and other digits are ignored when counting."""
    example: dict[str, str] = {}
    counted: Counter[str] = Counter()
    for error in errors:
        kind = "".join("#" if c.isdigit() else c for c in error.split(" (response ")[0])[:120]
        example.setdefault(kind, error)
        counted[kind] += 1
    shown = [f"{count}x {example[kind].rstrip('.')}" for kind, count in counted.most_common(limit)]
    return f"Causes: {'; '.join(shown)}."
