"""`verl ckpt ls|verify|prune`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from verl.errors import CheckpointError
from verl.observe.console import shared_console

if TYPE_CHECKING:
    from verl.checkpoint.steps import StepFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", required=True, metavar="ls|verify|prune")
    one = "run folder, or one global_step_N"
    for name, about, folder in (
        ("ls", "list the checkpoints of a run folder", one),
        ("verify", "read every file and compare checksums; exit code 1 when damaged", one),
        ("prune", "delete old checkpoints", "run folder"),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument("folder", type=Path, metavar="DIR", help=folder)
    prune = commands.choices["prune"]
    prune.add_argument("--keep", type=int, default=1, help="how many of the newest to keep (default 1)")
    prune.add_argument("--keep-best", metavar="METRIC", help="keep the best by this metric as well")
    prune.add_argument("--mode", choices=("max", "min"), default="max", help="whether more of it is better")
    prune.add_argument("--damaged", action="store_true", help="also delete damaged and incomplete ones")
    prune.add_argument("--dry-run", action="store_true", help="only print what would be deleted")


def run(args: argparse.Namespace) -> int:
    commands = {"ls": _ls, "verify": _verify, "prune": _prune}
    return commands[args.command](args)


def _entries(folder: Path) -> list[StepFolder]:
    from verl.checkpoint.steps import list_steps, step_of

    folder = folder.expanduser().absolute()
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give a run folder or a global_step_N folder")
    if step_of(folder) is None:
        found = list_steps(folder)
    else:
        found = [entry for entry in list_steps(folder.parent) if entry.path == folder]
    if not found:
        raise CheckpointError(f"there is no checkpoint (global_step_N) in {folder}")
    return found


def _ls(args: argparse.Namespace) -> int:
    from rich.table import Table

    from verl.checkpoint.manifest import verify

    table = Table("step", "state", "size", "saved", "processes", "parts", "metrics")
    for entry in _entries(args.folder):
        manifest = entry.manifest
        if manifest is None:
            table.add_row(str(entry.step), "incomplete", "", "", "", "", "")
            continue
        # Sizes only: checksums would read everything, which `verify` is for.
        wrong = verify(entry.path, manifest, checksums=False)
        parts = "; ".join(f"{name}: {', '.join(contents)}" for name, contents in manifest.parts.items())
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items())
        state = f"damaged: {wrong[0]}" if wrong else "complete"
        size, processes = f"{manifest.size / 1e6:,.1f} MB", str(manifest.world_size)
        table.add_row(str(entry.step), state, size, manifest.created, processes, parts, metrics)
    shared_console().print(table)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from verl.checkpoint.steps import problems

    damaged = 0
    for entry in _entries(args.folder):
        found = problems(entry)
        damaged += bool(found)
        count = len(entry.manifest.files) if entry.manifest is not None else 0
        _print(f"{entry.path.name}: " + ("; ".join(found) if found else f"{count} files, all as written"))
    return 1 if damaged else 0


def _prune(args: argparse.Namespace) -> int:
    from verl.checkpoint.steps import RetentionLimits, beyond_limits, delete, problems

    if args.keep < 1:
        raise CheckpointError(f"--keep {args.keep} would leave no checkpoint; it must be at least 1")
    entries = _entries(args.folder)
    bad = [entry for entry in entries if problems(entry)]
    good = [entry for entry in entries if entry not in bad]
    # Damaged ones do not count: the newest complete one is kept.
    limits = RetentionLimits(
        {p: args.keep for e in good if e.manifest for p in e.manifest.parts}, args.keep_best, args.mode
    )
    chosen = [*beyond_limits(good, limits)[0], *(bad if args.damaged else [])]
    for entry in chosen:
        if args.dry_run:
            _print(f"would delete {entry.path.name}")
        elif delete(entry.path):
            _print(f"deleted {entry.path.name}")
        else:
            _print(f"{entry.path.name} is in use and stays")
    if not chosen:
        _print("nothing to delete")
    return 0


def _print(text: str) -> None:
    from rich.text import Text

    shared_console().print(Text(text))
