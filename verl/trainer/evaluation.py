"""`python -m verl.trainer.main_eval`: score a file of responses with the rewards of training, statistics per source.

The statistics are those of validation in training (`verl.algorithms.validation`); a row is a prompt. A reward function
that fails costs its response the score only, and is counted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.data.chat import as_messages, plain_text
from verl.data.columns import require_column
from verl.data.files import Rows, read_rows
from verl.data.rl_dataset import as_mapping, truth_of
from verl.errors import DataError, RewardError
from verl.observe.jsonable import dumps, jsonable
from verl.observe.progress import counting
from verl.reward.base import RewardManager, RewardResult, RewardSample
from verl.reward.failures import causes
from verl.reward.managers import build_reward_manager
from verl.trainer.evaluation_report import SourceReport, source_report
from verl.trainer.row_output import ExtendedRows, check_place

if TYPE_CHECKING:
    from verl.config.schema import EvaluationConfig, EvaluationDataConfig

logger = logging.getLogger(__name__)

ALL = "all"
_TAKEN_APART = ("ground_truth", "extra_info")
_BESIDE = ("", "_finish_reason", "_length", "_token_ids", "_log_probs")
"""Endings of the columns a generation writes; none of them is a column of the data."""


@dataclass
class ScoredRow:
    """The responses of one prompt."""

    number: int
    data_source: str
    results: list[RewardResult] = field(default_factory=list)


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation found."""

    sources: dict[str, SourceReport]
    """By data source; with several, `all` has every row."""
    metrics_path: Path
    failures: list[str]
    """Why responses got no score, one entry each."""


def evaluate_file(cfg: EvaluationConfig) -> EvaluationResult:
    """Score as `cfg` says and write the numbers."""
    rows = read_rows(cfg.data.path, key="data.path", split="test")
    require_column(rows, cfg.data.response_key, "data.response_key", "response", "data.path")
    count = len(rows) if cfg.data.max_samples < 0 else min(cfg.data.max_samples, len(rows))
    check_place(metrics_path(cfg.data), "data.metrics_path")
    output = _open_output(cfg.data, rows, count)
    manager = build_reward_manager(cfg.reward, max_response_length=1)
    try:
        _check(manager, cfg.data, rows, count)
        scored = _score(manager, cfg.data, rows, count)
    finally:
        manager.close()
    result = _result(cfg.data, scored)
    _write_metrics(cfg.data, result)
    if output is not None:
        output.write(_columns(scored, cfg.data.response_key))
    if not any(report.responses > report.failed for report in result.sources.values()):
        raise RewardError(
            f"no response got a score; {result.metrics_path} says so. {causes(result.failures)} Try the function "
            "alone with `verl reward test --fn FILE --data FILE --response-key COLUMN`."
        )
    return result


def _open_output(data: EvaluationDataConfig, rows: Rows, count: int) -> ExtendedRows | None:
    if not data.output_path:
        return None
    key = data.response_key
    added = {f"{key}_score": "list<float64>", f"{key}_error": "list<string>", f"{key}_extra": "list<string>"}
    return ExtendedRows(
        rows,
        range(count),
        Path(data.output_path),
        added,
        key="data.output_path",
        if_taken="leave data.output_path out, or score the file as it was before",
    )


def _check(manager: RewardManager, data: EvaluationDataConfig, rows: Rows, count: int) -> None:
    """What could only fail for every response is refused before the first."""
    sources = {
        _source(value) for value, _ in zip(rows.column(data.data_source_key), range(count), strict=False)
    }
    columns = _data_columns(rows.column_names, data)
    if data.reward_model_key in columns:
        columns.append("ground_truth")  # a truth there is, whatever its column is called
    manager.check(sources, columns)


def _data_columns(names: Sequence[str], data: EvaluationDataConfig) -> list[str]:
    written = [f"{data.response_key}{ending}" for ending in _BESIDE]
    return [name for name in names if name not in written]


def _score(manager: RewardManager, data: EvaluationDataConfig, rows: Rows, count: int) -> list[ScoredRow]:
    scored: list[ScoredRow] = []
    with counting("rows", count) as counter:
        for start in range(0, count, data.batch_size):
            numbers = range(start, min(start + data.batch_size, count))
            places: list[ScoredRow] = []
            for number in numbers:
                row = rows[number]
                entry = ScoredRow(number, _source(row.get(data.data_source_key)))
                scored.append(entry)
                for sample in _samples(row, rows.origin(number), data, len(places)):
                    places.append(entry)
                    manager.submit(sample)
            results = manager.collect()
            for index, entry in enumerate(places):
                entry.results.append(results[index])
            counter.advance(len(numbers))
    return scored


def _source(value: Any) -> str:
    return "" if value is None else str(value)


def _samples(
    row: Mapping[str, Any], origin: str, data: EvaluationDataConfig, first: int
) -> Iterator[RewardSample]:
    """One for each response of a row, numbered from `first`."""
    responses = _responses(row.get(data.response_key), origin, data.response_key)
    prompt = row.get(data.prompt_key)
    messages = as_messages(prompt)
    named = (data.prompt_key, data.data_source_key, *_TAKEN_APART)
    columns = {name: row[name] for name in _data_columns(list(row), data) if name not in named}
    lengths = _beside(row.get(f"{data.response_key}_length"), len(responses), 0)
    reasons = _beside(row.get(f"{data.response_key}_finish_reason"), len(responses), "")
    for number, response in enumerate(responses):
        yield RewardSample(
            index=first + number,
            prompt=plain_text(messages) if messages else str(prompt or ""),
            response=response,
            ground_truth=_truth(row, data.reward_model_key),
            data_source=_source(row.get(data.data_source_key)),
            extra_info=dict(as_mapping(row.get("extra_info")) or {}),
            columns=columns,
            response_length=int(lengths[number]),
            truncated=reasons[number] == "length",
            messages=messages,
        )


def _responses(value: Any, origin: str, key: str) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, (list, tuple)) or not all(isinstance(text, str) for text in found):
        raise DataError(
            f"data.path: the column '{key}' of {origin} must hold a text or a list of texts, not "
            f"{str(value)[:80]!r}; set data.response_key to the column with the responses"
        )
    return list(found)


def _beside(value: Any, count: int, otherwise: Any) -> list[Any]:
    """What a generation wrote about each response, where it did."""
    return list(value) if isinstance(value, (list, tuple)) and len(value) == count else [otherwise] * count


def _truth(row: Mapping[str, Any], key: str) -> Any:
    """`key` as {ground_truth: ...} or as the truth itself, else what training would take."""
    value = row.get(key)
    nested = as_mapping(value)
    if nested is not None and nested.get("ground_truth") is not None:
        return nested["ground_truth"]
    return value if value is not None and nested is None else truth_of(row)


def _result(data: EvaluationDataConfig, scored: Sequence[ScoredRow]) -> EvaluationResult:
    by_source: dict[str, list[ScoredRow]] = {}
    for row in scored:
        by_source.setdefault(row.data_source or "unknown", []).append(row)
    sources = {name: _report(name, rows) for name, rows in sorted(by_source.items())}
    if len(sources) > 1:
        sources[ALL] = _report(ALL, scored)
    failures = [result.error or "" for row in scored for result in row.results if result.score is None]
    return EvaluationResult(sources, metrics_path(data), failures)


def _report(name: str, rows: Sequence[ScoredRow]) -> SourceReport:
    return source_report(name, [row.results for row in rows])


def metrics_path(data: EvaluationDataConfig) -> Path:
    """Where the numbers go: as told, else beside the first file; for an id of the hub, here."""
    if data.metrics_path:
        return Path(data.metrics_path)
    first = Path(data.path[0])
    return first.with_name(f"{first.stem}.metrics.json") if first.exists() else Path("metrics.json")


def _write_metrics(data: EvaluationDataConfig, result: EvaluationResult) -> None:
    from verl.checkpoint.files import replace_file

    content = {
        "data": data.path,
        "response_key": data.response_key,
        "data_sources": {name: report.as_json() for name, report in result.sources.items()},
        "failures": causes(result.failures) if result.failures else None,
    }
    try:
        result.metrics_path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(result.metrics_path, json.dumps(jsonable(content), indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise DataError(
            f"data.metrics_path: {result.metrics_path} cannot be written: {error.strerror or error}"
        ) from error


def _columns(scored: Sequence[ScoredRow], key: str) -> Iterator[dict[str, Any]]:
    for row in scored:
        yield {
            f"{key}_score": [result.score for result in row.results],
            f"{key}_error": [result.error for result in row.results],
            f"{key}_extra": [dumps(result.extra) for result in row.results],
        }
