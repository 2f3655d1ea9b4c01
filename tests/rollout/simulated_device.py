"""The device path without tensors: the runner's real loop and bookkeeping over a simulated device.

The device knows only what it was sent (tables, rows); every key it reads is compared with the tokens it should have
been computed from, every token is computed once, and nothing but a row decodes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from verl.rollout.base import Request, Response, RolloutStats
from verl.rollout.native import Limits
from verl.rollout.native.block_manager import BlockManager, Copy
from verl.rollout.native.device_runner import DeviceRunner
from verl.rollout.native.scheduler import Chunk, Scheduler, Start
from verl.rollout.sampling import Kinds, mix, sequence_key
from verl.rollout.sequence import Sequence, Stopper, sequences_of

EOS = 0
VOCABULARY = 12


def draw(key: int, produced: int) -> int:
    return mix(key + produced) % VOCABULARY


def expected(request: Request, sample: int) -> tuple[list[int], str]:
    """What must come out, by definition: draws until the end token or the longest response."""
    key = sequence_key(request.seed, request.request_id, sample)
    tokens: list[int] = []
    for produced in range(request.sampling.max_tokens):
        tokens.append(draw(key, produced))
        if tokens[-1] == EOS and not request.sampling.ignore_eos:
            return tokens, "stop"
    return tokens, "length"


class SimulatedState:
    """Stands for `DeviceState`: a list entry per row, a list of drawn tokens per slot."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: list[dict[str, Any]] = []
        self.slots: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}

    def fill(
        self, start: int, sequences: list[Sequence], stops: list[frozenset[int]], slots: list[int]
    ) -> None:
        assert start == len(self.rows)
        for sequence, stop_ids, slot in zip(sequences, stops, slots, strict=True):
            self.slots[slot] = []
            self.rows.append(
                {
                    "active": 1,
                    "slot": slot,
                    "stops": stop_ids,
                    "key": sequence.key,
                    "produced": sequence.produced,
                    "tokens": list(sequence.tokens),
                    "longest": sequence.max_length,
                    "table": [],
                }
            )

    def set_tables(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.tables[sequence.slot] = list(sequence.table)

    def send_tables(self, slots: np.ndarray, used: int) -> None:
        for row, slot in zip(self.rows, slots.tolist(), strict=True):
            row["table"] = self.tables[slot]

    def keep(self, kept: np.ndarray) -> None:
        self.rows = [self.rows[place] for place in kept]

    def poll(self, rows: int) -> Any:
        progress = [(row["active"], len(self.slots[row["slot"]])) for row in self.rows[:rows]]

        class Poll:
            def read(self) -> tuple[np.ndarray, np.ndarray]:
                active, made = np.array(progress).T
                return active, made

        return Poll()

    def fetch(
        self, slots: list[int], starts: list[int], counts: list[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        spans = list(zip(slots, starts, counts, strict=True))
        tokens = [self.slots[slot][start : start + count] for slot, start, count in spans]
        assert [len(part) for part in tokens] == counts
        return tokens, [[-1.0] * count for count in counts]


class SimulatedRunner(DeviceRunner):
    """`DeviceRunner` with the model and the tensors left out."""

    def __init__(self, stopper: Stopper, kinds: Kinds, capacity: int, block_size: int) -> None:
        self.stopper, self.kinds = stopper, kinds
        self.state: Any = SimulatedState(capacity)
        self.state.send = None
        self.cache: Any = self
        self.block_size = block_size
        self.use_graphs = self.wide = False
        self.graph_error = None
        self._empty_rows()
        self.places: dict[tuple[int, int], tuple[int, ...]] = {}
        """(block, offset) -> the tokens its keys were computed from."""
        self.computed: dict[int, int] = {}
        """For each sequence with blocks, by id: how many of its tokens have been computed."""
        self.decode_calls: list[tuple[int, int]] = []
        """(rows, steps) of every burst of decode steps."""
        self.joins: list[int] = []
        """Rows that started together."""
        self.polls = 0
        self.stats = RolloutStats()
        self.given_up = 0
        """Computed prompts, or prompts begun, that lost their blocks."""

    def copy(self, copies: list[Copy], send: Any = None) -> None:
        for copy in copies:
            for offset in range(copy.tokens):
                self.places[copy.target, offset] = self.places[copy.source, offset]

    def _compute(self, tokens: list[int], table: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            place = (table[position // self.block_size], position % self.block_size)
            self.places[place] = tuple(tokens[: position + 1])
        for position in range(end):
            place = (table[position // self.block_size], position % self.block_size)
            assert self.places[place] == tuple(tokens[: position + 1]), "keys of other tokens were read"

    def prefill(self, chunks: list[Chunk], starts: list[Start]) -> None:
        samplers: list[Sequence] = []
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            assert all(row is not sequence for row in self.rows), "a row is computed as a prompt"
            before = self.computed.get(id(sequence), chunk.start)
            assert before == chunk.start, "computed twice, or not at all"
            self._compute(sequence.tokens, sequence.table, chunk.start, end)
            self.computed[id(sequence)] = end
            assert bool(chunk.samplers or chunk.kept) == (end == len(sequence.tokens))
            if chunk.kept:
                sequence.prompt_state = tuple(sequence.tokens)
            samplers += chunk.samplers
            self.computed.update((id(sampler), end) for sampler in chunk.samplers)
        for start in starts:
            tokens = start.prompt.prompt_state
            for sampler in start.samplers:
                assert tokens == tuple(sampler.tokens), "it starts from another prompt"
                self._compute(sampler.tokens, sampler.table, len(tokens), len(tokens))
                self.computed[id(sampler)] = len(tokens)
            samplers += start.samplers
        if samplers:
            self.joins.append(len(samplers))
            self._join(samplers, None)  # type: ignore[arg-type]

    def _draw(self, logits: Any, start: int, end: int) -> None:
        for row in self.state.rows[start:end]:
            if not row["active"]:
                continue
            token = draw(row["key"], row["produced"])
            row["produced"] += 1
            row["tokens"].append(token)
            self.state.slots[row["slot"]].append(token)
            row["active"] = int(token not in row["stops"] and len(row["tokens"]) < row["longest"])

    def _send_tables(self, used: int) -> None:
        self.decode_calls.append((len(self.rows), self._steps))
        super()._send_tables(used)

    def decode_step(self, size: int) -> None:
        for row, state in zip(self.rows, self.state.rows, strict=True):
            if state["active"]:
                position = self.computed[id(row)]
                assert position == len(state["tokens"]) - 1
                self._compute(state["tokens"], state["table"], position, position + 1)
                self.computed[id(row)] = position + 1
        self._draw(None, 0, len(self.rows))

    def evict(self, sequences: list[Sequence]) -> Any:
        ended = super().evict(sequences)
        for sequence in sequences:
            self.computed.pop(id(sequence), None)
        return ended

    def poll_finished(self) -> Any:
        self.polls += 1
        return super().poll_finished()


def check_blocks(blocks: BlockManager, sequences: list[Sequence]) -> None:
    """Every block is counted once for each table that lists it, and is free when none does."""
    kept = [sequence for same in blocks.kept.values() for sequence in same]
    counts = Counter(block for sequence in [*sequences, *kept] for block in sequence.table)
    assert blocks.count == [counts[block] for block in range(blocks.num_blocks)]
    assert blocks.free == blocks.count.count(0)


def run(
    requests: list[Request],
    limits: Limits,
    blocks: int,
    block_size: int = 4,
    most_polls: int = 5000,
) -> tuple[dict[tuple[str, int], Response], SimulatedRunner]:
    """The responses of the device runner's loop; fails when it takes more than `most_polls` polls."""
    rows = min(limits.max_num_seqs or limits.max_num_batched_tokens, limits.max_num_batched_tokens)
    manager = BlockManager(blocks, block_size)
    scheduler = Scheduler(manager, rows, limits.max_num_batched_tokens, blocks // 100, prompts_apart=True)
    kinds = Kinds.of([request.sampling for request in requests])
    runner = SimulatedRunner(Stopper(None, frozenset({EOS})), kinds, rows, block_size)
    give_up = scheduler._give_up

    def noting(prompt: Sequence) -> None:
        runner.given_up += 1
        runner.computed.pop(id(prompt), None)
        give_up(prompt)

    scheduler._give_up = noting  # type: ignore[method-assign]
    for request in sorted(requests, key=lambda r: len(r.prompt_ids)):
        scheduler.add(sequences_of(request))
    found: dict[tuple[str, int], Response] = {}
    while not scheduler.idle:
        assert runner.polls < most_polls, "the loop does not end"
        runner.run(scheduler, runner.schedule(scheduler))
        for sequence, reason in runner.finished(scheduler):
            key = (sequence.request.request_id, sequence.sample)
            assert key not in found, "answered twice"
            found[key] = sequence.response(reason)
    check_blocks(manager, [])
    runner.stats = scheduler.stats
    return found, runner
