"""The report: one screen of text, or JSON."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from verl import __version__
from verl.doctor.finding import ORDER, Finding
from verl.doctor.plan import SECTIONS
from verl.doctor.runner import Answer
from verl.observe.terminal import harmless, raw

_MARKS = {"ok": "ok", "note": "-", "warning": "!", "fatal": "X"}
_COLOURS = {"ok": "32", "note": "2", "warning": "33", "fatal": "31;1"}
_NAMES_WIDTH = 18


def as_json(answers: Sequence[Answer]) -> str:
    findings = [
        {"section": answer.probe.section, **_without_form(finding)}
        for answer in answers
        for finding in answer.findings
    ]
    return json.dumps({"verl": __version__, "ok": not fatal(answers), "findings": findings}, indent=1)


def _without_form(finding: Finding) -> dict[str, Any]:
    values = finding.to_json()
    values.pop("together")
    return values


def fatal(answers: Sequence[Answer]) -> bool:
    return any(answer.fatal for answer in answers)


def as_text(answers: Sequence[Answer], seconds: float, *, width: int = 110, colour: bool = False) -> str:
    """Sections, each line: what was seen; where it is not in order, what it means and what to do."""
    lines = [f"verl {__version__} on this machine"]
    for section in SECTIONS:
        findings = [f for answer in answers if answer.probe.section == section for f in answer.findings]
        if findings:
            lines += ["", _painted(section, "1", colour)]
            lines += [line for finding in gathered(findings) for line in _lines(finding, width, colour)]
    lines += ["", verdict(answers, seconds)]
    return "\n".join(lines) + "\n"


def gathered(findings: Sequence[Finding]) -> list[Finding]:
    """Findings that are in order and belong together share a line, where the first of them stood."""
    places: dict[str, int] = {}
    lines: list[Finding] = []
    for finding in findings:
        if not finding.together:
            lines.append(finding)
        elif finding.together in places:
            number = places[finding.together]
            lines[number] = _joined(lines[number], finding)
        else:
            places[finding.together] = len(lines)
            lines.append(_joined(None, finding))
    return lines


def _joined(line: Finding | None, finding: Finding) -> Finding:
    name = finding.together
    if name == "missing packages":
        words = finding.subject
        do = finding.do if line is None else f"{line.do} {finding.do.removeprefix('pip install ')}"
    elif name == "missing extras":
        words = finding.subject
        before = "of these what a run needs: pip install" if line is None else line.do
        do = f"{before} {finding.do.removeprefix('pip install ')}"
    elif name == "not tried":
        words, do = f"{finding.subject} ({finding.seen.removeprefix('not tried').strip(': ')})", ""
    else:
        words, do = f"{finding.subject} {finding.seen}", ""
    seen = words if line is None else f"{line.seen}, {words}"
    status = finding.status if line is None else max(line.status, finding.status, key=ORDER.index)
    return Finding(name, status, seen, "", do)


def _lines(finding: Finding, width: int, colour: bool) -> Iterator[str]:
    mark = _painted(f"{_MARKS[finding.status]:>2}", _COLOURS[finding.status], colour)
    said = harmless(finding.seen if not finding.means else f"{finding.seen.rstrip('.')}: {finding.means}")
    indent = " " * (_NAMES_WIDTH + 5)
    room = max(40, width - len(indent))
    first, *rest = textwrap.wrap(said, room, break_long_words=False, break_on_hyphens=False) or [""]
    yield f"{mark}  {harmless(finding.subject):<{_NAMES_WIDTH}} {first}"
    yield from (indent + line for line in rest)
    if finding.do and finding.status != "ok":
        for number, line in enumerate(
            textwrap.wrap(harmless(finding.do), room - 3, break_long_words=False, break_on_hyphens=False)
        ):
            yield indent + ("-> " if number == 0 else "   ") + line


def verdict(answers: Sequence[Answer], seconds: float) -> str:
    found = [finding for answer in answers for finding in answer.findings]
    broken = [harmless(finding.subject) for finding in found if finding.status == "fatal"]
    warned = sum(finding.status == "warning" for finding in found)
    took = f"({seconds:.0f} s)"
    warnings = f"{warned} warning{'s' if warned != 1 else ''}"
    if broken:
        return f"To mend first: {', '.join(dict.fromkeys(broken))}; {warnings} {took}"
    return f"Ready: nothing stands in the way of a run; {warnings} {took}"


def _painted(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text


def write(text: str) -> None:
    """Write a report, whose only control characters are its colours."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    raw(sys.stdout).write(text)
    sys.stdout.flush()
