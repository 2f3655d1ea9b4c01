"""`verl view [RUN [RUN2]]`: look at a run, a project or two runs in the terminal.

Reads only the files of the run folder, so it works during a run, after it, and on a copy of it elsewhere.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from verl.errors import ConfigError, DataError
from verl.observe.view_files import Run, find_runs, is_run, open_run
from verl.observe.view_samples import Question, choose, follow_prompt, glimpse, show
from verl.observe.view_text import paper, styled, write

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

HOME = Path("checkpoints")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help=f"a run folder; two to compare them; a folder of runs to list them; default: the newest below {HOME}",
    )
    parser.add_argument("--step", type=int, help="samples of this step")
    parser.add_argument(
        "--best", type=int, default=0, metavar="K", help="the K samples with the highest score"
    )
    parser.add_argument(
        "--worst", type=int, default=0, metavar="K", help="the K samples with the lowest score"
    )
    parser.add_argument("--grep", metavar="TEXT", help="samples that contain TEXT, newest first")
    parser.add_argument(
        "--id", dest="uid", metavar="UID", help="one prompt through all steps (a uid or its row number)"
    )
    parser.add_argument("--val", action="store_true", help="samples of validation instead of training")
    parser.add_argument("--limit", type=int, metavar="N", help="show at most N samples")
    parser.add_argument("--full", action="store_true", help="texts of samples in full")
    parser.add_argument(
        "--metric", action="append", metavar="NAME", help="plot these metrics (with * and ?) instead"
    )
    parser.add_argument(
        "--follow", "-f", action="store_true", help="go on showing the run while it runs; Ctrl-C ends"
    )
    parser.add_argument("--html", action="store_true", help="write report.html anew and say where it is")


def run(args: argparse.Namespace) -> int:
    _check(args)
    console = paper()
    try:
        return _run(args, console)
    except BrokenPipeError:
        # The reader of a pipe (`head`) has seen enough; nothing must be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _check(args: argparse.Namespace) -> None:
    if len(args.runs) > 2:
        raise ConfigError(f"verl view takes at most two runs; {len(args.runs)} were given")
    if args.follow and len(args.runs) > 1:
        raise ConfigError("--follow follows one run; leave out the second")
    for name in ("best", "worst"):
        if getattr(args, name) < 0:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be 1 or more")
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit is {args.limit}; it must be 1 or more")


def _run(args: argparse.Namespace, console: Console) -> int:
    paths: list[Path] = args.runs or [_newest()]
    if len(paths) == 1 and paths[0].is_dir() and not is_run(paths[0]):
        found = find_runs(paths[0])
        if not found:
            raise DataError(f"there is no run in or below {paths[0]}")
        from verl.observe.view_sections import listing

        write(console, listing(found))
        return 0
    runs = [open_run(path) for path in paths]
    if args.html:
        return _html(runs, console)
    question = Question(args.step, args.best, args.worst, args.grep, args.uid, args.val, args.limit)
    if question.asked:
        return _samples(runs, question, args.full, console)
    if len(runs) == 2:
        from verl.observe.view_compare import compare

        for part in compare(runs[0], runs[1], console, args.metric):
            write(console, part)
        return 0
    if args.follow:
        from verl.observe.view_follow import follow

        follow(runs[0], console, lambda seen: whole(seen, console, args.metric, samples=False))
        return 0
    write(console, whole(runs[0], console, args.metric))
    return 0


def _newest() -> Path:
    found = find_runs(HOME)
    if not found:
        raise DataError(f"there is no run below {HOME.absolute()}; give a run folder: verl view RUN")
    return found[0]


def whole(
    seen: Run, console: Console, metrics: list[str] | None = None, *, samples: bool = True
) -> RenderableType:
    """Everything about one run, on about a screen."""
    from rich.console import Group

    from verl.observe.view_sections import curves, header, health, times

    def title(text: str) -> RenderableType:
        return styled(f"\n{text}", "bold")

    parts: list[RenderableType] = [header(seen, console), title("curves"), curves(seen, console, metrics)]
    parts += [styled("health", "bold"), health(seen), title("time of a step"), times(seen, console)]
    shown = glimpse(seen) if samples else []
    if shown:
        parts += [title("samples (--best, --worst, --step, --grep, --id and --val show others)")]
        parts += show(shown, 400)
    return Group(*parts)


def _samples(runs: list[Run], question: Question, full: bool, console: Console) -> int:
    count = 0
    for seen in runs:
        found = choose(seen, question)
        count += len(found)
        if len(runs) > 1:
            write(console, styled(f"{seen.name}", "bold underline"))
        blocks = follow_prompt if question.uid and not (question.best or question.worst) else show
        for block in blocks(found, sys.maxsize if full else 1200):
            write(console, block)
        if not found:
            write(console, styled(f"no sample of {seen.name} fits", "yellow"))
    return 0 if count else 1


def _html(runs: list[Run], console: Console) -> int:
    from verl.observe.report import write_report

    for seen in runs:
        try:
            target = write_report(seen.path)
        except OSError as error:
            raise DataError(
                f"report.html cannot be written to {seen.path}: {error.strerror or error}"
            ) from None
        write(console, styled(str(target)))
    return 0
