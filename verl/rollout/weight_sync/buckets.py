"""Weights through shared memory: buckets as safetensors files that every reader takes and acknowledges.

The writer keeps at most two buckets alive, so that a hand-over needs room for those and not for the model.
Nothing is unpickled; a folder in memory (/dev/shm) is used where there is one.

What always holds: readers see buckets whole and in order; a side that makes no progress for `timeout_s` ends the
hand-over with an error that says who waited for whom; no file stays behind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from verl.errors import RolloutError
from verl.rollout.weight_sync.stale_files import MEMORY, new_path
from verl.rollout.weight_sync.weights import Pairs

BUCKET_BYTES = 256 << 20
_ALIVE = 2
_POLL_S = 0.002
_END = "end"


def shared_folder() -> Path:
    """A new folder, in memory where the system has one; only this user may read it."""
    folder = new_path("weights", MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None)
    folder.mkdir(mode=0o700)
    return folder


def cut(pairs: Pairs, limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """Pairs in groups of at most `limit` bytes; a larger tensor is a group of its own."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in pairs:
        own = tensor.numel() * tensor.element_size()
        if bucket and size + own > limit:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += own
    if bucket:
        yield bucket


def write_buckets(
    pairs: Pairs,
    folder: Path,
    readers: int,
    *,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
    limit: int = BUCKET_BYTES,
) -> int:
    """Write all pairs for `readers` readers and return how many buckets it took; `check` may raise while waiting."""
    from safetensors.torch import save_file

    count = 0
    for number, bucket in enumerate(cut(pairs, limit)):
        _wait_for_readers(folder, number - _ALIVE, readers, timeout_s, check)
        # Copies: tied weights share memory, which the format does not take.
        host = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in bucket.items()}
        _appear(folder, _name(number), partial(save_file, host))
        count = number + 1
    _appear(folder, _END, lambda path: path.write_text(str(count)))
    for number in range(max(count - _ALIVE, 0), count):
        _wait_for_readers(folder, number, readers, timeout_s, check)
    return count


def read_buckets(folder: Path, reader: int, timeout_s: float) -> Iterator[tuple[str, torch.Tensor]]:
    """All pairs in the order written."""
    from safetensors.torch import load_file

    number = 0
    while True:
        path = folder / _name(number)
        _wait(
            partial(_arrived, folder, number),
            timeout_s,
            f"the engine's worker {reader} waited for bucket {number} of the weights, which the trainer did not write",
        )
        if not path.exists():
            return
        yield from load_file(path).items()
        (folder / f"{_name(number)}.read.{reader}").touch()
        number += 1


def _name(number: int) -> str:
    return f"bucket_{number:05d}.safetensors"


def _arrived(folder: Path, number: int) -> bool:
    return (folder / _name(number)).exists() or _ended(folder, number)


def _ended(folder: Path, number: int) -> bool:
    end = folder / _END
    return end.exists() and int(end.read_text()) <= number


def _appear(folder: Path, name: str, write: Callable[[Path], object]) -> None:
    half = folder / f".{name}"
    write(half)
    half.rename(folder / name)


def _wait_for_readers(
    folder: Path, number: int, readers: int, timeout_s: float, check: Callable[[], None]
) -> None:
    """Until every reader has taken this bucket; it is then removed."""
    if number < 0:
        return
    marks = [folder / f"{_name(number)}.read.{reader}" for reader in range(readers)]

    def taken() -> bool:
        check()
        return all(mark.exists() for mark in marks)

    _wait(
        taken,
        timeout_s,
        f"the trainer waited for the engine's workers to take bucket {number} of the weights",
    )
    (folder / _name(number)).unlink(missing_ok=True)


def _wait(done: Callable[[], bool], timeout_s: float, who: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise RolloutError(f"{who} for {timeout_s:g} s; the other side is stuck or dead (see its log)")
        time.sleep(_POLL_S)
