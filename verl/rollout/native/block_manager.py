"""Who holds which block of the KV cache: reference counts, copy on write, prefix sharing. Pure bookkeeping.

A block holds `block_size` consecutive tokens of every layer. Sequences whose first tokens are equal may hold
the same block. What a block contains is known in granules (`hash_block` tokens): the content of a hash_block is
named by a number that stands for its tokens and everything before them, so two granules with one name have
equal keys and values. On the GPU a hash_block is a block; on the CPU one block holds a whole sequence and has
many granules.

A block is free, or held by exactly as many tables as its count says; nobody writes to a
block that another table holds (it is copied first); a block that still has known content is given to a new
owner only when no blank one is left.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

from verl.rollout.native.sequence import Sequence


@dataclass(frozen=True)
class Copy:
    """Copy the first `tokens` tokens of block `source` to block `target`, in every layer, before the model runs."""

    source: int
    target: int
    tokens: int


class BlockManager:
    """Gives blocks to sequences. Nothing here touches a tensor."""

    def __init__(self, num_blocks: int, block_size: int, hash_block: int | None = None) -> None:
        hash_block = hash_block or block_size
        if num_blocks < 1 or block_size < 1 or block_size % hash_block:
            raise ValueError(f"{num_blocks} blocks of {block_size} tokens in granules of {hash_block}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.hash_block = hash_block
        self.count = [0] * num_blocks
        self._blank = list(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Free blocks with known content, the longest unused first."""
        self._places: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        """(name of what comes before, tokens) -> (block, name)."""
        self._content: list[dict[int, tuple[int, tuple[int, ...]]]] = [{} for _ in range(num_blocks)]
        """Per block: hash_block index within the block -> its key in `_places`."""
        self._next_name = 1

    @property
    def free(self) -> int:
        return len(self._blank) + len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    # Blocks one by one

    def _take(self) -> int:
        if self._blank:
            block = heapq.heappop(self._blank)
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self.count[block] = 1
        return block

    def _hold(self, block: int) -> None:
        if self.count[block] == 0:
            del self._cached[block]
        self.count[block] += 1

    def _drop(self, block: int) -> None:
        self.count[block] -= 1
        if self.count[block] == 0:
            if self._content[block]:
                self._cached[block] = None
            else:
                heapq.heappush(self._blank, block)

    def _forget(self, block: int, from_granule: int = 0) -> None:
        content = self._content[block]
        for index in [i for i in content if i >= from_granule]:
            key = content.pop(index)
            if self._places.get(key, (-1, 0))[0] == block:
                del self._places[key]

    # Tables of sequences

    def room_needed(self, sequence: Sequence, length: int) -> int:
        """Blocks that `grow` would take."""
        index = sequence.computed // self.block_size
        shared = index < len(sequence.table) and self.count[sequence.table[index]] > 1
        return max(self.blocks_for(length) - len(sequence.table), 0) + shared

    def grow(self, sequence: Sequence, length: int) -> list[Copy] | None:
        """Make the places from `computed` to `length` writable; None, and nothing changed, when too few are free."""
        if self.room_needed(sequence, length) > self.free:
            return None
        copies = []
        table = sequence.table
        index, offset = divmod(sequence.computed, self.block_size)
        if index < len(table):
            if self.count[table[index]] > 1:
                old, new = table[index], self._take()
                table[index] = new
                self._drop(old)
                if offset:
                    copies.append(Copy(old, new, offset))
            elif self._content[table[index]]:
                self._forget(table[index], -(-offset // self.hash_block))
        while len(table) * self.block_size < length:
            table.append(self._take())
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child starts with everything its parent has."""
        for block in parent.table:
            self._hold(block)
        child.table = list(parent.table)
        child.chain = list(parent.chain)

    def release(self, sequence: Sequence) -> None:
        # The end of a prefix is of use only with its beginning: let it be the first to go.
        for block in reversed(sequence.table):
            self._drop(block)
        sequence.table = []
        sequence.chain = []

    # Prefixes

    def attach_prefix(self, sequence: Sequence) -> int:
        """Give a sequence without blocks those that already hold its first tokens; returns how many tokens.

        At least one token stays to be computed, since its logits are wanted.
        """
        hash_block, tokens = self.hash_block, sequence.tokens
        name, blocks, chain = 0, [], []
        for start in range(0, len(tokens) - hash_block, hash_block):
            found = self._places.get((name, tuple(tokens[start : start + hash_block])))
            if found is None:
                break
            block, name = found
            chain.append(name)
            # Whoever holds a hash_block of a block holds the earlier ones in that block, too: the last one decides.
            if start % self.block_size == 0:
                blocks.append(block)
            else:
                blocks[-1] = block
        for block in blocks:
            self._hold(block)
        sequence.table = blocks
        sequence.chain = chain
        sequence.computed = len(chain) * hash_block
        return sequence.computed

    def register(self, sequence: Sequence, computed: int) -> None:
        """Make known the granules that will be full once the first `computed` tokens are."""
        hash_block, chain = self.hash_block, sequence.chain
        while (len(chain) + 1) * hash_block <= computed:
            start = len(chain) * hash_block
            key = (chain[-1] if chain else 0, tuple(sequence.tokens[start : start + hash_block]))
            block = sequence.table[start // self.block_size]
            found = self._places.get(key)
            if found is None:
                name = self._next_name
                self._next_name += 1
                self._places[key] = (block, name)
                self._content[block][start % self.block_size // hash_block] = key
            else:
                name = found[1]
            chain.append(name)

    def forget_unused(self) -> None:
        """Blocks nobody holds become blank: no prompt will come that could use their content."""
        for block in self._cached:
            self._forget(block)
            heapq.heappush(self._blank, block)
        self._cached.clear()

    def move(self, sequence: Sequence, index: int) -> Copy | None:
        """Move a block that only this sequence holds to the lowest blank place, when that is lower."""
        block = sequence.table[index]
        if self.count[block] != 1 or not self._blank or self._blank[0] > block:
            return None
        target = self._take()
        self._forget(block)
        self._drop(block)
        sequence.table[index] = target
        held = min(self.block_size, sequence.computed - index * self.block_size)
        return Copy(block, target, held)

    def check(self, sequences: list[Sequence]) -> None:
        """Raise when the books do not balance (used by tests)."""
        held = [0] * self.num_blocks
        for sequence in sequences:
            for block in sequence.table:
                held[block] += 1
        if held != self.count:
            raise RuntimeError("block counts differ from the tables")
        idle = sorted([*self._blank, *self._cached])
        if idle != [block for block in range(self.num_blocks) if held[block] == 0]:
            raise RuntimeError("free blocks differ from those no table holds")
