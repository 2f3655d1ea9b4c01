"""The KV cache on a device: all layers in one tensor, blocks of a few tokens, one block more that nobody owns.

Rows that have ended keep running inside a captured graph until the next harvest; they write to that last block.

What always holds: the tensor never moves while it lives, because captured graphs know its address.
"""

from __future__ import annotations

import torch

from verl.rollout.native.block_manager import Copy


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
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = [(pair[0], pair[1]) for pair in self.tensor]

    def copy(self, copies: list[Copy]) -> None:
        """Whole blocks, in order of the list; a target is never a later source, so one read and one write do."""
        device = self.tensor.device
        source = torch.tensor([copy.source for copy in copies]).to(device, non_blocking=True)
        target = torch.tensor([copy.target for copy in copies]).to(device, non_blocking=True)
        for layer in self.tensor:
            layer.index_copy_(1, target, layer.index_select(1, source))
