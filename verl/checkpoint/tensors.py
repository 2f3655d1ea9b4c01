"""Sharded tensors in safetensors files, in the layout of torch.distributed.checkpoint.

A file holds the chunks of one rank, its header their offsets in the full tensors, so any number of ranks reads what any
other number wrote. Reading is torch's `HuggingFaceStorageReader` on the files of the manifest. Writing is ours: torch's
`HuggingFaceStorageWriter` builds each rank's file in memory and gives no checksum, so it takes 3.7 times as long, and
its `FileSystemWriter`, twice as long, writes pickles.
"""

from __future__ import annotations

import json
import math
import struct
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate

from verl.checkpoint.files import ChecksumFile, FileRecord
from verl.errors import CheckpointError

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
_SHARDING = "DCP_SHARDING_INFO"
LARGE = 1024 * 1024
"""From this size on a file is written past the page cache."""


@dataclass(frozen=True)
class TensorChunk:
    """This rank's shard of the tensor `key`, which begins at `offsets`."""

    key: str
    offsets: tuple[int, ...]
    tensor: torch.Tensor


def local_chunks(tensors: Mapping[str, torch.Tensor], rank: int = 0) -> list[TensorChunk]:
    """The chunks this rank writes: its shards, and unsharded tensors on rank 0. A tensor on the meta device stands for
    one that other ranks hold."""
    mine = {key: tensor for key, tensor in tensors.items() if _is_writer(tensor, rank)}
    sharded = {key: tensor for key, tensor in mine.items() if isinstance(tensor, DTensor)}
    chunks = [
        TensorChunk(key, (0,) * tensor.ndim, tensor.detach())
        for key, tensor in mine.items()
        if key not in sharded
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
            chunks.append(TensorChunk(item.index.fqn, tuple(item.tensor_data.chunk.offsets), data.detach()))
    return chunks


def _is_writer(tensor: torch.Tensor, rank: int) -> bool:
    """Of replicas, the first writes."""
    if tensor.is_meta:
        return False
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(
        c == 0 for c, kind in zip(coordinate, tensor.placements, strict=True) if isinstance(kind, Replicate)
    )


def write_chunks(path: Path, chunks: Sequence[TensorChunk]) -> FileRecord:
    """The chunks of a rank as one file that says where each belongs."""
    # Larger elements first keeps every tensor aligned without padding, which the format does not allow.
    ordered = sorted(chunks, key=lambda chunk: -chunk.tensor.element_size())
    sharding = {chunk.key: {"saved_offsets": list(chunk.offsets)} for chunk in ordered}
    return write_stream(
        path,
        [(chunk.key, chunk.tensor.dtype, tuple(chunk.tensor.shape)) for chunk in ordered],
        (chunk.tensor for chunk in ordered),
        {"format": "pt", "DCP_VERSION": "1.0", _SHARDING: json.dumps(sharding)},
    )


def write_stream(
    path: Path,
    entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str],
) -> FileRecord:
    """One safetensors file. `tensors` are taken one at a time, in the order, types and shapes of `entries`."""
    header, size = file_header(entries)
    header["__metadata__"] = dict(metadata)
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with ChecksumFile(path, direct=size >= LARGE) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (key, dtype, shape), tensor in zip(entries, tensors, strict=True):
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"tensor {key!r} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}"
                )
            # The view as bytes must come after flattening: a 0-dimensional tensor cannot change its element size.
            flat = tensor.detach().cpu().contiguous().flatten()
            if (
                flat.numel()
            ):  # one that was an empty numpy array has a stride of 0, for which there is no view
                file.write(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return file.record


def file_header(entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file with these tensors, and their bytes; an error for what cannot be stored."""
    header: dict[str, Any] = {}
    offset = 0
    for key, dtype, shape in entries:
        if dtype not in _DTYPES:
            raise CheckpointError(f"tensor {key!r} has type {dtype}, which cannot be saved")
        if key in header:
            raise CheckpointError(f"there are two tensors {key!r}")
        size = math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    return header, offset


class _FileList(FileSystem):
    """Lists the given files, whatever else is in their folder."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def ls(self, path: str | Any) -> list[str]:
        return [str(file) for file in self._files]


class ShardReader(dcp.HuggingFaceStorageReader):
    """torch's reader of these files only; what their headers say is checked before anything is allocated by it."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.files = sorted(files)
        super().__init__(str(self.files[0].parent) if self.files else ".")
        self.fs = _FileList(self.files)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file: Any = "the shards"
        try:
            for file in self.files:
                with safe_open(str(file), framework="pt"):
                    pass
            metadata = super().read_metadata()
            for key, entry in metadata.state_dict_metadata.items():
                assert isinstance(entry, TensorStorageMetadata)
                starts = [tuple(chunk.offsets) for chunk in entry.chunks]
                if len(set(starts)) < len(starts) or any(len(start) != len(entry.size) for start in starts):
                    raise ValueError(f"the chunks of tensor {key!r} do not fit together")
                if any(at < 0 for start in starts for at in start) or math.prod(entry.size) >= 1 << 63:
                    raise ValueError(f"tensor {key!r} has an impossible shape")
        except Exception as error:  # the header is untrusted, and torch does not check it
            raise CheckpointError(f"the tensor file {file} cannot be read: {error!r}") from None
        return metadata


def saved_tensors(files: Iterable[Path]) -> dict[str, TensorStorageMetadata]:
    """Name, shape, type and chunks of every tensor in these files."""
    return ShardReader(files).read_metadata().state_dict_metadata  # type: ignore[return-value]


def check_fit(files: Iterable[Path], targets: Mapping[str, torch.Tensor], where: str) -> None:
    """Raise unless the files hold exactly these tensors, completely. Reads headers only."""
    known = saved_tensors(files)
    missing, surplus = sorted(set(targets) - set(known)), sorted(set(known) - set(targets))
    keys = "optim.name, model.path and model.lora_rank"
    advice = f"The checkpoint belongs to another model, LoRA setting or optimiser: check {keys}"
    if missing:
        raise CheckpointError(
            f"{where} lacks {len(missing)} of {len(targets)} tensors the model has, first {missing[0]!r}. {advice}"
        )
    if surplus:
        raise CheckpointError(
            f"{where} has {len(surplus)} tensors the model does not have, first {surplus[0]!r}. {advice}"
        )
    for key, tensor in targets.items():
        if tuple(known[key].size) != tuple(tensor.shape):
            raise CheckpointError(
                f"{where}: tensor {key!r} has shape {list(known[key].size)} in the checkpoint and "
                f"{list(tensor.shape)} in the model: check model.path and model.override_config"
            )
        _check_complete(key, known[key], where)


def _check_complete(key: str, entry: TensorStorageMetadata, where: str) -> None:
    if sum(chunk.sizes.numel() for chunk in entry.chunks) < entry.size.numel():
        raise CheckpointError(f"{where}: a shard of tensor {key!r} is missing")


def read_into(files: Iterable[Path], targets: dict[str, torch.Tensor], where: str) -> None:
    """Fill `targets` (plain tensors or DTensors, in place) from the files, whatever the sharding was. Those on the meta
    device, which other ranks hold, are only checked."""
    files = sorted(files)
    check_fit(files, targets, where)
    held = {key: tensor for key, tensor in targets.items() if not tensor.is_meta}
    with warnings.catch_warnings():
        # Every rank reads for itself, so no process group is used.
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        dcp.load(held, storage_reader=ShardReader(files), no_dist=True)


def read_tensors(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Every tensor of the files, unsharded, on the CPU."""
    files = sorted(files)
    where = str(files[0].parent) if files else "an empty list of files"
    known = saved_tensors(files)
    for key, entry in known.items():
        _check_complete(key, entry, where)  # before as much memory is allocated as the header claims
    targets = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in known.items()}
    read_into(files, targets, where)
    return targets
