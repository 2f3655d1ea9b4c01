"""What a validation run says: means over prompts of exact statistics over each prompt's N samples.

pass@k, best@k, worst@k and maj@k are expectations over all subsets of k of the N samples, each equally likely,
computed in closed form: nothing is drawn, and two calls agree to the last digit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from verl.errors import DataError

logger = logging.getLogger(__name__)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that at least one of k samples is right, when `correct` of n are (Chen et al. 2021)."""
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise DataError(
            f"pass@k needs 0 <= correct <= n and 1 <= k <= n, not n={n}, correct={correct}, k={k}"
        )
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


@lru_cache(maxsize=1024)
def _max_weights(n: int, k: int) -> np.ndarray:
    """Entry i: the chance that the i-th smallest of n is the largest of a subset of k."""
    return np.array([math.comb(i, k - 1) / math.comb(n, k) for i in range(n)])


def best_at_k(values: Any, k: int) -> Any:
    """The expected largest of k out of the last axis."""
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=-1)
    return ordered @ _max_weights(ordered.shape[-1], k)


def worst_at_k(values: Any, k: int) -> Any:
    """The expected smallest of k out of the last axis."""
    return -best_at_k(-np.asarray(values, dtype=np.float64), k)


def majority_at_k(predictions: Sequence[Any], values: Sequence[float], k: int) -> float:
    """The expected value of the answer most of k samples agree on. A tie is broken evenly among the answers tied;
    an answer's value is the mean over the samples that gave it. No answer (None) votes like any other."""
    return majority_curve(predictions, values)[k - 1]


def majority_curve(predictions: Sequence[Any], values: Iterable[float]) -> tuple[float, ...]:
    """`majority_at_k` for k = 1 ... N."""
    by_answer: dict[Any, list[float]] = {}
    for answer, value in zip(predictions, values, strict=True):
        key = answer if isinstance(answer, Hashable) else repr(answer)
        by_answer.setdefault(key, []).append(float(value))
    return _majority(tuple(sorted((len(found), sum(found) / len(found)) for found in by_answer.values())))


@lru_cache(maxsize=65536)
def _majority(answers: tuple[tuple[int, float], ...]) -> tuple[float, ...]:
    """From (votes, value) of each answer, by counting subsets.

    For each winning number of votes v, two tables are filled answer by answer: `ways[t, s]`, the subsets of s
    samples in which t answers have exactly v votes and none has more, and `value[t, s]`, the same weighted with
    the sum of the tied answers' values. An expectation for k is then the sum over v and t of value[t, k] / t."""
    n = sum(votes for votes, _ in answers)
    total = np.zeros(n + 1)
    for v in range(1, max(votes for votes, _ in answers) + 1):
        tied = min(n // v, sum(votes >= v for votes, _ in answers))
        ways, value = np.zeros((tied + 1, n + 1)), np.zeros((tied + 1, n + 1))
        ways[0, 0] = 1
        for votes, worth in answers:
            next_ways, next_value = np.zeros_like(ways), np.zeros_like(value)
            for u in range(min(v - 1, votes) + 1):
                choices = float(math.comb(votes, u))
                next_ways[:, u:] += choices * ways[:, : n + 1 - u]
                next_value[:, u:] += choices * value[:, : n + 1 - u]
            if votes >= v:
                choices = float(math.comb(votes, v))
                before = ways[:-1, : n + 1 - v]
                next_ways[1:, v:] += choices * before
                next_value[1:, v:] += choices * (value[:-1, : n + 1 - v] + worth * before)
            ways, value = next_ways, next_value
        total += (value[1:] / np.arange(1, tied + 1)[:, None]).sum(0)
    return tuple(float(total[k] / math.comb(n, k)) for k in range(1, n + 1))


def subset_sizes(n: int) -> list[int]:
    """1, 2, 4, ... and n itself."""
    return sorted({1 << i for i in range(n.bit_length()) if 1 << i <= n} | {n})


def _number(value: Any) -> float:
    """A number, or NaN for a sample that got none."""
    return math.nan if value is None else float(value)


def _has_value(value: Any) -> bool:
    return not math.isnan(_number(value))


def _is_numeric(values: Sequence[Any]) -> bool:
    return any(value is not None for value in values) and all(
        value is None or isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating))
        for value in values
    )


def validation_metrics(
    data_sources: Sequence[Any], uids: Sequence[Any], infos: Mapping[str, Sequence[Any]]
) -> dict[str, float]:
    """Metrics of one validation run. All arguments have one entry per sample; samples with the same data source
    and uid answer the same prompt. `infos` holds `reward` and the further keys of the reward function's result.

    `val-core/{source}/{acc, or reward where a sample that has one lacks acc}/`: mean@N, pass@N where the values are
    0 and 1 or best@N where they are not, and maj@N where there is `pred`. `val-aux/`: the rest, for every numeric key:
    std@N, pass@k, best@k, worst@k, maj@k. N is the largest number of samples of a prompt of that source;
    a prompt with fewer counts with all it has. Samples without a value (None, NaN) are left out and counted
    under `missing`.
    """
    lengths = {"data_sources": len(data_sources), "uids": len(uids)} | {
        key: len(v) for key, v in infos.items()
    }
    if len(set(lengths.values())) > 1:
        raise DataError(f"validation: columns of different lengths: {lengths}")
    rows: dict[str, dict[Any, list[int]]] = {}
    for row, (source, uid) in enumerate(zip(data_sources, uids, strict=True)):
        rows.setdefault(str(source), {}).setdefault(uid, []).append(row)
    numeric = [key for key in infos if key != "pred" and _is_numeric(infos[key])]
    metrics: dict[str, float] = {}
    for source, prompts in rows.items():
        known = [
            key
            for key in numeric
            if any(infos[key][row] is not None for at in prompts.values() for row in at)
        ]
        core = "acc" if "acc" in known else "reward"
        if {"acc", "reward"} <= set(known):
            scored = [row for at in prompts.values() for row in at if _has_value(infos["reward"][row])]
            lacking = sum(not _has_value(infos["acc"][row]) for row in scored)
            if lacking:  # as where it could read no answer: the mean of the others would be too high
                core = "reward"
                text = "%s: %d of %d scored responses have no acc; the headline numbers are of the reward"
                logger.warning(text, source, lacking, len(scored))
        for key in known:
            predictions = infos.get("pred") if key == core else None
            stats = _statistics(list(prompts.values()), infos[key], predictions)
            n = next(name for name in stats if name.startswith("mean@")).removeprefix("mean@")
            best = f"pass@{n}" if f"pass@{n}" in stats else f"best@{n}"
            for name, value in stats.items():
                headline = key == core and name in (f"mean@{n}", best, f"maj@{n}")
                metrics[f"val-{'core' if headline else 'aux'}/{source}/{key}/{name}"] = value
    return metrics


def _statistics(
    prompts: Sequence[Sequence[int]], column: Sequence[Any], predictions: Sequence[Any] | None
) -> dict[str, float]:
    """Of one key and data source: each statistic averaged over the prompts."""
    samples = [[row for row in prompt if _has_value(column[row])] for prompt in prompts]
    missing = sum(len(prompt) for prompt in prompts) - sum(len(prompt) for prompt in samples)
    most = max(len(prompt) for prompt in prompts)
    samples = [prompt for prompt in samples if prompt]
    if not samples:
        return {f"mean@{most}": math.nan, "missing": float(missing)}
    values = [np.array([_number(column[row]) for row in prompt]) for prompt in samples]
    stats = {f"mean@{most}": _average([float(v.mean()) for v in values])}
    if most > 1:
        stats[f"std@{most}"] = _average([float(v.std(ddof=1)) if len(v) > 1 else 0.0 for v in values])
    binary = all(bool(np.isin(v, (0, 1)).all()) for v in values)
    curves = []
    if predictions is not None:
        for prompt, v in zip(samples, values, strict=True):
            curves.append(majority_curve([predictions[row] for row in prompt], v))
    for k in subset_sizes(most):
        if binary:
            stats[f"pass@{k}"] = _average([pass_at_k(len(v), int(v.sum()), min(k, len(v))) for v in values])
        if k == 1:
            continue
        stats[f"best@{k}"] = _average([float(best_at_k(v, min(k, len(v)))) for v in values])
        stats[f"worst@{k}"] = _average([float(worst_at_k(v, min(k, len(v)))) for v in values])
        if curves:
            stats[f"maj@{k}"] = _average([curve[min(k, len(curve)) - 1] for curve in curves])
    if missing:
        stats["missing"] = float(missing)
    return stats


def _average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
