"""The first number or text in which a repeated run differs from the recorded one, and what that points to.

Of each step, in the order in which they depend on each other: prompts, responses, scores, metrics, then the validation.
Numbers are equal only where they are equal in every bit; times and speeds are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.observe.jsonl import read_jsonl, read_metrics
from verl.observe.run_reader import KINDS, Run

_TIMED = ("timing", "perf/")
_NOT_COMPARED = ("step", "findings")
ENGINE_LOG_PROBS = ("training/rollout_probs_diff_", "rollout_corr/")
"""Metrics of the rollout engine's log-probs. Where tools answer sooner or later, other requests are decoded together,
and these differ in their last bits; the tokens do not."""
DATA = "the data: the prompts are others, so data.train_files, their filter, order or seed changed"
RESPONSE = (
    "weights, sampling or environment: the same prompt got another response, so the model's files, the checkpoint, the "
    "rollout engine or the versions of its packages changed, or the device is another"
)
TOOL = (
    "a tool: the conversation is equal up to an answer of a tool, environment or simulated user, which does not answer "
    "the same call the same way"
)
SCORE = (
    "the reward function: the same response got another score, so the function or what it reads changed, or it is "
    "random or depends on time"
)
NUMERICS = (
    "numerics: prompts, responses and scores are equal, so versions of packages, the device or the number of threads "
    "changed, or weights that checkpoints do not hold (reference, teacher, reward model)"
)
OFFLINE = (
    "the data, the model's files or numerics: the rows, the weights, versions of packages, the device or the number of "
    "threads changed"
)
_PARTS = (
    (("prompt", "data_source", "ground_truth"), DATA),
    (("turns", "response", "length", "finish_reason", "requests"), RESPONSE),
    ((), SCORE),
    (("advantage",), NUMERICS),
)
"""Fields of a response in the order in which they depend on each other, and what a difference points to; (): those in
no other part."""


@dataclass(frozen=True)
class Difference:
    """The first value that differs."""

    step: int
    name: str
    recorded: Any
    repeated: Any
    cause: str


@dataclass
class Comparison:
    """What was compared, and the first difference."""

    difference: Difference | None = None
    numbers: int = 0
    responses: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Files:
    """The files of one run that are compared."""

    run: Run
    metrics: dict[int, dict[str, Any]]
    left_out: tuple[str, ...] = ()
    """Prefixes of metrics that are not compared."""

    @classmethod
    def of(cls, run: Run, left_out: tuple[str, ...] = ()) -> Files:
        rows = read_metrics(run.path / "metrics.jsonl")
        return cls(run, {row["step"]: row for row in rows}, left_out)


def compare(recorded: Files, repeated: Files, steps: Iterable[int], *, samples: bool) -> Comparison:
    """Compare these steps up to the first difference; `samples`: whether the command writes responses."""
    comparison = Comparison()
    comparison.difference = next(_differences(comparison, recorded, repeated, steps, samples), None)
    return comparison


def _differences(
    comparison: Comparison, recorded: Files, repeated: Files, steps: Iterable[int], samples: bool
) -> Iterator[Difference]:
    for step in steps:
        if step not in repeated.metrics and step not in recorded.metrics:
            continue
        for kind in KINDS:
            if samples and (step or kind == "validation"):
                yield from _compare_samples(comparison, step, recorded, repeated, kind)
            yield from _compare_metrics(comparison, step, recorded, repeated, samples, kind == "validation")


def metrics_differ(recorded: Files, step: int, repeated: Mapping[str, Any]) -> bool:
    """Whether a number that both runs have of a step differs."""
    row = recorded.metrics.get(step, {})
    return any(row[name] != repeated[name] for name in _compared(row, recorded.left_out) if name in repeated)


def _compared(row: Mapping[str, Any], left_out: tuple[str, ...]) -> list[str]:
    """The metrics of a row that two runs share, in the order in which they were computed."""
    others = (*_TIMED, *left_out)
    return [name for name in row if name not in _NOT_COMPARED and not name.startswith(others)]


def _compare_metrics(
    comparison: Comparison, step: int, recorded: Files, repeated: Files, samples: bool, validation: bool
) -> Iterator[Difference]:
    one, other = recorded.metrics.get(step), repeated.metrics.get(step)
    if one is None or other is None:
        if not validation:
            which = "recorded" if one is None else "repeated"
            comparison.notes.append(f"step {step}: the {which} run has no line in metrics.jsonl")
        return
    names, again = (
        [name for name in _compared(row, recorded.left_out) if name.startswith("val") == validation]
        for row in (one, other)
    )
    alone = {*names} ^ {*again}
    if alone:
        comparison.notes.append(f"step {step}: only one of the two runs measured {', '.join(sorted(alone))}")
    for name in names:
        if name not in alone:
            comparison.numbers += 1
            if one[name] != other[name]:
                yield Difference(step, name, one[name], other[name], NUMERICS if samples else OFFLINE)


def _compare_samples(
    comparison: Comparison, step: int, recorded: Files, repeated: Files, kind: str
) -> Iterator[Difference]:
    files = [run.samples(kind).folder / f"{step}.jsonl" for run in (recorded.run, repeated.run)]
    there = [file.is_file() for file in files]
    if not all(there):
        if any(there):
            which = "recorded" if there[1] else "repeated"
            comparison.notes.append(f"step {step}: the {which} run has no {kind}/{step}.jsonl")
        return
    one, other = (list(read_jsonl(file)) for file in files)
    comparison.responses += min(len(one), len(other))
    # Over all rows first what comes first: a score that follows from another response is no finding of its own.
    for names, points_to in _PARTS:
        for line, (row, again) in enumerate(zip(one, other, strict=False), start=1):
            different = _first_field(row, again, names, points_to)
            if different is not None:
                name, before, after, cause = different
                yield Difference(step, f"{name} in line {line} of {kind}/{step}.jsonl", before, after, cause)
    if len(one) != len(other):
        yield Difference(step, f"responses in {kind}/{step}.jsonl", len(one), len(other), DATA)


def _first_field(
    row: Mapping[str, Any], again: Mapping[str, Any], names: tuple[str, ...], cause: str
) -> tuple[str, Any, Any, str] | None:
    """The first of the fields that differs: name, values, cause."""
    others = {name for part, _ in _PARTS for name in part}
    for name in names or [name for name in row if name not in others]:
        before, after = row.get(name), again.get(name)
        if name not in again or before == after:
            continue
        if name == "turns":
            return _first_turn(before, after)
        # That of a response without a score has a suffix.
        other_prompt = name == "uid" and str(before).partition("#")[0] != str(after).partition("#")[0]
        return name, before, after, DATA if other_prompt else cause
    return None


def _first_turn(before: Any, after: Any) -> tuple[str, Any, Any, str]:
    if not (isinstance(before, list) and isinstance(after, list)):
        return "turns", before, after, RESPONSE
    for number, (turn, again) in enumerate(zip(before, after, strict=False), start=1):
        if turn == again:
            continue
        if not (isinstance(turn, dict) and isinstance(again, dict)):
            break
        name = next(name for name in {**turn, **again} if turn.get(name) != again.get(name))
        role = turn.get("role", "")
        cause = RESPONSE if role == "assistant" else TOOL
        if name == "reward":
            cause = SCORE
        return f"{name} of turn {number} ({role})", turn.get(name), again.get(name), cause
    return "number of turns", len(before), len(after), TOOL
