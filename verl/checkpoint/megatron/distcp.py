"""A checkpoint folder of torch.distributed.checkpoint's own format: `.metadata` and `*.distcp`.

Both hold pickles, and the folder is not trusted: no name in `.metadata` is imported or called, every object in it
becomes inert data; tensors are loaded with `weights_only=True`; no file outside the folder is opened, and `common.pt`
not at all.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint.files import inside
from verl.errors import CheckpointError

METADATA = ".metadata"
_LARGEST_METADATA = 2 * 1024**3
_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
_PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): getattr(torch, name) for name in _DTYPES},
}
_INERT = ("torch.distributed.checkpoint.", "megatron.core.", "pathlib.")
"""Where the classes come from that writers put into `.metadata`. Their names are noted, they are not imported."""
_INERT_NAMES = {("pathlib", "PosixPath"), ("torch.serialization", "_get_layout"), ("io", "BytesIO")}

Region = tuple[tuple[int, int], ...]
"""First and end in each dimension."""


class _Inert:
    """An unpickled object of another program: its state, no behaviour."""

    name = ""
    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        if not isinstance(self.state, dict) or name not in self.state:
            raise ValueError(f"{self.name} has no field {name!r}")
        return self.state[name]


def _enum_member(owner: Any, name: Any) -> _Inert:
    """In place of `getattr`, by which Python 3.11.0 to 3.11.3 writes members of an enum."""
    if not (isinstance(owner, type) and issubclass(owner, _Inert)):
        raise CheckpointError(
            f"it asks for an attribute of {owner!r}, which no such file needs: it may be meant to run a program"
        )
    return owner(name)


class _InertUnpickler(pickle.Unpickler):
    """Builds lists, dicts, numbers, text and `_Inert` objects, nothing else."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        super().__init__(file)
        self._classes: dict[tuple[str, str], type[_Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if not (module + ".").startswith(_INERT) and (module, name) not in _INERT_NAMES:
            raise CheckpointError(
                f"it asks for {module}.{name}, which no such file needs: it may be meant to run a program"
            )
        if (module, name) not in self._classes:
            self._classes[module, name] = type(name, (_Inert,), {"name": f"{module}.{name}"})
        return self._classes[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointError("it refers to objects outside itself")


@dataclass(frozen=True)
class _Stored:
    """Where a chunk is: begin and size in the tensor, file, position in the file."""

    begin: tuple[int, ...]
    size: tuple[int, ...]
    file: Path
    offset: int
    length: int


@dataclass(frozen=True)
class _Tensor:
    size: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[_Stored, ...]


class DistTensors:
    """The tensors of such a folder, read region by region."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / METADATA
        try:
            if path.stat().st_size > _LARGEST_METADATA:
                raise ValueError("larger than any such file is")
            with open(path, "rb") as file:
                self.tensors = _tensors(folder, _InertUnpickler(file).load())
        except CheckpointError as error:
            raise CheckpointError(f"{path} is refused: {error}") from None
        except FileNotFoundError:
            raise CheckpointError(f"{folder} has no {METADATA}: it is no distributed checkpoint") from None
        except Exception as error:  # whatever a damaged or hostile pickle does to the unpickler
            raise CheckpointError(f"{path} cannot be read: {error!r}") from None

    def read(self, name: str, region: Region | None = None) -> torch.Tensor:
        """A box of the tensor, from whichever chunks it lies in."""
        tensor = self.tensors[name]
        region = region if region is not None else tuple((0, n) for n in tensor.size)
        result = torch.empty([end - first for first, end in region], dtype=tensor.dtype)
        filled = 0
        for chunk in tensor.chunks:
            box = [
                (max(first, begin), min(end, begin + size))
                for (first, end), begin, size in zip(region, chunk.begin, chunk.size, strict=True)
            ]
            if any(first >= end for first, end in box):
                continue
            loaded = _load(chunk, name, tensor.dtype)
            here = tuple(slice(a - b, z - b) for (a, z), b in zip(box, chunk.begin, strict=True))
            there = tuple(slice(a - r, z - r) for (a, z), (r, _) in zip(box, region, strict=True))
            result[there] = loaded[here]
            filled += math.prod(end - first for first, end in box)
        if filled != result.numel():
            raise CheckpointError(
                f"{self.folder}: {filled} of {result.numel()} numbers of {name!r} are there; a file is missing"
            )
        return result


def _load(chunk: _Stored, name: str, dtype: torch.dtype) -> torch.Tensor:
    try:
        with open(chunk.file, "rb") as file:
            if chunk.offset + chunk.length > os.fstat(file.fileno()).st_size:
                raise ValueError("the file is too short")
            file.seek(chunk.offset)
            loaded = torch.load(io.BytesIO(file.read(chunk.length)), map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        first = str(error).splitlines()[0] if str(error) else repr(error)
        raise CheckpointError(f"{chunk.file}: a chunk of {name!r} cannot be read: {first}") from None
    if not isinstance(loaded, torch.Tensor) or loaded.dtype != dtype or tuple(loaded.shape) != chunk.size:
        shape = list(getattr(loaded, "shape", ()))
        seen = f"{getattr(loaded, 'dtype', type(loaded).__name__)} {shape}"
        raise CheckpointError(
            f"{chunk.file}: a chunk of {name!r} is {seen}; {METADATA} says {dtype} {list(chunk.size)}"
        )
    return loaded.detach()


def _tensors(folder: Path, document: Any) -> dict[str, _Tensor]:
    """The tensors that `.metadata` describes; ValueError where it is not what it should be."""
    _check_class(document, "Metadata")
    stored: dict[tuple[str, tuple[int, ...]], tuple[Path, int, int]] = {}
    for index, info in _typed(document.field("storage_data"), dict).items():
        _check_class(index, "MetadataIndex")
        _check_class(info, "_StorageInfo")
        offset = index.state.get("offset") if isinstance(index.state, dict) else None
        if offset is None:  # not a tensor
            continue
        if isinstance(info.state, dict) and info.state.get("transform_descriptors"):
            raise ValueError(f"{index.field('fqn')!r} is stored compressed, which is not supported")
        file = inside(folder, _typed(info.field("relative_path"), str))
        position, length = _sizes([info.field("offset"), info.field("length")])
        stored[_typed(index.field("fqn"), str), _sizes(offset)] = (file, position, length)
    tensors = {}
    for name, entry in _typed(document.field("state_dict_metadata"), dict).items():
        if not isinstance(entry, _Inert) or not entry.name.endswith(".TensorStorageMetadata"):
            continue
        size = _sizes(entry.field("size"))
        chunks = []
        for chunk in entry.field("chunks"):
            begin, extent = _sizes(chunk.field("offsets")), _sizes(chunk.field("sizes"))
            if not len(begin) == len(extent) == len(size) or (_typed(name, str), begin) not in stored:
                raise ValueError(f"a chunk of {name!r} is in no file")
            chunks.append(_Stored(begin, extent, *stored[name, begin]))
        properties = entry.field("properties")
        state = properties.state
        dtype = state[0] if isinstance(state, (tuple, list)) else properties.field("dtype")
        tensors[name] = _Tensor(size, _typed(dtype, torch.dtype), tuple(chunks))
    return tensors


def _check_class(value: Any, kind: str) -> None:
    if not isinstance(value, _Inert) or not value.name.endswith(f".{kind}"):
        raise ValueError(f"a {getattr(value, 'name', type(value).__name__)} found where {kind} is expected")


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{str(value)[:40]!r} is not a {kind.__name__}")
    return value


def _sizes(values: Sequence[Any]) -> tuple[int, ...]:
    for value in values:
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{value!r} is not a size")
    return tuple(values)
