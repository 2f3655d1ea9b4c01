"""What a reward sees of a sample, and what comes back.

A manager takes samples as they finish (`submit`) and gives all scores at the end (`collect`), so that rewards
run while other responses are still being generated. Every submitted sample gets exactly one result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


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
    """Scores samples."""

    @abstractmethod
    def submit(self, sample: RewardSample) -> None:
        """Take a finished sample; must return soon."""

    @abstractmethod
    def collect(self) -> dict[int, RewardResult]:
        """Wait for everything submitted since the last collect: results by `sample.index`."""

    def take_calls(self) -> int | None:
        """Calls of reward functions since this was last asked (`reward/calls`); a function of the whole batch counts
        once. None: there is no function to call, or the manager does not count."""
        return None

    def check(  # noqa: B027 - a manager may have nothing to check
        self, data_sources: Collection[str] = (), columns: Collection[str] | None = None
    ) -> None:
        """Refuse at start, with RewardError, what could only fail later. `columns` are those of the dataset;
        None where they are not known."""

    def close(self) -> None:  # noqa: B027 - a manager without processes has nothing to end
        """End worker processes."""
