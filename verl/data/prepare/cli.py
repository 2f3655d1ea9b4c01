"""`verl prepare NAME --from FILES --to DIR`; examples/data_preprocess has the same as scripts."""

from __future__ import annotations

import argparse
import glob
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl.data.file_search import SPLITS, files_by_split, is_data_file, matches, split_of
from verl.data.files import Rows, read_rows
from verl.data.prepare import tool_use  # noqa: F401  registers its recipe
from verl.data.prepare.recipes import RECIPES, DatasetRecipe, Row
from verl.data.tasks import get_task, known_tasks
from verl.data.write import require_new, write_rows
from verl.errors import ConfigError, DataError

_TASK_OPTIONS = {
    "count": (10_000, "training problems"),
    "test_count": (200, "test problems"),
    "difficulty": (1, "1 to 5"),
    "seed": (0, "of the draw"),
}


# -- files -> rows -> files


@dataclass
class Written:
    """One file that was written."""

    path: Path
    rows: int
    left_out: int
    example: Row


def sources_by_split(recipe: DatasetRecipe, sources: Sequence[str]) -> dict[str, list[str]]:
    """What each split is read from: files by their names and folders, hub datasets by their splits."""
    if not sources and recipe.hub_id is None:
        raise ConfigError(f"'{recipe.name}' has no default source: give --from FILES or a dataset id.")
    grouped: dict[str, list[str]] = {}
    for given in sources or [str(recipe.hub_id)]:
        for entry in matches(given, "--from") if glob.has_magic(given) else [given]:
            for split, files in _by_split(entry).items():
                grouped.setdefault(split, []).extend(map(str, files))
    return {split: grouped[split] for split in ("train", "val", "test") if split in grouped}


def _by_split(entry: str) -> Mapping[str, Sequence[str | Path]]:
    path = Path(entry).expanduser()
    suffix = entry.rpartition(":")[2]
    if path.is_dir():
        return files_by_split(path, "--from")
    if is_data_file(path):
        named = split_of(Path(path.name)) or SPLITS.get(path.absolute().parent.name.lower())
        return {named or "train": [path]}
    if suffix in SPLITS:
        return {SPLITS[suffix]: [entry]}
    return {split: [f"{entry}:{split}"] for split in ("train", "test")}


def convert_rows(
    recipe: DatasetRecipe, rows: Rows, split: str, limit: int | None = None
) -> tuple[list[Row], int]:
    """Training rows, and how many source rows were left out."""
    made: list[Row] = []
    left_out = 0
    for index, row in enumerate(rows):
        if limit is not None and len(made) >= limit:
            break
        # pandas has NaN where a row has no value.
        known = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
        try:
            converted = recipe.convert(known, index, split)
        except DataError as error:
            raise DataError(f"{rows.origin(index)} is not a row of '{recipe.name}': {error}") from error
        if converted is None:
            left_out += 1
        else:
            made.append(converted)
    if not made:
        raise DataError(f"{', '.join(rows.names)}: no row could be used by '{recipe.name}'.")
    return made, left_out


def prepare(
    recipe: DatasetRecipe,
    sources: Sequence[str],
    target: str | Path,
    *,
    form: str = "parquet",
    limit: int | None = None,
    overwrite: bool = False,
) -> list[Written]:
    """Read, convert and write every split; nothing is written unless all of them convert."""
    by_split = sources_by_split(recipe, sources)
    read = [file for files in by_split.values() for file in files]
    paths = _target_files(target, by_split, form, overwrite, read)
    converted = {
        split: convert_rows(recipe, read_rows(files, key="--from"), split, limit)
        for split, files in by_split.items()
    }
    return [_write(paths[split], *rows) for split, rows in converted.items()]


def _target_files(
    target: str | Path, splits: Iterable[str], form: str, overwrite: bool, read: Sequence[str] = ()
) -> dict[str, Path]:
    """The file of each split; refuses those that are `read`, or exist."""
    paths = {split: Path(target).expanduser() / f"{split}.{form}" for split in splits}
    for path in paths.values():
        require_new(
            path, "--to", read=read, read_key="--from", overwrite=overwrite, to_overwrite="--overwrite"
        )
    return paths


def _write(path: Path, rows: Sequence[Row], left_out: int = 0) -> Written:
    write_rows(rows, path)
    return Written(path, len(rows), left_out, rows[0])


def _generate(args: argparse.Namespace) -> list[Written]:
    """A procedural task's rows; training and test problems never overlap."""
    task = get_task(args.name)
    count, test_count, difficulty, seed = (
        default if getattr(args, name) is None else getattr(args, name)
        for name, (default, _) in _TASK_OPTIONS.items()
    )
    if min(count, test_count) < 1:
        raise ConfigError(f"--count={count} --test_count={test_count}: each split needs at least one row.")
    limit = args.limit or max(count, test_count)
    paths = _target_files(args.target, ("train", "test"), args.format, args.overwrite)
    return [
        _write(paths["train"], task.rows(min(count, limit), seed, difficulty, "train")),
        _write(paths["test"], task.rows(min(test_count, limit), seed, difficulty, "test")),
    ]


# -- commands


def known() -> list[str]:
    return sorted({*RECIPES, *known_tasks()})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    listed = "\n".join(f"  {name:12} {recipe.about}" for name, recipe in RECIPES.items())
    generated = ", ".join(name for name in known_tasks() if name not in RECIPES)
    parser.epilog = (
        f"datasets:\n{listed}\ngenerated, without files: {generated}, gym/<dataset of reasoning-gym>"
    )
    parser.add_argument("name", help=f"one of {', '.join(known())}")
    parser.add_argument(
        "--from",
        "--source",
        dest="sources",
        nargs="+",
        default=[],
        metavar="FILE",
        help="files, folders (names with train, test, val become splits) or dataset ids; default: the dataset's own id",
    )
    about = "folder for train.parquet, ..."
    parser.add_argument("--to", "--local_dir", dest="target", required=True, metavar="DIR", help=about)
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet", help="default: parquet")
    parser.add_argument("--limit", type=int, default=None, help="maximum number of rows per split")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist in the folder")
    options = parser.add_argument_group("generated problems")
    for name, (default, about) in _TASK_OPTIONS.items():
        options.add_argument(f"--{name}", type=int, default=None, help=f"{about} (default {default})")


def run(args: argparse.Namespace) -> int:
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit={args.limit}: at least one row per split is needed.")
    if args.name in RECIPES and (args.sources or args.name not in known_tasks()):
        unused = [f"--{name}" for name in _TASK_OPTIONS if getattr(args, name) is not None]
        if unused:
            raise ConfigError(f"{', '.join(unused)}: only for generated problems; '{args.name}' reads files.")
        written = prepare(
            RECIPES[args.name],
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
    for part in written:
        note = f" ({part.left_out} source rows left out)" if part.left_out else ""
        sys.stdout.write(f"{part.path}: {part.rows} rows{note}\n")
    sys.stdout.write("first row:\n")
    for name, value in written[0].example.items():
        sys.stdout.write(f"  {name}: {str(value)[:300]}\n")
    return 0
