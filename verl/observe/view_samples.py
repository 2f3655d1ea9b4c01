"""Which samples to look at: by step, best and worst, containing a text, or one prompt followed through the run.

What always holds: files are read line by line and only what is shown is kept; the same question to the same files
gives the same samples.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.errors import DataError
from verl.observe.terminal import harmless
from verl.observe.view_files import Run, SampleFiles
from verl.observe.view_text import shortened, styled

if TYPE_CHECKING:
    from rich.console import RenderableType

SHOWN_BY_GREP = 10
_UID = re.compile(r"(?:(\d+)-)?(\d+)(?:\.\d+)?(?:#\d+)?")
"""`epoch-row`, with `.k` where an epoch draws a row again and `#k` where a response got no score."""


@dataclass(frozen=True)
class Question:
    """What the user wants to see."""

    step: int | None = None
    best: int = 0
    worst: int = 0
    grep: str | None = None
    uid: str | None = None
    validation: bool = False
    limit: int | None = None

    @property
    def asked(self) -> bool:
        """Whether anything about samples was asked at all."""
        return bool(
            self.step is not None or self.best or self.worst or self.grep or self.uid or self.validation
        )


@dataclass(frozen=True)
class Sample:
    """A row of a samples file, with its step and why it is shown."""

    step: int
    row: dict[str, Any]
    why: str = ""

    @property
    def score(self) -> float | None:
        value = self.row.get("score")
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def choose(run: Run, question: Question) -> list[Sample]:
    """The samples that answer the question; DataError says what there is when it cannot be answered."""
    files = run.validation if question.validation else run.rollouts
    steps = _steps(files, question)
    matches = _filter(question)
    if question.best or question.worst:
        return _extremes(files, steps, question, matches)
    limit = question.limit or (None if question.uid else SHOWN_BY_GREP if question.grep else 3)
    found: list[Sample] = []
    # The newest answer a search best; a prompt is followed from its beginning.
    for step in steps if question.uid else reversed(steps):
        for row in matches(files.rows, step):
            found.append(Sample(step, row))
            if limit is not None and len(found) >= limit:
                return found
    return found


def _steps(files: SampleFiles, question: Question) -> list[int]:
    there = files.steps()
    if not there:
        raise DataError(f"there are no samples in {files.folder}")
    if question.step is None:
        everything = question.grep or question.uid
        return there if everything else there[-1:]
    if question.step not in there:
        nearest = min(there, key=lambda step: abs(step - (question.step or 0)))
        raise DataError(
            f"--step {question.step}: there are no {files.name} samples of that step. There are {len(there)}, from "
            f"{there[0]} to {there[-1]}; the nearest is {nearest}"
        )
    return [question.step]


Filter = Callable[[Callable[..., Iterator[dict[str, Any]]], int], Iterator[dict[str, Any]]]


def _filter(question: Question) -> Filter:
    """Rows of a step that the question is about. Lines that cannot be meant are passed over unread."""
    text = question.grep.casefold() if question.grep else None
    wanted = _row_number(question.uid) if question.uid else None
    needle = wanted.encode() if wanted is not None else (question.uid or "").encode()

    def maybe(line: bytes) -> bool:
        return needle in line

    def rows(read: Callable[..., Iterator[dict[str, Any]]], step: int) -> Iterator[dict[str, Any]]:
        for row in read(step, maybe):
            if question.uid and not _same_prompt(str(row.get("uid")), question.uid, wanted):
                continue
            if text is not None and text not in _all_text(row).casefold():
                continue
            yield row

    return rows


def _row_number(uid: str) -> str | None:
    match = _UID.fullmatch(uid)
    return match[2] if match else None


def _same_prompt(uid: str, asked: str, wanted: str | None) -> bool:
    """A prompt keeps its row number through the epochs; a uid of another form must be equal."""
    return uid == asked or (wanted is not None and _row_number(uid) == wanted)


def _all_text(row: dict[str, Any]) -> str:
    return "\n".join(str(row.get(name) or "") for name in ("prompt", "response", "ground_truth", "error"))


def _extremes(files: SampleFiles, steps: list[int], question: Question, matches: Filter) -> list[Sample]:
    """The best and the worst by score; those without a score are neither."""

    def scored() -> Iterator[tuple[float, int, int, Sample]]:
        for step in steps:
            for number, row in enumerate(matches(files.rows, step)):
                sample = Sample(step, row)
                if sample.score is not None:
                    yield sample.score, -step, -number, sample

    found: list[Sample] = []
    if question.best:
        top = heapq.nlargest(question.best, scored(), key=lambda item: item[:3])
        found += [Sample(item[3].step, item[3].row, "best") for item in top]
    if question.worst:
        bottom = heapq.nsmallest(question.worst, scored(), key=lambda item: (item[0], -item[1], -item[2]))
        found += [Sample(item[3].step, item[3].row, "worst") for item in bottom]
    return found


def glimpse(run: Run) -> list[Sample]:
    """Without a question: the best and the worst of the newest step."""
    files = run.rollouts if run.rollouts.steps() else run.validation
    if not files.steps():
        return []
    return choose(run, Question(best=1, worst=1, validation=files is run.validation))


def follow_prompt(samples: list[Sample], characters: int = 1200) -> list[RenderableType]:
    """One prompt through the steps: how it scored at each, and its different answers with how often they came."""
    from rich.console import Group

    if not samples:
        return []
    blocks: list[RenderableType] = [Group(*_texts(samples[0].row, ("prompt", "ground_truth"), characters))]
    steps: dict[int, list[Sample]] = {}
    for sample in samples:
        steps.setdefault(sample.step, []).append(sample)
    for step, group in steps.items():
        scores = [sample.score for sample in group if sample.score is not None]
        mean = f"mean score {sum(scores) / len(scores):.3g}" if scores else "no score"
        unscored = f", {len(group) - len(scores)} without a score" if len(scores) < len(group) else ""
        count = f"{len(group)} response{'s' if len(group) > 1 else ''}"
        lines = [
            styled(f"step {step}  uid {group[0].row.get('uid', '?')}  {count}, {mean}{unscored}", "bold")
        ]
        answers = Counter((str(sample.row.get("response") or ""), sample.score) for sample in group)
        for (text, score), times in answers.most_common():
            shown = "no score" if score is None else f"{score:g}"
            often = f"{times} x " if len(group) > 1 else ""
            head, *rest = shortened(text, characters).rstrip().splitlines() or ["(empty)"]
            lines.append(
                styled("\n".join([f"  {often}[{shown}] {head}", *(" " * 11 + line for line in rest)]))
            )
        blocks.append(Group(*lines))
    return blocks


_NAMED = (
    "uid",
    "prompt",
    "response",
    "ground_truth",
    "score",
    "length",
    "finish_reason",
    "error",
    "data_source",
)


def show(samples: list[Sample], characters: int = 1200) -> list[RenderableType]:
    """Each sample: a line of numbers, then its texts, indented."""
    from rich.console import Group

    blocks: list[RenderableType] = []
    for sample in samples:
        row = sample.row
        score = "no score" if sample.score is None else f"score {sample.score:g}"
        facts = [f"step {sample.step}", f"uid {row.get('uid', '?')}", score]
        facts += [f"{row['length']} tokens"] if "length" in row else []
        facts += [f"ended by {row['finish_reason']}"] if row.get("finish_reason") else []
        facts += [f"{name} {harmless(str(value))[:60]}" for name, value in row.items() if name not in _NAMED]
        title = (f"{sample.why}: " if sample.why else "") + "  ".join(map(str, facts))
        texts = _texts(row, ("prompt", "response", "ground_truth", "error"), characters)
        blocks.append(Group(styled(title, "bold"), *texts, styled("")))
    return blocks


_TEXT_STYLES = {"prompt": "dim", "response": "", "ground_truth": "green", "error": "red"}


def _texts(row: dict[str, Any], names: tuple[str, ...], characters: int) -> list[RenderableType]:
    texts: list[RenderableType] = []
    for name in names:
        if row.get(name) not in (None, ""):
            label = "truth" if name == "ground_truth" else name
            lines = shortened(str(row[name]), characters).rstrip().splitlines() or [""]
            indented = "\n".join([f"  {label:<9}{lines[0]}", *(" " * 11 + line for line in lines[1:])])
            texts.append(styled(indented, _TEXT_STYLES[name]))
    return texts
