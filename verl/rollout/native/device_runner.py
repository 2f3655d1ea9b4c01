"""Runs prompts and decode steps on a device: several steps between two polls of the host.

A decode step reads and writes only tensors of fixed address (weights, cache, state), so it is captured once per batch
size (`graph_batch_size`) as a CUDA graph and replayed. The host polls every few steps, removes the rows that have ended
and closes the gaps; it reads a poll only after the next steps are enqueued, so that the device never waits for the
host's bookkeeping.

Inside a step nothing waits for the device; a graph is replayed only while every address it was captured with is still
the right one. Without CUDA, or where a model's step cannot be captured (it synchronizes with the device), the same code
runs step by step.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any

import torch

from verl.errors import ConfigError
from verl.models.vmm_buffer import GraphRecorder
from verl.rollout.base import FinishReason
from verl.rollout.native.device_attention import DecodeAttention, PromptAttention
from verl.rollout.native.device_state import DeviceCache, DeviceState, Poll
from verl.rollout.native.model import Backbone, FusedDecoder, require_fp8_device
from verl.rollout.native.ops import DecodeInputs, Ops, TorchOps, TritonOps
from verl.rollout.native.scheduler import Chunk, Scheduler, Step, graph_batch_size
from verl.rollout.sampling import Kinds, sample
from verl.rollout.sequence import Sequence, Stopper

LOOKAHEAD = 4
"""Decode steps between two polls of the host. A row that has ended runs on for up to twice as many; the host's work for
a poll is hidden behind the steps in flight. (4 instead of 16, with the finer sizes of `graph_batch_size`: +5 % tokens
per second for a 7B model, +1 % for 135M, on one H200.)"""
PROMPT_PASSES = 8
"""At most this many prompt passes run between two bursts of decode steps. While rows are free and prompts wait they
follow each other, since a decode step of a few rows takes nearly as long as one of many; running rows, and an abort,
wait for no more than these."""


@dataclass(eq=False)
class Row:
    """A sequence on the device. `table` is the length and the newest writable block of the table the device knows;
    `fetched` is how many of the tokens in its slot the host has."""

    sequence: Sequence
    slot: int
    table: tuple[int, int] = (0, -1)
    fetched: int = 0
    removed: bool = False
    shared: int = 0
    """Leading tokens that it attends to together with the other samples of its prompt."""


@dataclass(eq=False, repr=False)
class DeviceRunner:
    model: InitVar[Any]
    cache: DeviceCache
    state: DeviceState
    stopper: Stopper
    kinds: Kinds
    max_length: int
    fp8: bool = False
    fused: FusedDecoder | None = field(default=None, init=False)
    _shares: bool = field(default=False, init=False)
    """Whether a row shares its prompt with others: then a step has a kernel more in each layer."""

    def __post_init__(self, model: Any) -> None:
        self.ops: Ops = TritonOps() if self.state.device.type == "cuda" else TorchOps()
        self.use_graphs = False
        self.graph_error: str | None = None
        """Why the step cannot be captured, where it cannot."""
        self.rows: list[Row] = []
        self._slots = list(range(self.state.capacity))
        """Those that are free."""
        self._in_flight = 0
        """Decode steps enqueued since the last poll that was read."""
        self._steps = 0
        """Decode steps of the iteration under way."""
        self._drawn = 0
        """Tokens found to be drawn and not yet in the scheduler's stats."""
        self._ended: list[tuple[Sequence, FinishReason]] = []
        """Found to have ended and not yet returned by `finished`."""
        self._poll: tuple[list[Row], Poll] | None = None
        self._tables_moved = False
        self.graphs: dict[tuple[int, Kinds | None, bool], torch.cuda.CUDAGraph] = {}
        self._recorder: GraphRecorder | None = None
        self.rebind(model)
        self.configure(self.stopper, self.kinds)

    def configure(self, stopper: Stopper, kinds: Kinds) -> None:
        """How rows end, and the sampling features they need."""
        self.stopper = stopper
        self.kinds = kinds
        if kinds.penalty:
            self.state.allocate_seen(self.vocab)

    def rebind(self, model: Any) -> None:
        """Compute with this module. Rows and cache stay; graphs over other weights are useless."""
        self.graphs.clear()
        self._recorder = None
        self.backbone = Backbone(model)
        self.vocab = int(model.get_input_embeddings().num_embeddings)
        if self.fp8:
            require_fp8_device(self.state.device, "rollout.dtype")
        self.fused = FusedDecoder.match(model, self.max_length, self.fp8)
        if self.fused is None and self.fp8:
            raise ConfigError(
                "rollout.dtype=fp8 serves Llama, Mistral, Qwen2 and Qwen3 layers without adapters, not "
                f"{type(model).__name__}; use rollout.dtype=auto"
            )

    def refresh(self, graphs: bool) -> None:
        """The values of the weights may be new; `graphs`: capture steps (again, where that failed before)."""
        self.use_graphs = graphs
        self.graph_error = None
        if self.fused is not None:
            self.fused.refresh()

    # One scheduling iteration: schedule, run, finished

    def schedule(self, scheduler: Scheduler) -> Step:
        """The rows to decode and the prompts to compute; preempted rows have left the device."""
        # Tokens of the steps in flight are not known yet; new steps and their blocks come on top of them.
        left = max((row.sequence.max_length - row.sequence.length for row in self.rows), default=0)
        self._steps = max(min(LOOKAHEAD, left - self._in_flight), 0)
        step = scheduler.schedule(lookahead=max(self._in_flight + self._steps, 1))
        self._make_free(scheduler, step)
        if len(step.decodes) != len(self.rows):
            raise RuntimeError(
                f"{len(step.decodes)} sequences are to decode and the runner has {len(self.rows)} rows: {scheduler!r}"
            )
        return step

    @torch.no_grad()
    def run(self, scheduler: Scheduler, step: Step) -> None:
        """Enqueue decode steps of all rows (those that end before are inactive) and prompt passes."""
        if step.decodes and self._steps:
            size = graph_batch_size(len(self.rows), self.state.capacity)
            self._send_tables(size)
            graph = self._graph(size) if self.use_graphs else None
            for _ in range(self._steps):
                if graph is None:
                    self.decode_step(size)
                else:
                    graph.replay()
        self._in_flight = self._steps if step.decodes else 0
        for passes_left in reversed(range(PROMPT_PASSES)):
            if step.chunks:
                self.prefill(step.chunks)
            scheduler.complete(step)
            if not passes_left or not step.chunks or step.preempted:
                break
            step = scheduler.schedule(lookahead=0)
            self._make_free(scheduler, step)

    def finished(self, scheduler: Scheduler) -> list[tuple[Sequence, FinishReason]]:
        """The sequences found to have finished, and why. What was just enqueued is not waited for."""
        finished = self.poll_finished()
        scheduler.finish_all([sequence for sequence, _ in finished])
        scheduler.stats.drawn_tokens += self._drawn
        ended, self._ended, self._drawn = self._ended, [], 0
        return [*ended, *finished]

    def _make_free(self, scheduler: Scheduler, step: Step) -> None:
        """Before a step runs, preempted rows leave the device and shared blocks are copied. Rows that turn out to have
        ended must not be prefilled again."""
        # The device runs ahead of the host: a row chosen for preemption may have drawn its end already. Its tokens
        # are fetched now, since its slot and blocks go to others with the next enqueued work.
        ended = self.evict(step.preempted)
        for sequence, _ in ended:
            scheduler.finish(sequence)
        self._ended += ended
        if step.copies:
            self.cache.copy(step.copies)

    # Prompts

    @torch.no_grad()
    def prefill(self, chunks: list[Chunk]) -> None:
        """Compute chunks of prompts; those that end their prompt draw a first token and become rows."""
        send = self.state.send
        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        samplers: list[Sequence] = []
        for chunk in chunks:
            end = chunk.start + chunk.count
            ids += chunk.sequence.tokens[chunk.start : end]
            positions += range(chunk.start, end)
            last += [len(ids) - 1] * len(chunk.samplers)
            samplers += chunk.samplers
        attention = PromptAttention.of(chunks, self.ops, self.cache, send)
        hidden = self.backbone.hidden(send(torch.tensor(ids)), send(torch.tensor(positions)), attention)
        if samplers:
            self._join(samplers, self.backbone.logits(hidden.index_select(0, send(torch.tensor(last)))))

    def _join(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        start, end = len(self.rows), len(self.rows) + len(sequences)
        stops = [self.stopper.stop_ids(s.request.sampling) for s in sequences]
        rows = [Row(sequence, self._slots.pop(), shared=self._shared(sequence)) for sequence in sequences]
        self.state.fill(start, sequences, stops, [row.slot for row in rows])
        if self.kinds.penalty:
            self.state.set_seen(start, sequences)
        self._draw(logits, start, end)
        for sequence in sequences:
            sequence.on_device = 1
        self._drawn += len(sequences)
        self.rows += rows

    def _draw(self, logits: torch.Tensor, start: int, end: int) -> None:
        """One token for each of the rows `start` to `end`, recorded on the device."""
        state, rows = self.state, slice(start, end)
        if self.kinds.plain:
            tokens, log_probs = self.ops.sample_plain(
                logits, state.temperature[rows], state.greedy[rows], state.keys[rows], state.produced[rows]
            )
        else:
            seen = state.seen[rows] if state.seen is not None else None
            tokens, log_probs = sample(
                logits, state.settings(start, end, self.kinds), state.produced[rows], seen
            )
            if seen is not None:
                seen.scatter_(1, tokens[:, None], True)
        columns, stop_ids = state.integers[:, rows], state.stop_ids[rows]
        self.ops.advance(tokens, log_probs, columns, stop_ids, state.out_tokens, state.out_log_probs)

    # Decoding

    def _graph(self, size: int) -> torch.cuda.CUDAGraph | None:
        """The step of this size as a graph; None, until the next `refresh`, where it cannot be captured."""
        # Plain sampling is one kernel for greedy and sampled rows at any temperature: its graphs serve them all.
        key = (size, None if self.kinds.plain else self.kinds, self._shares)
        if key not in self.graphs:
            try:
                self.graphs[key] = self.capture(size)
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.graph_error = str(error).splitlines()[0]
                self.use_graphs = False
                self._recorder = None
                return None
        return self.graphs[key]

    def _send_tables(self, used: int) -> None:
        changed = []
        for index, row in enumerate(self.rows):
            table = row.sequence.table
            newest = min(row.sequence.computed // self.cache.block_size, len(table) - 1)
            known = (len(table), table[newest])
            if row.table != known:
                row.table = known
                changed.append((index, table))
        if changed or self._tables_moved:
            self.state.set_tables(changed, used)
            self._tables_moved = False
            shared = [row.shared for row in self.rows]
            self._shares = any(shared)
            if self._shares and self.fused is not None:
                self.state.set_shared(shared, self.cache.block_size, self.fused.sharing_rows)

    def _shared(self, sequence: Sequence) -> int:
        request = sequence.request
        block_size = self.cache.block_size
        return self.fused.shared_tokens(len(request.prompt_ids), request.n, block_size) if self.fused else 0

    def decode_step(self, size: int) -> None:
        state = self.state
        inputs = DecodeInputs(
            state.tokens[:size], state.positions[:size], state.active[:size], state.table[:size]
        )
        if self._shares and self.fused is not None:
            inputs = inputs._replace(shared=state.shared[:size], sharing=state.sharing[: size + 1])
        if self.fused is not None:
            logits = self.fused.logits(self.fused.decode(self.ops, inputs, self.cache.layers))
        else:
            context = DecodeAttention(self.ops, self.cache, inputs)
            logits = self.backbone.logits(self.backbone.hidden(inputs.tokens, inputs.positions, context))
        self._draw(logits, 0, size)

    def capture(self, size: int) -> torch.cuda.CUDAGraph:
        """Capture the step for one batch size, with no active row: the warm-up run and the capture itself must not draw
        tokens or write to blocks of sequences."""
        state = self.state
        if self._recorder is None:
            self._recorder = GraphRecorder(state.device)
        # Inactive rows write to the cache's last block and keep their state, so the warm-up run changes nothing a
        # sequence reads. Only the tokens seen (repetition penalty) are always written: they are saved and restored.
        active = state.active.clone()
        state.active.zero_()
        seen = state.seen[:size].clone() if state.seen is not None else None
        try:
            return self._recorder.record(lambda: self.decode_step(size))
        finally:
            state.active.copy_(active)
            if seen is not None and state.seen is not None:
                state.seen[:size] = seen

    # Polling

    def poll_finished(self) -> list[tuple[Sequence, FinishReason]]:
        """Read the poll of the last call and enqueue a new one; the rows found ended leave: (sequence, why).

        What was enqueued since the last call is not waited for. A sequence's `length` is what is known of it."""
        before, self._poll = self._poll, None
        if self.rows:
            self._poll = (list(self.rows), self.state.poll(len(self.rows)))
        ended: list[Row] = []
        watched: list[Row] = []
        for row, active, generated in zip(before[0], *before[1].read(), strict=True) if before else ():
            if row.removed:
                continue
            self._drawn += generated - row.fetched - row.sequence.on_device
            row.sequence.on_device = generated - row.fetched
            if not active:
                ended.append(row)
            elif row.sequence.request.sampling.stop:
                watched.append(row)
        for row in self.rows:
            row.sequence.computed = row.sequence.length - 1
        return self._finalize(ended, watched)

    def settle(self) -> list[tuple[Sequence, FinishReason]]:
        """Wait for the device: the length of every sequence is then exact. Returns those that have ended."""
        ended = [*self.poll_finished(), *self.poll_finished()]  # the poll of the last step, then one of now
        self._in_flight = 0
        return ended

    def evict(self, sequences: list[Sequence]) -> list[tuple[Sequence, FinishReason]]:
        """Rows that are preempted or aborted leave, with all their tokens copied to the host; returns those that have
        ended meanwhile, which must not be continued: (sequence, why). Waits for the device."""
        wanted = {id(sequence) for sequence in sequences}
        if not any(id(row.sequence) in wanted for row in self.rows):
            return []
        ended: list[Row] = []
        running: list[Row] = []
        for row, active, generated in zip(self.rows, *self.state.poll(len(self.rows)).read(), strict=True):
            if id(row.sequence) in wanted:
                self._drawn += generated - row.fetched - row.sequence.on_device
                row.sequence.on_device = generated - row.fetched
                (running if active else ended).append(row)
        answers = self._finalize(ended, running)
        self._remove([row for row in running if not row.removed])
        return answers

    def _finalize(self, ended: list[Row], running: list[Row]) -> list[tuple[Sequence, FinishReason]]:
        """Copy the new tokens of some rows to the host. Those that have ended leave: (sequence, why). Of the `running`
        ones these are the ones in which the host finds a stop string."""
        rows = [*ended, *running]
        if not rows:
            return []
        slots, starts = [row.slot for row in rows], [row.fetched for row in rows]
        tokens, log_probs = self.state.fetch(slots, starts, [row.sequence.on_device for row in rows])
        answers: list[tuple[Sequence, FinishReason]] = []
        leaving: list[Row] = []
        for index, (row, ids, values) in enumerate(zip(rows, tokens, log_probs, strict=True)):
            row.fetched += len(ids)
            row.sequence.on_device = 0
            # The device checks everything but stop strings, so that only the newest token can end it.
            reason = row.sequence.extend(ids, values, self.stopper, only_last=True)
            if reason is not None:
                leaving.append(row)
                answers.append((row.sequence, reason))
            elif index < len(ended):
                raise RuntimeError(f"{row.sequence!r} ended on the device, but not on the host")
        self._remove(leaving)
        return answers

    def _remove(self, leaving: list[Row]) -> None:
        if not leaving:
            return
        for row in leaving:
            row.removed = True
            self._slots.append(row.slot)
        kept = [index for index, row in enumerate(self.rows) if not row.removed]
        self.state.keep(kept)
        self._tables_moved = True
        self.rows = [self.rows[index] for index in kept]
