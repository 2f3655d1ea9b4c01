"""Interfaces of the reward package: samples, results, managers, and the backends that call functions or models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.reward.functions import Signature


@dataclass
class RewardSample:
    """One response with everything a reward function may ask for by parameter name."""

    index: int
    """The row of the batch this sample belongs to."""
    prompt: str
    response: str
    ground_truth: Any = None
    data_source: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the dataset's row, by name."""
    response_length: int = 0
    """In tokens."""
    truncated: bool = False
    messages: list[dict[str, Any]] | None = None
    """The conversation before the response, where the data had messages."""


@dataclass
class RewardResult:
    """A score, or the reason there is none. `extra` holds the other keys of a dict result."""

    score: float | None
    extra: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


class RewardManager(ABC):
    """Scores samples: `submit` takes each as it finishes, `collect` returns exactly one result for each of them."""

    @abstractmethod
    def submit(self, sample: RewardSample) -> None:
        """Queue a finished sample; must return soon."""

    @abstractmethod
    def collect(self) -> dict[int, RewardResult]:
        """Wait for everything submitted since the last collect: results by `sample.index`."""

    def take_calls(self) -> int | None:
        """Calls of reward functions since the last `take_calls` (`reward/calls`); a function of the whole batch counts
        once. None: there is no function to call, or the manager does not count."""
        return None

    def check(  # noqa: B027 - a manager may have nothing to check
        self, data_sources: Collection[str] = (), columns: Collection[str] | None = None
    ) -> None:
        """Raise RewardError at start for what could only fail later. `columns` are those of the dataset; None where
        they are not known."""

    def close(self) -> None:  # noqa: B027 - a manager without processes has nothing to end
        """End worker processes."""


class Backend(ABC):
    """Runs reward functions, by number, or one model. Every submitted call gets one result per sample."""

    calls: int | None = None
    """Calls of functions so far, failed ones included; None for a model or a judge."""

    @property
    @abstractmethod
    def signatures(self) -> list[Signature]:
        """What each function takes."""

    @abstractmethod
    def submit(self, key: Hashable, function: int, samples: Sequence[RewardSample]) -> None:
        """Queue one call; `key` is how `drain` names its results."""

    @abstractmethod
    def drain(self) -> dict[Hashable, list[RewardResult]]:
        """Wait for everything submitted since the last drain."""

    @abstractmethod
    def close(self) -> None:
        """Release processes and memory. Safe to call twice."""
