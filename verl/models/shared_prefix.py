"""Attention of a pack in which the common beginning of some rows, such as the prompt of a preference pair, is once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from verl.models.attention import PackedAttention, choose_backend, dense_runs, varlen_kernel


class SharedPrefixAttention:
    """Attention of a pack in which the common beginning of some rows is there once.

    First come all beginnings (`prefixes`: their lengths), then what follows in each row: (queries, keys) of each, whose
    keys are the beginning's and its own, `key_index` in the pack. Each kind is an ordinary causal attention in which
    the last query sees the last key."""

    def __init__(
        self,
        prefixes: Sequence[int],
        rests: Sequence[tuple[int, int]],
        key_index: torch.Tensor,
        device: torch.device,
    ) -> None:
        self._prefix = PackedAttention.from_lengths(prefixes, device)
        self._split = sum(prefixes)
        self.rests, self._key_index = tuple(rests), key_index
        self._bounds = [PackedAttention.from_lengths(side, device) for side in zip(*rests, strict=True)]

    def attend(
        self,
        module: nn.Module | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        options: dict[str, Any] = {
            "scaling": scaling,
            "sliding_window": sliding_window,
            "softcap": softcap,
        }
        first = self._prefix.attend(module, *(x[:, :, : self._split] for x in (q, k, v)), **options)
        q, k, v = (
            q[:, :, self._split :],
            k.index_select(2, self._key_index),
            v.index_select(2, self._key_index),
        )
        queries, keys = self._bounds
        longest = max(keys.lengths)
        window = None if sliding_window is None or sliding_window >= longest else sliding_window
        backend = choose_backend(q.is_cuda, q.dtype, (q.shape[-1], v.shape[-1]), False, window, softcap)
        if backend == "varlen":
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            ends = (keys.cu_seqlens, longest)
            rest = varlen_kernel()(
                q, k, v, queries.cu_seqlens, max(queries.lengths), scaling, window, keys=ends
            ).unsqueeze(0)
        else:
            rest = dense_runs(q, k, v, self.rests, scaling, window, softcap)
        return torch.cat([first, rest], dim=1)
