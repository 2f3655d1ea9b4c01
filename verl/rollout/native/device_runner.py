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
from itertools import compress
from typing import Any

import numpy as np
import torch

from verl.errors import ConfigError
from verl.models.vmm_buffer import GraphRecorder
from verl.rollout.base import FinishReason
from verl.rollout.native.device_attention import DecodeAttention, prompt_inputs
from verl.rollout.native.device_state import DeviceCache, DeviceState, Poll
from verl.rollout.native.model import Backbone, FusedDecoder, require_fp8_device
from verl.rollout.native.ops import DecodeInputs, Ops, TorchOps, TritonOps
from verl.rollout.native.scheduler import Chunk, Scheduler, Start, Step, graph_batch_size
from verl.rollout.sampling import Kinds, sample
from verl.rollout.sequence import Sequence, Stopper

LOOKAHEAD = 4
"""Decode steps between two polls of the host. A row that has ended runs on for up to twice as many; the host's work for
a poll is hidden behind the steps in flight. (4 instead of 16, with the finer sizes of `graph_batch_size`: +5 % tokens
per second for a 7B model on one H200.)"""
_NARROW = 1024
"""Models up to this width decode with the fewer sizes of `graph_batch_size`, and with twice the steps between two
polls: their steps take less time than the host's work for a poll of a run."""
PROMPT_PASSES = 8
"""At most this many prompt passes run between two bursts of decode steps. While rows are free and prompts wait they
follow each other, since a decode step of a few rows takes nearly as long as one of many; running rows, and an abort,
wait for no more than these."""


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
        self._empty_rows()
        self.graphs: dict[tuple[int, Kinds | None, bool], torch.cuda.CUDAGraph] = {}
        self._recorder: GraphRecorder | None = None
        self.rebind(model)
        self.configure(self.stopper, self.kinds)

    def _empty_rows(self) -> None:
        """No row, nothing in flight."""
        capacity = self.state.capacity
        self.rows: list[Sequence] = []
        self._row_slots = np.zeros(0, dtype=np.int64)
        """Replaced, never changed: a poll refers to the one of its time."""
        self._slots = list(range(capacity))
        """Those that are free."""
        self._of_slot: dict[int, Sequence] = {}
        slots = np.zeros((6, capacity), dtype=np.int64)
        self._joined_at, self._most, self._generated, self._fetched, self._watched, self._shared = slots
        """By slot: the sequence's length when it became a row, the tokens it may generate, those it is known to have
        generated, those the host has, whether it reads them while they run (for stop strings, or a reader), and the
        leading tokens that it attends to together with the other samples of its prompt."""
        self._in_flight = 0
        """Decode steps enqueued since the last poll that was read."""
        self._steps = 0
        """Decode steps of the iteration under way."""
        self._drawn = 0
        """Tokens found to be drawn and not yet in the scheduler's stats."""
        self._ended: list[tuple[Sequence, FinishReason]] = []
        """Found to have ended and not yet returned by `finished`."""
        self._poll: tuple[np.ndarray, Poll] | None = None
        """The slots of the rows (-1: the row has left since), and their state on the device."""
        self._tables_moved = False

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
        # In a step of a small model rows that have ended cost next to nothing, captures and polls as much as elsewhere.
        self.wide = int(model.get_input_embeddings().weight.shape[1]) > _NARROW
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

    @torch.no_grad()
    def compile_kernels(self) -> None:
        """Those of all batch sizes at once. They depend on the order of magnitude of the size, and on whether it is a
        multiple of 16."""
        if self.fused is None or not self.kinds.plain or self.state.device.type != "cuda":
            return
        from verl.models.kernels import compile_together

        capacity = self.state.capacity
        known = (graph_batch_size(rows, capacity) for rows in range(1, capacity + 1))
        sizes = {(size.bit_length(), size % 16 == 0): size for size in known}

        def decode() -> None:
            for size in sizes.values():
                self.decode_step(size)

        compile_together("generation", decode)

    # One scheduling iteration: schedule, run, finished

    def schedule(self, scheduler: Scheduler) -> Step:
        """The rows to decode and the prompts to compute; preempted rows have left the device."""
        # Tokens of the steps in flight are not known yet; new steps and their blocks come on top of them.
        slots = self._row_slots
        left = int((self._most[slots] - self._generated[slots]).max()) if self.rows else 0
        steps = LOOKAHEAD if self.wide else 2 * LOOKAHEAD
        self._steps = max(min(steps, left - self._in_flight), 0)
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
        if step.grown:
            self.state.set_tables(step.grown)
            self._tables_moved = True
        if step.decodes and self._steps:
            size = graph_batch_size(len(self.rows), self.state.capacity, self.wide)
            self._send_tables(size)
            graph = self._graph(size) if self.use_graphs else None
            for _ in range(self._steps):
                if graph is None:
                    self.decode_step(size)
                else:
                    graph.replay()
        self._in_flight = self._steps if step.decodes else 0
        for passes_left in reversed(range(PROMPT_PASSES)):
            if step.chunks or step.starts:
                self.prefill(step.chunks, step.starts)
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
            self.cache.copy(step.copies, self.state.send)

    # Prompts

    @torch.no_grad()
    def prefill(self, chunks: list[Chunk], starts: list[Start]) -> None:
        """Compute chunks of prompts. Samples of those that end, and of prompts computed earlier, draw a first token and
        become rows."""
        ends_PD: list[torch.Tensor] = []
        if chunks:
            ends_PD.append(self._prompt_pass(chunks))
        if starts:
            ends_PD.append(torch.stack([start.prompt.prompt_state for start in starts]))
        groups = [chunk.samplers for chunk in chunks] + [start.samplers for start in starts]
        samplers = [sampler for group in groups for sampler in group]
        if samplers:
            prompt_of = self.state.send(torch.tensor([at for at, group in enumerate(groups) for _ in group]))
            self._join(samplers, self.backbone.logits(torch.cat(ends_PD).index_select(0, prompt_of)))

    def _prompt_pass(self, chunks: list[Chunk]) -> torch.Tensor:
        """[P, D]: the hidden state of the last token of each chunk; kept by the prompts that need it later."""
        inputs, attention = prompt_inputs(chunks, self.ops, self.cache, self.state.send)
        if self.fused is not None:
            hidden = self.fused.prompt(self.ops, inputs, attention)
        else:
            hidden = self.backbone.hidden(inputs.tokens, inputs.positions, attention)
        ends_PD = hidden.index_select(0, inputs.last)
        for chunk, end_D in zip(chunks, ends_PD, strict=True):
            if chunk.kept:
                chunk.sequence.prompt_state = end_D
        return ends_PD

    def _join(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        start, end = len(self.rows), len(self.rows) + len(sequences)
        known = {id(s.request): s.request.sampling for s in sequences}
        stop_ids = {request: self.stopper.stop_ids(sampling) for request, sampling in known.items()}
        stops = [stop_ids[id(s.request)] for s in sequences]
        slots = [self._slots.pop() for _ in sequences]
        self.state.fill(start, sequences, stops, slots)
        if self.kinds.penalty:
            self.state.set_seen(start, sequences)
        self._draw(logits, start, end)
        lengths = np.array([sequence.length for sequence in sequences])
        self._joined_at[slots] = lengths
        self._most[slots] = np.array([sequence.max_length for sequence in sequences]) - lengths
        requests = [sequence.request for sequence in sequences]
        self._watched[slots] = [request.streamed or bool(request.sampling.stop) for request in requests]
        self._generated[slots], self._fetched[slots] = 1, 0
        if self.fused is not None:
            size, shared = self.cache.block_size, self.fused.shared_tokens
            self._shared[slots] = [shared(len(each.prompt_ids), each.n, size) for each in requests]
        for sequence, slot in zip(sequences, slots, strict=True):
            sequence.on_device, sequence.slot = 1, slot
            self._of_slot[slot] = sequence
        self._drawn += len(sequences)
        self.rows += sequences
        self._row_slots = np.concatenate([self._row_slots, slots])

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
        if self._tables_moved:
            self.state.send_tables(self._row_slots, used)
            self._tables_moved = False
            shared = self._shared[self._row_slots]
            self._shares = bool(shared.any())
            if self._shares and self.fused is not None:
                size, most = self.cache.block_size, self.fused.sharing_rows
                self.state.set_shared(self._row_slots, shared, size, most)

    def decode_step(self, size: int) -> None:
        state = self.state
        inputs = DecodeInputs(
            state.tokens[:size], state.positions[:size], state.active[:size], state.table[:size]
        )
        if self._shares and self.fused is not None:
            shared = (state.shared[:size], state.sharing[: size + 1], self.fused.sharing_rows)
            inputs = DecodeInputs(*inputs[:4], *shared)
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
            self._poll = (self._row_slots, self.state.poll(len(self.rows)))
        if before is None:
            return []
        there = before[0] >= 0
        slots, active, generated = (values[there] for values in (before[0], *before[1].read()))
        self._note_generated(slots, generated)
        return self._finalize(slots[active == 0], slots[(active != 0) & (self._watched[slots] != 0)])

    def _note_generated(self, slots: np.ndarray, generated: np.ndarray) -> None:
        """So many tokens are known to be drawn in these slots. (A loop over all rows: it does as little as can be.)"""
        self._drawn += int((generated - self._generated[slots]).sum())
        self._generated[slots] = generated
        on_device = (generated - self._fetched[slots]).tolist()
        computed = (self._joined_at[slots] + generated - 1).tolist()
        of_slot = self._of_slot
        for slot, new, length in zip(slots.tolist(), on_device, computed, strict=True):
            sequence = of_slot[slot]
            sequence.on_device = new
            sequence.computed = length

    def settle(self) -> list[tuple[Sequence, FinishReason]]:
        """Wait for the device: the length of every sequence is then exact. Returns those that have ended."""
        ended = [*self.poll_finished(), *self.poll_finished()]  # the poll of the last step, then one of now
        self._in_flight = 0
        return ended

    def evict(self, sequences: list[Sequence]) -> list[tuple[Sequence, FinishReason]]:
        """Rows that are preempted or aborted leave, with all their tokens copied to the host; returns those that have
        ended meanwhile, which must not be continued: (sequence, why). Waits for the device."""
        wanted = np.array([sequence.slot for sequence in sequences if sequence.slot >= 0], dtype=np.int64)
        if not len(wanted):
            return []
        leaving = np.isin(self._row_slots, wanted)
        active, generated = (values[leaving] for values in self.state.poll(len(self.rows)).read())
        slots = self._row_slots[leaving]
        self._note_generated(slots, generated)
        answers = self._finalize(slots[active == 0], slots[active != 0])
        self._remove(np.array([s.slot for s in sequences if s.slot >= 0], dtype=np.int64))
        return answers

    def _finalize(self, ended: np.ndarray, running: np.ndarray) -> list[tuple[Sequence, FinishReason]]:
        """Copy the new tokens of some slots to the host. Those that have ended leave: (sequence, why). Of the `running`
        ones these are the ones in which the host finds a stop string."""
        slots = np.concatenate([ended, running])
        if not len(slots):
            return []
        starts = self._fetched[slots]
        counts = self._generated[slots] - starts
        tokens, log_probs = self.state.fetch(slots.tolist(), starts.tolist(), counts.tolist())
        self._fetched[slots] += counts
        answers: list[tuple[Sequence, FinishReason]] = []
        for index, (slot, ids, values) in enumerate(zip(slots.tolist(), tokens, log_probs, strict=True)):
            sequence = self._of_slot[slot]
            sequence.on_device = 0
            # The device checks everything but stop strings, so that only the newest token can end it.
            reason = sequence.extend(ids, values, self.stopper, only_last=True)
            if reason is not None:
                answers.append((sequence, reason))
            elif index < len(ended):
                raise RuntimeError(f"{sequence!r} ended on the device, but not on the host")
        self._remove(np.array([sequence.slot for sequence, _ in answers], dtype=np.int64))
        return answers

    def _remove(self, slots: np.ndarray) -> None:
        """The rows of these slots leave."""
        if not len(slots):
            return
        for slot in slots.tolist():
            self._of_slot.pop(slot).slot = -1
            self._slots.append(slot)
        stays = ~np.isin(self._row_slots, slots)
        self.state.keep(stays.nonzero()[0])
        self._tables_moved = True
        self.rows = list(compress(self.rows, stays.tolist()))
        self._row_slots = self._row_slots[stays]
        if self._poll is not None:
            polled, poll = self._poll
            self._poll = (np.where(np.isin(polled, slots), -1, polled), poll)
