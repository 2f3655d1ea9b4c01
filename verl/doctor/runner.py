"""Runs probes in child processes that can be killed, and what they find: a status, what was seen, and how to fix it.

Every probe gets at least one result: its own, or one that says that it hung or crashed. The probes after it then
run in a new process.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from verl.errors import VerlError

if TYPE_CHECKING:
    from verl.user_process import Service

Status = Literal["ok", "note", "warning", "fatal"]
_START_S = 20.0
"""For starting Python, on top of the limit of the first probe."""


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    subject: str
    status: Status
    seen: str
    fix: str = ""
    """A key, a command or a variable to set."""
    group: str = ""
    """Findings of one group share a line of the text report."""
    data: dict[str, Any] = field(default_factory=dict)


def size(count: float) -> str:
    """Bytes for people."""
    for unit, width in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= width:
            return f"{count / width:.{0 if count >= 100 * width else 1}f} {unit}"
    return f"{count:.0f} bytes"


def one_line(error: BaseException | str, limit: int = 300) -> str:
    """The class and first line of an error, at most `limit` characters."""
    if isinstance(error, BaseException):
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        error = f"{type(error).__name__}: {first}" if first else type(error).__name__
    text = " ".join(error.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


@dataclass(frozen=True)
class DoctorProbe:
    """A function that returns findings, and how long it may take."""

    name: str
    target: str
    """`module:function`, below `verl.doctor`."""
    section: str
    limit_s: float = 60.0
    on_failure: Status = "warning"
    fix: str = ""
    required: bool = False
    """The probes after it in its group are skipped where it is fatal."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its whole group: those of the first probe count."""


@dataclass(frozen=True)
class ProbeAnswer:
    probe: DoctorProbe
    findings: list[Check]

    @property
    def fatal(self) -> bool:
        return any(finding.status == "fatal" for finding in self.findings)

    @property
    def stops(self) -> bool:
        """Whether the probes after it in its group are skipped."""
        return self.probe.required and self.fatal


def run_groups(groups: Sequence[Sequence[DoctorProbe]], limit_s: float | None = None) -> list[ProbeAnswer]:
    """Run each group in a separate process, a few at once; `limit_s` replaces the limits of the probes."""
    return asyncio.run(_run_groups(groups, limit_s))


async def _run_groups(groups: Sequence[Sequence[DoctorProbe]], limit_s: float | None) -> list[ProbeAnswer]:
    places = asyncio.Semaphore(max(2, min(4, os.cpu_count() or 1)))
    async with asyncio.TaskGroup() as running:
        tasks = [running.create_task(_run_group(list(group), limit_s, places)) for group in groups]
    return [answer for task in tasks for answer in task.result()]


async def _run_group(
    probes: list[DoctorProbe], limit_s: float | None, places: asyncio.Semaphore
) -> list[ProbeAnswer]:
    answers: list[ProbeAnswer] = []
    while rest := probes[len(answers) :]:
        if answers and answers[-1].stops:
            skipped = f"not tried: {answers[-1].probe.name} does not work"
            return answers + [ProbeAnswer(probe, [Check(probe.name, "note", skipped)]) for probe in rest]
        async with places:
            answers += await _run_process(rest, limit_s)
    return answers


async def _run_process(probes: list[DoctorProbe], limit_s: float | None) -> list[ProbeAnswer]:
    """The answers of one process: of all probes, or of those up to the one that broke it or stops its group."""
    from verl.user_process import PythonProcess  # needs a package that may be missing

    answers: list[ProbeAnswer] = []
    process = PythonProcess(None, environment=probes[0].environment)
    try:
        start_s = _START_S + (limit_s or probes[0].limit_s)
        await process.load(f"{__name__}:serve_probes", None, VerlError, timeout_s=start_s)
        for probe in probes:
            limit = limit_s or probe.limit_s
            request = (probe.name, probe.target, probe.on_failure, dict(probe.arguments))
            message = await process.request(pickle.dumps(request), limit)
            if not message:
                how = "" if message is None else await process.how_it_ended()
                how = how or f"no answer within {limit:g} s, after: {process.last_line() or 'no output'}"
                seen = f"the check hangs or crashes: {how}"
                return [*answers, ProbeAnswer(probe, [Check(probe.name, probe.on_failure, seen, probe.fix)])]
            answers.append(ProbeAnswer(probe, [Check(**fields) for fields in message["findings"]]))
            if answers[-1].stops:
                break
        return answers
    finally:
        await process.kill()


def serve_probes(_: None) -> Service:
    """In the process: requests are (name, target, status of a failure, arguments)."""
    from verl.user_process import Service

    return Service(_answer)


async def _answer(name: str, target: str, on_failure: Status, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        module, _, function = target.partition(":")
        findings = list(getattr(importlib.import_module(module), function)(**arguments))
    except VerlError as error:
        findings = [Check(name, on_failure, one_line(str(error), 1200))]
    except BaseException as error:  # a broken package raises anything, SystemExit included
        findings = [Check(name, on_failure, f"could not be checked: {one_line(error)}")]
    text = json.dumps([asdict(finding) for finding in findings], default=str)
    return {"findings": json.loads(text)}
