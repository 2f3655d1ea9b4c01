"""Recipes: pure functions from a source row to a training row (None: dropped and counted); and writing the rows."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.data.columns import likely_column
from verl.data.files import SPLITS, Rows, files_by_split, is_data_file, matches, read_rows, split_of
from verl.data.write import require_new, write_rows
from verl.errors import ConfigError, DataError

Row = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How one dataset becomes rows."""

    name: str
    about: str
    convert: Callable[[Mapping[str, Any], int, str], Row | None]
    """Source row, its number, the split's name -> training row, or None to leave it out."""
    hub_id: str | None = None
    """Where the rows come from when no files are given."""
    hub_splits: tuple[str, ...] = ("train", "test")


@dataclass
class Written:
    """One file that was written."""

    path: Path
    rows: int
    left_out: int = 0
    example: Row = field(default_factory=dict)


def first_of(row: Mapping[str, Any], names: Sequence[str], what: str) -> Any:
    """The first of these columns that holds something; DataError with the columns there are."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    guess = likely_column(names[0], "prompt", list(row), row)
    hint = f" (is it '{guess}'?)" if guess else ""
    raise DataError(f"no {what}: looked for {', '.join(names)}; the columns are {', '.join(row)}{hint}")


def rl_row(
    data_source: str,
    question: str,
    truth: Any,
    *,
    ability: str,
    index: int,
    split: str,
    extra: Mapping[str, Any] | None = None,
) -> Row:
    """A row for reinforcement learning in the usual columns."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, **(extra or {})},
    }


def sources_by_split(recipe: Recipe, sources: Sequence[str]) -> dict[str, list[str]]:
    """What each split is read from: files by their names and folders, hub datasets by their splits."""
    if not sources and recipe.hub_id is None:
        raise ConfigError(f"'{recipe.name}' has no default source: give --from FILES or a dataset id.")
    grouped: dict[str, list[str]] = {}
    for given in sources or [str(recipe.hub_id)]:
        for entry in matches(given, "--from") if glob.has_magic(given) else [given]:
            for split, files in _by_split(recipe, entry).items():
                grouped.setdefault(split, []).extend(map(str, files))
    return {split: grouped[split] for split in ("train", "val", "test") if split in grouped}


def _by_split(recipe: Recipe, entry: str) -> Mapping[str, Sequence[str | Path]]:
    path = Path(entry).expanduser()
    suffix = entry.rpartition(":")[2]
    if path.is_dir():
        return files_by_split(path, "--from")
    if is_data_file(path):
        named = split_of(Path(path.name)) or SPLITS.get(path.absolute().parent.name.lower())
        return {named or "train": [path]}
    if suffix in SPLITS:
        return {SPLITS[suffix]: [entry]}
    return {SPLITS[split]: [f"{entry}:{split}"] for split in recipe.hub_splits}


def convert_rows(recipe: Recipe, rows: Rows, split: str, limit: int | None = None) -> tuple[list[Row], int]:
    """Training rows, and how many source rows were left out."""
    out: list[Row] = []
    left_out = 0
    for index, row in enumerate(rows):
        if limit is not None and len(out) >= limit:
            break
        try:
            converted = recipe.convert(_without_nan(row), index, split)
        except DataError as error:
            raise DataError(f"{rows.origin(index)} is not a row of '{recipe.name}': {error}") from error
        if converted is None:
            left_out += 1
        else:
            out.append(converted)
    if not out:
        raise DataError(f"{', '.join(rows.names)}: no row could be used by '{recipe.name}'.")
    return out, left_out


def _without_nan(row: Mapping[str, Any]) -> Row:
    """pandas has NaN where a row has no value."""
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()
    }


def prepare(
    recipe: Recipe,
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
    paths = target_files(target, by_split, form, read=read, overwrite=overwrite)
    converted = {
        split: convert_rows(recipe, read_rows(files, key="--from"), split, limit)
        for split, files in by_split.items()
    }
    return [write_split(paths[split], *found) for split, found in converted.items()]


def target_files(
    target: str | Path, splits: Iterable[str], form: str, *, read: Sequence[str] = (), overwrite: bool = False
) -> dict[str, Path]:
    """The file of each split; refuses those that are `read`, or exist."""
    paths = {split: Path(target).expanduser() / f"{split}.{form}" for split in splits}
    for path in paths.values():
        require_new(
            path, "--to", read=read, read_key="--from", overwrite=overwrite, to_overwrite="--overwrite"
        )
    return paths


def write_split(path: Path, rows: Sequence[Row], left_out: int = 0) -> Written:
    """Write the rows of one split."""
    write_rows(rows, path)
    return Written(path, len(rows), left_out, rows[0])
