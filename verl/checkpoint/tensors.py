"""Sharded tensors in safetensors files, in the layout of torch.distributed.checkpoint.

A file holds the chunks of one rank. Its header says where in the whole tensor each chunk begins, so any number of
ranks can read what any other number wrote; `torch.distributed.checkpoint.HuggingFaceStorageReader` reads it too.

What always holds: a chunk is written by exactly one rank; writing needs no communication and holds at most a few
chunks in host memory beside the source; reading maps files into memory and copies only what the rank needs.
"""

from __future__ import annotations

import json
import math
import os
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor, Replicate
from torch.futures import Future

from verl.checkpoint.direct_io import LARGE, BulkFile, Writers
from verl.checkpoint.files import ChecksumFile, FileRecord
from verl.errors import CheckpointError
from verl.json_input import open_regular, parse_json

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_NAMES = {name: dtype for dtype, name in _DTYPES.items()}
_SHARDING = "DCP_SHARDING_INFO"


@dataclass(frozen=True)
class Chunk:
    """A piece of the tensor `key` that begins at `offsets` and lies on this rank."""

    key: str
    offsets: tuple[int, ...]
    tensor: torch.Tensor


def local_chunks(tensors: Mapping[str, torch.Tensor], rank: int = 0) -> list[Chunk]:
    """The chunks this rank is to write: its shards, and whole tensors on rank 0."""
    mine = {key: tensor for key, tensor in tensors.items() if _is_writer(tensor, rank)}
    sharded = {key: tensor for key, tensor in mine.items() if isinstance(tensor, DTensor)}
    chunks = [
        Chunk(key, (0,) * tensor.ndim, tensor.detach()) for key, tensor in mine.items() if key not in sharded
    ]
    if not sharded:
        return chunks
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(dict(sharded), is_coordinator=True)
    for item in planner.create_local_plan().items:
        if item.tensor_data is None:
            raise CheckpointError(f"state {item.index.fqn!r} is not a tensor")
        data = planner.resolve_data(item)
        assert isinstance(data, torch.Tensor)
        if data.numel() or item.tensor_data.size.numel() == 0:
            chunks.append(Chunk(item.index.fqn, tuple(item.tensor_data.chunk.offsets), data.detach()))
    return chunks


def _is_writer(tensor: torch.Tensor, rank: int) -> bool:
    """Of those that hold the same values, the first one writes."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(
        c == 0 for c, place in zip(coordinate, tensor.placements, strict=True) if isinstance(place, Replicate)
    )


def write_chunks(path: Path, chunks: Sequence[Chunk], writers: Writers | None = None) -> FileRecord:
    """The chunks of a rank as one file that says where each belongs. Large files need `writers`, their own if none
    are given."""
    # Larger elements first keeps every tensor aligned without padding, which the format does not allow.
    ordered = sorted(chunks, key=lambda chunk: -chunk.tensor.element_size())
    sharding = {chunk.key: {"saved_offsets": list(chunk.offsets)} for chunk in ordered}
    return write_stream(
        path,
        [(chunk.key, chunk.tensor.dtype, tuple(chunk.tensor.shape)) for chunk in ordered],
        (chunk.tensor for chunk in ordered),
        {"format": "pt", "DCP_VERSION": "1.0", _SHARDING: json.dumps(sharding)},
        writers,
    )


def write_stream(
    path: Path,
    entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str],
    writers: Writers | None = None,
) -> FileRecord:
    """One safetensors file. `tensors` come one at a time, in the order and of the kind that `entries` announce."""
    header: dict[str, Any] = {}
    offset = 0
    for key, dtype, shape in entries:
        if dtype not in _DTYPES:
            raise CheckpointError(f"tensor {key!r} has type {dtype}, which cannot be saved")
        if key in header:
            raise CheckpointError(
                f"tensor {key!r} would be in the file {path.name} twice, which cannot be saved"
            )
        size = math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    header["__metadata__"] = dict(metadata)
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with _new_file(path, 8 + len(text) + offset, writers) as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for (key, dtype, shape), tensor in zip(entries, tensors, strict=True):
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"tensor {key!r} is {tensor.dtype} {list(tensor.shape)}, announced were {dtype} {list(shape)}"
                )
            file.write(_bytes_of(tensor))
    return file.record


@contextmanager
def _new_file(path: Path, size: int, writers: Writers | None) -> Iterator[ChecksumFile | BulkFile]:
    with ExitStack() as stack:
        if size < LARGE:
            yield stack.enter_context(ChecksumFile(path))
        else:
            yield stack.enter_context(BulkFile(path, writers or stack.enter_context(Writers())))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    # The view as bytes must come after flattening: a 0-dimensional tensor cannot change its element size.
    flat = tensor.detach().cpu().contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)`. Between plain arrays in host memory it is one memory copy: torch's own would wake
    all its threads for each of many tensors, which on a busy machine costs many times the copy."""
    plain = all(t.device.type == "cpu" and t.is_contiguous() for t in (target, source))
    if plain and target.dtype == source.dtype and target.shape == source.shape and target.ndim:
        to, from_ = (t.detach().flatten().view(torch.uint8).numpy() for t in (target, source))
        np.copyto(to, from_)
    else:
        target.copy_(source)


@dataclass(frozen=True)
class _Place:
    file: Path
    key: str


class ShardReader(StorageReader):
    """Reads a set of such files for torch.distributed.checkpoint; never unpickles anything."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.files = sorted(files)
        self._places: dict[MetadataIndex, _Place] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        self._places = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        known: dict[str, TensorStorageMetadata] = {}
        places: dict[MetadataIndex, _Place] = {}
        for file in self.files:
            for key, dtype, shape, offsets in _header_entries(file):
                end = [o + s for o, s in zip(offsets, shape, strict=True)]
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))
                place = MetadataIndex(key, torch.Size(offsets))
                if key not in known:
                    known[key] = TensorStorageMetadata(
                        TensorProperties(dtype=dtype), torch.Size(end), [chunk]
                    )
                elif place in places or len(known[key].size) != len(end):
                    raise CheckpointError(
                        f"the chunk of tensor {key!r} in {file} does not go with the others"
                    )
                else:
                    whole = [max(a, b) for a, b in zip(known[key].size, end, strict=True)]
                    known[key].size = torch.Size(whole)
                    known[key].chunks.append(chunk)
                places[place] = _Place(file, key)
        return Metadata(state_dict_metadata=dict(known), storage_data=places, storage_meta=StorageMeta())

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[Path, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self._places[item.storage_index].file, []).append(item)
        for file, items in by_file.items():
            with safe_open(str(file), framework="pt") as opened:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    name = self._places[item.storage_index].key
                    if not item.lengths:
                        piece = opened.get_tensor(name)
                    else:
                        spans = zip(item.storage_offsets, item.lengths, strict=True)
                        piece = opened.get_slice(name)[tuple(slice(o, o + n) for o, n in spans)]
                    copy_into(target, piece)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _header_entries(file: Path) -> list[tuple[str, torch.dtype, list[int], list[int]]]:
    """Name, type, shape and place in the whole tensor of every chunk in a file."""
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size - 8
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(100_000_000, size):
                raise ValueError("header longer than the file")
            header = parse_json(opened.read(length).decode("utf-8"))
        extra = header.pop("__metadata__", {})
        sharding = parse_json(extra[_SHARDING]) if _SHARDING in extra else {}
        found = []
        for key, entry in header.items():
            dtype, shape, (begin, end) = (
                _NAMES[entry["dtype"]],
                _counts(entry["shape"]),
                entry["data_offsets"],
            )
            offsets = _counts(sharding[key]["saved_offsets"]) if key in sharding else [0] * len(shape)
            if end - begin != math.prod(shape) * dtype.itemsize or not 0 <= begin <= end <= size - length:
                raise ValueError(f"tensor {key!r} does not lie in the file")
            if math.prod(o + s for o, s in zip(offsets, shape, strict=True)) >= 1 << 63:
                raise ValueError(f"tensor {key!r} is too large")
            found.append((key, dtype, shape, offsets))
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"the tensor file {file} cannot be read: {error!r}") from None


def _counts(values: Any) -> list[int]:
    if not isinstance(values, list) or any(type(v) is not int or not 0 <= v < 1 << 63 for v in values):
        raise ValueError(f"{str(values)[:40]} is no shape")
    return values


def saved_tensors(files: Iterable[Path]) -> dict[str, TensorStorageMetadata]:
    """Name, shape, type and chunks of every tensor in these files."""
    return ShardReader(files).read_metadata().state_dict_metadata  # type: ignore[return-value]


def check_fit(files: Iterable[Path], targets: Mapping[str, torch.Tensor], where: str) -> None:
    """Raise unless the files hold exactly these tensors, whole, and safetensors opens them. Reads headers only."""
    files = sorted(files)
    known = saved_tensors(files)
    missing = sorted(set(targets) - set(known))
    if missing:
        raise CheckpointError(
            f"{where} lacks {len(missing)} of {len(targets)} tensors the model has, first {missing[0]!r}. "
            "The checkpoint belongs to another model or another LoRA setting: check model.path and model.lora_rank"
        )
    surplus = sorted(set(known) - set(targets))
    if surplus:
        raise CheckpointError(
            f"{where} has {len(surplus)} tensors the model does not have, first {surplus[0]!r}. "
            "The checkpoint belongs to another model or another LoRA setting: check model.path and model.lora_rank"
        )
    for key, tensor in targets.items():
        if tuple(known[key].size) != tuple(tensor.shape):
            raise CheckpointError(
                f"{where}: tensor {key!r} has shape {list(known[key].size)} in the checkpoint and "
                f"{list(tensor.shape)} in the model: check model.path and model.override_config"
            )
        _check_covered(key, known[key], where)
    for file in files:
        with safe_open(str(file), framework="pt"):
            pass


def _check_covered(key: str, entry: TensorStorageMetadata, where: str) -> None:
    if sum(chunk.sizes.numel() for chunk in entry.chunks) < entry.size.numel():
        raise CheckpointError(f"{where}: a shard of tensor {key!r} is missing")


def read_into(files: Iterable[Path], targets: dict[str, torch.Tensor], where: str) -> None:
    """Fill `targets` (plain tensors or DTensors, in place) from the files, whatever the sharding was."""
    files = sorted(files)
    check_fit(files, targets, where)
    with warnings.catch_warnings():
        # Every rank reads for itself; that no group is used is meant.
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        dcp.load(dict(targets), storage_reader=ShardReader(files), no_dist=True)


def read_whole(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Every tensor of the files, whole, on the CPU."""
    files = sorted(files)
    where = str(files[0].parent) if files else "an empty list of files"
    known = saved_tensors(files)
    for key, entry in known.items():
        _check_covered(key, entry, where)  # before there is memory for as much as the header claims
    targets = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in known.items()}
    read_into(files, targets, where)
    return targets
