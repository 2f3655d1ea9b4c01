"""`verl prepare NAME --from FILES --to DIR`, and the same as a script for examples/data_preprocess."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from verl.data.prepare.base import Recipe, Written, prepare, target_files, write_split
from verl.data.tasks import get_task, known_tasks
from verl.data.tasks.base import Split
from verl.errors import ConfigError

RECIPES = ("gsm8k", "math", "countdown", "code", "preference", "sft_chat", "tool_use")


_TASK_OPTIONS = {
    "count": (10_000, "training problems"),
    "test_count": (200, "test problems"),
    "difficulty": (1, "1 to 5"),
    "seed": (0, "of the draw"),
}


def get_recipe(name: str) -> Recipe:
    return importlib.import_module(f"verl.data.prepare.{name}").RECIPE


def known() -> list[str]:
    return sorted({*RECIPES, *known_tasks()})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    listed = "\n".join(f"  {name:12} {get_recipe(name).about}" for name in RECIPES)
    generated = ", ".join(name for name in known_tasks() if name not in RECIPES)
    parser.epilog = (
        f"datasets:\n{listed}\ngenerated, without files: {generated}, gym/<dataset of reasoning-gym>"
    )
    parser.add_argument("name", help=f"one of {', '.join(known())}")
    parser.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        default=[],
        metavar="FILE",
        help="files, folders (names with train, test, val become splits) or dataset ids; default: the dataset's own id",
    )
    parser.add_argument(
        "--to", dest="target", required=True, metavar="DIR", help="folder for train.parquet, ..."
    )
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet", help="default: parquet")
    parser.add_argument("--limit", type=int, default=None, help="maximum number of rows per split")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist in the folder")
    generated = parser.add_argument_group("generated problems")
    for name, (default, about) in _TASK_OPTIONS.items():
        generated.add_argument(f"--{name}", type=int, default=None, help=f"{about} (default {default})")


def _generate(args: argparse.Namespace) -> list[Written]:
    """A procedural task's rows; training and test problems never overlap."""
    task = get_task(args.name)
    count, test_count, difficulty, seed = (
        default if getattr(args, name) is None else getattr(args, name)
        for name, (default, _) in _TASK_OPTIONS.items()
    )
    if min(count, test_count) < 1:
        raise ConfigError(f"--count={count} --test_count={test_count}: each split needs at least one row.")
    wanted: list[tuple[Split, int]] = [("train", count), ("test", test_count)]
    paths = target_files(args.target, ("train", "test"), args.format, overwrite=args.overwrite)
    return [
        write_split(
            paths[split],
            task.rows(min(number, args.limit or number), seed=seed, difficulty=difficulty, split=split),
        )
        for split, number in wanted
    ]


def run(args: argparse.Namespace) -> int:
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit={args.limit}: at least one row per split is needed.")
    if args.name in RECIPES and (args.sources or args.name not in known_tasks()):
        unused = [f"--{name}" for name in _TASK_OPTIONS if getattr(args, name) is not None]
        if unused:
            raise ConfigError(f"{', '.join(unused)}: only for generated problems; '{args.name}' reads files.")
        written = prepare(
            get_recipe(args.name),
            args.sources,
            args.target,
            form=args.format,
            limit=args.limit,
            overwrite=args.overwrite,
        )
    elif args.name in known_tasks() or args.name.startswith(("gym/", "tasks/")):
        if args.sources:
            raise ConfigError(f"'{args.name}' reads no files; datasets with files: {', '.join(RECIPES)}.")
        written = _generate(args)
    else:
        raise ConfigError(f"There is no dataset '{args.name}'; known: {', '.join(known())}.")
    sys.stdout.write(summary(written))
    return 0


def summary(written: Sequence[Written]) -> str:
    """What was written, and the first row."""
    lines = []
    for part in written:
        note = f" ({part.left_out} source rows left out)" if part.left_out else ""
        lines.append(f"{part.path}: {part.rows} rows{note}")
    example = written[0].example
    lines.append("first row:")
    lines += [f"  {name}: {str(value)[:300]}" for name, value in example.items()]
    return "\n".join(lines) + "\n"


def script(name: str, description: str | None, argv: Sequence[str] | None = None) -> int:
    """The program of examples/data_preprocess/NAME.py."""
    from verl.runtime import run_command

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--local_dir", dest="target", required=True, help="folder for train.parquet, test.parquet"
    )
    parser.add_argument(
        "--source", dest="sources", nargs="+", default=[], help="files, folders or a dataset id"
    )
    _add_common(parser)
    args = parser.parse_args(argv)
    args.name = name
    return run_command(lambda: run(args))
