"""`verl doctor [RUN | CONFIG.yaml] [key=value ...]`: what works here and what does not, in one screen.

Exit code 0: nothing stands in the way; 1: something does; 2: the question could not be understood.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from verl.doctor.finding import Finding
from verl.doctor.plan import probes_of_a_config, probes_of_a_run, probes_of_the_machine
from verl.doctor.report import as_json, as_text, fatal, write
from verl.doctor.runner import Answer, run_groups
from verl.errors import ConfigError

DEFAULT_FOLDER = "checkpoints"


def main(argv: list[str] | None = None) -> int:
    from verl.runtime import run_command

    arguments = sys.argv[1:] if argv is None else argv
    return run_command(lambda: run(parser().parse_intermixed_args(arguments)))


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(
        prog="verl doctor",
        description="Checks this machine, and a config or a run folder where one is given.",
        epilog="Marks: ok; - to know; ! works less well; X must be mended. Exit code 1 when anything is marked X.",
    )
    words.add_argument(
        "what",
        nargs="*",
        metavar="RUN|CONFIG.yaml|key=value",
        help="a run folder, a YAML file, and keys as `verl train` and `verl sft` take them",
    )
    words.add_argument("--json", action="store_true", help="for programs")
    words.add_argument(
        "--quick", action="store_true", help="do not import optional packages nor start processes"
    )
    words.add_argument(
        "--timeout", type=float, metavar="S", help="seconds each check may take; default: its own"
    )
    return words


def run(args: argparse.Namespace) -> int:
    """Check, report, and say by the exit code whether a run could start."""
    began = time.monotonic()
    if args.timeout is not None and args.timeout <= 0:
        raise ConfigError(f"--timeout is {args.timeout:g}; it must be above 0")
    folder, arguments = understand(args.what)
    groups = probes_of_the_machine(str(folder or _folder_of(arguments) or DEFAULT_FOLDER), quick=args.quick)
    if folder is not None:
        groups = [*probes_of_a_run(str(folder)), *groups]
    if arguments:
        groups = [*probes_of_a_config(arguments), *groups]
    with _Progress(sys.stderr.isatty() and not args.json) as progress:
        at_once = max(2, min(4, os.cpu_count() or 1))
        answers = run_groups(groups, at_once=at_once, limit_s=args.timeout, on_start=progress.show)
    answers = as_the_config_needs(answers)
    if args.json:
        write(as_json(answers) + "\n")
    else:
        width = min(140, shutil.get_terminal_size((110, 24)).columns) if sys.stdout.isatty() else 110
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        write(as_text(answers, time.monotonic() - began, width=width, colour=colour))
    return 1 if fatal(answers) else 0


def understand(words: list[str]) -> tuple[Path | None, list[str]]:
    """(run folder, arguments of a training program) from what was typed."""
    places = [word for word in words if "=" not in word and not word.startswith(("+", "~"))]
    keys = [word for word in words if word not in places]
    if len(places) > 1:
        raise ConfigError(f"give one run folder or YAML file, not {len(places)}: {', '.join(places)}")
    if not places:
        return None, keys
    place = Path(places[0]).expanduser()
    if place.is_dir():
        config = place / "config.yaml"
        given = ["--config-path", str(place), "--config-name", "config.yaml"] if config.is_file() else []
        return place, [*given, *keys]
    if place.is_file():
        return None, ["--config-path", str(place.parent), "--config-name", place.name, *keys]
    raise ConfigError(
        f"'{places[0]}' is neither a run folder nor a YAML file; keys are given as key=value, "
        "for example: verl doctor checkpoints/verl/first, verl doctor my.yaml trainer.nnodes=2"
    )


def _folder_of(arguments: list[str]) -> str:
    given = [word.partition("=")[2] for word in arguments if word.startswith("trainer.default_local_dir=")]
    return given[-1] if given else ""


_STANDS_FOR = {"processes": ("gloo", "hostname", "ray cluster")}


def as_the_config_needs(answers: list[Answer]) -> list[Answer]:
    """What is optional in general and needed by this config is taken seriously."""
    needs: set[str] = set()
    for answer in answers:
        for finding in answer.findings:
            needs |= set(finding.data.get("needs", ()))
            if finding.data.get("processes", 1) > 1:
                needs |= set(_STANDS_FOR["processes"])

    def weighed(finding: Finding) -> Finding:
        missing = finding.subject in needs and (
            finding.status == "warning" or finding.together == "missing extras"
        )
        if not missing:
            return finding
        return replace(finding, status="fatal", together="", means=finding.means or "this config needs it")

    return [Answer(answer.probe, [weighed(f) for f in answer.findings]) for answer in answers]


class _Progress:
    """One line on a terminal that says what is being looked at, gone when it is done."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._width = 0
        self._lock = threading.Lock()

    def __enter__(self) -> _Progress:
        return self

    def show(self, name: str) -> None:
        if self._shown:
            with self._lock:
                self._rewrite(f"looking at {name} ...")

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._rewrite("")
            sys.stderr.write("\r")
            sys.stderr.flush()

    def _rewrite(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)
