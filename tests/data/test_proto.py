"""DataProto: every operation against what plain lists would do, and every misuse."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data.proto import DataProto, object_column, same_value
from verl.errors import DataError


def make(rows: int = 4, offset: int = 0) -> DataProto:
    numbers = torch.arange(offset, offset + rows)
    return DataProto.from_dict(
        tensors={"x": numbers.clone(), "m": numbers[:, None].repeat(1, 3).float()},
        non_tensors={"uid": [f"u{int(i)}" for i in numbers], "ids": [[int(i)] * 2 for i in numbers]},
        meta_info={"step": 7},
    )


def xs(proto: DataProto) -> list[int]:
    """The row numbers, after checking that all parts still belong together."""
    rows = proto.batch["x"].tolist()
    assert proto.batch["m"].tolist() == [[float(i)] * 3 for i in rows]
    assert proto.non_tensor_batch["uid"].tolist() == [f"u{i}" for i in rows]
    assert list(proto.non_tensor_batch["ids"]) == [[i, i] for i in rows]
    return rows


def test_lists_of_equal_length_stay_one_element_per_row() -> None:
    column = object_column([[1, 2], [3, 4]])
    assert column.shape == (2,) and column[0] == [1, 2]
    grid = DataProto.from_dict(non_tensors={"a": np.arange(6).reshape(3, 2)})
    assert len(grid) == 3 and grid.non_tensor_batch["a"][1].tolist() == [2, 3]


def test_length_of_each_kind_and_of_nothing() -> None:
    assert len(make(5)) == 5
    assert len(DataProto.from_dict(non_tensors={"a": ["x", "y"]})) == 2
    assert len(DataProto.from_dict(tensors={"a": torch.zeros(3, 2)})) == 3
    assert len(DataProto()) == 0
    assert len(DataProto.from_dict(meta_info={"a": 1})) == 0


def test_survives_pickling() -> None:
    again = pickle.loads(pickle.dumps(make()))
    assert xs(again) == [0, 1, 2, 3] and again.meta_info == {"step": 7}


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (2, [2]),
        (-1, [3]),
        (np.int64(1), [1]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        (slice(10, 20), []),
        ([3, 0, 0], [3, 0, 0]),
        ([-1, 1], [3, 1]),
        ([], []),
        (range(2), [0, 1]),
        (np.array([1, 2]), [1, 2]),
        (torch.tensor([2, 1]), [2, 1]),
        ([True, False, True, False], [0, 2]),
        (np.array([False, True, False, True]), [1, 3]),
        (torch.tensor([False] * 4), []),
    ],
)
def test_indexing_gives_a_batch_of_those_rows(index: object, expected: list[int]) -> None:
    picked = make()[index]  # type: ignore[index]
    assert isinstance(picked, DataProto)
    assert xs(picked) == expected
    assert picked.meta_info == {"step": 7}


@pytest.mark.parametrize(
    "index",
    [
        4,
        -5,
        [0, 4],
        [True, False],
        torch.tensor([True] * 5),
        [0.5],
        "x",
        [[0, 1]],
        True,
        None,
        torch.tensor(1),
    ],
)
def test_wrong_indices_are_refused(index: object) -> None:
    with pytest.raises(DataError):
        make()[index]  # type: ignore[index]


def test_iteration_gives_single_rows_and_ends() -> None:
    assert [xs(row) for row in make(3)] == [[0], [1], [2]]


@pytest.mark.parametrize(
    "parts",
    [
        {"tensors": {"a": torch.zeros(2), "b": torch.zeros(3)}},
        {"tensors": {"a": torch.zeros(2)}, "non_tensors": {"b": ["x"]}},
        {"non_tensors": {"a": [1], "b": [1, 2]}},
        {"tensors": {"a": torch.tensor(1.0)}},
        {"tensors": {"a": [1, 2]}},
        {"non_tensors": {"a": "text"}},
        {"non_tensors": {"a": 3}},
        {"tensors": {"a": torch.zeros(2)}, "non_tensors": {"a": [1, 2]}},
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: dict) -> None:
    with pytest.raises(DataError):
        DataProto.from_dict(**parts)


def test_mismatch_message_names_every_part_with_its_rows() -> None:
    with pytest.raises(DataError, match=r"a: 2, b: 3"):
        DataProto.from_dict(tensors={"a": torch.zeros(2), "b": torch.zeros(3)})


def test_a_bad_part_set_later_is_found_by_the_next_operation() -> None:
    proto = make()
    proto.batch["late"] = torch.zeros(9)
    for operation in (
        lambda: proto[0],
        lambda: proto.select(),
        lambda: proto.repeat(2),
        lambda: proto.split(2),
    ):
        with pytest.raises(DataError, match="late: 9"):
            operation()
    plain = make()
    plain.non_tensor_batch["late"] = np.zeros((4, 2))
    with pytest.raises(DataError, match="object array"):
        plain.check()


def test_select_keeps_all_for_none_and_nothing_for_empty() -> None:
    proto = make()
    assert set(proto.select().batch) == {"x", "m"}
    only = proto.select(batch_keys=["x"], non_tensor_keys=[], meta_keys=[])
    assert set(only.batch) == {"x"} and not only.non_tensor_batch and not only.meta_info
    only.batch["new"] = torch.zeros(4)
    assert "new" not in proto.batch
    for wrong in ({"batch_keys": ["y"]}, {"non_tensor_keys": ["x"]}, {"meta_keys": ["nope"]}):
        with pytest.raises(DataError, match="it has"):
            proto.select(**wrong)


def test_pop_removes_and_returns_and_changes_nothing_when_refused() -> None:
    proto = make()
    with pytest.raises(DataError):
        proto.pop(batch_keys=["x"], non_tensor_keys=["missing"])
    assert xs(proto) == [0, 1, 2, 3]
    taken = proto.pop(batch_keys=["m"], non_tensor_keys=["uid"], meta_keys=["step"])
    assert (
        set(taken.batch) == {"m"}
        and set(taken.non_tensor_batch) == {"uid"}
        and taken.meta_info == {"step": 7}
    )
    assert set(proto.batch) == {"x"} and set(proto.non_tensor_batch) == {"ids"} and not proto.meta_info


def test_union_joins_and_refuses_contradictions() -> None:
    proto = make()
    extra = DataProto.from_dict(
        tensors={"y": torch.ones(4), "x": torch.arange(4)}, meta_info={"step": 7, "b": 1}
    )
    joined = proto.union(extra)
    assert xs(joined) == [0, 1, 2, 3] and "y" in joined.batch and joined.meta_info == {"step": 7, "b": 1}
    assert "y" not in proto.batch
    for wrong in (
        DataProto.from_dict(tensors={"x": torch.arange(4) + 1}),
        DataProto.from_dict(tensors={"y": torch.ones(3)}),
        DataProto.from_dict(non_tensors={"uid": ["a"] * 4}),
        DataProto.from_dict(meta_info={"step": 8}),
        DataProto.from_dict(tensors={"uid": torch.ones(4)}),
    ):
        with pytest.raises(DataError):
            proto.union(wrong)
    assert len(DataProto().union(make())) == 4 and len(make().union(DataProto())) == 4


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 7), n=st.integers(1, 4))
def test_repeat_follows_lists(rows: int, n: int) -> None:
    assert xs(make(rows).repeat(n)) == [i for i in range(rows) for _ in range(n)]
    assert xs(make(rows).repeat(n, interleave=False)) == list(range(rows)) * n


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 12), k=st.integers(1, 6))
def test_cutting_and_joining_give_the_same_rows(rows: int, k: int) -> None:
    proto = make(rows)
    pieces = proto.split(k)
    assert [len(piece) for piece in pieces] == [min(k, rows - start) for start in range(0, rows, k)]
    if pieces:
        assert xs(DataProto.concat(pieces)) == list(range(rows))
    if rows % k == 0:
        equal = proto.chunk(k)
        assert len(equal) == k and {len(piece) for piece in equal} == {rows // k}
        assert xs(DataProto.concat(equal)) == list(range(rows))
    else:
        with pytest.raises(DataError, match="cannot be cut"):
            proto.chunk(k)


def test_concat_refuses_what_does_not_belong_together() -> None:
    assert xs(DataProto.concat([make(2), make(3, offset=5)])) == [0, 1, 5, 6, 7]
    other_meta = make()
    other_meta.meta_info["step"] = 8
    wide = make()
    wide.batch["m"] = torch.zeros(4, 5)
    double = make()
    double.batch["m"] = double.batch["m"].double()
    for wrong in (
        other_meta,
        wide,
        double,
        make().select(batch_keys=["x"]),
        make().select(non_tensor_keys=[]),
    ):
        with pytest.raises(DataError):
            DataProto.concat([make(), wrong])
    with pytest.raises(DataError):
        DataProto.concat([])


def test_reorder_takes_permutations_only() -> None:
    assert xs(make().reorder([2, 0, 3, 1])) == [2, 0, 3, 1]
    assert xs(make().reorder(torch.tensor([3, 2, 1, 0]))) == [3, 2, 1, 0]
    for wrong in ([0, 1, 2], [0, 0, 1, 2], [0, 1, 2, 4], [0, 1, 2, 3, 3]):
        with pytest.raises(DataError):
            make().reorder(wrong)


def test_rename() -> None:
    renamed = make().rename({"x": "y", "uid": "id"})
    assert "y" in renamed.batch and "id" in renamed.non_tensor_batch and "x" not in renamed.batch
    assert set(make().rename({"x": "m", "m": "x"}).batch) == {"m", "x"}
    for wrong in ({"nope": "a"}, {"x": "m"}, {"x": "uid"}):
        with pytest.raises(DataError):
            make().rename(wrong)


def test_to_moves_tensors() -> None:
    moved = make().to("meta")
    assert moved.batch["x"].device.type == "meta" and moved.non_tensor_batch["uid"][0] == "u0"


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2", None])
def test_counts_must_be_whole_and_positive(bad: object) -> None:
    for name in ("repeat", "chunk", "split"):
        with pytest.raises(DataError):
            getattr(make(), name)(bad)


def test_empty_batches_travel_too() -> None:
    none = make()[[]]
    assert len(none) == 0 and none.split(3) == []
    assert [len(part) for part in none.chunk(3)] == [0, 0, 0]
    assert xs(DataProto.concat([none, make(2)])) == [0, 1]


def test_deep_equality() -> None:
    nan = float("nan")
    assert same_value(
        {"a": [1, (2, nan)], "t": torch.tensor([1.0, nan])},
        {"a": [1, (2, nan)], "t": torch.tensor([1.0, nan])},
    )
    assert same_value(np.array([1, 2]), np.array([1, 2]))
    for left, right in (
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.long)),
        (torch.ones(2), [1.0, 1.0]),
        (np.array([1, 2]), np.array([1, 3])),
        ({"a": 1}, {"b": 1}),
        ([1], (1,)),
        ([1, 2], [1]),
    ):
        assert not same_value(left, right)
