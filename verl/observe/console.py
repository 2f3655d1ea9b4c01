"""The rich console every command shares, the display of training steps, progress bars and closing lines.

Piped output has no control codes and one line per step. Text from models, data or exceptions is never read as markup,
and its control characters are written out.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import shlex
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from verl.observe.diagnoses import validation_summary
from verl.observe.jsonl import plain
from verl.observe.live import Snapshot, live
from verl.observe.terminal import SafeStream, escape_control, protect_terminal, raw

if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger(__name__)

# What a line shows, in order: metric name (first that is present), label, format.
_COLUMNS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("reward/mean",), "reward", "{:.3f}"),
    (("train/loss",), "loss", "{:.4f}"),
    (("train/accuracy",), "accuracy", "{:.3f}"),
    (("train/margin",), "margin", "{:+.3f}"),
    (("val/loss",), "val loss", "{:.4f}"),
    (("val/accuracy",), "val accuracy", "{:.3f}"),
    (("response_length/mean",), "length", "{:.0f}"),
    (("actor/pg_loss",), "loss", "{:+.4f}"),
    (("actor/kl_loss", "actor/kl"), "kl", "{:.4f}"),
    (("actor/entropy",), "entropy", "{:.3f}"),
    (("actor/pg_clipfrac",), "clip", "{:.3f}"),
    (("critic/vf_loss",), "value loss", "{:.3f}"),
    (("actor/grad_norm", "train/grad_norm"), "grad", "{:.2f}"),
    (("perf/throughput",), "tok/s", "{:,.0f}"),
    (("timing_s/step", "perf/time_per_step"), "time", "{:.1f}s"),
)
_SPARKS = "▁▂▃▄▅▆▇█"
LINE_S = 30.0
"""Between two lines of piped output."""
RATE_S = 10.0
"""Tokens per second are those of the last so many seconds."""
_ECHO = 4
"""Columns beside the live display, for the `^C` of one who stops the run: it must not begin another line."""
_OUTER = "step"
"""The phase that contains the others."""


class SafeConsole(Console):
    """Reads no markup in text and escapes its control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else escape_control(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)

    @property
    def file(self) -> IO[str]:
        """The stream below `SafeStream`, which would escape rich's own control codes."""
        return raw(Console.file.fget(self))  # type: ignore[attr-defined]

    @file.setter
    def file(self, stream: IO[str]) -> None:
        self._file = stream

    def on_broken_pipe(self) -> None:
        """The caller decides; rich would end the process."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def start_live(display: Live) -> None:
    """Start a live display. It replaces sys.stdout by streams that obey escape sequences, so protect them again."""
    protected = isinstance(sys.stdout, SafeStream)
    display.start()
    if protected:
        protect_terminal()


@cache
def shared_console() -> Console:
    """The console all of the program writes to. Piped output is not wrapped and carries no colour codes."""
    console = SafeConsole()
    return console if console.is_terminal else SafeConsole(width=100_000, soft_wrap=True)


def log_console() -> Console:
    """Where log lines go: above the live display on a terminal, to stderr where output is piped, so that what a
    command prints (a config, a plan, a table) can be used as it is."""
    console = shared_console()
    return console if console.is_terminal else SafeConsole(stderr=True, width=100_000, soft_wrap=True)


def show_lines(rows: list[tuple[str, str]]) -> None:
    """Labels and texts, one line each, so that paths and commands can be copied."""
    for label, text in rows:
        shared_console().print(Text(f"{label:<14} {text}".rstrip()), soft_wrap=True)


def shown_path(path: Path) -> str:
    """Relative to the working directory where it is below it."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def typed(*words: str) -> str:
    """A command of `verl` of this environment: by its name where the shell finds it, else by its path."""
    found, script = shutil.which("verl"), Path(sys.executable).parent / "verl"
    program = [shown_path(script)]
    if not script.is_file():
        program = [sys.executable, "-m", "verl.cli"]
    elif found is not None and script.samefile(found):
        program = ["verl"]
    return shlex.join([*program, *words])


def number_text(value: float, form: str = "{:.3f}") -> str:
    """A number that would be shown as zero and is not has an exponent."""
    shown = form.format(value) if math.isfinite(value) else str(value)
    return shown if form[-1] == "s" or not value or set(shown) & set("123456789n") else f"{value:.1e}"


def step_line(
    step: int, metrics: Mapping[str, Any], total_steps: int | None = None, width: int | None = None
) -> str:
    """`step 12/200  reward 0.431  length 85 ...`; what is wider than `width` stands below the first number."""
    head = f"step {step:>{len(str(total_steps))}}/{total_steps}" if total_steps else f"step {step}"
    parts = [head]
    for names, label, form in _COLUMNS:
        value = next((metrics[name] for name in names if metrics.get(name) is not None), None)
        if value is not None:
            parts.append(f"{label} {number_text(float(value), form)}")
    if (validation := validation_summary(metrics)) is not None:
        parts.append(f"validation {number_text(validation)}")
    lines = parts[:1]
    for part in parts[1:]:
        if width is not None and len(lines[-1]) + 2 + len(part) > width:
            lines.append(" " * len(head))
        lines[-1] += f"  {part}"
    return "\n".join(lines)


def sparkline(values: list[float], width: int = 40, rows: int = 1, marks: str = _SPARKS) -> str:
    """The newest `width` values of a metric as columns in `rows` lines of text, scaled to their range."""
    shown = [v for v in values if math.isfinite(v)][-width:]
    if not shown:
        return ""
    low, high, count = min(shown), max(shown), len(marks)
    scale = (rows * count - 1) / (high - low) if high > low else 0.0
    heights = [round((v - low) * scale) for v in shown]
    lines = (
        "".join(" " if height < floor else marks[min(height - floor, count - 1)] for height in heights)
        for floor in range((rows - 1) * count, -1, -count)
    )
    return "\n".join(lines)


class StepProgress:
    """Called by one thread, every few seconds or more often."""

    def __init__(
        self,
        snapshots: Callable[[], list[Snapshot]] = live.everything,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._snapshots, self._clock = snapshots, clock
        self._drawn: deque[tuple[float, float]] = deque()

    def line(self) -> str:
        """`gen 42 s  63/128 responses  1,234 tok/s  waiting for 3 sequences ...`; empty where nothing runs."""
        snapshots, now = self._snapshots(), self._clock()
        tokens = _sum(snapshots, "generated_tokens_total")
        self._drawn.append((now, tokens))
        while len(self._drawn) > 2 and self._drawn[1][0] <= now - RATE_S:
            self._drawn.popleft()
        start, before = self._drawn[0]
        rate = max(tokens - before, 0.0) / (now - start) if now > start else 0.0
        phases = [(name, since) for name, since in snapshots[0].phases.items() if name != _OUTER]
        if not phases:
            return ""
        name, since = phases[-1]
        parts = [f"{name} {max(now - since, 0):.0f} s"]
        running = _sum(snapshots, "sequences_running")
        wanted, done = _sum(snapshots, "responses_wanted"), _sum(snapshots, "responses_done")
        if name == "gen" or running:
            if wanted:
                parts.append(f"{min(done, wanted):,.0f}/{wanted:,.0f} responses")
            parts.append(f"{rate:,.0f} tok/s")
        waiting = waits(snapshots)
        return "  ".join(parts) + (f"  waiting for {', '.join(waiting)}" if waiting else "")


def waits(snapshots: list[Snapshot]) -> list[str]:
    """What has to end before the phase does."""
    longest = max(snapshot.values.get("longest_response_tokens", 0.0) for snapshot in snapshots)
    known = f", the longest with {longest:,.0f} tokens" if longest else ""
    counted = (
        ("sequences_running", f"response being generated{known}", f"responses being generated{known}"),
        ("sequences_waiting", "sequence not yet started", "sequences not yet started"),
        ("tool_calls_waiting", "tool call", "tool calls"),
        ("rewards_waiting", "reward", "rewards"),
    )
    numbers = [(_sum(snapshots, name), one, many) for name, one, many in counted]
    return [f"{number:,.0f} {one if number == 1 else many}" for number, one, many in numbers if number > 0]


def _sum(snapshots: list[Snapshot], name: str) -> float:
    return sum(snapshot.values.get(name, 0.0) for snapshot in snapshots)


class StepConsole:
    """Shows steps as they finish. `live=True` asks for the live display below them, which needs a terminal and has a
    curve of the reward or the loss, `rows` lines high."""

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        live: bool = False,
        title: str = "training",
        console: Console | None = None,
        rows: int = 1,
    ) -> None:
        self.console = console or shared_console()
        self.total_steps = total_steps
        self.title = title
        self._curve: list[float] = []
        self._curve_name = ""
        self._rows = rows
        self._last: list[str] = []
        """The lines of a step that is not among those above the display."""
        self._step = 0
        self._live: Live | None = None
        self._progress = StepProgress()
        self._shown_at = time.monotonic()
        self._closed = threading.Event()
        if live and self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(get_renderable=self._panel, console=self.console, refresh_per_second=4)
            start_live(self._live)
        else:
            threading.Thread(target=self._print_progress, name="console", daemon=True).start()

    def _print_progress(self) -> None:
        """A line every `LINE_S` seconds while a step is running."""
        while not self._closed.wait(min(LINE_S, 5.0)):
            line = self._progress.line()
            if line and time.monotonic() - self._shown_at >= LINE_S:
                self._shown_at = time.monotonic()
                self.console.print(Text(f"step {self._step + 1}  {line}"))

    def log(self, step: int, metrics: Mapping[str, Any], *, stays: bool = True) -> None:
        """Show a step; `stays=False`: only in the live display, until the next one."""
        self._step = step
        line = step_line(step, metrics, self.total_steps, self.console.width - (0 if stays else 4 + _ECHO))
        for name, label in (("reward/mean", "reward"), ("train/loss", "loss")):
            if metrics.get(name) is not None:
                self._curve.append(float(metrics[name]))
                self._curve_name = label
                break
        last = [] if stays else line.splitlines()
        self._last = last + [""] * (len(self._last) - len(last))
        if stays:
            self._shown_at = time.monotonic()
            self.console.print(Text(line))
        elif self._live is not None:
            self._live.refresh()

    def log_samples(self, step: int, rows: list[Any]) -> None:
        """The first few samples as text."""
        for row in rows:
            texts = {name: repr(plain(value)) for name, value in row.items()}
            short = {name: text if len(text) <= 160 else f"{text[:157]}..." for name, text in texts.items()}
            self.note(f"step {step} sample  {'  '.join(f'{name}={text}' for name, text in short.items())}")

    def note(self, text: str) -> None:
        """A message between steps, above the live display if there is one."""
        self.console.print(Text(text))

    def close(self) -> None:
        self._closed.set()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _panel(self) -> Any:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar

        # Always as high: what is printed from one thread while another draws a display of another height would erase
        # steps above it, or leave parts of it there.
        now = self._progress.line() or ("" if self._step else "starting ...")
        curve = Text("\n" * (self._rows if self._rows > 1 else 0))
        if len(self._curve) > 1:
            label = f"{self._curve_name} {self._curve[0]:.3g} -> {self._curve[-1]:.3g}"
            between, columns = ("  ", 40) if self._rows == 1 else ("\n", 60)
            curve = Text.assemble(label, between, (sparkline(self._curve, columns, self._rows), "cyan"))
        newline, width = Text("\n", no_wrap=True, overflow="ellipsis"), self.console.width - _ECHO
        text = newline.join([*map(Text, self._last), Text(now, "dim"), curve])
        bars = [ProgressBar(total=self.total_steps, completed=self._step)] if self.total_steps else []
        return Panel(Group(text, *bars), title=Text(self.title), title_align="left", width=width)


class Counter:
    """Counts up to `total`; `about` is shown next to it: on a bar, or in a line of the log from time to time."""

    def __init__(self, title: str, total: int, done: int, bar: Progress) -> None:
        self.title, self.total, self.done = title, total, done
        self._bar, self._last_line = bar, time.monotonic()
        self._task = bar.add_task(title, total=total, completed=done, about="")

    def advance(self, count: int = 1, about: str = "") -> None:
        self.done += count
        self._bar.update(self._task, completed=self.done, about=about)
        if self._bar.disable and time.monotonic() - self._last_line > LINE_S:
            self._last_line = time.monotonic()
            logger.info("%s %d/%d%s", self.title, self.done, self.total, f"  {about}" if about else "")


@contextlib.contextmanager
def counting(title: str, total: int, done: int = 0) -> Iterator[Counter]:
    """A counter that is shown while the block runs."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = shared_console()
    name, about = (TextColumn(f"{{task.{each}}}", markup=False) for each in ("description", "fields[about]"))
    columns = (name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), about)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with contextlib.ExitStack() as stack:
        if console.is_terminal:
            start_live(bar.live)
            stack.callback(bar.stop)
        yield Counter(title, total, done, bar)
