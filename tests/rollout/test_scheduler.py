"""The scheduler and the block manager driven through random arrivals, aborts and cache sizes.

A model of the cache checks what bookkeeping alone cannot: every place that is read was written by the same
tokens, and nothing is written while another table holds it.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import check_blocks

from verl.rollout.base import Request, SamplingParams
from verl.rollout.native.block_manager import BlockManager
from verl.rollout.native.scheduler import Scheduler, Step
from verl.rollout.sequence import Sequence, Status, sequences_of


class FakeCache:
    """For each slot the tokens up to and including it, and the version of the weights: what its key depends on."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.version = 0
        self.slots: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}

    def run(self, step: Step) -> list[Sequence]:
        size = self.blocks.block_size
        for copy in step.copies:
            for offset in range(copy.tokens):
                self.slots[copy.target, offset] = self.slots[copy.source, offset]
        writes: dict[tuple[int, int], Sequence] = {}
        spans = [(c.sequence, c.start, c.count) for c in step.chunks]
        spans += [(s, s.computed, 1) for s in step.decodes]
        for sequence, start, count in spans:
            for position in range(start, start + count):
                place = (sequence.table[position // size], position % size)
                others = [s for s in self.before.get(place[0], []) if s is not sequence]
                assert not any(place[0] in s.table for s in others), "written while shared"
                assert place not in writes, "written twice in one step"
                writes[place] = sequence
                self.slots[place] = tuple(sequence.tokens[: position + 1]), self.version
        for chunk in step.chunks:
            if chunk.kept:
                chunk.sequence.prompt_state = tuple(chunk.sequence.tokens), self.version
        for start in step.starts:
            for sampler in start.samplers:
                assert start.prompt.prompt_state == (tuple(sampler.tokens), self.version), "not its prompt"
        samplers = [s for part in (*step.chunks, *step.starts) for s in part.samplers] + step.decodes
        for sequence, start, count in spans:
            for position in range(start + count):
                place = (sequence.table[position // size], position % size)
                tokens, version = self.slots[place]
                assert tokens == tuple(sequence.tokens[: position + 1]), "another sequence's keys"
                assert sequence.stale or version == self.version, "keys of old weights"
        return samplers

    def look(self, running: list[Sequence]) -> None:
        """Note whose table has which block before a step is scheduled: those may rely on the content."""
        self.before: dict[int, list[Sequence]] = {}
        for sequence in [*running, *(s for kept in self.blocks.kept.values() for s in kept)]:
            for block in sequence.table:
                self.before.setdefault(block, []).append(sequence)


def next_token(sequence: Sequence) -> int:
    """A draw that depends on the sequence alone; few values, so that contents coincide."""
    return hash((sequence.key, len(sequence.tokens))) % 3


@pytest.mark.slow(seconds=2)
@settings(max_examples=250, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    small_blocks=st.booleans(),
    apart=st.booleans(),
    lookahead=st.sampled_from([1, 1, 3]),
    cache_sequences=st.integers(1, 6),
    max_sequences=st.sampled_from([1, 2, 3, 5, 8, 24]),
    budget=st.integers(1, 40),
    keep_free=st.integers(0, 2),
)
def test_every_request_finishes_once_and_no_block_is_lost(
    seed: int,
    small_blocks: bool,
    apart: bool,
    lookahead: int,
    cache_sequences: int,
    max_sequences: int,
    budget: int,
    keep_free: int,
) -> None:
    rng = random.Random(seed)
    longest = 32
    size = 4 if small_blocks else longest
    blocks = BlockManager(cache_sequences * longest // size, size, hash_block=4)
    apart = apart and small_blocks
    if apart:
        max_sequences = min(max_sequences, budget)
    scheduler = Scheduler(blocks, max_sequences, budget, keep_free, small_blocks, prompts_apart=apart)
    cache = FakeCache(blocks)
    finished: dict[tuple[str, int], int] = {}
    requests = []
    for index in range(rng.randint(1, 12)):
        prompt = [0, 1, 2, 0, 1, 2, 0, 1][: rng.randint(0, 8)] + [
            rng.randint(0, 1) for _ in range(rng.randint(1, 8))
        ]
        n = rng.randint(1, 4)
        partial = (
            tuple([rng.randint(0, 2)] * rng.randint(0, 3) for _ in range(n)) if rng.random() < 0.2 else ()
        )
        sampling = SamplingParams(max_tokens=rng.randint(4, longest - len(prompt)))
        requests.append(Request(f"q{index}", prompt, sampling, n=n, seed=seed, partial=partial))
    expected = {(r.request_id, i) for r in requests for i in range(r.n)}
    requests = [replace(r, prefix_id=rng.choice([None, "x", "y"])) for r in requests]
    pending = list(requests)
    for _ in range(5000):
        while pending and (rng.random() < 0.3 or scheduler.idle):
            request = pending.pop()
            scheduler.add(sequences_of(request))
        if scheduler.idle:
            break
        if rng.random() < 0.03:
            victim = rng.choice(scheduler.everything()).request.request_id
            for sequence in scheduler.everything():
                if sequence.request.request_id == victim:
                    sequence.siblings = []
                    scheduler.finish(sequence)
                    key = (victim, sequence.sample)
                    finished[key] = finished.get(key, 0) + 1
            continue
        if rng.random() < 0.03:
            cache.version += 1
            scheduler.set_version(cache.version)
        if rng.random() < 0.03:
            blocks.release_kept(["x"])
        cache.look([*scheduler.running, *scheduler.prompts])
        step = scheduler.schedule(lookahead)
        if not small_blocks:
            scheduler.compact(step)
        tokens = step.prompt_tokens + len(step.decodes)
        assert (step.prompt_tokens if apart else tokens) <= budget and len(scheduler.running) <= max_sequences
        assert tokens or step.starts, "a step without work would hang"
        samplers = cache.run(step)
        assert len({id(s) for s in samplers}) == len(samplers)
        scheduler.complete(step)
        for sequence in step.decodes if apart else ():
            sequence.computed += 1
        ended = []
        for sequence in samplers:
            assert sequence.status is Status.RUNNING
            sequence.tokens.append(next_token(sequence))
            if len(sequence.tokens) >= sequence.max_length or rng.random() < 0.03:
                ended.append(sequence)
                key = (sequence.request.request_id, sequence.sample)
                finished[key] = finished.get(key, 0) + 1
                if sequence.request.prefix_id and len(sequence.tokens) < longest - 4 and rng.random() < 0.5:
                    name, prompt = f"{key}+", [*sequence.tokens, rng.randint(0, 2)]
                    sampling = SamplingParams(max_tokens=longest - len(prompt))
                    pending.append(Request(name, prompt, sampling, prefix_id=sequence.request.prefix_id))
                    expected.add((name, 0))
        scheduler.finish_all(ended)
        check_blocks(blocks, scheduler.everything())
    assert scheduler.idle and not pending
    assert finished == dict.fromkeys(expected, 1)
    blocks.release_kept(["x", "y"])
    assert blocks.free == blocks.num_blocks


def drive(scheduler: Scheduler, steps: int = 200) -> list[Step]:
    """Run until idle, every sequence to its full length."""
    made = []
    while not scheduler.idle and len(made) < steps:
        step = scheduler.schedule()
        scheduler.complete(step)
        made.append(step)
        ended = []
        for sequence in [*(s for part in (*step.chunks, *step.starts) for s in part.samplers), *step.decodes]:
            sequence.tokens.append(7)
            if len(sequence.tokens) >= sequence.max_length:
                ended.append(sequence)
        scheduler.finish_all(ended)
    assert scheduler.idle
    return made


def test_a_group_computes_its_prompt_once() -> None:
    blocks = BlockManager(64, 4)
    scheduler = Scheduler(blocks, 16, 100)
    scheduler.add(sequences_of(Request("a", list(range(10)), SamplingParams(max_tokens=3), n=8)))
    steps = drive(scheduler)
    assert sum(chunk.count for step in steps for chunk in step.chunks) == 10
    assert len(steps[0].chunks[0].samplers) == 8
    # The prompt ends inside a block: seven of eight samples copy it, the last one keeps it.
    assert sum(len(step.copies) for step in steps) == 7
    assert all(copy.tokens == 2 for step in steps for copy in step.copies)


@pytest.mark.parametrize("whole_pages", [False, True])
def test_a_common_opening_is_computed_once(whole_pages: bool) -> None:
    blocks = BlockManager(32, 32 if whole_pages else 4, hash_block=4)
    scheduler = Scheduler(blocks, 16, 100, prefix_in_same_step=not whole_pages)
    system = list(range(100, 112))
    for index in range(5):
        request = Request(str(index), [*system, index, index], SamplingParams(max_tokens=2))
        scheduler.add(sequences_of(request))
    steps = drive(scheduler)
    assert sum(chunk.count for step in steps for chunk in step.chunks) == 12 + 5 * 2


def test_prompts_are_cut_to_the_budget_beside_running_decodes() -> None:
    scheduler = Scheduler(BlockManager(100, 4), 16, 8)
    scheduler.add(sequences_of(Request("short", [1, 2], SamplingParams(max_tokens=12))))
    first = scheduler.schedule()
    scheduler.complete(first)
    scheduler.running[0].tokens.append(5)
    scheduler.add(sequences_of(Request("long", list(range(30)), SamplingParams(max_tokens=2))))
    steps = drive(scheduler)
    mixed = [step for step in steps if step.chunks and step.decodes]
    assert [step.chunks[0].count for step in mixed] == [7, 7, 7, 7, 2]
    assert all(step.prompt_tokens + len(step.decodes) <= 8 for step in steps)


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    scheduler = Scheduler(BlockManager(5, 4), 8, 64)
    for index, name in enumerate("abc"):
        scheduler.add(sequences_of(Request(name, [index] * 4, SamplingParams(max_tokens=9))))
    steps = drive(scheduler)
    preempted = [s.request.request_id for step in steps for s in step.preempted]
    assert preempted[0] == "c" and "a" not in preempted
    assert scheduler.stats.preemptions == len(preempted) > 0


def test_a_scheduler_that_can_run_nothing_raises_instead_of_being_asked_for_ever() -> None:
    scheduler = Scheduler(BlockManager(2, 4), 8, 64)
    scheduler.add(sequences_of(Request("large", [1] * 9, SamplingParams(max_tokens=4))))
    with pytest.raises(
        RuntimeError, match="nothing to run.*0 prompts, 1 waiting, 2 of 2 blocks free.*'large'"
    ):
        scheduler.schedule()
    assert not scheduler.schedule(lookahead=0).chunks, "a step of prompts alone may be empty"
