"""`verl reward test`: try a reward function on a few rows, with the checks and worker processes of a run."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from verl.config.schema import RewardConfig
from verl.data.chat import as_messages, plain_text
from verl.data.files import read_rows
from verl.data.rl_dataset import truth_of
from verl.errors import ConfigError, DataError, RewardError
from verl.reward.base import RewardResult, RewardSample
from verl.reward.build import build_reward_manager
from verl.reward.functions import Signature
from verl.reward.managers import FunctionRewardManager

_PROMPT_COLUMNS = ("prompt", "question", "problem", "messages", "instruction")
_SAMPLE_COLUMNS = ("data_source", "ground_truth", "extra_info")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--fn", help="file.py, file.py:function, pkg.module:function; default: the scorer of each data_source"
    )
    add("--data", required=True, nargs="+", help="parquet, json, jsonl or csv files")
    add("--name", help="the function's name, where --fn does not say it")
    add("--rows", type=int, default=3, help="rows to try (default: 3)")
    add("--kwargs", default="{}", help='reward_kwargs as JSON, such as \'{"method": "flexible"}\'')
    add("--response", help="try this text; default: the row's truth, then an empty response")
    add("--response-key", help="try the responses in this column")
    add("--prompt-key", help="the prompt's column; default: the first usual one there is")
    add("--data-source", help="for rows without the column data_source")
    add(
        "--timeout-s",
        type=float,
        default=RewardConfig.timeout_s,
        help="deadline of one call (default: %(default)g)",
    )
    add("--in-process", action="store_true", help="call the function in this process")


def run(args: argparse.Namespace) -> int:
    rows = read_rows(args.data, key="--data")
    columns = rows.column_names
    chosen = [rows[number] for number in range(min(args.rows, len(rows)))]
    if args.prompt_key is not None:
        _require_column(args.prompt_key, "--prompt-key", columns)
    prompt_key = args.prompt_key or next((name for name in _PROMPT_COLUMNS if name in columns), None)
    manager = build_reward_manager(_config(args), max_response_length=1)
    assert isinstance(manager, FunctionRewardManager)
    scored = 0
    with contextlib.closing(manager), _captured_output() as printed:
        _print(f"{len(rows)} rows; columns: {', '.join(columns)}")
        for signature in manager.signatures:
            _print(_describe(signature))
        manager.check({_source(row, args) for row in chosen}, columns)
        for number, row in enumerate(chosen):
            for title, response in _responses(row, args):
                sample = _sample(number, row, response, prompt_key, _source(row, args))
                began = time.monotonic()
                manager.submit(sample)
                result = manager.collect()[number]
                _report(sample, title, result, time.monotonic() - began, printed)
                printed.clear()
                scored += result.score is not None
    if not scored:
        raise RewardError("The function gave no score for any of the rows tried; see the reasons above.")
    _print(f"\n{scored} scores; the function can be used.")
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


def _require_column(name: str, option: str, columns: list[str]) -> None:
    if name not in columns:
        raise DataError(f"{option} {name!r}: no such column; there are: {', '.join(columns)}.")


def _source(row: Mapping[str, Any], args: argparse.Namespace) -> str:
    return str(row.get("data_source") or args.data_source or "")


def _responses(row: Mapping[str, Any], args: argparse.Namespace) -> list[tuple[str, str]]:
    if args.response_key:
        _require_column(args.response_key, "--response-key", list(row))
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
        columns={name: value for name, value in row.items() if name not in (*_SAMPLE_COLUMNS, prompt_key)},
        messages=messages,
    )


def _describe(signature: Signature) -> str:
    kind = "a whole batch" if signature.is_batch else "one sample"
    kind += ", async" if signature.is_async else ""
    names = [f"{name} (optional)" if name in signature.optional else name for name in signature.names]
    return f"function {signature.name}: takes {kind}; parameters: {', '.join(names) or 'any'}"


def _report(
    sample: RewardSample, title: str, result: RewardResult, seconds: float, printed: list[str]
) -> None:
    lines = {"prompt": sample.prompt, "response": sample.response, "ground_truth": sample.ground_truth}
    _print(f"\nrow {sample.index}, {title}")
    for name, value in lines.items():
        _print(f"  {name:<13} {_short(value)}")
    for line in printed:
        _print(f"  it printed    {line}")
    if result.score is None:
        _print(f"  NO SCORE      {result.error}")
        return
    _print(f"  score         {result.score:g}   ({seconds * 1000:.1f} ms)")
    for name, value in result.extra.items():
        _print(f"  {name:<13} {_short(value)}")


def _short(value: Any, limit: int = 100) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def _captured_output() -> Iterator[list[str]]:
    """What functions print, for the report instead of the log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("verl.reward.output")
    before = logger.propagate, logger.level
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = before[0]
        logger.setLevel(before[1])
