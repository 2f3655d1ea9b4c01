"""Tensors packed into buckets of bounded size, so that neither side of a transfer needs a second copy of the model."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from verl.models.weight_source import NamedTensors

BUCKET_BYTES = 256 << 20
_ALIGNMENT = 16
"""Every tensor starts at a multiple of it, so that any dtype can be viewed in place."""

Bucket = dict[str, torch.Tensor]
Header = list[tuple[str, str, list[int]]]
"""Name, dtype and shape of each tensor of a bucket, in order."""


def split_buckets(tensors: NamedTensors, limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Tensors in groups of at most `limit` bytes; a larger tensor is a group by itself."""
    bucket: Bucket = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def bucket_header(bucket: Bucket) -> Header:
    return [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in bucket.items()]


def packed_bytes(header: Header) -> int:
    return sum(_aligned(_nbytes(dtype, shape)) for _, dtype, shape in header)


def pack(bucket: Bucket, buffer: torch.Tensor) -> None:
    """Copy the tensors into `buffer` (uint8)."""
    start = 0
    for tensor in bucket.values():
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        buffer[start : start + flat.numel()].copy_(flat)
        start += _aligned(flat.numel())


def unpack(header: Header, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the tensors in `buffer`."""
    start = 0
    for name, dtype, shape in header:
        size = _nbytes(dtype, shape)
        yield name, buffer[start : start + size].view(getattr(torch, dtype)).view(shape)
        start += _aligned(size)


def _nbytes(dtype: str, shape: list[int]) -> int:
    itemsize: int = getattr(torch, dtype).itemsize
    return torch.Size(shape).numel() * itemsize


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
