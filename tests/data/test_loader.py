"""The loader: what an epoch visits, and that stopping anywhere changes nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data.loader import EpochOrder, Loader, MixturePart
from verl.data.proto import DataProto
from verl.errors import CheckpointError, DataError


class Numbers:
    """A dataset of numbers; its files have every third row left out."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def row_number(self, position: int) -> int:
        return position * 3

    def batch(self, positions: Sequence[int], uids: Sequence[str]) -> DataProto:
        return DataProto.from_dict(non_tensors={"n": list(positions), "uid": list(uids)})


def loader(
    size: int = 10, batch: int = 3, workers: int = 0, drop_last: bool = True, **order: object
) -> Loader:
    numbers = Numbers(size)
    return Loader(numbers, batch, order=EpochOrder(size, **order), drop_last=drop_last, num_workers=workers)  # type: ignore[arg-type]


def epochs(source: Loader, count: int) -> list[tuple[list[int], list[str]]]:
    """Every batch of the next epochs: numbers and uids."""
    out = []
    for _ in range(count):
        for batch in source:
            out.append((batch.non_tensor_batch["n"].tolist(), batch.non_tensor_batch["uid"].tolist()))
    return out


def test_each_epoch_is_another_shuffle_of_the_same_rows() -> None:
    source = loader(batch=5, seed=1)
    first, second = epochs(source, 1), epochs(source, 1)
    flat = [[n for numbers, _ in part for n in numbers] for part in (first, second)]
    assert sorted(flat[0]) == sorted(flat[1]) == list(range(10)) and flat[0] != flat[1]
    assert epochs(loader(batch=5, seed=1), 2) == first + second
    assert epochs(loader(batch=5, seed=2), 1) != first
    assert first[0][1] == [f"0-{n * 3}" for n in first[0][0]] and second[0][1][0].startswith("1-")


def test_unshuffled_order_and_last_batch() -> None:
    assert [n for n, _ in epochs(loader(shuffle=False), 1)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    whole = loader(shuffle=False, drop_last=False)
    assert [n for n, _ in epochs(whole, 1)][-1] == [9] and len(whole) == 4 and len(loader()) == 3


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("kind", ["shuffled", "mixture"])
def test_resume_at_every_position_equals_an_uninterrupted_pass(
    workers: int, drop_last: bool, kind: str
) -> None:
    parts = [MixturePart("a", 3.0, np.arange(2)), MixturePart("b", 1.0, np.arange(2, 10))]
    order = {"seed": 5, "mixture": parts if kind == "mixture" else None}
    whole = epochs(loader(drop_last=drop_last, **order), 3)
    per_epoch = len(whole) // 3
    for stop in range(len(whole) + 1):
        begun = loader(workers=workers, drop_last=drop_last, **order)
        head = []
        while len(head) < stop:
            for batch in begun:
                head.append((batch.non_tensor_batch["n"].tolist(), batch.non_tensor_batch["uid"].tolist()))
                if len(head) == stop:
                    break
        state = json.loads(json.dumps(begun.state_dict()))
        again = loader(workers=workers, drop_last=drop_last, **order)
        again.load_state_dict(state)
        assert (again.epoch, again.remaining) == (stop // per_epoch, per_epoch - stop % per_epoch)
        assert again.last_epoch == begun.last_epoch == max(stop - 1, 0) // per_epoch
        tail = epochs(again, 3 - stop // per_epoch)
        assert head == whole[:stop] and tail == whole[stop:]


def test_the_state_counts_batches_handed_out_not_those_prepared() -> None:
    source = loader(workers=3, seed=1)
    running = iter(source)
    next(running)
    state = source.state_dict()
    assert (state["epoch"], state["position"], state["rows"]) == (0, 3, 10)
    running.close()  # type: ignore[attr-defined]


def test_another_batch_size_goes_on_at_the_same_row() -> None:
    first = loader(batch=4, seed=1)
    next(iter(first))
    other = loader(batch=2, seed=1)
    other.load_state_dict(first.state_dict())
    whole = [n for numbers, _ in epochs(loader(batch=2, seed=1), 1) for n in numbers]
    assert [n for numbers, _ in epochs(other, 1) for n in numbers] == whole[4:]
    nothing_left = loader(batch=7, seed=1)
    nothing_left.load_state_dict({"epoch": 0, "position": 8, "rows": 10})
    assert (nothing_left.epoch, nothing_left.position) == (1, 0)


def test_another_order_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    first = loader(seed=1)
    next(iter(first))
    loader(seed=1).load_state_dict(first.state_dict())
    assert not caplog.text
    loader(seed=2).load_state_dict(first.state_dict())
    assert "another order" in caplog.text


def test_errors_name_the_value_that_works() -> None:
    with pytest.raises(DataError, match=r"data.train_batch_size=11 .*at most 10"):
        loader(batch=11)
    with pytest.raises(DataError, match="at most 10"):
        loader(batch=11, drop_last=False)
    with pytest.raises(DataError, match="no rows"):
        loader(size=0)


@pytest.mark.parametrize(
    "state",
    [
        {"epoch": 0, "position": 0, "rows": 9},
        {"epoch": 0, "position": 11, "rows": 10},
        {"epoch": -1, "position": 0, "rows": 10},
        {"epoch": 0},
        {"epoch": "x", "position": 0, "rows": 10},
    ],
)
def test_states_of_other_data_are_refused(state: dict) -> None:
    source = loader()
    with pytest.raises(CheckpointError):
        source.load_state_dict(state)
    assert (source.epoch, source.position) == (0, 0)


def test_an_error_in_a_worker_reaches_the_caller() -> None:
    class Broken(Numbers):
        def batch(self, positions: Sequence[int], uids: Sequence[str]) -> DataProto:
            if 4 in positions:
                raise DataError("row 4 is bad")
            return super().batch(positions, uids)

    source = Loader(Broken(10), 2, num_workers=2)
    seen = []
    with pytest.raises(DataError, match="row 4 is bad"):
        for batch in source:
            seen.append(batch.non_tensor_batch["n"].tolist())
    assert seen == [[0, 1], [2, 3]] and source.position == 4


def test_easiest_first_with_ties_shuffled() -> None:
    levels = np.array([2.0, 1.0, 2.0, 1.0, 0.0, 1.0])
    orders = {tuple(EpochOrder(6, seed=s, difficulty=levels).positions(0).tolist()) for s in range(20)}
    assert all(sorted(levels[list(o)]) == levels[list(o)].tolist() for o in orders) and len(orders) > 3
    assert EpochOrder(6, shuffle=False, difficulty=levels).positions(3).tolist() == [4, 1, 3, 5, 0, 2]


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    seed=st.integers(0, 9),
)
def test_mixtures_hold_their_shares_and_treat_rows_equally(
    sizes: list[int], weights: list[float], seed: int
) -> None:
    starts = np.cumsum([0, *sizes])
    parts = [MixturePart(str(k), weights[k], np.arange(starts[k], starts[k + 1])) for k in range(len(sizes))]
    order = EpochOrder(40, seed=seed, mixture=parts)
    shares = np.array(weights[: len(sizes)]) / sum(weights[: len(sizes)])
    drawn = np.concatenate([order.positions(epoch) for epoch in range(3)])
    for k, part in enumerate(parts):
        inside = np.isin(drawn[:40], part.positions)
        behind = np.cumsum(inside) - shares[k] * np.arange(1, 41)
        assert np.abs(behind).max() < len(parts)  # every beginning of an epoch has the share
        counts = Counter(drawn[np.isin(drawn, part.positions)].tolist())
        visits = [counts[int(p)] for p in part.positions]
        assert max(visits) - min(visits) <= 1


def test_mixtures_that_cannot_be_drawn_from() -> None:
    with pytest.raises(DataError, match="'empty' has no usable rows"):
        EpochOrder(2, mixture=[MixturePart("empty", 1.0, np.arange(0))])


def test_restarting_gives_the_same_draws_by_the_same_names() -> None:
    numbers = loader(10, 3, drop_last=False, shuffle=True, seed=5)
    first = [(list(b.non_tensor_batch["n"]), list(b.non_tensor_batch["uid"])) for b in numbers]
    assert numbers.epoch == 1
    next(iter(numbers))
    numbers.restart()
    assert [(list(b.non_tensor_batch["n"]), list(b.non_tensor_batch["uid"])) for b in numbers] == first
