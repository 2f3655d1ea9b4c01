"""Files written with their checksum, direct or not: the bytes, the record, and what a failing disk does."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from verl.checkpoint.files import ChecksumFile, FileRecord, record_of
from verl.checkpoint.tensors import LARGE, local_chunks, write_chunks

BUFFER = 8192


def content_of(size: int) -> bytes:
    return bytes(torch.randint(0, 256, (size,), dtype=torch.uint8).numpy())


def write(path: Path, content: bytes, step: int = 3000, *, direct: bool = True) -> FileRecord:
    with ChecksumFile(path, direct=direct, buffer=BUFFER) as file:
        for start in range(0, len(content), step):
            file.write(content[start : start + step])
    return file.record


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "ordinary"])
@pytest.mark.parametrize("in_memory", [True, False], ids=["tmpfs", "disk"])
def test_the_file_holds_the_bytes_and_the_record_is_of_them(
    tmp_path: Path, fast_folder: Path, direct: bool, in_memory: bool
) -> None:
    folder = fast_folder if in_memory else tmp_path
    for size in (0, 1, 4095, 4096, BUFFER, BUFFER + 1, 100_001):
        for step in (700, 4096, 50_000):
            path, content = folder / f"{size}_{step}", content_of(size)
            record = write(path, content, step, direct=direct)
            assert path.read_bytes() == content
            assert record == FileRecord(size, f"{zlib.crc32(content):08x}") == record_of(path)


def test_a_system_that_refuses_direct_files_gets_ordinary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.open, []

    def refusing(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "no direct files here")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refusing)
    content = content_of(50_000)
    record = write(tmp_path / "x", content)
    assert refused and (tmp_path / "x").read_bytes() == content and record == record_of(tmp_path / "x")


def test_a_direct_write_that_stops_inside_a_block_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a disk does that is almost full, or one with larger blocks: the rest cannot be direct any more."""
    real, short = os.pwrite, []

    def stopping(descriptor: int, data: Any, offset: int) -> int:
        if short:
            return real(descriptor, data, offset)
        short.append(offset)
        ordinary = os.open(tmp_path / "x", os.O_WRONLY)
        try:
            return real(ordinary, bytes(data[:1000]), offset)
        finally:
            os.close(ordinary)

    monkeypatch.setattr(os, "pwrite", stopping)
    content = content_of(50_000)
    record = write(tmp_path / "x", content)
    assert short and (tmp_path / "x").read_bytes() == content and record == record_of(tmp_path / "x")


@pytest.mark.parametrize("failing", [0, 3, 12])
def test_an_error_of_the_disk_is_raised_and_ends_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    real = os.pwrite

    def full(descriptor: int, data: Any, offset: int) -> int:
        if offset >= failing * BUFFER:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    content = content_of(13 * BUFFER)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "x", content)
    monkeypatch.undo()
    write(tmp_path / "y", content)  # nothing is left hanging


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        write(tmp_path / "x", content_of(10))
    assert (tmp_path / "x").read_bytes() == b"precious"


def test_tensors_of_a_large_file_come_back(tmp_path: Path) -> None:
    tensors = {
        "big": torch.randn(LARGE // 4 + 5),
        "strided": torch.randn(300, 500).T,
        "half": torch.randn(1001, dtype=torch.bfloat16),
        "flags": torch.rand(77) > 0.5,
    }
    record = write_chunks(tmp_path / "x.safetensors", local_chunks(tensors))
    assert record.size > LARGE and record == record_of(tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
