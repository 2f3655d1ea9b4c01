"""`verl reward test`: try a reward function on a few rows before any training, and say what it saw and gave.

It goes the way a run goes: the same finding, the same checks, the same worker process with its deadline.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from verl.config.schema import RewardConfig
from verl.data.chat import as_messages, plain_text
from verl.data.files import read_rows
from verl.data.rl_dataset import truth_of
from verl.errors import ConfigError, DataError, RewardError
from verl.reward.base import RewardResult, RewardSample
from verl.reward.functions import Signature
from verl.reward.managers import FunctionRewardManager, build_reward_manager

_PROMPT_COLUMNS = ("prompt", "question", "problem", "messages", "instruction")
_OWN = ("data_source", "ground_truth", "extra_info")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fn", help="file.py, file.py:function, pkg.module:function; default: the scorer of each data_source"
    )
    parser.add_argument("--data", required=True, nargs="+", help="parquet, json, jsonl or csv files")
    parser.add_argument("--name", help="the function's name, where --fn does not say it")
    parser.add_argument("--rows", type=int, default=3, help="rows to try (default: 3)")
    parser.add_argument(
        "--kwargs", default="{}", help='reward_kwargs as JSON, such as \'{"method": "flexible"}\''
    )
    parser.add_argument("--response", help="try this text; default: the row's truth, then an empty response")
    parser.add_argument("--response-key", help="try the responses in this column")
    parser.add_argument("--prompt-key", help="the prompt's column; default: the first usual one there is")
    parser.add_argument("--data-source", help="for rows without the column data_source")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="deadline of one call (default: 30)")
    parser.add_argument("--in-process", action="store_true", help="call the function in this process")


def run(args: argparse.Namespace) -> int:
    rows = read_rows(args.data, key="--data")
    chosen = [rows[number] for number in range(min(args.rows, len(rows)))]
    prompt_key = _prompt_column(rows.column_names, args.prompt_key)
    manager = build_reward_manager(_config(args), max_response_length=1)
    if not isinstance(manager, FunctionRewardManager):
        raise RewardError("verl reward test works with our own reward managers only.")
    printed = _Printed()
    try:
        _say(f"{len(rows)} rows; columns: {', '.join(rows.column_names)}")
        for signature in manager.signatures:
            _say(_describe(signature, rows.column_names, prompt_key))
        sources = {_source(row, args) for row in chosen}
        manager.check(sources, rows.column_names)
        scored = 0
        for number, row in enumerate(chosen):
            for title, response in _responses(row, args):
                sample = _sample(number, row, response, prompt_key, _source(row, args))
                began = time.monotonic()
                manager.submit(sample)
                result = manager.collect()[number]
                _report(sample, title, result, time.monotonic() - began, printed.take())
                scored += result.score is not None
    finally:
        manager.close()
        printed.remove()
    if not scored:
        raise RewardError("The function gave no score for any of the rows tried; the reasons stand above.")
    _say(f"\n{scored} scores; the function can be used.")
    return 0


def _config(args: argparse.Namespace) -> RewardConfig:
    try:
        kwargs = json.loads(args.kwargs)
    except ValueError as error:
        raise ConfigError(f"--kwargs {args.kwargs!r} is not JSON: {error}.") from error
    if not isinstance(kwargs, dict):
        raise ConfigError(f"--kwargs {args.kwargs!r} must be a JSON object.")
    config = RewardConfig(timeout_s=args.timeout_s, in_process=args.in_process)
    config.custom_reward_function.path = args.fn
    config.custom_reward_function.reward_kwargs = kwargs
    if args.name:
        config.custom_reward_function.name = args.name
    return config


def _prompt_column(columns: list[str], wanted: str | None) -> str | None:
    if wanted is not None and wanted not in columns:
        raise DataError(f"--prompt-key {wanted!r}: no such column; there are: {', '.join(columns)}.")
    return wanted or next((name for name in _PROMPT_COLUMNS if name in columns), None)


def _source(row: Mapping[str, Any], args: argparse.Namespace) -> str:
    return str(row.get("data_source") or args.data_source or "")


def _responses(row: Mapping[str, Any], args: argparse.Namespace) -> list[tuple[str, str]]:
    if args.response_key:
        if args.response_key not in row:
            raise DataError(
                f"--response-key {args.response_key!r}: no such column; there are: {', '.join(row)}."
            )
        return [(f"column {args.response_key}", str(row[args.response_key]))]
    if args.response is not None:
        return [("given response", args.response)]
    return [("the truth as response", str(truth_of(row))), ("an empty response", "")]


def _sample(
    number: int, row: Mapping[str, Any], response: str, prompt_key: str | None, source: str
) -> RewardSample:
    prompt = row.get(prompt_key) if prompt_key else None
    messages = as_messages(prompt)
    return RewardSample(
        index=number,
        prompt=plain_text(messages) if messages else str(prompt or ""),
        response=response,
        ground_truth=truth_of(row),
        data_source=source,
        extra_info=dict(row.get("extra_info") or {}),
        columns={name: value for name, value in row.items() if name not in (*_OWN, prompt_key)},
        messages=messages,
    )


def _describe(signature: Signature, columns: list[str], prompt_key: str | None) -> str:
    kind = ("a whole batch" if signature.is_batch else "one sample") + (
        ", async" if signature.is_async else ""
    )
    asked = [f"{name} (optional)" if name in signature.optional else name for name in signature.names]
    return f"function {signature.name}: takes {kind}; parameters: {', '.join(asked) or 'any'}"


def _report(
    sample: RewardSample, title: str, result: RewardResult, seconds: float, printed: list[str]
) -> None:
    _say(f"\nrow {sample.index}, {title}")
    _say(f"  prompt        {_short(sample.prompt)}")
    _say(f"  response      {_short(sample.response)}")
    _say(f"  ground_truth  {_short(sample.ground_truth)}")
    for line in printed:
        _say(f"  it printed    {line}")
    if result.score is None:
        _say(f"  NO SCORE      {result.error}")
        return
    _say(f"  score         {result.score:g}   ({seconds * 1000:.1f} ms)")
    for key, value in result.extra.items():
        _say(f"  {key:<13} {_short(value)}")


def _short(value: Any, limit: int = 100) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class _Printed(logging.Handler):
    """What the function printed, kept for the report instead of being logged."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._lines: list[str] = []
        self._logger = logging.getLogger("verl.reward.output")
        self._before = (self._logger.propagate, self._logger.level)
        self._logger.propagate = False
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def take(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines

    def remove(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate, level = self._before
        self._logger.setLevel(level)
