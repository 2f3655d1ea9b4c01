"""Which tokens the model sees next. A state machine without tensors, clock or randomness.

Every step serves the running sequences, oldest first: one token for each that decodes; what these leave of the token
budget goes to chunks of prompts, started ones before waiting ones. When the cache is full, kept prefixes are given up
first, then the youngest running sequence is preempted: it gives its blocks back, waits at the head of the queue and is
prefilled again later; its tokens are kept, so nothing it generated is lost.

A sequence decodes from the step that drew its first token until it finishes or is preempted: exactly while the runner
has it as a row. (How many tokens remain says nothing: a prompt may be cut one token before its end.)

The oldest running sequence can always continue, so every sequence finishes; a step never has more than
`max_batched_tokens` tokens or `max_sequences` sequences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from verl.rollout.base import RolloutStats
from verl.rollout.native.block_manager import BlockManager, Copy
from verl.rollout.sequence import Sequence, Status


@dataclass
class Chunk:
    """`count` tokens of a prompt from `start`; when they are its last, `samplers` each draw a first token."""

    sequence: Sequence
    start: int
    count: int
    samplers: list[Sequence] = field(default_factory=list)


@dataclass
class Step:
    """What to do now: first the copies, then one pass of the model over chunks and decodes."""

    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(chunk.count for chunk in self.chunks)


@dataclass(eq=False, repr=False)
class Scheduler:
    blocks: BlockManager
    max_sequences: int
    max_batched_tokens: int
    keep_free: int = 0
    """Blocks that stay unused when new sequences start, so that running ones can grow."""
    prefix_in_same_step: bool = True
    """A prompt may share blocks that another prompt fills in the same step (the model writes keys before it reads
    them); otherwise it waits until they are there to be copied."""
    stats: RolloutStats = field(default_factory=RolloutStats)
    """Counts preemptions and prefilled tokens."""
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequences: Iterable[Sequence]) -> None:
        self.waiting.extend(sequences)

    def schedule(self, lookahead: int = 1) -> Step:
        """The next step; decoding sequences get blocks for `lookahead` more tokens. 0: a step of prompts alone, which
        is empty when none can be computed."""
        step = Step()
        served = [sequence for sequence in self.running if lookahead or not sequence.decoding]
        decoding = sum(sequence.decoding for sequence in served)
        spare = self.max_batched_tokens - min(decoding, self.max_batched_tokens)
        budget = self.max_batched_tokens - spare
        for sequence in served:
            if sequence.status is not Status.RUNNING:
                break
            if sequence.decoding:
                budget -= self._serve(sequence, budget, lookahead, step)
            else:
                spare -= self._serve(sequence, spare, lookahead, step)
        if not step.preempted:
            self._admit(spare, step)
        if lookahead and not (step.chunks or step.decodes or step.preempted or self.idle):
            raise RuntimeError(f"the scheduler has nothing to run although sequences are left: {self!r}")
        return step

    def _serve(self, sequence: Sequence, budget: int, lookahead: int, step: Step) -> int:
        """Schedule tokens of one running sequence, preempting the youngest if need be; returns their count."""
        count = min(sequence.remaining, budget)
        if count < 1:
            return 0
        length = sequence.computed + count
        if sequence.decoding and lookahead > 1:
            length = max(min(length + lookahead - 1, sequence.max_length - 1), length)
        while (copies := self.blocks.grow(sequence, length)) is None:
            # The youngest has the least to compute again, and the oldest is never the victim of another: it always
            # finishes, so preemption cannot go in circles.
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is sequence:
                return 0
        step.copies.extend(copies)
        if sequence.decoding:
            step.decodes.append(sequence)
        else:
            self._add_chunk(sequence, count, step)
        return count

    def _add_chunk(self, sequence: Sequence, count: int, step: Step) -> None:
        chunk = Chunk(sequence, sequence.computed, count)
        if self.prefix_in_same_step:
            self.blocks.register(sequence, chunk.start + count)
        if chunk.start + count == sequence.length:
            chunk.samplers = [sequence, *self._start_siblings(sequence)]
        step.chunks.append(chunk)

    def _start_siblings(self, leader: Sequence) -> list[Sequence]:
        """Samples of the same prompt start up to `max_sequences`; the rest wait, first in the queue."""
        most = self.max_sequences - len(self.running)
        started, later = leader.siblings[:most], leader.siblings[most:]
        leader.siblings = []
        for child in started:
            self.blocks.fork(leader, child)
            child.status = Status.RUNNING
            self.running.append(child)
        self.waiting.extendleft(reversed(later))
        return started

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        self.running.remove(sequence)
        # Blocks are recomputed, not copied to the host: released blocks stay findable by content until they are
        # needed, so a sequence that runs again soon finds its prompt there.
        self.blocks.release(sequence)
        sequence.computed = 0
        sequence.decoding = sequence.stale = False
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)
        step.preempted.append(sequence)
        self.stats.preemptions += 1
        for chunk in step.chunks:
            # A sibling that was to start in this very step: it draws its first token when it runs again.
            if sequence in chunk.samplers[1:]:
                chunk.samplers.remove(sequence)

    def preempt_all(self) -> None:
        """Every running sequence waits again, in the same order; the cache may be replaced."""
        for sequence in reversed(self.running.copy()):
            self._preempt(sequence, Step())

    def set_version(self, version: int) -> None:
        """The weights are new. Running sequences, whose lengths must be exact, continue on the keys and values they
        have, which no other sequence may reuse; the next token of each sequence is of this version."""
        self.blocks.invalidate()
        for sequence in self.running:
            sequence.stale = True
        for sequence in self.everything():
            sequence.set_version(version)

    def _admit(self, budget: int, step: Step) -> None:
        fresh: set[tuple[int, ...]] = set()
        passed: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_sequences:
            sequence = self.waiting.popleft()
            opening = tuple(sequence.tokens[: self.blocks.hash_block])
            if not self.prefix_in_same_step and opening in fresh and len(sequence.tokens) > len(opening):
                passed.append(sequence)
                continue
            # Before the blocks are counted: shared blocks cost nothing, and attaching keeps them from being reused.
            self.blocks.attach_prefix(sequence)
            count = min(sequence.remaining, budget)
            reserve = self.keep_free if self.running else 0
            end = sequence.computed + count
            copies = None
            if self.blocks.can_grow(sequence, end, reserve):
                copies = self.blocks.grow(sequence, end)
            if copies is None:
                self.blocks.release(sequence)
                sequence.computed = 0
                self.waiting.appendleft(sequence)
                break
            if sequence.computed == 0:
                fresh.add(opening)
            step.copies.extend(copies)
            sequence.status = Status.RUNNING
            self.running.append(sequence)
            self._add_chunk(sequence, count, step)
            budget -= count
        self.waiting.extendleft(reversed(passed))

    def complete(self, step: Step) -> None:
        """The model has run: everything of the step is in the cache."""
        for chunk in step.chunks:
            chunk.sequence.computed = chunk.start + chunk.count
            self.stats.prefilled_tokens += chunk.count
            self.blocks.register(chunk.sequence, chunk.sequence.computed)
            for sampler in chunk.samplers:
                sampler.computed = chunk.sequence.computed
                sampler.decoding = True
        for sequence in step.decodes:
            sequence.computed += 1

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence, running or waiting."""
        if sequence.status is Status.RUNNING:
            self.finish_all([sequence])
        else:
            self.waiting = deque(other for other in self.waiting if other is not sequence)
            sequence.status = Status.FINISHED

    def finish_all(self, sequences: list[Sequence]) -> None:
        """Remove running sequences and free their blocks, or keep them for the next turn of the conversation."""
        for sequence in sequences:
            if sequence.request.prefix_id is not None and sequence.computed and not sequence.stale:
                self.blocks.keep(sequence)
            else:
                self.blocks.release(sequence)
            sequence.status = Status.FINISHED
        if sequences:
            self.running = [sequence for sequence in self.running if sequence.status is Status.RUNNING]

    def everything(self) -> list[Sequence]:
        """All unfinished sequences, siblings that wait inside their leader included."""
        found: list[Sequence] = []
        for sequence in [*self.running, *self.waiting]:
            found.append(sequence)
            found.extend(sequence.siblings)
        return found

    def compact(self, step: Step) -> None:
        """Move blocks down into gaps, where one block is one sequence, so that running rows are adjacent in memory and
        attention over them is one call."""
        highest = max((s.table[0] for s in self.running), default=-1)
        if 4 * (highest + 1) <= 5 * (len(self.running) + len(self.blocks.kept)):
            return
        if not self.waiting:
            self.blocks.forget_unused()
        for sequence in sorted(self.running, key=lambda s: -s.table[0]):
            copy = self.blocks.move(sequence, 0)
            if copy is not None:
                step.copies.append(copy)

    def __repr__(self) -> str:
        first = [*self.running, *self.waiting][:3]
        return (
            f"Scheduler({len(self.running)} running, {len(self.waiting)} waiting, "
            f"{self.blocks.free} of {self.blocks.num_blocks} blocks free, first {first})"
        )


def graph_batch_size(rows: int, capacity: int) -> int:
    """The batch size to run `rows` rows with: powers of two and three steps between up to 256, then multiples of 32 (of
    64 above 2048 and so on), at most `capacity`.

    A graph is captured when its size is first met: about 50 of them for 1024 rows that end one after the other."""
    if rows <= 8:
        size = max(rows, 1)
    else:
        quarter = max(1 << (rows - 1).bit_length() - 3, 4)
        step = min(quarter, max(quarter // 8, 32))
        size = -(-rows // step) * step
    return min(size, capacity)
