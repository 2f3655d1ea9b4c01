"""The reward manager behind all four built-in names: calls one or several rewards and sums their scores.

With several rewards the score is their weighted sum, each single score is in `extra` under the reward's name, and a
sample that one of them could not score has no score.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.errors import ConfigError, RewardError
from verl.reward.base import Backend, RewardManager, RewardResult, RewardSample
from verl.reward.failures import causes
from verl.reward.functions import Signature

Shaper = Callable[[Sequence[RewardSample], list[RewardResult]], list[RewardResult]]


@dataclass
class RewardTerm:
    """One reward of the sum."""

    backend: Backend
    label: str
    weight: float = 1.0
    function: int = 0
    check: Callable[[Sequence[str], Sequence[str] | None], None] | None = None

    @property
    def signature(self) -> Signature:
        return self.backend.signatures[self.function]


class FunctionRewardManager(RewardManager):
    """Scores with one or several terms and then shapes the sum."""

    def __init__(self, terms: Sequence[RewardTerm], shaper: Shaper | None = None) -> None:
        self.terms = list(terms)
        self._backends = list(dict.fromkeys(term.backend for term in terms))
        self._shaper = shaper
        self._samples: list[RewardSample] = []
        # In every key, so that what an interrupted batch left behind is never taken for a result of the next.
        self._batch = 0
        self._calls_taken = 0

    @property
    def reward_keys(self) -> list[str]:
        """Names under which `extra` holds the single scores; empty with only one reward."""
        return [term.label for term in self.terms] if len(self.terms) > 1 else []

    @property
    def reward_weights(self) -> list[float]:
        return [term.weight for term in self.terms] if len(self.terms) > 1 else []

    @property
    def signatures(self) -> list[Signature]:
        """What each reward takes."""
        return [term.signature for term in self.terms]

    def check(self, data_sources: Collection[str] = (), columns: Collection[str] | None = None) -> None:
        """Raise RewardError for rows no scorer knows and parameters nothing provides."""
        sources = sorted({str(name) for name in data_sources})
        for term in self.terms:
            if term.check is not None:
                term.check(sources, None if columns is None else sorted(columns))

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
        position = len(self._samples)
        self._samples.append(sample)
        for number, term in enumerate(self.terms):
            if not term.signature.is_batch:
                term.backend.submit((self._batch, number, position), term.function, [sample])

    def collect(self) -> dict[int, RewardResult]:
        samples, self._samples = self._samples, []
        if not samples:
            return {}
        batch, self._batch = self._batch, self._batch + 1
        for number, term in enumerate(self.terms):
            if term.signature.is_batch:
                term.backend.submit((batch, number), term.function, samples)
        done: dict[Hashable, list[RewardResult]] = {}
        for backend in self._backends:
            done.update(backend.drain())
        columns = [
            done[batch, number]
            if term.signature.is_batch
            else [done[batch, number, position][0] for position in range(len(samples))]
            for number, term in enumerate(self.terms)
        ]
        results = [self._sum(row) for row in zip(*columns, strict=True)]
        if self._shaper is not None:
            results = self._shaper(samples, results)
        return {sample.index: result for sample, result in zip(samples, results, strict=True)}

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
        errors = [result.error for result in results if result.score is None]
        score = None
        if not errors:
            pairs = zip(self.terms, results, strict=True)
            score = sum(term.weight * (result.score or 0.0) for term, result in pairs)
        if len(results) == 1:
            return replace(results[0], score=score)
        extra: dict[str, Any] = {}
        for term, result in zip(self.terms, results, strict=True):
            for key, value in result.extra.items():
                extra[f"{term.label}/{key}" if key in extra else key] = value
        for term, result in zip(self.terms, results, strict=True):
            if result.score is not None:
                extra[term.label] = result.score
        return RewardResult(score, extra, errors[0] if errors else None)


def overlong_shaper(max_response_length: int, buffer: Any) -> Shaper:
    """Adds DAPO's overlong penalty, as the section `reward.overlong_buffer` says; with its `log` the extra values
    `overlong_reward` and `overlong` report it."""
    if not 0 < buffer.len <= max_response_length:
        raise ConfigError(
            f"reward.overlong_buffer.len is {buffer.len}; it must be between 1 and "
            f"data.max_response_length={max_response_length}."
        )

    def shape(samples: Sequence[RewardSample], results: list[RewardResult]) -> list[RewardResult]:
        import torch  # worker processes import this module and need no torch

        from verl.algorithms.sampling import overlong_penalty

        lengths = torch.tensor([sample.response_length for sample in samples], dtype=torch.long)
        penalties = overlong_penalty(lengths, max_response_length, buffer.len, buffer.penalty_factor).tolist()
        shaped = []
        for result, penalty in zip(results, penalties, strict=True):
            if result.score is not None:
                log = {"overlong_reward": penalty, "overlong": float(penalty < 0)} if buffer.log else {}
                result = replace(result, score=result.score + penalty, extra={**result.extra, **log})
            shaped.append(result)
        return shaped

    return shape
