"""The manager behind all built-in names: one score per sample, the weighted sum of one or several rewards.

Each single score is in `extra` under the reward's name, and a sample that one of them could not score has no score.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.config.sections.reward import OverlongBufferConfig
from verl.errors import ConfigError, RewardError
from verl.reward import sandbox
from verl.reward.base import Backend, Call, RewardManager, RewardResult, RewardSample, causes
from verl.reward.functions import FunctionSpec, ScorerFunction, Signature
from verl.reward.scorers import check_data_sources, uses_sandbox
from verl.reward.scoring import rows_text


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

    def check(self, data_sources: Sequence[str], columns: Collection[str] | None) -> None:
        """Raise RewardError for rows no scorer knows and parameters nothing provides."""
        if self.spec is None:
            return
        if not self.spec.is_scorers:
            self.signature.check(self.spec.kwargs, columns, self.spec.key)
            return
        check_data_sources(data_sources)
        ScorerFunction(self.spec.kwargs).check(data_sources, columns, self.spec.key)
        if any(uses_sandbox(name) for name in data_sources):
            sandbox.require()


class FunctionRewardManager(RewardManager):
    """Scores with one or several terms; `overlong` adds DAPO's penalty for responses near `max_response_length`."""

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
        self._backends = list(dict.fromkeys(term.backend for term in terms))
        self._overlong, self._max_response_length = overlong, max_response_length
        self._lock = threading.Lock()
        self._samples: dict[int, tuple[RewardSample, list[Call | None]]] = {}
        self._calls_taken = 0

    @property
    def signatures(self) -> list[Signature]:
        """What each reward takes."""
        return [term.signature for term in self.terms]

    def check(self, data_sources: Collection[str] = (), columns: Collection[str] | None = None) -> None:
        """Raise RewardError for rows no scorer knows and parameters nothing provides."""
        for term in self.terms:
            term.check(sorted({str(name) for name in data_sources}), columns)

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
            calls = [row[position] for _, row in taken]
            single = [call for call in calls if call is not None]
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

        from verl.algorithms.sampling import overlong_penalty

        lengths = torch.tensor([sample.response_length for sample in samples], dtype=torch.long)
        longest = self._max_response_length
        penalties = overlong_penalty(lengths, longest, buffer.len, buffer.penalty_factor).tolist()
        penalized = []
        for result, penalty in zip(results, penalties, strict=True):
            if result.score is not None:
                log = {"overlong_reward": penalty, "overlong": float(penalty < 0)} if buffer.log else {}
                result = replace(result, score=result.score + penalty, extra={**result.extra, **log})
            penalized.append(result)
        return penalized
