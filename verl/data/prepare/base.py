"""Recipes: pure functions from a source row to a training row (None: dropped and counted); and writing the rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.data.columns import likely_column
from verl.data.files import Rows, is_data_file, read_rows
from verl.data.write import write_rows
from verl.errors import ConfigError, DataError

Row = dict[str, Any]
_SPLITS = {"train": "train", "test": "test", "val": "val", "valid": "val", "validation": "val", "dev": "val"}
_SPLIT_NAME = re.compile(rf"^({'|'.join(_SPLITS)})(?![a-z])", re.IGNORECASE)


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


def split_of_name(name: str) -> str:
    """train, test or val by how a file's name starts; train for any other name."""
    found = _SPLIT_NAME.match(name)
    return _SPLITS[found[1].lower()] if found else "train"


def sources_by_split(recipe: Recipe, sources: Sequence[str]) -> dict[str, Rows]:
    """The rows of each split: files by their names, hub datasets by their splits."""
    entries = list(sources)
    if not entries:
        if recipe.hub_id is None:
            raise ConfigError(f"'{recipe.name}' has no default source: give --from FILES or a dataset id.")
        entries = [recipe.hub_id]
    grouped: dict[str, list[Rows]] = {}
    for entry in entries:
        path = Path(entry).expanduser()
        suffix = entry.rpartition(":")[2]
        found: list[tuple[str, str | Path]]
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if is_data_file(file))
            found = [(file.stem, file) for file in files] or [("train", path)]
        elif is_data_file(path):
            found = [(path.stem, path)]
        elif suffix in _SPLITS:
            found = [(suffix, entry)]
        else:
            found = [(split, f"{entry}:{split}") for split in recipe.hub_splits]
        for name, source in found:
            grouped.setdefault(split_of_name(name), []).append(read_rows(source, key="--from"))
    order = sorted(grouped, key=("train", "val", "test").index)
    return {split: Rows.joined(grouped[split]) for split in order}


def convert_rows(recipe: Recipe, rows: Rows, split: str, limit: int | None = None) -> tuple[list[Row], int]:
    """Training rows, and how many source rows were left out."""
    out: list[Row] = []
    left_out = 0
    for index, row in enumerate(rows):
        if limit is not None and len(out) >= limit:
            break
        try:
            converted = recipe.convert(row, index, split)
        except DataError as error:
            raise DataError(f"{rows.origin(index)} is not a row of '{recipe.name}': {error}") from error
        if converted is None:
            left_out += 1
        else:
            out.append(converted)
    if not out:
        raise DataError(f"{', '.join(rows.names)}: no row could be used by '{recipe.name}'.")
    return out, left_out


def prepare(
    recipe: Recipe,
    sources: Sequence[str],
    target: str | Path,
    *,
    form: str = "parquet",
    limit: int | None = None,
) -> list[Written]:
    """Read, convert and write every split; nothing is written unless all of them convert."""
    folder = Path(target).expanduser()
    converted = {
        split: convert_rows(recipe, rows, split, limit)
        for split, rows in sources_by_split(recipe, sources).items()
    }
    written = []
    for split, (rows, left_out) in converted.items():
        path = folder / f"{split}.{form}"
        write_rows(rows, path)
        written.append(Written(path, len(rows), left_out, rows[0]))
    return written
