"""The tensors of the KV cache, one pair per layer, made when a layer first writes.

On the CPU a block is a page as long as the longest sequence ([page, token, head, dim]): the pages of several
rows then are one strided tensor, and attention over them one call without gathering anything (about a third
of the time of gathering blocks of 16). Pages cost memory only as far as they were written to.

What always holds: every layer has the same number of blocks; copying happens before the model runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl.errors import RolloutError
from verl.rollout.native.block_manager import Copy


def head_shape(config: Any) -> tuple[int, int, int]:
    """(layers, key/value heads, head size) of a Hugging Face text config."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(config.num_hidden_layers), int(kv_heads), int(head_dim)


def token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token over all layers."""
    layers, kv_heads, head_dim = head_shape(config)
    return layers * 2 * kv_heads * head_dim * dtype.itemsize


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
