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

from verl.config.schema import RewardConfig, RewardFunctionConfig
from verl.data.columns import extra_info_of, responses_of, truth_of
from verl.data.files import Rows, read_rows
from verl.data.messages import plain_text, read_messages
from verl.errors import ConfigError, DataError, RewardError
from verl.reward.base import RewardSample
from verl.reward.managers import FunctionRewardManager, build_reward_manager

_PROMPT_COLUMNS = ("prompt", "question", "problem", "messages", "instruction")
_SAMPLE_COLUMNS = ("data_source", "ground_truth", "extra_info")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--fn", help="file.py, file.py:function, pkg.module:function; default: the scorer of each data_source"
    )
    add("--data", required=True, nargs="+", help="parquet, json, jsonl or csv files")
    add("--name", default=RewardFunctionConfig.name, help="the function's name, where --fn does not say it")
    add("--rows", type=int, default=3, help="rows to try (default: 3)")
    add("--kwargs", default="{}", help='reward_kwargs as JSON, such as \'{"method": "flexible"}\'')
    add("--response", help="try this text; default: the row's truth, then an empty response")
    add("--response-key", help="try the responses in this column: texts, or lists of texts")
    add("--prompt-key", help="the prompt's column; default: the first usual one there is")
    add("--data-source", help="for rows without the column data_source")
    add("--timeout-s", type=float, default=RewardConfig.timeout_s, help="of one call (default: %(default)g)")
    add("--in-process", action="store_true", help="call the function in this process")


def run(args: argparse.Namespace) -> int:
    rows = read_rows(args.data, key="--data")
    columns = rows.column_names
    for option, name in (("--prompt-key", args.prompt_key), ("--response-key", args.response_key)):
        if name is not None and name not in columns:
            raise DataError(f"{option} {name!r}: no such column; there are: {', '.join(columns)}.")
    prompt_key = args.prompt_key or next((name for name in _PROMPT_COLUMNS if name in columns), None)
    chosen = [rows[number] for number in range(min(args.rows, len(rows)))]
    sources = [str(row.get("data_source") or args.data_source or "") for row in chosen]
    manager = build_reward_manager(_config(args), max_response_length=1)
    assert isinstance(manager, FunctionRewardManager)
    scored = 0
    with contextlib.closing(manager), _captured_output() as printed:
        _print(f"{len(rows)} rows; columns: {', '.join(columns)}")
        for signature in manager.signatures:
            kind = ("a whole batch" if signature.is_batch else "one sample") + ", async" * signature.is_async
            names = [name + " (optional)" * (name in signature.optional) for name in signature.names]
            _print(f"function {signature.name}: takes {kind}; parameters: {', '.join(names) or 'any'}")
        manager.check(sources, columns)
        for number, (row, source) in enumerate(zip(chosen, sources, strict=True)):
            for title, response in _responses(rows, number, row, args):
                sample = _sample(rows, number, row, response, prompt_key, source)
                _print(f"\nrow {number}, {title}")
                for name in ("prompt", "response", "ground_truth"):
                    _show(name, getattr(sample, name))
                start = time.monotonic()
                manager.submit(sample)
                result = manager.collect()[number]
                milliseconds = (time.monotonic() - start) * 1000
                for line in printed:
                    _show("it printed", line)
                printed.clear()
                if result.score is None:
                    _print(f"  NO SCORE      {result.error}")
                    continue
                scored += 1
                _print(f"  score         {result.score:g}   ({milliseconds:.1f} ms)")
                for name, value in result.extra.items():
                    _show(name, value)
    if not scored:
        raise RewardError("The function gave no score for any of the rows tried; see the reasons above.")
    _print(f"\n{scored} scores; the function can be used.")
    return 0


def _config(args: argparse.Namespace) -> RewardConfig:
    try:
        kwargs = dict(json.loads(args.kwargs))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--kwargs {args.kwargs!r} is not JSON of an object: {error}.") from error
    function = RewardFunctionConfig(args.fn, args.name, kwargs)
    return RewardConfig(function, timeout_s=args.timeout_s, in_process=args.in_process)


def _responses(
    rows: Rows, number: int, row: Mapping[str, Any], args: argparse.Namespace
) -> list[tuple[str, str]]:
    """What is tried on a row, each with its title."""
    if args.response_key:
        texts = responses_of(row, args.response_key, rows.origin(number), "--data", "--response-key")
        numbers = [f", response {at}" if len(texts) > 1 else "" for at in range(len(texts))]
        return [(f"column {args.response_key}{at}", text) for at, text in zip(numbers, texts, strict=True)]
    if args.response is not None:
        return [("given response", args.response)]
    return [("the truth as response", str(truth_of(row))), ("an empty response", "")]


def _sample(
    rows: Rows, number: int, row: Mapping[str, Any], response: str, prompt_key: str | None, source: str
) -> RewardSample:
    prompt = row.get(prompt_key) if prompt_key else None
    messages = read_messages(prompt, rows.origin(number))
    return RewardSample(
        index=number,
        prompt=plain_text(messages) if messages else str(prompt or ""),
        response=response,
        ground_truth=truth_of(row),
        data_source=source,
        extra_info=extra_info_of(row, rows.origin(number), "--data"),
        columns={name: value for name, value in row.items() if name not in (*_SAMPLE_COLUMNS, prompt_key)},
        messages=messages,
    )


def _show(name: str, value: Any, limit: int = 100) -> None:
    text = " ".join(str(value).split())
    _print(f"  {name:<13} {text if len(text) <= limit else text[: limit - 3] + '...'}")


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
    logger.propagate, logger.level = False, logging.INFO
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.propagate, logger.level = before
