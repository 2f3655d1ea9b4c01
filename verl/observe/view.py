"""`verl view [RUN]`: state, metrics, findings and samples of a run in the terminal.

Reads only the files of the run folder. No control character of a sample reaches the terminal, and text is not read
as markup.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import heapq
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError, DataError
from verl.observe.run_facts import facts, first_shown, notes, results
from verl.observe.run_reader import (
    Run,
    SampleFiles,
    State,
    duration,
    find_runs,
    is_run,
    last_written,
    notices,
    open_run,
    state_of,
)
from verl.observe.terminal import escape_control

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

HOME = Path("checkpoints")
PIPE_WIDTH = 100
FOLLOW_S = 1.0
SETTLE_POLLS = 5
"""A run that restarts itself releases its folder for a moment: this many polls without a process mean its end."""
_STATE_STYLES = {"running": "green", "finished": "green", "stopped": "yellow", "waiting": "yellow"}
_SAMPLE_TEXTS = {"prompt": "dim", "response": "", "ground_truth": "green", "error": "red"}
_MARKS = re.compile(r"<\|[^|<>\s]{1,40}\|>|</?(?:s|bos|eos|pad|start_of_turn|end_of_turn)>|\[/?INST\]")
_BLANK = re.compile(r"[ \t]*\n\s*")
_UID = re.compile(r"(?:\d+-)?(\d+)(?:\.\d+)?(?:#\d+)?")
"""`epoch-row`, with `.k` where an epoch draws a row again and `#k` where a response got no score."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    run_help = f"a run folder, or a folder of runs to list them; default: the newest run below {HOME}"
    parser.add_argument("run", nargs="*", type=Path, metavar="RUN", help=run_help)
    parser.add_argument("--metric", action="append", metavar="NAME", help="show these metrics (with * and ?)")
    parser.add_argument("--follow", "-f", action="store_true", help="update while the run runs")
    parser.add_argument("--html", action="store_true", help="write report.html and print its path")
    parser.add_argument(
        "--serve", action="store_true", help="serve a page for the browser; several RUNs compare"
    )
    parser.add_argument(
        "--outside",
        action="store_true",
        help="for --serve and --html: read also what a run names outside of its folder: the run it was forked from, "
        "samples, links",
    )
    parser.add_argument("--port", type=int, help="of --serve; default: 8265, or a free one")
    samples = parser.add_argument_group("samples")
    samples.add_argument("--step", type=int, help="of this step")
    samples.add_argument("--best", type=int, metavar="K", help="the K with the highest score")
    samples.add_argument("--worst", type=int, metavar="K", help="the K with the lowest score")
    samples.add_argument("--grep", metavar="TEXT", help="that contain TEXT, newest first")
    samples.add_argument("--id", dest="uid", metavar="UID", help="of one prompt: a uid or its row number")
    samples.add_argument("--val", action="store_true", help="of validation instead of training")
    samples.add_argument("--limit", type=int, metavar="N", help="at most N")
    samples.add_argument("--full", action="store_true", help="texts in full")


def run(args: argparse.Namespace) -> int:
    for name in ("best", "worst", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; it must be 1 or more")
    if args.port is not None and not args.serve:
        raise ConfigError("--port is the port of --serve, which was not given")
    if args.port is not None and not 0 <= args.port < 1 << 16:
        raise ConfigError(f"--port is {args.port}; it must be between 0 (any free port) and 65535")
    if args.outside and not (args.serve or args.html):
        raise ConfigError("--outside is for --serve and --html; in the terminal everything is read")
    paths: list[Path] = args.run or find_runs(HOME)[:1] or [HOME]
    if len(paths) > 1 and not (args.serve or args.html):
        raise ConfigError("several runs are compared in the browser: add --serve, or --html for one file")
    several = [path for path in paths if path.is_dir() and not is_run(path)]
    runs = [run for path in paths for run in (find_runs(path) if path in several else [path])]
    if not runs:
        raise DataError(f"there is no run in or below {paths[0]}; give a run folder: verl view RUN")
    console = make_console()
    if args.serve:
        return _serve(runs, args.port, args.outside, console)
    if several:
        write(console, listing(runs))
        return 0
    return _show(open_run(runs[0]), runs[1:], args, console)


def _show(seen: Run, others: list[Path], args: argparse.Namespace, console: Console) -> int:
    if args.html:
        from verl.observe.report import write_report

        try:
            write(console, styled(str(write_report(seen.path, others=others, outside=args.outside))))
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"report.html cannot be written to {seen.path}: {reason}") from None
    elif any((args.step is not None, args.best, args.worst, args.grep, args.uid, args.val)):
        chosen = list(choose_samples(seen, args))
        for title, row in chosen:
            write(console, sample_text(title, row, sys.maxsize if args.full else 1200))
        if not chosen:
            write(console, styled(f"no sample of {seen.name} matches", "yellow"))
            return 1
    elif args.follow:
        follow(seen, console, args.metric)
    else:
        write(console, overview(seen, args.metric))
    return 0


def _serve(runs: list[Path], port: int | None, outside: bool, console: Console) -> int:
    from verl.observe.web_data import WebData
    from verl.observe.web_server import WebServer

    with WebServer(WebData(runs, live=True, outside=outside), port) as server:
        write(console, styled(f"{server.url}/   (Ctrl-C ends)"))
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


# -- one run ------------------------------------------------------------------------------------------------------


def overview(seen: Run, patterns: list[str] | None = None, *, samples: bool = True) -> RenderableType:
    """Everything about one run, on about a screen."""
    from rich.console import Group

    styles = {"run": "bold", "state": _STATE_STYLES.get(state_of(seen).name, "red")}
    lines = [(f"{label:<13}{text}", styles.get(label, "")) for label, text in facts(seen)]
    lines += [(f"note         {note}", "yellow") for note in notes(seen)]
    blocks: list[RenderableType] = [styled(*line) for line in (*lines, ("", ""))]
    blocks += [metrics_table(seen, patterns), styled("\nfindings", "bold")]
    found = [
        styled(f"{notice.when}: {notice.finding.line}", "yellow" if notice.recent else "dim")
        for notice in notices(seen)[:8]
    ]
    blocks += found or [styled("nothing to report", "dim")]
    validation = bool(seen.samples("validation").steps())
    validation = validation and (seen.is_sft or not seen.samples("rollouts").steps())
    if samples and seen.samples("validation" if validation else "rollouts").steps():
        scored = None if seen.is_sft and not validation else 1  # rows to learn from have no score
        args = argparse.Namespace(
            step=None, best=scored, worst=scored, grep=None, uid=None, val=validation, limit=1
        )
        others = "--best, --worst, --step, --grep, --id and --val show others"
        blocks.append(styled(f"\nsamples ({others})", "bold"))
        blocks += [sample_text(title, row, 400) for title, row in choose_samples(seen, args)]
    return Group(*blocks)


def metrics_table(seen: Run, patterns: list[str] | None = None) -> RenderableType:
    """First, last and the trend of the metrics that show how a run is doing, or of those that match `patterns`."""
    from verl.observe.console import sparkline

    names = seen.log.names()
    if patterns:
        matches = (name for pattern in patterns for name in names if fnmatch.fnmatchcase(name, pattern))
        shown = [name for name in dict.fromkeys(matches) if seen.log.points(name)]
    else:
        values = {name: [value for _, value in seen.log.points(name)] for name in names}
        shown = first_shown({name: points for name, points in values.items() if points})
        shown += _longest_phases(seen)
    if not shown:
        if patterns and names:
            raise DataError(f"--metric {' '.join(patterns)}: no such metric. There are: {', '.join(names)}")
        return styled("no step has finished yet", "dim")
    table = _table("metric", "first", "last", "step", "trend")
    for name in shown:
        points = seen.log.points(name)
        first = seen.log.first.get(name, points[0][1])
        trend = sparkline([value for _, value in points], 30)
        cells = (f"{first:.4g}", f"{points[-1][1]:.4g}", str(points[-1][0]), trend)
        table.add_row(styled(name), *map(styled, cells))
    return table


def _longest_phases(seen: Run) -> list[str]:
    """The times of the newest step that are a twentieth of it or more, longest first."""
    times = {name: value for name, value in seen.log.last().items() if name.startswith("timing_s/")}
    whole = times.pop("timing_s/step", 0.0)
    long = [name for name, value in times.items() if value >= 0.05 * whole]
    return sorted(long, key=lambda name: -times[name])


def listing(paths: list[Path]) -> RenderableType:
    """The runs of a project, newest first."""
    table = _table("run", "state", "steps", "reward or loss", "validation", "written")
    for path in paths:
        seen = open_run(path)
        state = state_of(seen)
        points = seen.log.points("reward/mean") or seen.log.points("train/loss")
        table.add_row(
            styled(seen.name),
            styled(state.name, _STATE_STYLES.get(state.name, "red")),
            styled(f"{seen.step or '-'}" + (f"/{seen.total_steps}" if seen.total_steps else "")),
            styled(f"{points[0][1]:.3g} -> {points[-1][1]:.3g}" if points else "-"),
            styled(_validated(seen)),
            styled(f"{duration(time.time() - last_written(path))} ago"),
        )
    return table


def _validated(seen: Run) -> str:
    found = results(seen)
    first, last, loss = (found[name] for name in ("validation_first", "validation", "validation_loss"))
    if first is not None and last is not None:
        return f"{first:.3g} -> {last:.3g}"
    return "-" if loss is None else f"loss {loss:.3g}"


# -- samples ------------------------------------------------------------------------------------------------------


def choose_samples(seen: Run, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """(title, row) of the samples asked for; DataError names the steps there are when there is none of --step."""
    files = seen.samples("validation" if args.val else "rollouts")
    steps = files.steps()
    if not steps:
        raise DataError(f"there are no samples in {files.folder}")
    if args.step is not None and args.step not in steps:
        nearest = min(steps, key=lambda step: abs(step - args.step))
        raise DataError(
            f"--step {args.step} has no samples; steps {steps[0]} to {steps[-1]}, nearest {nearest}"
        )
    search = args.grep or args.uid
    chosen = [args.step] if args.step is not None else steps if search else steps[-1:]
    if args.best or args.worst:
        for label, count, pick in (
            ("best", args.best, heapq.nlargest),
            ("worst", args.worst, heapq.nsmallest),
        ):
            rows = ((step, row) for step, row in _rows(files, chosen, args) if _score(row) is not None)
            for step, row in pick(count or 0, rows, key=lambda item: _score(item[1])):
                yield f"{label}: {_title(step, row)}", row
        return
    # A prompt is followed from its first step; a search starts at the newest.
    order = chosen if args.uid else chosen[::-1]
    limit = args.limit or (None if args.uid else 10 if search else 3)
    for step, row in itertools.islice(_rows(files, order, args), limit):
        yield _title(step, row), row


def _rows(
    files: SampleFiles, steps: list[int], args: argparse.Namespace
) -> Iterator[tuple[int, dict[str, Any]]]:
    number = _row_number(args.uid or "")
    needle = (number or args.uid or "").encode()
    text = (args.grep or "").casefold()
    for step in steps:
        for row in files.rows(step, lambda line: needle in line):
            uid = str(row.get("uid"))
            same = not args.uid or uid == args.uid or (number is not None and _row_number(uid) == number)
            if same and text in "\n".join(str(value or "") for _, value in _texts(row)).casefold():
                yield step, row


def _row_number(uid: str) -> str | None:
    """A prompt keeps its row number from epoch to epoch."""
    match = _UID.fullmatch(uid)
    return match[1] if match else None


def _score(row: dict[str, Any]) -> Any:
    value = row.get("score")
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _title(step: int, row: dict[str, Any]) -> str:
    score = "no score" if _score(row) is None else f"score {_score(row):g}"
    known = {*_SAMPLE_TEXTS, "uid", "score", "data_source", "turns"}
    others = [f"{name} {_short(value)}" for name, value in row.items() if name not in known]
    return "  ".join([f"step {step}", f"uid {row.get('uid', '?')}", score, *others])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:60]


def _texts(row: dict[str, Any]) -> list[tuple[str, Any]]:
    """What is shown of a sample, in order: prompt, response or turns, truth, error."""
    turns = row.get("turns")
    responses = [("response", row.get("response"))]
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        responses = []
        for number, turn in enumerate(turns, 1):
            reward = f"\n(reward {turn['reward']:g})" if isinstance(turn.get("reward"), int | float) else ""
            responses.append((f"{number} {turn.get('role', '')}", f"{turn.get('content', '')}{reward}"))
        turn_rewards = [value for turn in turns if isinstance(value := turn.get("reward"), int | float)]
        if _score(row) is not None and turn_rewards:
            # Scores are of single precision; + 0.0 makes 0 of -0.
            responses.append(("at the end", f"reward {round(_score(row) - sum(turn_rewards), 6) + 0.0:.4g}"))
    others = [(name, row.get(name)) for name in ("prompt", "ground_truth", "error")]
    return [others[0], *responses, *others[1:]]


def sample_text(title: str, row: dict[str, Any], characters: int) -> RenderableType:
    """A title, then the texts, indented. Where they are shortened, the marks of chat templates are left out."""
    from rich.console import Group

    blocks = [styled(title, "bold")]
    for name, value in _texts(row):
        if value not in (None, ""):
            label = "truth" if name == "ground_truth" else name
            text = str(value)
            if name == "prompt" and characters < sys.maxsize:
                text = _BLANK.sub("\n", _MARKS.sub("\n", text)).strip()
            text = shortened(text, characters).rstrip().replace("\n", "\n" + " " * 14)
            blocks.append(styled(f"  {label:<12}{text}", _SAMPLE_TEXTS.get(name, "")))
    return Group(*blocks, styled(""))


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters: the start, and the end, where answers are."""
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail]} […{len(text) - limit} characters…] {text[len(text) - tail :]}"


# -- follow -------------------------------------------------------------------------------------------------------


def follow(
    seen: Run,
    console: Console,
    patterns: list[str] | None = None,
    *,
    pause: Callable[[float], None] = time.sleep,
) -> State:
    """Show the run until it ends or Ctrl-C; its state then. On a terminal the overview is redrawn, in a pipe a line
    is written for each step."""
    from rich.live import Live

    from verl.observe.console import start_live, step_line

    def show(rows: list[dict[str, Any]]) -> None:
        if live is not None:
            live.update(overview(seen, patterns, samples=False), refresh=True)
            return
        for row in rows:
            metrics = {name: value for name, value in row.items() if name != "step"}
            write(console, styled(step_line(row["step"], metrics, seen.total_steps)))
            for finding in (found for step, found in seen.log.findings if step == row["step"]):
                write(console, styled(finding.line))

    live = Live(console=console, auto_refresh=False, screen=True) if console.is_terminal else None
    try:
        if live is not None:
            start_live(live)
        show(seen.log.rows[-5:])
        over = 0
        while True:
            # The state first: what a run wrote before it released its folder is then read below.
            state = state_of(seen)
            show(seen.log.poll())
            over = over + 1 if state.over else 0
            if over >= (1 if state.name == "finished" else SETTLE_POLLS):
                break
            pause(FOLLOW_S)
    except KeyboardInterrupt:
        pass
    finally:
        if live is not None:
            live.stop()
    state = state_of(seen)
    write(console, styled(state.text) if live is None else overview(seen, patterns, samples=False))
    return state


# -- output -------------------------------------------------------------------------------------------------------


def make_console() -> Console:
    """As wide as the terminal; plain text and a fixed width where output is piped."""
    from verl.observe.console import SafeConsole

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    console = SafeConsole()
    return console if console.is_terminal else SafeConsole(width=PIPE_WIDTH, color_system=None)


def write(console: Console, what: RenderableType) -> None:
    """On a terminal text is wrapped to its width; in a pipe a line stays a line."""
    console.print(what, soft_wrap=not console.is_terminal)


def styled(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(escape_control(text), style=style)


def _table(*columns: str) -> Table:
    from rich.table import Table

    return Table(*columns, box=None, pad_edge=False, header_style="dim")
