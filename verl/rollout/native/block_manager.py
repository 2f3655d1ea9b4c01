"""Which sequence holds which block of the KV cache: reference counts, copy on write, prefix sharing. No tensors.

A block holds `block_size` consecutive tokens of every layer. Sequences whose first tokens are equal may hold the same
block. Content is known in hash blocks of `hash_block` tokens: an id identifies the tokens of one and everything before
them, so two hash blocks with one id have equal keys and values. On a GPU a hash block is a block; on the CPU a block is
a page for a whole sequence and has many hash blocks.

A block is free, or its count equals the number of tables that list it; a block that several tables list is copied
before it is written.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from verl.rollout.sequence import Sequence


@dataclass(frozen=True)
class Copy:
    """Copy the first `tokens` tokens of block `source` to block `target`, in every layer, before the model runs."""

    source: int
    target: int
    tokens: int


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int, hash_block: int | None = None) -> None:
        hash_block = hash_block or block_size
        if num_blocks < 1 or block_size < 1 or block_size % hash_block:
            raise ValueError(f"{num_blocks} blocks of {block_size} tokens, hash blocks of {hash_block}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.hash_block = hash_block
        self.count = [0] * num_blocks
        self.kept: OrderedDict[str, list[Sequence]] = OrderedDict()
        """Finished sequences whose blocks stay for the next turn, by `Request.prefix_id`; the oldest first."""
        self._blank = list(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Free blocks with known content, the least recently used first."""
        self._index: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        """(content id of what comes before, tokens) -> (block, content id)."""
        self._content: list[dict[int, tuple[int, tuple[int, ...]]]] = [{} for _ in range(num_blocks)]
        """Per block: number of the hash block within it -> its key in `_index`."""
        self._next_id = 1

    @property
    def free(self) -> int:
        return len(self._blank) + len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    # Single blocks

    def _allocate(self) -> int:
        """A free block; content that a later prompt could reuse is given up only when no blank block is left."""
        if self._blank:
            block = heapq.heappop(self._blank)
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self.count[block] = 1
        return block

    def _share(self, block: int) -> None:
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

    def _forget(self, block: int, first: int = 0) -> None:
        content = self._content[block]
        for number in [n for n in content if n >= first]:
            key = content.pop(number)
            if self._index.get(key, (-1, 0))[0] == block:
                del self._index[key]

    # Tables of sequences

    def can_grow(self, sequence: Sequence, length: int, reserve: int = 0) -> bool:
        """Whether `grow` finds its blocks and `reserve` more, after releasing kept prefixes, oldest first, if need be.

        Each release may also make a block of this sequence its own, which then needs no copy."""
        table, index = sequence.table, sequence.computed // self.block_size
        new = max(self.blocks_for(length) - len(table), 0)
        while new + (index < len(table) and self.count[table[index]] > 1) + reserve > self.free:
            if not self.kept:
                return False
            self.release_kept([next(iter(self.kept))])
        return True

    def grow(self, sequence: Sequence, length: int) -> list[Copy] | None:
        """Make the slots from `computed` to `length` writable; None when too few blocks are free."""
        if not self.can_grow(sequence, length):
            return None
        copies = []
        table = sequence.table
        index, offset = divmod(sequence.computed, self.block_size)
        if index < len(table):
            if self.count[table[index]] > 1:
                # Copy on write: another sequence (a sibling, or one that found this prefix) reads this block, too.
                old, new = table[index], self._allocate()
                table[index] = new
                self._drop(old)
                if offset:
                    copies.append(Copy(old, new, offset))
            elif self._content[table[index]]:
                # A hash block that is about to be overwritten, even in part, can no longer be found.
                self._forget(table[index], offset // self.hash_block)
        while len(table) * self.block_size < length:
            table.append(self._allocate())
        sequence.writable = len(table) * self.block_size
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child starts with everything its parent has."""
        for block in parent.table:
            self._share(block)
        child.table = list(parent.table)
        child.chain = list(parent.chain)
        child.stale = parent.stale

    def release(self, sequence: Sequence) -> None:
        # The end of a prefix is of use only with its beginning: let it be the first to go.
        for block in reversed(sequence.table):
            self._drop(block)
        sequence.table = []
        sequence.chain = []

    # Prefixes

    def keep(self, sequence: Sequence) -> None:
        """A finished sequence keeps its blocks for the request that continues it."""
        sequence.computed = min(sequence.computed, len(sequence.tokens) - 1)
        self.register(sequence, sequence.computed)
        used = self.blocks_for(sequence.computed)
        for block in reversed(sequence.table[used:]):
            self._drop(block)
        del sequence.table[used:]
        prefix_id = str(sequence.request.prefix_id)
        self.kept.setdefault(prefix_id, []).append(sequence)
        self.kept.move_to_end(prefix_id)

    def release_kept(self, prefix_ids: Iterable[str]) -> None:
        for prefix_id in prefix_ids:
            for sequence in self.kept.pop(prefix_id, ()):
                self.release(sequence)

    def attach_prefix(self, sequence: Sequence) -> int:
        """Give a sequence without blocks those that already hold its first tokens; returns how many tokens.

        At least one token is left to compute, since its logits are needed."""
        blocks, chain = self._find(sequence.tokens)
        sequence.computed = len(chain) * self.hash_block
        if self._continue_kept(sequence):
            return sequence.computed
        for block in blocks:
            self._share(block)
        sequence.table = blocks
        sequence.chain = chain
        return sequence.computed

    def _find(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        """Blocks and content ids of the longest known prefix, in full hash blocks."""
        content_id, blocks, chain = 0, [], []
        for start in range(0, len(tokens) - self.hash_block, self.hash_block):
            found = self._index.get((content_id, tuple(tokens[start : start + self.hash_block])))
            if found is None:
                break
            # The id of what comes before is part of the key: equal tokens after different beginnings have other keys
            # and values.
            block, content_id = found
            chain.append(content_id)
            # A block that has one of its hash blocks has the earlier ones, too: the last one decides.
            if start % self.block_size == 0:
                blocks.append(block)
            else:
                blocks[-1] = block
        return blocks, chain

    def _continue_kept(self, sequence: Sequence) -> bool:
        """Take over the blocks kept for this conversation, which hold its tokens to the last one, unless full hash
        blocks found elsewhere hold more. Ownership moves: continuing needs no copy and no second block."""
        kept = self.kept.get(sequence.request.prefix_id or "", [])
        best, length = None, sequence.computed
        for candidate in kept:
            common = _common_prefix(candidate.tokens[: candidate.computed], sequence.tokens[:-1])
            if common and common >= length:
                best, length = candidate, common
        if best is None:
            return False
        kept.remove(best)
        if not kept:
            del self.kept[str(sequence.request.prefix_id)]
        used = self.blocks_for(length)
        for block in reversed(best.table[used:]):
            self._drop(block)
        sequence.table, best.table = best.table[:used], []
        sequence.chain = best.chain[: length // self.hash_block]
        sequence.computed = length
        return True

    def register(self, sequence: Sequence, computed: int) -> None:
        """Make known the hash blocks that will be full once the first `computed` tokens are."""
        if sequence.stale:
            return
        hash_block, chain = self.hash_block, sequence.chain
        while (len(chain) + 1) * hash_block <= computed:
            start = len(chain) * hash_block
            key = (chain[-1] if chain else 0, tuple(sequence.tokens[start : start + hash_block]))
            block = sequence.table[start // self.block_size]
            found = self._index.get(key)
            if found is None:
                content_id = self._next_id
                self._next_id += 1
                self._index[key] = (block, content_id)
                self._content[block][start % self.block_size // hash_block] = key
            else:
                content_id = found[1]
            chain.append(content_id)

    def forget_unused(self) -> None:
        """Free blocks become blank, so that `move` can use them."""
        for block in self._cached:
            self._forget(block)
            heapq.heappush(self._blank, block)
        self._cached.clear()

    def invalidate(self) -> None:
        """The weights have changed: nothing in the cache may be found any more; tables keep their blocks."""
        self.release_kept(list(self.kept))
        self.forget_unused()
        self._index.clear()
        for content in self._content:
            content.clear()

    def move(self, sequence: Sequence, index: int) -> Copy | None:
        """Move a block that only this sequence holds to the lowest blank one, when that is lower."""
        block = sequence.table[index]
        if self.count[block] != 1 or not self._blank or self._blank[0] > block:
            return None
        target = self._allocate()
        self._forget(block)
        self._drop(block)
        sequence.table[index] = target
        return Copy(block, target, min(self.block_size, sequence.computed - index * self.block_size))


def _common_prefix(first: list[int], second: list[int]) -> int:
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(at for at in range(shorter) if first[at] != second[at])
