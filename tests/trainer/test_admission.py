"""Admission: whatever finishes when, groups are trained once, in time and without a deadlock."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.trainer.admission import Admission


@dataclass(frozen=True)
class Limits:
    batch: int
    staleness: int
    window: int | None = None
    extra: int | None = None
    """Groups in progress above the batch."""
    sync_every: int = 1

    def admission(self, total: int | None = None) -> Admission:
        limit = None if self.extra is None else self.batch + self.extra
        return Admission(self.batch, self.staleness, window=self.window, total=total, limit=limit)


class Run:
    """Starts, finishes, loses and trains groups named 0, 1, 2... in random order, and checks every batch."""

    def __init__(self, limits: Limits, seed: int, total: int | None = None) -> None:
        self.limits, self.total = limits, total
        self.admission = limits.admission(total)
        self.random = Random(seed)
        self.drawn = itertools.count()
        self.again: list[str] = []  # started before a resume that had no capacity for them
        self.synced = 0
        self.started: dict[str, int] = {}  # not trained: the clock of the weights
        self.running: list[str] = []
        self.batches: list[list[str]] = []
        self.failures = 20

    def train(self, steps: int, *, restart: bool = True) -> None:
        while len(self.batches) < steps:
            events = [self.start, self.finish, self.finish, self.take, self.fail]
            self.random.choice(events + [self.resume] * restart)()

    def start(self) -> None:
        if self.admission.capacity(self.synced):
            group = self.again.pop(0) if self.again else str(next(self.drawn))
            self.admission.start(group, self.synced)
            self.started[group] = self.synced
            self.running.append(group)
        elif not self.running:
            assert self.take(), "a deadlock: nothing runs, nothing may start, and there is no batch"
        extra = self.limits.extra
        assert extra is None or self.admission.in_progress() <= self.limits.batch + extra

    def finish(self) -> None:
        if self.running:
            self.admission.finish(self.running.pop(self.random.randrange(len(self.running))))

    def fail(self) -> None:
        if self.started and self.failures:
            self.failures -= 1
            group = self.random.choice(list(self.started))
            self.admission.fail(group)
            self.running = [*(other for other in self.running if other != group), group]

    def take(self) -> bool:
        clock = len(self.batches)
        awaited = self.admission.waiting_for(clock)
        batch = self.admission.take(clock)
        if batch is None:
            assert set(awaited) <= set(self.running)
            return False
        assert not awaited and len(batch) == self.limits.batch
        assert not set(batch) & set(self.running)
        assert batch == [group for group in self.started if group in batch]
        for group in batch:
            assert clock - self.started.pop(group) <= self.limits.staleness
        self.batches.append(batch)
        if len(self.batches) % self.limits.sync_every == 0:
            self.synced = len(self.batches)
        return True

    def resume(self, limits: Limits | None = None) -> None:
        state = json.loads(json.dumps(self.admission.state_dict()))
        self.limits = limits or self.limits
        self.admission = self.limits.admission(self.total)
        self.admission.load_state_dict(state)
        kept = self.admission.groups()
        assert kept == list(self.started)[: len(kept) if limits else None]
        self.again = list(self.started)[len(kept) :] + self.again
        self.running = self.admission.unfinished()
        self.synced = len(self.batches)
        # What is generated again has the age of the weights that do so, but is not trained later than before.
        kept_starts = {group: self.started[group] for group in kept}
        if limits is not None:
            kept_starts |= dict.fromkeys(self.running, self.synced)
        self.started = kept_starts

    @property
    def trained(self) -> list[int]:
        return [int(group) for batch in self.batches for group in batch]


@st.composite
def all_limits(draw: st.DrawFn) -> Limits:
    staleness = draw(st.integers(0, 3))
    return Limits(
        batch=draw(st.integers(1, 3)),
        staleness=staleness,
        window=draw(st.sampled_from([None, 1, 2, 5])),
        extra=draw(st.sampled_from([None, 0, 1, 4])),
        sync_every=draw(st.integers(1, staleness + 1)),
    )


seeds = st.integers(0, 2**32 - 1)


@settings(deadline=None, max_examples=150)
@given(all_limits(), st.integers(1, 8), seeds)
def test_every_group_is_trained_once_and_in_time(limits: Limits, steps: int, seed: int) -> None:
    run = Run(limits, seed, total=steps * limits.batch)
    run.train(steps)
    assert sorted(run.trained) == list(range(steps * limits.batch))
    assert run.admission.in_progress() == 0


@settings(deadline=None, max_examples=50)
@given(all_limits(), seeds)
def test_a_window_of_one_trains_in_the_order_of_start(limits: Limits, seed: int) -> None:
    run = Run(replace(limits, window=1), seed, total=6 * limits.batch)
    run.train(6)
    assert run.trained == list(range(6 * limits.batch))


@settings(deadline=None, max_examples=50)
@given(all_limits(), seeds)
def test_staleness_zero_trains_the_batches_of_a_synchronous_run(limits: Limits, seed: int) -> None:
    run = Run(replace(limits, staleness=0, sync_every=1), seed, total=6 * limits.batch)
    run.train(6)
    assert run.trained == list(range(6 * limits.batch))


@settings(deadline=None, max_examples=100)
@given(all_limits(), all_limits(), seeds)
def test_resuming_with_other_limits_keeps_the_new_ones(before: Limits, after: Limits, seed: int) -> None:
    run = Run(before, seed)
    run.train(4, restart=False)
    run.resume(after)
    run.train(10)
    assert len(set(run.trained)) == len(run.trained)


def brute_force(groups: list[tuple[int, bool]], limits: Limits, clock: int) -> list[int] | None:
    """The oldest of all batches that the window allows and that leave every other group a batch in time."""
    for batch in itertools.combinations(range(len(groups)), limits.batch):
        left = list(range(len(groups)))
        allowed = True
        for group in batch:
            allowed &= groups[group][1] and group in left[: limits.window]
            left.remove(group)
        latest = sorted(groups[group][0] + limits.staleness for group in left)
        if allowed and all(clock + 1 + i // limits.batch <= last for i, last in enumerate(latest)):
            return list(batch)
    return None


@settings(deadline=None, max_examples=150)
@given(all_limits(), st.integers(0, 4), seeds)
def test_take_gives_the_oldest_batch_there_can_be(limits: Limits, steps: int, seed: int) -> None:
    run = Run(limits, seed)
    run.train(steps)
    for _ in range(20):
        run.random.choice([run.start, run.finish])()
        if len(run.batches) > steps:
            break
        clock = len(run.batches)
        names = list(run.started)
        groups = [(run.started[name], name not in run.running) for name in names]
        probe = limits.admission()
        probe.load_state_dict(run.admission.state_dict())
        best = brute_force(groups, limits, clock)
        assert probe.take(clock) == (None if best is None else [names[group] for group in best])


def test_take_waits_for_a_slow_group_only_when_it_must() -> None:
    admission = Admission(1, 2)
    for group in "abc":
        admission.start(group, 0)
    assert admission.capacity(0) == 0 and admission.take(0) is None
    admission.finish("b")
    assert admission.take(0) == ["b"]
    admission.start("d", 1)
    admission.finish("d")
    # 'a' and 'c' must be trained at clock 2 at the latest and a batch is one group: 'd' cannot come before both.
    assert admission.take(1) is None and admission.waiting_for(1) == ["a", "c"]
    admission.finish("c")
    assert admission.take(1) == ["c"] and admission.take(2) is None and admission.waiting_for(2) == ["a"]
    admission.finish("a")
    assert admission.take(2) == ["a"]


def test_the_window_moves_on_with_each_pick() -> None:
    admission = Admission(2, 3, window=2)
    for group in "abcd":
        admission.start(group, 0)
    admission.finish("b")
    admission.finish("d")
    assert admission.take(0) is None and admission.waiting_for(0) == ["a", "c"]
    admission.finish("c")
    assert admission.take(0) == ["b", "c"]


def test_a_failed_group_keeps_its_place() -> None:
    admission = Admission(2, 1)
    for group in "abcd":
        admission.start(group, 0)
        admission.finish(group)
    admission.fail("a")
    assert admission.unfinished() == ["a"]
    assert admission.take(0) == ["b", "c"] and admission.take(1) is None
    admission.finish("a")
    assert admission.take(1) == ["a", "d"]


def test_what_the_caller_may_not_do() -> None:
    admission = Admission(1, 0, total=1)
    admission.start("a", 0)
    with pytest.raises(ValueError, match="started before"):
        admission.start("a", 0)
    with pytest.raises(ValueError, match="no capacity"):
        admission.start("b", 0)
    with pytest.raises(ValueError, match="the clock cannot be 1"):
        admission.take(1)
    with pytest.raises(KeyError):
        admission.finish("b")
