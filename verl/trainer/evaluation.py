"""`python -m verl.trainer.main_eval`: score a file of responses with the rewards of training, statistics per source.

The statistics are those of validation in training (`verl.algorithms.validation`); a row is a prompt. A reward function
that fails costs its response the score only, and is counted.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.algorithms.validation import validation_metrics
from verl.checkpoint.files import replace_file
from verl.data.columns import extra_info_of, require_column, responses_of, truth_of
from verl.data.files import Rows, read_rows
from verl.data.messages import plain_text, read_messages
from verl.errors import DataError, RewardError
from verl.observe.console import counting, shared_console, show_lines, shown_path
from verl.observe.jsonl import dumps, jsonable
from verl.observe.run_reader import duration
from verl.reward.base import RewardManager, RewardResult, RewardSample, causes
from verl.reward.managers import build_reward_manager
from verl.trainer.row_output import ExtendedRows, require_output

if TYPE_CHECKING:
    from verl.config.schema import EvaluationConfig, EvaluationDataConfig

logger = logging.getLogger(__name__)

ALL = "all"
_SAMPLE_FIELDS = ("ground_truth", "extra_info")
_GENERATION_SUFFIXES = ("", "_finish_reason", "_length", "_token_ids", "_log_probs")
"""Suffixes of the columns a generation writes."""


_ORDER = ("mean", "pass", "best", "maj")
"""Statistics of the table, in this order."""
Scored = tuple[str, list[RewardResult]]
"""The data source of a prompt, and the results of the responses to it."""


@dataclass(frozen=True)
class SourceReport:
    """Statistics of one data source."""

    rows: int
    responses: int
    failed: int
    """Responses without a score."""
    core: dict[str, float]
    """`acc/mean@4` (or `reward/...`, where the reward gives no acc) and the like."""
    aux: dict[str, float]

    @classmethod
    def of(cls, name: str, rows: Sequence[Scored]) -> SourceReport:
        results = [(uid, result) for uid, (_, found) in enumerate(rows) for result in found]
        keys = dict.fromkeys(key for _, result in results for key in result.extra if key != "reward")
        columns: dict[str, list[Any]] = {"reward": [result.score for _, result in results]}
        columns |= {key: [r.extra.get(key) for _, r in results] for key in keys}
        metrics = validation_metrics([name] * len(results), [uid for uid, _ in results], columns)
        return cls(
            rows=len(rows),
            responses=len(results),
            failed=sum(result.score is None for _, result in results),
            core=_below(f"val-core/{name}/", metrics),
            aux=_below(f"val-aux/{name}/", metrics),
        )

    @property
    def measure(self) -> str:
        """What the core statistics are of: acc or reward."""
        return next(iter(self.core), "reward/").split("/")[0]

    def shown(self) -> dict[str, float]:
        """Statistics of that measure by name: mean@n, pass@k (or best@k, where values are not only 0 and 1), maj@k."""
        found = _below(f"{self.measure}/", {**self.core, **self.aux})
        kinds = set(_ORDER) - ({"best"} if any(name.startswith("pass@") for name in found) else set())
        return {name: value for name, value in found.items() if name.split("@")[0] in kinds}


def evaluate_file(cfg: EvaluationConfig) -> None:
    """Score the file, write the metrics, and show them as a table."""
    started, data = time.monotonic(), cfg.data
    rows = read_rows(data.path, key="data.path", split="test")
    require_column(rows, data.response_key, "data.response_key", "response", "data.path")
    count = len(rows) if data.max_samples < 0 else min(data.max_samples, len(rows))
    target = metrics_path(data)
    # The default name belongs to the data file, so numbers of it replace earlier ones.
    require_output(target, "data.metrics_path", rows, data.overwrite or not data.metrics_path)
    output = _open_output(data, rows, count)
    with closing(build_reward_manager(cfg.reward, max_response_length=1)) as manager:
        # Refuse before scoring what would fail for every response.
        named = {_source(value) for value in islice(rows.column(data.data_source_key), count)}
        columns = _data_columns(rows.column_names, data)
        manager.check(named, [*columns, "ground_truth"] if data.reward_model_key in columns else columns)
        scored = _score(manager, data, rows, count)
    sources = _reports(scored)
    by_row = [[result.error or "" for result in results if result.score is None] for _, results in scored]
    failures = [error for errors in by_row for error in errors]
    _write_metrics(data, target, sources, failures)
    if output is not None:
        output.write(_columns(scored, data.response_key))
    if not any(report.responses > report.failed for report in sources.values()):
        raise RewardError(
            f"no response got a score (see {target}). {causes(failures)} Try the function "
            "alone with `verl reward test --fn FILE --data FILE --response-key COLUMN`."
        )
    show(sources)
    if failures:
        text = "%d responses got no score, in %d rows. %s"
        logger.warning(text, len(failures), sum(map(bool, by_row)), causes(failures))
    ended = [("finished", f"in {duration(time.monotonic() - started)}"), ("numbers", shown_path(target))]
    if output is not None:
        ended.append(("scored rows", shown_path(output.path)))
    else:
        ended.append(("next", "data.output_path=FILE.jsonl writes every response with its score"))
    show_lines(ended)


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
        overwrite=data.overwrite,
    )


def _data_columns(names: Sequence[str], data: EvaluationDataConfig) -> list[str]:
    written = [f"{data.response_key}{ending}" for ending in _GENERATION_SUFFIXES]
    return [name for name in names if name not in written]


def _score(manager: RewardManager, data: EvaluationDataConfig, rows: Rows, count: int) -> list[Scored]:
    scored: list[Scored] = []
    with counting("rows", count) as counter:
        for start in range(0, count, data.batch_size):
            numbers = range(start, min(start + data.batch_size, count))
            owners: list[list[RewardResult]] = []
            for number in numbers:
                row = rows[number]
                found: list[RewardResult] = []
                scored.append((_source(row.get(data.data_source_key)), found))
                for sample in _samples(row, number, rows.origin(number), data, len(owners)):
                    owners.append(found)
                    manager.submit(sample)
            results = manager.collect()
            for index, owner in enumerate(owners):
                owner.append(results[index])
            counter.advance(len(numbers))
    return scored


def _source(value: Any) -> str:
    return "" if value is None else str(value)


def _samples(
    row: Mapping[str, Any], row_number: int, origin: str, data: EvaluationDataConfig, first: int
) -> Iterator[RewardSample]:
    """One for each response of a row, numbered from `first`; messages name its row of the data."""
    responses = responses_of(row, data.response_key, origin, "data.path", "data.response_key")
    prompt = row.get(data.prompt_key)
    messages = read_messages(prompt, origin)
    named = (data.prompt_key, data.data_source_key, *_SAMPLE_FIELDS)
    columns = {name: row[name] for name in _data_columns(list(row), data) if name not in named}
    lengths = _per_response(row.get(f"{data.response_key}_length"), len(responses), 0)
    reasons = _per_response(row.get(f"{data.response_key}_finish_reason"), len(responses), "")
    for number, response in enumerate(responses):
        yield RewardSample(
            index=first + number,
            prompt=plain_text(messages) if messages else str(prompt or ""),
            response=response,
            ground_truth=truth_of(row, data.reward_model_key),
            data_source=_source(row.get(data.data_source_key)),
            extra_info=extra_info_of(row, origin, "data.path"),
            columns=columns,
            response_length=int(lengths[number]),
            truncated=reasons[number] == "length",
            messages=messages,
            label=f"{row_number}, response {number}" if len(responses) > 1 else str(row_number),
        )


def _per_response(value: Any, count: int, otherwise: Any) -> list[Any]:
    """Per-response values written by a generation; `otherwise` where there are none."""
    return list(value) if isinstance(value, (list, tuple)) and len(value) == count else [otherwise] * count


def _reports(scored: Sequence[Scored]) -> dict[str, SourceReport]:
    """By data source; with several, `all` has every row."""
    by_source: dict[str, list[Scored]] = {}
    for row in scored:
        by_source.setdefault(row[0] or "unknown", []).append(row)
    sources = {name: SourceReport.of(name, rows) for name, rows in sorted(by_source.items())}
    if len(sources) > 1:
        sources[ALL] = SourceReport.of(ALL, scored)
    return sources


def metrics_path(data: EvaluationDataConfig) -> Path:
    """`data.metrics_path`, or next to the first input file; for a hub id, the working directory."""
    if data.metrics_path:
        return Path(data.metrics_path)
    first = Path(data.path[0])
    return first.with_name(f"{first.stem}.metrics.json") if first.exists() else Path("metrics.json")


def _write_metrics(
    data: EvaluationDataConfig, path: Path, sources: Mapping[str, SourceReport], failures: list[str]
) -> None:
    content = {
        "data": data.path,
        "response_key": data.response_key,
        "data_sources": {name: asdict(report) for name, report in sources.items()},
        "failures": causes(failures) if failures else None,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(jsonable(content), indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise DataError(f"data.metrics_path: {path} cannot be written: {error.strerror or error}") from error


def _columns(scored: Sequence[Scored], key: str) -> Iterator[dict[str, Any]]:
    for _, results in scored:
        yield {
            f"{key}_score": [result.score for result in results],
            f"{key}_error": [result.error for result in results],
            f"{key}_extra": [dumps(result.extra) for result in results],
        }


def _below(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def _order(statistic: str) -> tuple[int, int]:
    kind, _, number = statistic.partition("@")
    return _ORDER.index(kind), int(number or 0)


def show(sources: Mapping[str, SourceReport]) -> None:
    """The table, on the command's own output."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    names = sorted({name for report in sources.values() for name in report.shown()}, key=_order)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("data source", "of"):
        table.add_column(heading)
    for heading in ("rows", "responses", "no score", *names):
        table.add_column(heading, justify="right")
    for source, report in sources.items():
        shown = report.shown()
        counts = [str(number) for number in (report.rows, report.responses, report.failed)]
        values = [f"{shown[name]:.4f}" if name in shown else "" for name in names]
        table.add_row(source, report.measure, *counts, *values)
    shared_console().print(table)
