"""The tensors of the KV cache, one pair per layer, made when a layer first writes.

On the CPU a block is a page as long as the longest sequence ([page, token, head, dim]): the pages of several
rows then are one strided tensor, and attention over them one call without gathering anything (about a third
of the time of gathering blocks of 16). Pages cost memory only as far as they were written to.

What always holds: every layer has the same number of blocks; copying happens before the model runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl.errors import RolloutError
from verl.models.attention_calls import attention_calls, attention_fault
from verl.models.float32 import FAULTS, first_line
from verl.models.forward import backbone_of
from verl.rollout.native.block_manager import Copy
from verl.rollout.verify import cannot_generate


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
    """What the layers really write, found by running a few tokens: configurations name head sizes that differ from it
    (multi-head latent attention) or from layer to layer. RolloutError where the cache cannot serve the model.

    The model uses our attention."""
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


def free_host_memory() -> int:
    """Bytes a process may still take without swapping."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class PageCache:
    """Keys and values on the CPU: for each layer [pages, page_size, kv_heads, head_dim]."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors of one layer, shaped after the first keys [1, K, N, D] and values it writes."""
        pair = self._layers.get(index)
        if pair is None:
            # Zeros, since unwritten places are read behind the mask; the system gives zero pages when touched.
            pair = (self._zeros(key), self._zeros(value))
            self._layers[index] = pair
        if pair[0].shape[2:] != (key.shape[1], key.shape[3]) or pair[0].dtype != key.dtype:
            raise RolloutError(
                f"layer {index} wrote keys of shape {tuple(key.shape)} and type {key.dtype} into a cache of "
                f"{tuple(pair[0].shape)} and type {pair[0].dtype}; was the model changed while generating?"
            )
        return pair

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self.pages, self.page_size, like.shape[1], like.shape[3], dtype=like.dtype)

    def copy(self, copies: Sequence[Copy]) -> None:
        for pair in self._layers.values():
            for tensor in pair:
                for copy in copies:
                    tensor[copy.target, : copy.tokens] = tensor[copy.source, : copy.tokens]
