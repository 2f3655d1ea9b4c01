"""Tensors and plain values on the disk: exact, readable by others, and never a way to run code."""

from __future__ import annotations

import json
import math
import struct
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from verl.checkpoint.files import finish_removals, inside, record_of, remove_folder
from verl.checkpoint.state import capture_rng, decode, encode, restore_rng
from verl.checkpoint.tensors import TensorChunk, local_chunks, read_into, read_tensors, write_chunks
from verl.errors import CheckpointError

TENSORS = {
    "a.weight": torch.randn(3, 4),
    "half": torch.randn(5, dtype=torch.bfloat16),
    "f16": torch.randn(2, 2, dtype=torch.float16),
    "double": torch.randn(2, dtype=torch.float64),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "flags": torch.tensor([True, False]),
    "count": torch.arange(4),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "strided": torch.randn(4, 6).T[::2],
    "nan": torch.tensor([math.nan, math.inf, -0.0]),
}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(
            a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
        )
    )


def test_every_type_comes_back_bit_for_bit_and_the_record_is_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    record = write_chunks(file, local_chunks(TENSORS))
    assert record == record_of(file)
    for loaded in (read_tensors([file]), load_file(file)):  # by us, and by safetensors itself
        assert set(loaded) == set(TENSORS)
        for name, tensor in TENSORS.items():
            assert same(loaded[name], tensor), name


@pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled.*")
def test_the_stock_reader_of_torch_reads_our_shards(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    write_chunks(tmp_path / "0.safetensors", [TensorChunk("w", (0, 0), whole[:4])])
    write_chunks(tmp_path / "1.safetensors", [TensorChunk("w", (4, 0), whole[4:])])
    target = {"w": torch.zeros(6, 4)}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
    assert torch.equal(target["w"], whole)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_cut_into_boxes_is_put_together_again(tmp_path_factory: Any, data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    whole = torch.randn(rows, columns)
    row_cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=3))})
    column_cuts = sorted({0, columns, *data.draw(st.lists(st.integers(0, columns), max_size=3))})
    folder = tmp_path_factory.mktemp("boxes")
    files = []
    for r0, r1 in pairwise(row_cuts):
        for c0, c1 in pairwise(column_cuts):
            files.append(folder / f"{r0}_{c0}.safetensors")
            write_chunks(files[-1], [TensorChunk("w", (r0, c0), whole[r0:r1, c0:c1])])
    assert torch.equal(read_tensors(files)["w"], whole)
    if len(files) > 1:
        with pytest.raises(CheckpointError, match="shard of tensor 'w' is missing|has shape"):
            read_into(files[:-1], {"w": torch.zeros(rows, columns)}, "here")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"w": torch.zeros(2, 2), "v": torch.zeros(1)}, "lacks 1 of 2 tensors.*'v'.*model.path"),
        ({}, "has 1 tensors the model does not have.*'w'"),
        ({"w": torch.zeros(2, 3)}, r"'w' has shape \[2, 2\] in the checkpoint and \[2, 3\] in the model"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, target: dict[str, torch.Tensor], words: str
) -> None:
    write_chunks(tmp_path / "x.safetensors", local_chunks({"w": torch.ones(2, 2)}))
    with pytest.raises(CheckpointError, match=words):
        read_into([tmp_path / "x.safetensors"], target, "here")


def test_whole_tensors_are_written_by_the_first_rank_only() -> None:
    assert local_chunks({"w": torch.ones(2)}, rank=1) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"\x01", struct.pack("<Q", 1 << 60), struct.pack("<Q", 4) + b"nope", struct.pack("<Q", 2) + b"[]"],
)
def test_a_file_that_is_no_tensor_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tensors([tmp_path / "x.safetensors"])


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(
            st.text(max_size=5) | st.integers() | st.sampled_from(["__tensor__", "__pairs__"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@given(PLAIN)
@settings(max_examples=150, deadline=None)
def test_plain_trees_come_back_equal_types_included(tree: Any) -> None:
    text, tensors = encode(tree)
    json.loads(text)
    again = decode(text, tensors)
    assert again == tree and repr(again) == repr(tree)


def test_arrays_tensors_and_generators_come_back() -> None:
    tree = {
        "tensor": torch.randn(3),
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "words": np.array([2**63 + 5], dtype=np.uint64),
        "number": np.float32(0.5),
        "nested": [(torch.tensor(1), {"x": np.array([1.5])})],
        "nan": float("nan"),
        "numpy": np.random.default_rng(3).bit_generator.state,
    }
    text, tensors = encode(tree)
    again = decode(text, tensors)
    assert torch.equal(again["tensor"], tree["tensor"])
    for name in ("array", "words"):
        assert again[name].dtype == tree[name].dtype and np.array_equal(again[name], tree[name])
    assert again["number"] == 0.5 and math.isnan(again["nan"])
    assert again["nested"][0][0] == 1 and again["nested"][0][1]["x"][0] == 1.5
    generator = np.random.default_rng(0)
    generator.bit_generator.state = again["numpy"]
    assert generator.integers(1 << 30) == np.random.default_rng(3).integers(1 << 30)


def test_names_that_flatten_alike_stay_apart() -> None:
    tree = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    text, tensors = encode(tree)
    again = decode(text, tensors)
    assert (int(again["a.b"]), int(again["a"]["b"])) == (1, 2)


@pytest.mark.parametrize("value", [object(), np.array([object()], dtype=object), {"x": {1, 2}}, print])
def test_what_is_not_plain_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(CheckpointError, match="state 'loader.cursor"):
        encode({"loader": {"cursor": value}})


@pytest.mark.parametrize(
    "text",
    ['{"__array__": "a", "dtype": "O"}', '{"__tensor__": "absent"}', "nonsense", '{"__bytes__": "%%"}'],
)
def test_a_state_file_that_lies_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        decode(text, {"a": torch.zeros(2, dtype=torch.int64)})


def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    (tmp_path / "secret").write_text("s")
    (folder / "link").symlink_to(tmp_path / "secret")
    for name in ("../secret", "/etc/passwd", "", "a/../../secret", "link"):
        with pytest.raises(CheckpointError):
            inside(folder, name)
    assert inside(folder, "actor/model/x.json") == folder / "actor/model/x.json"


def test_random_states_of_every_kind_are_put_back() -> None:
    import random

    def draw() -> tuple[float, ...]:
        return (
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
            torch.rand(()).item(),
        )

    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    draw()  # leaves a cached normal draw behind
    text, tensors = encode(capture_rng())
    expected = [draw() for _ in range(3)]
    restore_rng(decode(text, tensors))
    assert [draw() for _ in range(3)] == expected


def test_folders_are_removed_by_several_threads_at_once(tmp_path: Path) -> None:
    """As when a background save retires an old checkpoint while the trainer waits for the one before."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for index in range(100):
                folder = tmp_path / f"step_{number}_{index}"
                folder.mkdir()
                (folder / "file").write_text("x")
                remove_folder(folder, wait=False)
                finish_removals()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    finish_removals()
    assert errors == [] and list(tmp_path.iterdir()) == []
