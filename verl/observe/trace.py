"""`verl trace RUN`: the phases of all processes of a run, its main metrics and its profiles in one file for Perfetto.

The file is in Chrome's trace event format. Slices on one track nest; every process of the run is one process of the
trace. Times are those of each process's own host: no clock is corrected.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import math
import os
import re
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from verl.errors import ConfigError, DataError
from verl.json_input import open_regular
from verl.observe.jsonl import complete_lines, number_or_nan, parse_row, read_metrics
from verl.observe.run_folder import profile_files
from verl.observe.run_reader import open_run

logger = logging.getLogger(__name__)

CONTROLLER = "controller"
COUNTERS = {
    "reward": "reward/mean",
    "loss": "train/loss",
    "response length": "response_length/mean",
    "tokens/s per device": "perf/throughput",
}
"""Names of counter tracks, and the metrics they show; those a run has."""
MAX_PROFILE_BYTES = 1 << 30
TIMELINE_STEPS = 200
TIMELINE_SPANS = 30_000
TIMELINE_BYTES = 8 << 20
PROFILE_THREADS = 1000
"""Thread numbers of profiles begin here; those of phases are below."""

Event = dict[str, Any]

# A file that was cut short, and one that holds something else.
_DAMAGED = (
    OSError, EOFError, zlib.error, ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError,
)  # fmt: skip


@dataclass(frozen=True)
class Span:
    """A phase of one process, in microseconds since the epoch."""

    name: str
    start: int
    end: int
    step: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    out_help = "default: RUN/trace.json.gz; .gz: compressed"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out_help)
    parser.add_argument("--steps", metavar="A-B", help="these steps only, e.g. 10-12 or 10; default: all")


def run(args: argparse.Namespace) -> int:
    out = args.out or args.run.expanduser() / "trace.json.gz"
    write_trace(args.run, out, parse_steps(args.steps))
    sys.stdout.write(f"{out}\nopen it at https://ui.perfetto.dev\n")
    return 0


def parse_steps(text: str | None) -> range | None:
    """`3` or `3-5`, both ends included."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15})(?:-(\d{1,15}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise ConfigError(f"--steps is '{text}'; it must be a step or a range of steps, e.g. 10 or 10-12")
    return range(first, last + 1)


def write_trace(path: Path, out: Path, steps: range | None = None) -> None:
    """Write the trace of a run to `out`, compressed where its name ends with .gz."""
    folder = open_run(path).path
    phases = read_phases(folder)
    if not phases:
        raise DataError(
            f"{folder}/phases has no phases, so there is nothing to trace: no phase has ended yet, or the run was made "
            "by an earlier version. Traces in profile/ can be opened in Perfetto by themselves"
        )
    if steps is not None:
        phases = _within(phases, steps)
    out = out.expanduser()
    partial = out.with_name(f".{out.name}")
    try:
        open_text = gzip.open if out.suffix == ".gz" else open
        with open_text(partial, "wt", encoding="utf-8") as file:
            _write_events(file, Trace(folder, phases, steps))
        os.replace(partial, out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(
            f"cannot write {out}: {error.strerror or error}. Give another file with --out"
        ) from None


def _write_events(file: IO[str], trace: Trace) -> None:
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(trace.origin_us / 1e6))
    header = {"run": str(trace.folder), "origin": began, "clocks": "of each process's host, not corrected"}
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(header)}, "traceEvents": [\n')
    for number, event in enumerate(trace.events()):
        file.write((",\n" if number else "") + json.dumps(event))
    file.write("\n]}\n")


# -- phases -------------------------------------------------------------------------------------------------------


def read_phases(folder: Path, newest_bytes: int | None = None) -> dict[str, list[Span]]:
    """`phases/*.jsonl` of a run by process, the controller first; each in the order of time. Damaged lines are left
    out, as is the half-written last line of a run that runs. `newest_bytes`: of each file only its end."""

    def order(path: Path) -> tuple[bool, list[tuple[int, str]]]:
        """The controller first, and rank_2 before rank_10."""
        parts = re.split(r"(\d+)", path.stem)
        return path.stem != CONTROLLER, [(int(p), "") if p.isdecimal() else (-1, p) for p in parts]

    found: dict[str, list[Span]] = {}
    for path in sorted(folder.glob("phases/*.jsonl"), key=order):
        try:
            with open_regular(path) as file:
                if newest_bytes is not None and file.seek(0, os.SEEK_END) > newest_bytes:
                    file.seek(-newest_bytes, os.SEEK_END)  # most likely into a line, which is then no span
                else:
                    file.seek(0)
                spans = [span for line in complete_lines(file) if (span := _span(parse_row(line)))]
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read (%s) and is left out", path, error)
            continue
        if spans:
            # Of two that start together the longer one is around the other.
            found[path.stem] = sorted(spans, key=lambda span: (span.start, -span.end))
    return found


def _span(row: Mapping[str, Any] | None) -> Span | None:
    if row is None or not isinstance(row.get("name"), str):
        return None
    start, end, step = (number_or_nan(row.get(name)) for name in ("start", "end", "step"))
    if math.isnan(step) or not 0 <= start <= end < 1e12:
        return None
    return Span(row["name"], round(start * 1e6), round(end * 1e6), int(step))


def _within(phases: dict[str, list[Span]], steps: range) -> dict[str, list[Span]]:
    """The phases of all processes that overlap these steps of the controller, which counts them."""
    counted = phases.get(CONTROLLER) or [span for spans in phases.values() for span in spans]
    chosen = [span for span in counted if span.step in steps]
    if not chosen:
        known = [span.step for span in counted]
        words = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        raise DataError(
            f"--steps: the run has no phases of {words}; it has those of {min(known)} to {max(known)}"
        )
    start, end = min(span.start for span in chosen), max(span.end for span in chosen)
    if CONTROLLER in phases:
        kept = {name: [s for s in spans if s.start < end and s.end > start] for name, spans in phases.items()}
        kept[CONTROLLER] = chosen
    else:
        kept = {name: [span for span in spans if span.step in steps] for name, spans in phases.items()}
    return {name: spans for name, spans in kept.items() if spans}


def nested_tracks(spans: list[Span]) -> list[list[Span]]:
    """Spans in the order of time, on as few tracks as nesting allows: phases of several threads may overlap."""
    tracks: list[tuple[list[Span], list[int]]] = []  # the spans of a track, and the ends of those still open
    for span in spans:
        for placed, ends in tracks:
            while ends and ends[-1] <= span.start:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                placed.append(span)
                ends.append(span.end)
                break
        else:
            tracks.append(([span], [span.end]))
    return [placed for placed, _ in tracks]


# -- the viewer's timeline ----------------------------------------------------------------------------------------


def timeline(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest steps' phases: of `phases/`, else the times in rows of metrics, laid end to end."""
    phases = read_phases(folder, TIMELINE_BYTES)
    spans = [(process, span) for process in sorted(phases) for span in phases[process]]
    spans = spans or [(CONTROLLER, span) for span in _laid_out(rows[-TIMELINE_STEPS:])]
    newest = max((span.step for _, span in spans), default=0)
    steps = TIMELINE_STEPS
    while (
        len(kept := [each for each in spans if each[1].step > newest - steps]) > TIMELINE_SPANS and steps > 1
    ):
        steps //= 2
    kept = sorted(kept[-TIMELINE_SPANS:], key=lambda each: (each[1].start, -each[1].end))
    origin = kept[0][1].start if kept else 0

    spans_json = [
        [process, s.name, *(round((time_us - origin) / 1e6, 4) for time_us in (s.start, s.end)), s.step]
        for process, s in kept
    ]
    return {"origin": origin / 1e6, "spans": spans_json}


def _laid_out(rows: list[dict[str, Any]]) -> Iterator[Span]:
    """Runs that recorded no phases: one process, one phase after the other, in the order they were measured."""
    at = 0
    for row in rows:
        timed = {name[9:]: seconds for name, seconds in row.items() if name.startswith("timing_s/")}
        times = {name: round(seconds * 1e6) for name, seconds in timed.items() if 0 <= seconds < 1e12}
        whole = times.pop("step", None)
        apart = {name: times.pop(name) for name in ("testing", "save_checkpoint") if name in times}
        length = sum(times.values()) if whole is None else whole
        if length:
            yield Span("step", at, at + length, row["step"])
        begin = at
        for name, duration in times.items():
            yield Span(name, begin, begin + duration, row["step"])
            begin += duration
        at = max(at + length, begin)
        for name, duration in apart.items():
            yield Span(name, at, at + duration, row["step"])
            at += duration


# -- the trace ----------------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """What is joined, with times relative to shortly before the first phase."""

    folder: Path
    phases: dict[str, list[Span]]
    steps: range | None = None
    pids: dict[str, int] = field(default_factory=dict)
    flows: dict[tuple[Any, ...], int] = field(default_factory=dict)

    @property
    def origin_us(self) -> int:
        """A second early: profiles begin a little before the phase they are around, and times must not be negative."""
        return min(spans[0].start for spans in self.phases.values()) - 1_000_000

    def events(self) -> Iterator[Event]:
        origin = self.origin_us
        for process, spans in self.phases.items():
            yield from self._process(process)
            for number, track in enumerate(nested_tracks(spans), start=1):
                pid = self.pids[process]
                yield from _thread(pid, number, "phases" if number == 1 else f"phases {number}")
                for span in track:
                    place = {
                        "pid": pid,
                        "tid": number,
                        "ts": span.start - origin,
                        "dur": span.end - span.start,
                    }
                    yield {"ph": "X", "cat": "phase", "name": span.name, **place, "args": {"step": span.step}}
        yield from self._counters(origin)
        for step, rank, file in profile_files(self.folder):
            if self.steps is None or step in self.steps:
                yield from self._profile(file, step, rank, origin)

    def _process(self, process: str) -> Iterator[Event]:
        """Its name and place, the first time it is met."""
        if process not in self.pids:
            pid = self.pids[process] = len(self.pids) + 1
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}

    def _counters(self, origin: int) -> Iterator[Event]:
        """A metric of a step is shown from the step's start, over the time it was measured in."""
        process = CONTROLLER if CONTROLLER in self.phases else next(iter(self.phases))
        starts = {span.step: span.start for span in self.phases[process] if span.name == "step"}
        for row in read_metrics(self.folder / "metrics.jsonl"):
            for name, metric in COUNTERS.items() if row["step"] in starts else ():
                value = number_or_nan(row.get(metric))
                if not math.isnan(value):
                    place = {"pid": self.pids[process], "ts": starts[row["step"]] - origin}
                    yield {"ph": "C", "name": name, **place, "args": {"value": value}}

    def _profile(self, file: Path, step: int, rank: int, origin: int) -> Iterator[Event]:
        """The events of a profile as threads of its process; numbers of threads and flows are its own."""
        try:
            with open_regular(file) as raw, gzip.open(raw, "rb") as unpacked:
                text = unpacked.read(MAX_PROFILE_BYTES + 1)
            if len(text) > MAX_PROFILE_BYTES:
                raise ValueError(f"it unpacks to more than {MAX_PROFILE_BYTES:,} bytes")
            content = json.loads(text)
            base_ns = int(content["baseTimeNanoseconds"]) - origin * 1000
            float(base_ns)  # what no float can hold, or has no hash below, is no profile
            # Those of the profiler itself have names in place of numbers.
            events = [event for event in content["traceEvents"] if isinstance(event["pid"], int)]
            events = [event for event in events if math.isfinite(event["ts"])]
            hash(tuple(event.get(name) for event in events for name in ("tid", "cat", "name", "id")))
            names = _thread_names(events)
        except _DAMAGED as error:
            logger.warning("%s is damaged (%s: %s) and is left out", file, type(error).__name__, error)
            return
        process = f"rank_{rank}" if f"rank_{rank}" in self.phases or rank else CONTROLLER
        yield from self._process(process)
        pid = self.pids[process]
        threads: dict[tuple[int, Any], int] = {}
        for event in events:
            if event.get("ph") == "M":
                continue
            track = (event["pid"], event.get("tid"))
            if track not in threads:
                threads[track] = PROFILE_THREADS * step + len(threads)
                yield from _thread(pid, threads[track], f"step {step}: {names.get(track, track[1])}")
            moved = {**event, "pid": pid, "tid": threads[track]}
            moved["ts"] = (base_ns + round(event["ts"] * 1000)) / 1000
            if "id" in event:
                key = (file.name, event.get("cat"), event.get("name"), event["id"])
                moved["id"] = self.flows.setdefault(key, len(self.flows) + 1)
            yield moved


def _thread_names(events: list[Event]) -> dict[tuple[int, Any], str]:
    """Of threads and GPU streams, by (process or device, thread or stream)."""
    labels, names = {}, {}
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "process_labels":
            labels[event["pid"]] = str(event["args"].get("labels", ""))
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            names[event["pid"], event["tid"]] = str(event["args"].get("name", "")).strip()
    return {track: f"{labels.get(track[0], '')} {name}".strip() for track, name in names.items()}


def _thread(pid: int, tid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
