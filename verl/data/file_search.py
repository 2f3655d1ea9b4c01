"""Finding data files: paths, patterns, folders with splits, ids of hub datasets; and what a misnamed file holds."""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from verl.errors import DataError

logger = logging.getLogger(__name__)

TEXT_ENDINGS = (".jsonl", ".json", ".csv", ".tsv")
ENDINGS = (".parquet", *TEXT_ENDINGS, ".arrow")
KNOWN = ", ".join(ENDINGS) + ", text also with .gz"


def ending(path: Path) -> str:
    """What decides the reader, in lower case: the last ending, or for compressed text the one before .gz."""
    last, inner = path.suffix.lower(), Path(path.stem).suffix.lower()
    return inner if last == ".gz" and inner in TEXT_ENDINGS else last


def is_data_file(path: Path) -> bool:
    """Whether there is a reader for it, by its name."""
    return ending(path) in ENDINGS


_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+(:[\w.-]+){0,2}$")


def expand(entry: str | Path, split: str, key: str) -> list[Path | str]:
    """The files that an entry of `key` stands for, or the id of a hub dataset."""
    text = str(entry)
    path = Path(text).expanduser()
    if path.is_dir():
        return list(_files_of_split(path, split, key))
    if path.exists():
        if not path.is_file():
            raise DataError(f"{key}: {path} is neither a regular file nor a folder.")
        if not is_data_file(path):
            raise DataError(
                f"{key}: {path} has the unknown ending '{path.suffix}'; known: {KNOWN}.{looks_like(path)}"
            )
        return [path]
    if glob.has_magic(text):
        return [file for match in matches(path, key) for file in expand(match, split, key)]
    if not is_data_file(path) and _HUB_ID.match(text):
        return [text]
    raise DataError(_not_found(path, key))


def matches(pattern: str | Path, key: str) -> list[str]:
    """The files and folders that a glob pattern stands for, sorted; a path that exists stands for itself."""
    path = Path(pattern).expanduser()
    found = [str(path)] if path.exists() else sorted(glob.glob(str(path), recursive=True))
    if not found:
        raise DataError(f"{key}: no file matches {path}.")
    return found


SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words in the names of files and folders, and the split they stand for."""
_WORD = re.compile(r"[^\W\d_]+")
_NO_DATA = re.compile(
    r"dataset_infos?\.json|dataset_dict\.json|state\.json|cache-[0-9a-f]+(_\d+_of_\d+)?\.arrow"
)
"""What the hub and `datasets` keep beside the data."""


def split_of(path: Path) -> str | None:
    """train, val or test by a word of the file's name, else of the nearest of its folders; None without one."""
    for part in (path.name, *reversed(path.parent.parts)):
        found = next((SPLITS[word] for word in _WORD.findall(part.lower()) if word in SPLITS), None)
        if found is not None:
            return found
    return None


def files_by_split(folder: Path, key: str) -> dict[str, list[Path]]:
    """The data files of a folder and those below it, sorted; a file whose name says no split is of train."""
    grouped: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        hidden = any(name.startswith((".", "_")) for name in inside.parts)
        if is_data_file(path) and path.is_file() and not hidden and not _NO_DATA.fullmatch(path.name):
            grouped.setdefault(split_of(inside) or "train", []).append(path)
    if not grouped:
        raise DataError(f"{key}: the folder {folder} holds no data file ({KNOWN}).")
    return grouped


def _files_of_split(folder: Path, split: str, key: str) -> list[Path]:
    """The files of a folder, or only those of `split` where they are of several; val is read as test without one."""
    grouped = files_by_split(folder, key)
    if len(grouped) == 1:
        ((only, files),) = grouped.items()
        if only != split and any(split_of(path.relative_to(folder)) for path in files):
            logger.warning("%s: %s has no files of %s; those of %s are read", key, folder, split, only)
        return files
    chosen = "val" if split == "test" and "test" not in grouped else split
    shown = {name: _names(folder, files) for name, files in grouped.items()}
    if chosen not in grouped:
        every = "; ".join(f"{name}: {names}" for name, names in shown.items())
        raise DataError(
            f"{key}: the folder {folder} has no files of {split}, but of other splits ({every}); give the files."
        )
    others = "; ".join(f"{name}: {names}" for name, names in shown.items() if name != chosen)
    read = "%s: %s has several splits: %s is read (%s), not %s; give files instead of the folder for others"
    logger.info(read, key, folder, chosen, shown[chosen], others)
    return grouped[chosen]


def _names(folder: Path, files: Sequence[Path], limit: int = 4) -> str:
    names = [str(path.relative_to(folder)) for path in files[:limit]]
    return ", ".join(names) + (f" and {len(files) - limit} more" if len(files) > limit else "")


def absent(entry: str | Path, key: str) -> str | None:
    """Why an entry of `key` that can only mean something on this machine is not there; None where it may be."""
    path = Path(str(entry)).expanduser()
    local = is_data_file(path) or str(entry).startswith(("/", ".", "~"))
    return _not_found(path, key) if local and not path.exists() and not glob.has_magic(str(entry)) else None


def _not_found(path: Path, key: str) -> str:
    if path.is_symlink():
        return f"{key}: {path} is a link to {path.readlink()}, which does not exist."
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    if parent != path.parent:
        return f"{key}: {path} does not exist (nor does its folder; the nearest that does is {parent})."
    shown = [p for p in parent.iterdir() if not p.name.startswith(".") and (is_data_file(p) or p.is_dir())]
    names = [p.name for p in sorted(shown, key=lambda p: (p.is_dir(), p.name))][:8]
    return f"{key}: {path} does not exist. The folder {parent.resolve()} holds: {', '.join(names) or 'no data files'}."


_FIRST_BYTES = (
    (b"version https://git-lfs", (), "a Git LFS pointer, not the data: fetch it with `git lfs pull`"),
    (b"PAR1", (".parquet",), "a parquet file: give it the ending .parquet"),
    (b"ARROW1", (".arrow",), "an arrow file: give it the ending .arrow"),
    (b"\x1f\x8b", (".gz",), "a file compressed by gzip: give it the ending .gz, e.g. .jsonl.gz"),
    (b"\x28\xb5\x2f\xfd", (), "a file compressed by zstd: uncompress it first"),
    (b"PK\x03\x04", (), "a zip archive: unpack it first"),
    (b"\xff\xfe", (), "UTF-16 text: save it as UTF-8"),
    (b"\xfe\xff", (), "UTF-16 text: save it as UTF-8"),
    (b"<", (), "a page of HTML or XML, not the data: look at what was downloaded"),
    (b"{", (".jsonl", ".json"), "JSON: give it the ending .jsonl"),
    (b"[", (".json",), "one list of JSON: give it the ending .json"),
)
"""First bytes of a file, the endings that fit, and what it is."""


def looks_like(path: Path) -> str:
    """What a misnamed file holds, by its first bytes; empty where they say nothing new."""
    try:
        with path.open("rb") as file:
            first = file.read(64)
    except OSError:
        return ""
    for start, endings, what in _FIRST_BYTES:
        if first.startswith(start) or first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(start):
            return "" if path.suffix.lower() in endings else f" It looks like {what}."
    return ""
