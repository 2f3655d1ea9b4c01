"""Scorers, chosen by a row's `data_source`.

A scorer is a reward function. Ours are imported when first used; a user adds one with `@register_scorer("my_task")`. A
pattern may end in `*` ("aime*"); an exact name goes before a pattern.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from verl.errors import RewardError

Scorer = Callable[..., Any]

# data_source -> "module:function"; a module beginning with a dot is one of this package
_BUILTIN: dict[str, str] = {
    "gsm8k": ".gsm8k:compute_score",
    "openai/gsm8k": ".gsm8k:compute_score",
    "math": ".math:compute_score",
    "lighteval/MATH": ".math:compute_score",
    "DigitalLearningGmbH/MATH-lighteval": ".math:compute_score",
    "HuggingFaceH4/MATH-500": ".math:compute_score",
    "numina*": ".math:compute_score",
    "math_dapo": ".math:compute_dapo_score",
    "aime*": ".math:compute_dapo_score",
    "multiple_choice": ".choice:compute_score",
    "mmlu*": ".choice:compute_score",
    "gpqa*": ".choice:compute_score",
    "qa_em": ".qa:compute_em",
    "qa_f1": ".qa:compute_f1",
    "searchR1_*": ".qa:compute_em",
    "json_schema": ".json_schema:compute_score",
    "code": ".code:compute_score",
    "apps": ".code:compute_score",
    "taco": ".code:compute_score",
    "codecontests": ".code:compute_score",
    "codeforces": ".code:compute_score",
    "mbpp": ".code:compute_score",
    "humaneval": ".code:compute_score",
    "tool_use": ".tool_calls:compute_score",
    "tasks/*": "verl.data.tasks:compute_score",
}
REGISTERED: dict[str, Scorer] = {}


def register_scorer(*data_sources: str) -> Callable[[Scorer], Scorer]:
    """Decorator: score rows of these data sources with the function. Replaces what was there before."""
    if not data_sources or not all(isinstance(name, str) and name for name in data_sources):
        raise RewardError(f"register_scorer takes the names of data sources, not {data_sources!r}.")

    def add(function: Scorer) -> Scorer:
        for name in data_sources:
            REGISTERED[name] = function
        return function

    return add


def find_scorer(data_source: str) -> str | None:
    """The registered name or pattern that serves `data_source`."""
    for table in (REGISTERED, _BUILTIN):
        if data_source in table:
            return data_source
    for table in (REGISTERED, _BUILTIN):
        for name in table:
            if name.endswith("*") and fnmatchcase(data_source, name):
                return name
    return None


def get_scorer(data_source: str) -> Scorer:
    """The scorer of `data_source`."""
    name = find_scorer(data_source)
    if name is None:
        raise unknown_sources([data_source])
    if name in REGISTERED:
        return REGISTERED[name]
    module, _, function = _BUILTIN[name].partition(":")
    return getattr(importlib.import_module(module, __name__), function)


def uses_sandbox(data_source: str) -> bool:
    """Whether scoring this source runs code a model wrote."""
    name = find_scorer(data_source)
    return name is not None and name not in REGISTERED and _BUILTIN[name].startswith(".code:")


def returns_details(data_source: str) -> bool:
    """Whether callers of verl's `default_compute_score` get all that the scorer returns, not only its score."""
    name = find_scorer(data_source)
    return name is not None and (name in REGISTERED or _BUILTIN[name].endswith(":compute_dapo_score"))


def known_scorers() -> list[str]:
    return sorted({*_BUILTIN, *REGISTERED})


def registered_scorers() -> dict[str, Scorer]:
    """Those a user added in this process."""
    return dict(REGISTERED)


def check_data_sources(data_sources: Iterable[str]) -> None:
    """Raise RewardError for data sources without a scorer."""
    unknown = sorted({str(name) for name in data_sources if find_scorer(str(name)) is None})
    if unknown:
        raise unknown_sources(unknown)


def unknown_sources(names: list[str]) -> RewardError:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    unnamed = " (rows without the column data_source)" if "" in names else ""
    return RewardError(
        f"No scorer for data_source {', '.join(map(repr, names[:5]))}{more}{unnamed}. Known: "
        f"{', '.join(known_scorers())}. Set reward.custom_reward_function.path=FILE or use "
        f"register_scorer."
    )
