"""The KV cache on a device: all layers in one piece of memory, blocks of a few tokens, one block more that nobody owns.

Rows that have ended keep running inside a captured graph until the next poll_finished; they write to that last block.

The tensor never moves while it lives, because captured graphs know its address; while parked it has no memory behind
it. Its content is never cleared: a place is read only after it was written, and what masks hide is replaced, not
multiplied by zero (it may be NaN).
"""

from __future__ import annotations

import logging

import torch

from verl.rollout.native.block_manager import Copy
from verl.rollout.native.kv_cache import CacheLayout
from verl.rollout.native.vmm_buffer import ParkableMemory, reserve

log = logging.getLogger(__name__)


class DeviceCache:
    """For each layer a pair (keys, values) of [blocks + 1, kv_heads, block_size, size]: views of one memory."""

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
        self._memory: ParkableMemory | None = None
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
        for layer in self.layers:
            for tensor in layer:
                tensor.index_copy_(0, target, tensor.index_select(0, source))
