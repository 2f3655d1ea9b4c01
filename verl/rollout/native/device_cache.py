"""The KV cache on a device: all layers in one tensor, blocks of a few tokens, one block more that nobody owns.

Rows that have ended keep running inside a captured graph until the next harvest; they write to that last block.

The tensor never moves while it lives, because captured graphs know its address; while parked it has no memory behind
it. Its content is never cleared: a place is read only after it was written, and what masks hide is replaced, not
multiplied by zero (it may be NaN).
"""

from __future__ import annotations

import logging
import math

import torch

from verl.rollout.native.block_manager import Copy
from verl.rollout.native.parkable import ParkableMemory, reserve

log = logging.getLogger(__name__)


class DeviceCache:
    """[layers, 2, blocks + 1, kv_heads, block_size, head_dim]; `layers` are pairs of views of it."""

    def __init__(
        self,
        layers: int,
        blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.blocks = blocks
        self.block_size = block_size
        shape = (layers, 2, blocks + 1, kv_heads, block_size, head_dim)
        reserved = reserve(math.prod(shape) * dtype.itemsize, device)
        self._memory: ParkableMemory | None = None
        if reserved is None:
            self.tensor = torch.empty(shape, dtype=dtype, device=device)
        else:
            self._memory, plain = reserved
            self.tensor = plain.view(dtype).view(shape)
        self.layers = [(pair[0], pair[1]) for pair in self.tensor]

    @property
    def bytes(self) -> int:
        """Memory held now."""
        return 0 if self.parked else self.tensor.nbytes

    @property
    def parked(self) -> bool:
        return self._memory is not None and not self._memory.mapped

    def park(self) -> bool:
        """Give the memory back but keep the address; False where that cannot be done."""
        if self._memory is None:
            return False
        self._memory.park()
        return True

    def unpark(self) -> bool:
        """Take the memory again; False when the device has too little left."""
        if self.parked and self._memory is not None:
            try:
                self._memory.unpark()
            except RuntimeError as error:
                log.debug("the parked cache cannot come back: %s", error)
                return False
        return True

    def copy(self, copies: list[Copy]) -> None:
        """Whole blocks, in order of the list; a target is never a later source, so one read and one write do."""
        device = self.tensor.device
        source = torch.tensor([copy.source for copy in copies]).to(device, non_blocking=True)
        target = torch.tensor([copy.target for copy in copies]).to(device, non_blocking=True)
        for layer in self.tensor:
            layer.index_copy_(1, target, layer.index_select(1, source))
