"""The shape of a model's KV cache, and its blocks on a device.

On a device all layers are views of one allocation, which never moves, because captured graphs hold its address; while
asleep it has no memory behind it. Its content is never cleared: a slot is read only after it was written, and what
masks hide is replaced, not multiplied by zero (it may be NaN).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from verl.models.introspection import backbone_of
from verl.models.packability import FAULTS, attention_calls, attention_fault, first_line
from verl.models.vmm_buffer import VMMBuffer, reserve
from verl.rollout.native.block_manager import Copy
from verl.rollout.source import cannot_generate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerShape:
    """What one layer writes for each token. A layer without attention has no heads."""

    kv_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def bytes(self) -> int:
        return self.kv_heads * (self.key_size + self.value_size) * self.dtype.itemsize


@dataclass(frozen=True)
class CacheLayout:
    """The shapes of all layers, by `layer_idx`."""

    layers: tuple[LayerShape, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return sum(layer.bytes for layer in self.layers)


def cache_layout(model: Any) -> CacheLayout:
    """What the layers write, found by running a few tokens: configurations name head sizes that differ from it
    (multi-head latent attention) or from layer to layer. RolloutError where the cache cannot serve the model, which
    must use our attention."""
    try:
        calls = attention_calls(model, backbone_of(model))
    except torch.OutOfMemoryError:
        raise
    except FAULTS as error:
        raise cannot_generate(model, f"its layers do not take our inputs ({first_line(error)})") from error
    fault = attention_fault(calls, model.config.get_text_config())
    by_layer = {call.layer: call for call in calls}
    if fault is None and None in by_layer:
        fault = "its attention layers have no layer_idx"
    if fault is None and len(by_layer) < len(calls):
        fault = "some of its layers call their attention more than once"
    if fault is not None:
        raise cannot_generate(model, fault)
    shapes = {
        index: LayerShape(call.kv_heads, call.key_size, call.value_size, call.dtype)
        for index, call in by_layer.items()
        if index is not None
    }
    return CacheLayout(tuple(shapes.get(index, LayerShape()) for index in range(max(shapes) + 1)))


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

    @property
    def bytes(self) -> int:
        """Memory in use now."""
        return 0 if self.asleep else self.tensor.nbytes

    @property
    def asleep(self) -> bool:
        return self._memory is not None and not self._memory.mapped

    def sleep(self) -> bool:
        """Release the memory but keep the address; False where that cannot be done."""
        if self._memory is None:
            return False
        self._memory.sleep()
        return True

    def wake_up(self) -> bool:
        """Allocate the memory again; False when the device has too little left."""
        if self.asleep and self._memory is not None:
            try:
                self._memory.wake_up()
            except RuntimeError as error:
                log.debug("the KV cache cannot be restored: %s", error)
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
