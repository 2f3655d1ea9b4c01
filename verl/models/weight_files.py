"""The safetensors files of a Hugging Face model, read tensor by tensor and only where asked.

What always holds: reading rows of a tensor touches those rows of the file and no others; nothing of a file stays
mapped between two reads, so a reader's memory grows by what it keeps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from verl.errors import ModelError

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def model_file(path: str, name: str) -> Path | None:
    """A file of a model folder, or of a model of the hub (fetched if need be); None where it has none."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        return Path(hf_hub_download(path, name))
    except (EntryNotFoundError, HfHubHTTPError, OSError, ValueError):  # also: offline and not in the cache
        return None


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read weights from {str(file)!r}: {error} (model.path)") from error


class WeightFiles:
    """Which file holds which tensor."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files

    @classmethod
    def of(cls, path: str) -> WeightFiles | None:
        """None where the model has no safetensors files."""
        whole = model_file(path, _WHOLE)
        if whole is not None:
            with _opened(whole) as handle:
                return cls(dict.fromkeys(handle.keys(), whole))
        index = model_file(path, _INDEX)
        if index is None:
            return None
        placed: dict[str, str] = json.loads(index.read_text())["weight_map"]
        parts = {name: model_file(path, name) for name in set(placed.values())}
        return cls({key: part for key, name in placed.items() if (part := parts[name]) is not None})

    def __contains__(self, name: object) -> bool:
        return name in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor, from the files' headers."""
        found = {}
        for file in set(self.files.values()):
            with _opened(file) as handle:
                for name in handle.keys():  # noqa: SIM118  the handle is no mapping
                    found[name] = tuple(handle.get_slice(name).get_shape())
        return found

    def read_rows(self, name: str, start: int, stop: int, into: torch.Tensor, through: torch.dtype) -> None:
        """Rows `start` to `stop` of a tensor into `into`, rounded to the precision `through` on the way."""
        with _opened(self.files[name]) as handle:
            rows = handle.get_slice(name)[start:stop]
            into.copy_(rows.to(through))
