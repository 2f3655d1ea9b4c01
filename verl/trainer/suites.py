"""`verl eval --suite NAME`: answer the questions of a known dataset greedily, and count the right answers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verl.config.load import load_config
from verl.config.schema import GenerationConfig
from verl.data.columns import responses_of, truth_of
from verl.data.file_search import absent
from verl.data.files import read_rows
from verl.errors import ConfigError, DataError
from verl.observe.console import show_lines
from verl.reward.scorers import gsm8k
from verl.trainer.generation import generate_file

Scorer = Callable[[str, Any], dict[str, Any]]
SUITES: dict[str, dict[str, Scorer]] = {
    "gsm8k": {method: partial(gsm8k.compute_score, method=method) for method in gsm8k.METHODS}
}
"""How each suite scores a response, by the name of the score."""


def run_suite(name: str, arguments: Sequence[str]) -> None:
    """`arguments`: keys of `verl generate`."""
    if name not in SUITES:
        raise ConfigError(f"--suite {name}: known: {', '.join(SUITES)}")
    defaults = [f"data.output_path={name}.responses.parquet", "rollout.temperature=0"]
    cfg = load_config(GenerationConfig, [*defaults, *arguments])
    for path in cfg.data.path:
        if problem := absent(path, "data.path"):
            raise DataError(f"{problem} `verl prepare {name} --to DIR` writes the data.")
    generate_file(cfg)
    show_lines(suite_lines(name, Path(cfg.data.output_path), cfg.data.response_key))


def suite_lines(name: str, file: Path, key: str) -> list[tuple[str, str]]:
    """The share of right answers by each score, over the questions of a file of responses."""
    scores: dict[str, list[float]] = {score: [] for score in SUITES[name]}
    rows = read_rows([str(file)], key="data.output_path")
    for number in range(len(rows)):
        row, origin = rows[number], rows.origin(number)
        texts = responses_of(row, key, origin, "data.path", "data.response_key")
        for score, scorer in SUITES[name].items():
            truth = truth_of(row, "reward_model")
            scores[score].append(statistics.fmean(scorer(text, truth)["acc"] for text in texts))
    return [
        (f"{name} {score}", f"{_mean_and_error(values)} (standard error), {len(values)} questions")
        for score, values in scores.items()
    ]


def _mean_and_error(values: Sequence[float]) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.4f} ± {error:.4f}"
