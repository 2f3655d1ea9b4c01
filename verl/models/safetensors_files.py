"""The safetensors files of a Hugging Face folder or hub model, and which of them has which tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from verl.atomic_file import mode_of_new_files
from verl.config.model_path import SAFETENSORS, weight_map
from verl.errors import ModelError


class CannotStream(Exception):
    """Why the weights cannot be read parameter by parameter."""


def let_others_read(folder: Path) -> None:
    """safetensors creates files that only their owner may read, unlike the files beside them."""
    mode = mode_of_new_files(folder)
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


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


def checked_weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor; ModelError where the index cannot be used."""
    try:
        return weight_map(index)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read weights by {str(index)!r}: {error} (model.path)") from error


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read weights from {str(file)!r}: {error} (model.path)") from error


class SafetensorsFiles:
    """Which file has which tensor."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files

    @classmethod
    def of(cls, path: str) -> SafetensorsFiles:
        """The files transformers would read; other files are ignored."""
        single = model_file(path, SAFETENSORS[0])
        if single is not None:
            with _opened(single) as handle:
                return cls(dict.fromkeys(handle.keys(), single))
        index = model_file(path, SAFETENSORS[1])
        if index is None:
            raise CannotStream("it has no safetensors files")
        names = checked_weight_map(index)
        shards = {name: model_file(path, name) for name in set(names.values())}
        return cls({key: shard for key, name in names.items() if (shard := shards[name]) is not None})

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

    def read_rows(
        self,
        name: str,
        start: int,
        stop: int,
        into: torch.Tensor,
        through: torch.dtype,
        columns: slice | None = None,
    ) -> None:
        """Rows `start` to `stop` of a tensor (of a matrix, these `columns` only) into `into`, rounded to `through`
        first, as transformers loads them."""
        with _opened(self.files[name]) as handle:
            stored = handle.get_slice(name)
            part = stored[start:stop] if columns is None else stored[start:stop, columns]
            into.copy_(part.to(through))
