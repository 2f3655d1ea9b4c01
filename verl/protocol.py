"""`DataProto` under verl's import path. Its home is `verl.data.proto`."""

from __future__ import annotations

from verl.data.proto import DataProto
from verl.missing_names import explain

__all__ = ["DataProto", "pad_dataproto_to_divisor", "unpad_dataproto"]


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """The batch with its first rows repeated at the end until `size_divisor` divides their number, and how many those
    are."""
    pad_size = -len(data) % size_divisor
    rows = [row % len(data) for row in range(len(data) + pad_size)] if pad_size else []
    return (data[rows] if pad_size else data), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """The batch without its last `pad_size` rows."""
    return data[: len(data) - pad_size] if pad_size else data


__getattr__ = explain(__name__)
