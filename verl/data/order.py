"""Which rows an epoch visits, and in which order: shuffled, easiest first, or a weighted mixture.

The order depends on the seed and the epoch's number alone, so a position in it is all that a checkpoint must save.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl.errors import DataError


@dataclass(frozen=True)
class MixturePart:
    """Rows (positions in the dataset) that are drawn together with one weight."""

    name: str
    weight: float
    positions: np.ndarray


class EpochOrder:
    """The positions an epoch visits."""

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        difficulty: np.ndarray | None = None,
        mixture: Sequence[MixturePart] | None = None,
    ) -> None:
        """`difficulty` (one number per row) puts easy rows first, equal ones shuffled; `mixture` draws each
        part's share, `size` rows in all, and visits every row of a part equally often."""
        if difficulty is not None and len(difficulty) != size and not mixture:
            raise DataError(f"There are {len(difficulty)} difficulties for {size} rows.")
        self._whole = MixturePart("all", 1.0, np.arange(size))
        self._parts = list(mixture or ())
        for part in self._parts:
            if not len(part.positions):
                raise DataError(
                    f"data.mixture: the part '{part.name}' has no usable rows (filtered away, or empty files)."
                )
            if not part.weight > 0:
                raise DataError(
                    f"data.mixture: the weight of '{part.name}' must be above 0, got {part.weight}."
                )
        self._seed = seed
        self._shuffle = shuffle
        self._difficulty = difficulty
        self._size = size
        self._turns = _turns([part.weight for part in self._parts], self._size) if self._parts else None

    def __len__(self) -> int:
        return self._size

    def _pass(self, part: MixturePart, which: int, number: int) -> np.ndarray:
        """All rows of a part once, in the order of its pass `number`."""
        rows = part.positions
        if self._shuffle:
            rows = np.random.default_rng([self._seed, which, number]).permutation(rows)
        if self._difficulty is not None:
            rows = rows[np.argsort(self._difficulty[rows], kind="stable")]
        return rows

    def fingerprint(self, epoch: int) -> str:
        """Changes with the order of this epoch."""
        return f"{zlib.crc32(np.ascontiguousarray(self.positions(epoch), dtype=np.int64).tobytes()):08x}"

    def positions(self, epoch: int) -> np.ndarray:
        """What this epoch visits, in order."""
        if self._turns is None:
            return self._pass(self._whole, 0, epoch)
        out = np.empty(self._size, dtype=np.int64)
        for which, part in enumerate(self._parts):
            slots = np.flatnonzero(self._turns == which)
            first = epoch * len(slots)  # a part's passes go on across epochs, so no row falls behind
            wanted = np.arange(first, first + len(slots))
            passes = wanted // len(part.positions)
            for number in np.unique(passes):
                rows = self._pass(part, which, int(number))
                inside = passes == number
                out[slots[inside]] = rows[wanted[inside] % len(part.positions)]
        return out


def _turns(weights: Sequence[float], size: int) -> np.ndarray:
    """Which part each draw comes from: every prefix holds each part's share to within one or two draws.

    Each draw goes to the part that is furthest behind its share (smooth weighted round robin)."""
    shares = np.asarray(weights, dtype=np.float64) / float(sum(weights))
    credit = np.zeros(len(shares))
    turns = np.empty(size, dtype=np.int64)
    for draw in range(size):
        credit += shares
        turns[draw] = which = int(credit.argmax())
        credit[which] -= 1.0
    return turns
