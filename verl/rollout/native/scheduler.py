"""Which tokens the model sees next. A state machine without tensors, clock or randomness.

A sequence waits, then its prompt is computed, in one chunk or several, then it runs: one token a step. Samples of one
prompt wait inside the first of them. A computed prompt keeps its blocks until all of its samples run, and the runner
keeps its last hidden state, so that a sample starts as soon as a row is free, without another pass of the layers.
When rows are free and no sample of a computed prompt waits for them, prompts are computed: as many as the token budget
of a pass allows, whether rows are free for all of their samples or not.

Every step serves the running sequences first. When the cache is full, kept prefixes of conversations are given up, then
computed prompts, the youngest first, then the youngest running sequence: it is preempted, gives its blocks back, waits
at the head of the queue and is prefilled again later; its tokens are kept, so nothing it generated is lost.

Where prompts are computed apart from decoding rows (`prompts_apart`), starting samples interrupts the running ones:
they start together, when they are a sixteenth of those (`_GROUP`) or have waited for `_PATIENCE` steps.

The oldest running sequence can always continue, and where none runs the oldest prompt, so every sequence finishes. A
pass never has more than `max_batched_tokens` tokens, and at most `max_sequences` sequences run.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from verl.rollout.base import RolloutStats
from verl.rollout.native.block_manager import BlockManager, Copy
from verl.rollout.sequence import Sequence, Status

_GROUP = 16
"""Samples start together when they are this part of the running ones."""
_PATIENCE = 4
"""Steps that samples wait for others to start with, at most."""
_ROOM = 4
"""Blocks that stay free for each running sequence, at most, when prompts are computed for which no row is free."""
_GROWTH = 64
"""Tokens for which a running sequence gets blocks at once where the cache has plenty."""


@dataclass
class Chunk:
    """`count` tokens of a prompt from `start`. When they are its last, `samplers` each draw a first token; `kept`: some
    of its samples start later, from the last hidden state of this pass."""

    sequence: Sequence
    start: int
    count: int
    samplers: list[Sequence] = field(default_factory=list)
    kept: bool = False


@dataclass
class Start:
    """`samplers` each draw a first token from what was kept of a prompt computed earlier."""

    prompt: Sequence
    samplers: list[Sequence]


@dataclass
class Step:
    """What to do now: first the copies, then one pass of the model over chunks and decodes. `grown` are the running
    sequences whose tables have changed."""

    chunks: list[Chunk] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    grown: list[Sequence] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


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
    prompts_apart: bool = False
    """Prompts and decoding rows are passes of their own, each within `max_batched_tokens`; and the runner says how far
    running sequences are."""
    stats: RolloutStats = field(default_factory=RolloutStats)
    """Counts preemptions, prompts and their passes and tokens."""
    waiting: deque[Sequence] = field(default_factory=deque)
    prompts: list[Sequence] = field(default_factory=list)
    """Those being computed and those that are, with samples that wait; the oldest first."""
    running: list[Sequence] = field(default_factory=list)
    """Those that decode: exactly while the runner has them as rows."""
    _held: int = 0
    """Steps since samples could have started."""

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.prompts and not self.running

    def add(self, sequences: Iterable[Sequence]) -> None:
        self.waiting.extend(sequences)

    def schedule(self, lookahead: int = 1) -> Step:
        """The next step; running sequences get blocks for `lookahead` more tokens. 0: a step of prompts alone, which is
        empty when none can be computed."""
        step = Step()
        if lookahead:
            self._serve_rows(lookahead, step)
        if not step.preempted and not self._hold(lookahead):
            if self._needs_prompts():
                budget = self.max_batched_tokens - (0 if self.prompts_apart else len(step.decodes))
                self._admit(self._continue_prompts(budget, step), step)
            self._start(step)
        if lookahead and not (step.chunks or step.starts or step.decodes or step.preempted or self.idle):
            raise RuntimeError(f"the scheduler has nothing to run although sequences are left: {self!r}")
        return step

    # Running sequences

    def _serve_rows(self, lookahead: int, step: Step) -> None:
        """Give running sequences the blocks that `lookahead` more tokens need, oldest first."""
        due = self.running[: self.max_batched_tokens]
        size = self.blocks.block_size
        if self.blocks.hash_block == size:
            # Only full blocks are shared: a block that a sequence writes to stays its own.
            due = [sequence for sequence in due if sequence.computed + lookahead > sequence.writable]
        plenty = self.prompts_apart and self.blocks.free * size > 2 * _GROWTH * len(self.running)
        for at, sequence in enumerate(due):
            if sequence.status is not Status.RUNNING:
                break  # the youngest are preempted first: so are all that follow
            wanted = lookahead
            if plenty:
                # Sequences that start together begin with different numbers of blocks: they do not all grow at once.
                wanted = max(_GROWTH if sequence.writable else _GROWTH * (1 + at % 4) // 4, lookahead)
            length = sequence.computed + 1
            length = max(min(length + wanted - 1, sequence.max_length - 1), length)
            copies = self.blocks.grow(sequence, length)
            while copies is None and sequence.status is Status.RUNNING:
                self._free_blocks(step)
                copies = self.blocks.grow(sequence, length) if sequence.status is Status.RUNNING else None
            if copies is not None:
                step.copies += copies
                step.grown.append(sequence)
                if length >= sequence.max_length - 1:
                    sequence.writable = sys.maxsize  # it needs no more
        step.decodes = self.running[: self.max_batched_tokens]

    def _free_blocks(self, step: Step) -> None:
        # The youngest has the least to compute again, and the oldest is never the victim of another: it always
        # finishes, so preemption cannot go in circles.
        if self.prompts:
            self._give_up(self.prompts[-1])
        else:
            self._preempt(self.running[-1], step)

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        self.running.remove(sequence)
        self._wait_again(sequence)
        step.preempted.append(sequence)
        self.stats.preemptions += 1

    def _give_up(self, prompt: Sequence) -> None:
        """A prompt for which no row was free is computed again later."""
        self.prompts.remove(prompt)
        self._wait_again(prompt)

    def _wait_again(self, sequence: Sequence) -> None:
        # Blocks are recomputed, not copied to the host: released blocks stay findable by content until they are
        # needed, so a sequence that runs again soon finds its prompt there.
        self.blocks.release(sequence)
        sequence.computed = 0
        sequence.stale = False
        sequence.prompt_state = None
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)

    # Prompts

    def _hold(self, lookahead: int) -> bool:
        """Whether samples that wait shall go on waiting for others, so that rows are interrupted once for all."""
        if not self.prompts_apart or not self.running:
            return False
        enough = -(-len(self.running) // _GROUP)
        free = self.max_sequences - len(self.running)
        found = 0
        for sequence in chain(self.prompts, self.waiting) if free else ():
            found += 1 + len(sequence.siblings)
            if found >= min(enough, free):
                break
        if not min(found, free):
            self._held = 0
            return True
        self._held += lookahead > 0
        if min(found, free) < enough and self._held <= _PATIENCE:
            return True
        self._held = 0
        return False

    def _needs_prompts(self) -> bool:
        """Whether more rows are free than samples of computed prompts wait."""
        ready = sum(1 + len(prompt.siblings) for prompt in self.prompts if not prompt.remaining)
        return ready < self.max_sequences - len(self.running)

    def _continue_prompts(self, budget: int, step: Step) -> int:
        """Chunks of prompts begun earlier; what is left of the budget, 0 when blocks are missing for a prompt."""
        for prompt in self.prompts.copy():
            if prompt.status is not Status.PROMPT or budget < 1:
                break
            if prompt.remaining:
                count = min(prompt.remaining, budget)
                reserve = self.keep_free if self.running else 0
                while not self.blocks.can_grow(prompt, prompt.computed + count, reserve):
                    # Where no row runs nothing else frees blocks: the older prompt takes them from the younger ones.
                    if self.running or self.prompts[-1] is prompt:
                        return 0
                    self._give_up(self.prompts[-1])
                self._add_chunk(prompt, count, step)
                budget -= count
        return budget

    def _admit(self, budget: int, step: Step) -> None:
        """Begin waiting prompts: all that fit into the budget, also those for whose samples no row is free yet."""
        fresh: set[tuple[int, ...]] = set()
        passed: list[Sequence] = []
        samples = sum(1 + len(prompt.siblings) for prompt in self.prompts)
        while self.waiting and budget > 0:
            ahead = len(self.running) + samples >= self.max_sequences
            sequence = self.waiting.popleft()
            opening = tuple(sequence.tokens[: self.blocks.hash_block])
            if not self.prefix_in_same_step and opening in fresh and len(sequence.tokens) > len(opening):
                passed.append(sequence)
                continue
            # Before the blocks are counted: shared blocks cost nothing, and attaching keeps them from being reused.
            self.blocks.attach_prefix(sequence)
            count = min(sequence.remaining, budget)
            reserve = self.keep_free if self.running or self.prompts else 0
            if ahead:
                growth = self.blocks.blocks_for(sequence.max_length - sequence.length)
                reserve += min(growth, _ROOM) * self.max_sequences
            if not self.blocks.can_grow(sequence, sequence.computed + count, reserve):
                self.blocks.release(sequence)
                sequence.computed = 0
                self.waiting.appendleft(sequence)
                break
            if sequence.computed == 0:
                fresh.add(opening)
            sequence.status = Status.PROMPT
            self.prompts.append(sequence)
            self._add_chunk(sequence, count, step)
            budget -= count
            samples += 1 + len(sequence.siblings)
        self.waiting.extendleft(reversed(passed))

    def _add_chunk(self, sequence: Sequence, count: int, step: Step) -> None:
        """The blocks for it are free."""
        chunk = Chunk(sequence, sequence.computed, count)
        step.copies += self.blocks.grow(sequence, chunk.start + count) or ()
        if self.prefix_in_same_step:
            self.blocks.register(sequence, chunk.start + count)
        step.chunks.append(chunk)

    def _start(self, step: Step) -> None:
        """Samples of computed prompts, and of those that this step computes, take the free rows."""
        ending = {id(c.sequence): c for c in step.chunks if c.start + c.count == c.sequence.length}
        for prompt in self.prompts.copy():
            chunk = ending.get(id(prompt))
            if prompt.remaining and chunk is None:
                continue
            samplers = self._take_rows(prompt)
            if chunk is not None:
                chunk.samplers = samplers
                chunk.kept = prompt.status is Status.PROMPT
            elif samplers:
                step.starts.append(Start(prompt, samplers))

    def _take_rows(self, prompt: Sequence) -> list[Sequence]:
        """As many samples of a prompt as rows are free run now. The prompt's own sample, which has the blocks, is not
        among them until the others are."""
        free = self.max_sequences - len(self.running)
        samplers, prompt.siblings = prompt.siblings[:free], prompt.siblings[free:]
        for child in samplers:
            self.blocks.fork(prompt, child)
        if len(samplers) < free:
            self.prompts.remove(prompt)
            samplers.insert(0, prompt)
        for sampler in samplers:
            sampler.status = Status.RUNNING
            sampler.writable = 0
        self.running += samplers
        return samplers

    def complete(self, step: Step) -> None:
        """The model has run: everything of the step is in the cache."""
        if step.chunks:
            self.stats.prompt_passes += 1
        for chunk in step.chunks:
            chunk.sequence.computed = chunk.start + chunk.count
            self.stats.prefilled_tokens += chunk.count
            self.stats.prompts += bool(chunk.samplers or chunk.kept)
            self.blocks.register(chunk.sequence, chunk.sequence.computed)
            for sampler in chunk.samplers:
                sampler.computed = chunk.sequence.computed
        for start in step.starts:
            for sampler in start.samplers:
                sampler.computed = start.prompt.computed
            if start.prompt.status is Status.RUNNING:
                start.prompt.prompt_state = None
        if not self.prompts_apart:
            for sequence in step.decodes:
                sequence.computed += 1

    # Everything

    def preempt_all(self) -> None:
        """Every sequence waits again, in the same order; the cache may be replaced."""
        for prompt in reversed(self.prompts.copy()):
            self._give_up(prompt)
        for sequence in reversed(self.running.copy()):
            self._preempt(sequence, Step())

    def set_version(self, version: int) -> None:
        """The weights are new. Sequences that run, whose lengths must be exact, and prompts begun continue on the keys
        and values they have, which no other sequence may reuse; what was kept of a computed prompt is of no use. The
        next token of each sequence is of this version."""
        for prompt in reversed(self.prompts.copy()):
            if not prompt.remaining:
                self._give_up(prompt)
        self.blocks.invalidate()
        for sequence in (*self.running, *self.prompts):
            sequence.stale = True
        for sequence in self.everything():
            sequence.set_version(version)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence, running or waiting."""
        self.finish_all([sequence])

    def finish_all(self, sequences: list[Sequence]) -> None:
        """Remove sequences and free their blocks, or keep those of running ones for the next turn of the
        conversation."""
        left = {sequence.status for sequence in sequences}
        for sequence in sequences:
            running = sequence.status is Status.RUNNING
            if (
                running
                and sequence.request.prefix_id is not None
                and sequence.computed
                and not sequence.stale
            ):
                self.blocks.keep(sequence)
            else:
                self.blocks.release(sequence)
            sequence.prompt_state = None
            sequence.status = Status.FINISHED
        if Status.RUNNING in left:
            self.running = [sequence for sequence in self.running if sequence.status is Status.RUNNING]
        if Status.PROMPT in left:
            self.prompts = [sequence for sequence in self.prompts if sequence.status is Status.PROMPT]
        if Status.WAITING in left:
            self.waiting = deque(sequence for sequence in self.waiting if sequence.status is Status.WAITING)

    def everything(self) -> list[Sequence]:
        """All unfinished sequences, siblings that wait inside their leader included."""
        found: list[Sequence] = []
        for sequence in (*self.running, *self.prompts, *self.waiting):
            found.append(sequence)
            found.extend(sequence.siblings)
        return found

    def compact(self, step: Step) -> None:
        """Move blocks down into gaps, where one block is one sequence, so that running rows are adjacent in memory and
        attention over them is one call."""
        held = [*self.running, *self.prompts]
        highest = max((s.table[0] for s in held), default=-1)
        if 4 * (highest + 1) <= 5 * (len(held) + len(self.blocks.kept)):
            return
        if not self.waiting:
            self.blocks.forget_unused()
        for sequence in sorted(held, key=lambda s: -s.table[0]):
            copy = self.blocks.move(sequence, 0)
            if copy is not None:
                step.copies.append(copy)

    def __repr__(self) -> str:
        first = [*self.running, *self.prompts, *self.waiting][:3]
        return (
            f"Scheduler({len(self.running)} running, {len(self.prompts)} prompts, {len(self.waiting)} waiting, "
            f"{self.blocks.free} of {self.blocks.num_blocks} blocks free, first {first})"
        )


def graph_batch_size(rows: int, capacity: int, fine: bool = True) -> int:
    """The batch size to run `rows` rows with: powers of two and three steps between; `fine`: above 256 multiples of 32
    (of 64 above 2048 and so on). At most `capacity`.

    A graph is captured when its size is first met: about 80 of them for 2048 rows that end one after the other, 40
    without `fine`. What a row costs decides which is better, not how often a size was met: rounding errors depend on
    the size, and a resumed run must choose the same."""
    if rows <= 8:
        size = max(rows, 1)
    else:
        quarter = max(1 << (rows - 1).bit_length() - 3, 4)
        step = min(quarter, max(quarter // 8, 32)) if fine else quarter
        size = -(-rows // step) * step
    return min(size, capacity)
