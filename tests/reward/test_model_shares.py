"""How waiting responses are shared out: everything once, dearest first, nobody overloaded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verl.reward import RewardSample
from verl.reward.model import MAX_BATCHES, estimated_work, next_share

WORK = st.lists(st.integers(1, 10_000), max_size=60)


@given(WORK, st.integers(1, 6), st.integers(1, 8))
def test_a_piece_is_a_share_of_the_work_in_whole_batches_where_there_is_enough(work, takers, batch_size):
    piece = next_share(work, takers, batch_size)
    assert len(set(piece)) == len(piece) and all(0 <= at < len(work) for at in piece)
    assert bool(piece) == bool(work)
    if not work:
        return
    assert len(piece) <= MAX_BATCHES * batch_size
    assert len(piece) >= min(batch_size, len(work) // takers)
    left = [work[at] for at in set(range(len(work))) - set(piece)]
    assert not left or max(left) <= min(work[at] for at in piece)  # the dearest go first
    if len(piece) > -(-len(work) // takers):  # more than an equal number: then only as much as an equal share
        assert sum(work[at] for at in piece) <= sum(work) / takers


@given(WORK, st.integers(1, 6), st.integers(1, 8))
def test_takers_that_come_one_after_the_other_leave_nothing(work, takers, batch_size):
    waiting, loads = list(work), [0] * takers
    while waiting:
        piece = next_share(waiting, takers, batch_size)
        first_free = loads.index(min(loads))
        loads[first_free] += sum(waiting[at] for at in piece)
        waiting = [value for at, value in enumerate(waiting) if at not in set(piece)]
    assert sum(loads) == sum(work)
    if batch_size == 1 and work:  # nobody ends later than by one response after an equal share
        assert max(loads) <= sum(work) / takers + max(work)


def test_a_longer_conversation_is_more_work_and_more_than_in_proportion():
    def work(characters: int) -> int:
        return estimated_work(RewardSample(0, "", "x" * characters), hidden_size=64)

    assert 0 < work(0) < work(400)
    assert work(80_000) > 2 * work(40_000)
    assert estimated_work(RewardSample(0, "x" * 400, ""), 64) == work(400)
