"""What decode steps read and write on a device: the KV cache, and the rows as tensors. Neither ever moves, because
captured graphs hold their addresses.

All layers of the cache are views of one allocation; while asleep it has no memory behind it. Its content is never
cleared: a slot is read only after it was written, and what masks hide is replaced, not multiplied by zero (it may be
NaN).

A row is one decoding sequence. Its tokens and their log-probs go to its slot, which does not move when `keep` closes
the gaps that ended rows leave; so the host can read a slot while later steps run. A slot belongs to one sequence until
the host has read it; a poll gives the state after the work enqueued before it, whatever has been enqueued since.

Shapes: R rows, T tokens of a response, W blocks of a table row, S stop tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl.models.vmm_buffer import VMMBuffer, reserve
from verl.rollout.native.block_manager import Copy
from verl.rollout.sampling import Kinds, SamplingBatch
from verl.rollout.sequence import Sequence

if TYPE_CHECKING:
    from verl.rollout.native.engine_state import CacheLayout

log = logging.getLogger(__name__)

_COPIES = 256
"""Blocks copied at once: as many are in memory twice."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view of eight-bit floats as integers, which every operation that moves numbers knows; others as they are."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


class DeviceCache:
    """For each layer a pair (keys, values) of [blocks + 1, kv_heads, block_size, size].

    The last block belongs to no sequence: rows that have ended keep running inside a captured graph until the host
    removes them, and write there."""

    def __init__(self, layout: CacheLayout, blocks: int, block_size: int, device: torch.device) -> None:
        self.blocks = blocks
        self.block_size = block_size
        sizes = [
            ((blocks + 1) * layer.kv_heads * block_size * width, layer, width)
            for layer in layout.layers
            for width in (layer.key_size, layer.value_size)
        ]
        # Every tensor starts at a multiple of 16 bytes, as the kernels' loads want it.
        strides = [-(-count * layer.dtype.itemsize // 16) * 16 for count, layer, _ in sizes]
        total = max(sum(strides), 16)
        reserved = reserve(total, device)
        self._memory: VMMBuffer | None = None
        if reserved is None:
            self.tensor = torch.empty(total, dtype=torch.uint8, device=device)
        else:
            self._memory, self.tensor = reserved
        tensors = [
            part[: count * layer.dtype.itemsize]
            .view(layer.dtype)
            .view(blocks + 1, layer.kv_heads, block_size, width)
            for part, (count, layer, width) in zip(self.tensor.split(strides), sizes, strict=True)
        ]
        self.layers = list(zip(tensors[::2], tensors[1::2], strict=True))
        self._together = [as_bytes(tensor).flatten(1)[None] for tensor in tensors]
        """[tensors, blocks + 1, size]: what one call copies. All tensors of a cache whose layers are alike."""
        if len({(tensor.shape, tensor.dtype) for tensor in tensors}) == 1:
            whole = self.tensor[: sum(strides)].view(len(tensors), strides[0])
            dtype = as_bytes(tensors[0]).dtype
            self._together = [whole[:, : tensors[0].nbytes].view(dtype).unflatten(1, (blocks + 1, -1))]

    @property
    def bytes(self) -> int:
        """Memory in use now."""
        return 0 if self._memory is not None and not self._memory.mapped else self.tensor.nbytes

    def sleep(self) -> bool:
        """Release the memory but keep the address; False where that cannot be done."""
        if self._memory is None:
            return False
        self._memory.sleep()
        return True

    def wake_up(self) -> bool:
        """Allocate the memory again; False when the device has too little left."""
        if self._memory is not None and not self._memory.mapped:
            try:
                self._memory.wake_up()
            except RuntimeError as error:
                log.debug("the KV cache cannot be restored: %s", error)
                return False
        return True

    def copy(self, copies: list[Copy], send: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Whole blocks, in order of the list; a target is never a later source, so one read and one write do."""
        source, target = send(
            torch.tensor([[copy.source for copy in copies], [copy.target for copy in copies]])
        )
        for sources, targets in zip(source.split(_COPIES), target.split(_COPIES), strict=True):
            for blocks in self._together:
                blocks.index_copy_(1, targets, blocks.index_select(1, sources))


class Poll:
    """Which rows were active and how many tokens each had generated when the host polled."""

    def __init__(self, progress: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if progress.is_cuda:
            self._host = torch.empty(progress.shape, dtype=progress.dtype, pin_memory=True)
            self._host.copy_(progress, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = progress.clone()

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """(active, generated) of each row. Waits for the work enqueued before the poll, not for what came after."""
        if self._event is not None:
            self._event.synchronize()
        active, generated = self._host.numpy()
        return active, generated


class DeviceState:
    """Integer and float columns of shape [R]; a row ends when its newest token has position `last`."""

    def __init__(self, rows: int, width: int, table_width: int, stops: int, device: torch.device) -> None:
        self.capacity = rows
        self.device = device
        self.integers = torch.zeros(11, rows, dtype=torch.int64, device=device)
        # `Ops.advance` reads the first seven by this order, `poll` the first two.
        self.active, self.generated, self.tokens, self.positions = self.integers[:4]
        self.produced, self.last, self.slots, self.keys = self.integers[4:8]
        self.top_k, self.greedy, self.raw = self.integers[8:]
        self.floats = torch.ones(4, rows, dtype=torch.float32, device=device)
        self.temperature, self.top_p, self.min_p, self.penalty = self.floats
        self.stop_ids = torch.full((rows, stops), -1, dtype=torch.int64, device=device)
        self.table = torch.zeros(rows, table_width, dtype=torch.int32, device=device)
        # `DecodeInputs` says what these are.
        self.shared = torch.zeros(rows, dtype=torch.int32, device=device)
        self.sharing = torch.zeros(1 + rows, 2, dtype=torch.int32, device=device)
        self.out_tokens = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.out_log_probs = torch.zeros(rows, width, dtype=torch.float32, device=device)
        self.seen: torch.Tensor | None = None
        self._reader = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host_table = np.zeros((rows, table_width), dtype=np.int32)
        """By slot."""

    def fill(
        self, start: int, sequences: Seq[Sequence], stop_ids: Seq[frozenset[int]], slots: Seq[int]
    ) -> None:
        """Rows from `start` on become these sequences, whose known tokens are all computed but for a new draw."""
        params = [s.request.sampling for s in sequences]
        integers = [
            [1] * len(sequences),
            [0] * len(sequences),
            [0] * len(sequences),
            [s.length - 1 for s in sequences],
            [s.produced for s in sequences],
            [s.max_length - 1 for s in sequences],
            list(slots),
            [s.key for s in sequences],
            [p.top_k for p in params],
            [int(p.temperature == 0) for p in params],
            [int(p.raw_log_probs) for p in params],
        ]
        floats = [
            [p.temperature or 1.0 for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            [p.repetition_penalty for p in params],
        ]
        width = self.stop_ids.shape[1]
        stops = [[*ids, *[-1] * (width - len(ids))] for ids in stop_ids]
        end = start + len(sequences)
        self.integers[:, start:end] = self.send(torch.tensor(integers, dtype=torch.int64))
        self.floats[:, start:end] = self.send(torch.tensor(floats, dtype=torch.float32))
        self.stop_ids[start:end] = self.send(torch.tensor(stops, dtype=torch.int64))

    def allocate_seen(self, vocab: int) -> None:
        if self.seen is None:
            self.seen = torch.zeros(self.capacity, vocab, dtype=torch.bool, device=self.device)

    def set_seen(self, start: int, sequences: Seq[Sequence]) -> None:
        """Mark the tokens of new rows (for repetition penalties)."""
        assert self.seen is not None
        self.seen[start : start + len(sequences)] = False
        rows = np.repeat(np.arange(start, start + len(sequences)), [len(s.tokens) for s in sequences])
        tokens = np.fromiter(chain.from_iterable(s.tokens for s in sequences), dtype=np.int64)
        row_index, token_index = self.send(torch.from_numpy(np.stack([rows, tokens])))
        self.seen[row_index, token_index] = True

    def set_tables(self, sequences: Seq[Sequence]) -> None:
        """Note the block tables of these rows on the host."""
        for sequence in sequences:
            self._host_table[sequence.slot, : len(sequence.table)] = sequence.table

    def set_shared(self, slots: np.ndarray, tokens_R: np.ndarray, block_size: int, most: int) -> None:
        """The rows with these slots have so many leading tokens in blocks they may share: runs of up to `most` rows
        whose tables begin with the same blocks compute their attention to them together."""
        table_RW = self._host_table[slots]
        own_RW = np.arange(table_RW.shape[1]) * block_size >= tokens_R[1:, None]
        same = (tokens_R[1:] == tokens_R[:-1]) & ((table_RW[1:] == table_RW[:-1]) | own_RW).all(1)
        starts = np.flatnonzero(np.concatenate([[True], ~same]))
        counts = np.diff(np.append(starts, len(slots)))
        place_R = np.arange(len(slots)) - np.repeat(starts, counts)
        left_R = np.repeat(counts, counts) - place_R
        firsts = np.flatnonzero((place_R % most == 0) & (tokens_R > 0))
        runs = np.zeros((1 + len(firsts), 2), dtype=np.int32)
        runs[0, 0] = len(firsts)
        runs[1:, 0], runs[1:, 1] = firsts, np.minimum(left_R[firsts], most)
        self.shared[: len(slots)] = self.send(torch.from_numpy(tokens_R.astype(np.int32)))
        self.sharing[: len(runs)] = self.send(torch.from_numpy(runs))

    def send_tables(self, slots: np.ndarray, used: int) -> None:
        """Bring the tables of the rows with these slots to the device, where `used` rows are read."""
        tables = np.zeros((used, self._host_table.shape[1]), dtype=np.int32)
        tables[: len(slots)] = self._host_table[slots]
        self.table[:used] = self.send(torch.from_numpy(tables))

    def keep(self, rows: np.ndarray) -> None:
        """Only these rows stay, in this order, from row 0 on; the others are inactive."""
        index = self.send(torch.from_numpy(rows))
        count = len(rows)
        for tensor in (self.integers, self.floats):
            tensor[:, :count] = tensor[:, index]
        for tensor in [self.stop_ids] if self.seen is None else [self.stop_ids, self.seen]:
            tensor[:count] = tensor[index]
        self.active[count:] = 0

    def poll(self, rows: int) -> Poll:
        return Poll(self.integers[:2, :rows])

    def fetch(
        self, slots: list[int], starts: list[int], counts: list[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """For each slot `counts` tokens and log-probs from `starts` on, which were there at a poll that was read.

        Does not wait for what has been enqueued since that poll."""
        with torch.cuda.stream(self._reader):
            slot_R, start_R = self.send(torch.tensor([slots, starts], dtype=torch.int64))
            index_RC = start_R[:, None] + torch.arange(max(counts), device=self.device)
            index_RC.clamp_(max=self.out_tokens.shape[1] - 1)
            found = (self.out_tokens, self.out_log_probs.view(torch.int32))
            both_2RC = torch.stack([values[slot_R[:, None], index_RC] for values in found]).cpu()
        tokens, log_probs = both_2RC[0].tolist(), both_2RC[1].view(torch.float32).tolist()
        cut = range(len(slots))
        return [tokens[i][: counts[i]] for i in cut], [log_probs[i][: counts[i]] for i in cut]

    def settings(self, start: int, end: int, kinds: Kinds) -> SamplingBatch:
        """Views of the sampling columns for rows `start` to `end`."""
        rows = slice(start, end)
        temperature, top_p, min_p, penalty = self.floats[:, rows]
        keys, top_k = self.keys[rows], self.top_k[rows]
        raw, greedy = self.raw[rows].bool(), self.greedy[rows].bool()
        return SamplingBatch(keys, temperature, top_p, top_k, min_p, penalty, raw, greedy, kinds)

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """To the device without waiting for it."""
        if self.device.type != "cuda":
            return values.to(self.device)
        return values.pin_memory().to(self.device, non_blocking=True)
