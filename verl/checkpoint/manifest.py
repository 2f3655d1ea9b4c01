"""`ckpt_contents.json`: what a checkpoint consists of. It is written last, so its presence means "complete".

It contains its own checksum, so `verify` finds damage in any file, the manifest included; only files it lists are read.
"""

from __future__ import annotations

import json
import os
import platform
import stat
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verl.checkpoint.files import FileRecord, inside, record_of, replace_file, write_file
from verl.errors import CheckpointError
from verl.json_input import read_json

MANIFEST = "ckpt_contents.json"
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """The contents of one `global_step_N` folder."""

    step: int
    world_size: int
    parts: dict[str, list[str]]
    """What was saved of each part: {"actor": ["model", "optimizer", "extra", "hf_model"], ...}."""
    files: dict[str, FileRecord]
    metrics: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    created: str = ""
    command: str = ""
    """That trained, such as `verl sft`; empty where none is known: a `Session`, or an older version."""

    def to_json(self) -> str:
        document = {"format": FORMAT, **asdict(self)}
        return json.dumps({**document, "crc32": document_crc(document)}, indent=1, sort_keys=True) + "\n"

    @property
    def size(self) -> int:
        return sum(record.size for record in self.files.values())

    def files_of(self, folder: Path, prefix: str) -> list[Path]:
        """The listed files whose name begins with `prefix`, checked to lie inside the folder."""
        return [inside(folder, name) for name in sorted(self.files) if name.startswith(prefix)]


def installed_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("verl", "torch", "transformers", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_manifest(folder: Path, manifest: Manifest, *, replace: bool = False) -> None:
    if replace:
        replace_file(folder / MANIFEST, manifest.to_json())
    else:
        write_file(folder / MANIFEST, manifest.to_json())


def read_manifest(folder: Path) -> Manifest:
    """The manifest, if it is there and undamaged; CheckpointError with the reason otherwise."""
    path = folder / MANIFEST
    try:
        document = read_json(path)
        if not isinstance(document, dict):
            raise ValueError("not an object")
        stated = document.pop("crc32")
        if stated != document_crc(document):
            raise ValueError("its checksum is wrong")
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']!r} is not known here; known: {FORMAT}")
        if not document["files"]:
            raise ValueError("it lists no files")
        return Manifest(
            step=_count(document, "step"),
            world_size=_count(document, "world_size"),
            parts={str(name): [str(c) for c in contents] for name, contents in document["parts"].items()},
            files={
                str(name): FileRecord(_count(entry, "size"), str(entry["crc32"]))
                for name, entry in document["files"].items()
            },
            metrics={str(name): float(value) for name, value in document["metrics"].items()},
            versions=dict(document["versions"]),
            created=str(document["created"]),
            command=str(document.get("command", "")),
        )
    except FileNotFoundError:
        why = f"has no {MANIFEST}: the save was not finished, or it is not a checkpoint"
        raise CheckpointError(f"{folder} {why if folder.is_dir() else 'does not exist'}") from None
    except NotADirectoryError:
        raise CheckpointError(f"{folder} is not a folder") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def verify(folder: Path, manifest: Manifest | None = None, *, checksums: bool = True) -> list[str]:
    """What is wrong with the files of a checkpoint. Without `checksums` only sizes are compared."""
    if manifest is None:
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            return [str(error)]

    def problem(item: tuple[str, FileRecord]) -> str | None:
        name, expected = item
        shown = name if name.isprintable() else repr(name)
        try:
            path = inside(folder, name)
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                return f"{shown} is not a regular file"
            if found.st_size != expected.size:
                return f"{shown} has {found.st_size} bytes instead of {expected.size}"
            if checksums and (record := record_of(path)) != expected:
                return f"{shown} has checksum {record.crc32} instead of {expected.crc32}"
        except FileNotFoundError:
            return f"{shown} is missing"
        except (OSError, CheckpointError) as error:
            return f"{shown} cannot be read: {error}"
        return None

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return [found for found in pool.map(problem, manifest.files.items()) if found]


def _count(document: Mapping[str, Any], name: str) -> int:
    value = document[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"its {name} is {str(value)[:40]!r}, not a count")
    return value


def document_crc(document: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(document, sort_keys=True).encode('utf-8')):08x}"
