"""One attention implementation, "verl", for every Hugging Face model that uses the attention interface.

Only the attention call of the model is ours; the context object in the keyword argument `verl_attn` computes it.
Training passes a `PackedAttention` (sequences end to end), the native rollout engine its paged context. A token sees
itself and the earlier tokens of its own sequence (within the sliding window). On CUDA no call waits for the device.

Shapes: H query heads, K key/value heads, N tokens of the pack, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from verl.models.torch_attention import gated, varlen_attention, written_attention

log = logging.getLogger(__name__)

ATTENTION_NAME = "verl"
_FEWEST_FLEX = 128
"""For fewer tokens torch compiles another kernel of FlexAttention, which takes longer than they do."""
_LARGEST_FLASH_HEAD = 256
_FEWEST_QUERIES = 512
"""Queries of a sliding window that are served at once."""
Backend = Literal["auto", "sdpa", "varlen", "flex", "cudnn", "fa4", "exact"]
RAGGED = ("varlen", "cudnn", "fa4")
"""The kernels for sequences of any lengths."""
_UNBOUNDED = 1 << 30
DENSE: dict[str, Callable[[AttentionCall], torch.Tensor]] = {}  # by `asked`, where it is not torch's


class AttentionCall(NamedTuple):
    """One attention of a layer: q is [1,H,N,D], k and v [1,K,N,D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scaling: float | None = None
    """None: the root of the head size."""
    window: int | None = None
    softcap: float | None = None
    layer: int = 0
    asked: Backend = "auto"  # the key `model.attention_backend`, or "exact" (`verl.models.exact`)
    sink: torch.Tensor | None = None
    """[H]: one more score of each query (`verl.models.torch_attention`)."""

    @property
    def plain(self) -> bool:
        """Whether torch's fused attention computes it."""
        return self.softcap is None and self.sink is None

    def on(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionCall:
        """The same attention of other tensors."""
        return self._replace(q=q, k=k, v=v)

    def within(self, longest: int) -> AttentionCall:
        """Without a window that reaches over sequences of at most `longest` tokens."""
        covered = self.window is not None and self.window >= longest
        return self._replace(window=None) if covered else self

    def backend(self, rows: int = 1, longest: int = _UNBOUNDED, uniform: bool = False) -> Backend:
        """The kernel for it in a pack of so many sequences of at most `longest` keys; `uniform`: all have one length.
        Without these it does not depend on them."""
        sizes = (self.q.shape[-1], self.v.shape[-1])
        has_sinks = self.sink is not None
        own = choose_backend(
            self.q.is_cuda, self.q.dtype, sizes, uniform, self.window, self.softcap, has_sinks
        )
        half = self.q.dtype in (torch.bfloat16, torch.float16)
        if not (self.q.is_cuda and half) or is_in_torch_dispatch_mode():
            return own
        from verl.models.attention_backends import choose_installed

        return choose_installed(self, own, rows, longest)


class AttentionContext(Protocol):
    """What the keyword argument `verl_attn` must offer."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """[1, N, H, D]."""


def _attention(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    verl_attn: AttentionContext | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    observer = _observer.get()
    if observer is not None:
        named = {**other, "sliding_window": sliding_window, "s_aux": s_aux, "verl_attn": verl_attn}
        return observer.attend(module, q, k, v, attention_mask, named), None
    if verl_attn is None:
        raise RuntimeError(
            "the attention implementation 'verl' needs a context; call the model through a verl engine, or "
            "model.set_attn_implementation('sdpa')"
        )
    asked, layer = asked_backend(module), getattr(module, "layer_idx", None) or 0
    call = AttentionCall(q, k, v, scaling, sliding_window, softcap, layer, asked, s_aux)
    return verl_attn.attend(call), None


def _no_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    observer = _observer.get()
    return None if observer is None else observer.mask(kwargs["mask_function"], kwargs.get("device"))


@dataclass(frozen=True)
class AttentionObserver:
    """Gets every mask and attention call in place of a context (`verl.models.packability`)."""

    mask: Callable[..., torch.Tensor]
    attend: Callable[..., torch.Tensor]


_observer: ContextVar[AttentionObserver | None] = ContextVar("attention_observer", default=None)


@contextmanager
def observe_attention(observer: AttentionObserver) -> Iterator[None]:
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def register_attention(outside_graphs: bool = False) -> None:
    """Make "verl" known to transformers. `outside_graphs`: torch.compile shall call it, never trace it; that
    holds for the process from then on and costs nothing where nothing is compiled."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if outside_graphs:
        AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(_attention))
    elif ATTENTION_NAME not in AttentionInterface().valid_keys():
        AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def use_verl_attention(model: Any, backend: Backend = "auto") -> bool:
    """Switch a Hugging Face model to "verl" with this `model.attention_backend`. False when its attention cannot be
    exchanged (it must stay padded)."""
    register_attention()
    set_backend(model, backend)
    if not getattr(model, "_supports_attention_backend", False):
        return False
    try:
        model.set_attn_implementation(ATTENTION_NAME)
    except (ValueError, ImportError, AttributeError) as error:
        log.debug("%s keeps its own attention: %s", type(model).__name__, error)
        return False
    return bool(model.config._attn_implementation == ATTENTION_NAME)


def set_backend(model: nn.Module, backend: Backend) -> None:
    """Let the layers of a model ask for a kernel (`model.attention_backend`)."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.verl_attention_backend = backend  # type: ignore[assignment]


def asked_backend(module: nn.Module) -> Backend:
    return cast(Backend, getattr(module, "verl_attention_backend", "auto"))


def caps_scores(model: Any) -> bool:
    """Whether its attention caps the scores. transformers' SDPA leaves the cap out, and older versions (5.10 to 5.17 at
    least) choose it for Gemma 2 all the same: such a model needs "eager"."""
    return getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None


def send(values: torch.Tensor | np.ndarray, device: torch.device) -> torch.Tensor:
    """To the device without waiting for it."""
    x = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class PackedAttention:
    """Attention within each sequence of a pack: the tokens of sequence i are those from cu_seqlens[i] to [i+1].

    `lengths` is the same on the host, so that no kernel launch has to ask the device. (No dataclass: FSDP2 would copy
    it for every layer when it casts inputs, and the masks would be made again in each.)"""

    def __init__(
        self,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
        backend: Backend = "auto",
        by_shape: bool = True,
    ) -> None:
        """`backend`: a kernel for all calls, whatever the model's key says. `by_shape`: which kernel computes a
        sequence may depend on those beside it."""
        self.cu_seqlens, self.lengths, self.backend, self._by_shape = cu_seqlens, lengths, backend, by_shape
        self._bounds = RaggedBounds(cu_seqlens, max(lengths, default=0))
        self._flex_masks: dict[int | None, Any] = {}

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], device: torch.device | str, backend: Backend = "auto"
    ) -> PackedAttention:
        bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(torch.tensor(lengths, dtype=torch.int32), 0, out=bounds[1:])
        return cls(bounds.to(device, non_blocking=True), tuple(lengths), backend)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        tokens = call.q.shape[2]
        if call.q.shape[0] != 1 or tokens != sum(self.lengths):
            raise RuntimeError(
                f"packed attention got {tuple(call.q.shape)} for sequences of lengths {list(self.lengths)}"
            )
        longest = self._bounds.longest
        call = call.within(longest)
        backend = self.backend
        if backend == "auto":
            rows, most = (len(self.lengths), longest) if self._by_shape else (1, _UNBOUNDED)
            backend = call.backend(rows, most, uniform=len(set(self.lengths)) == 1)
            if backend == "flex" and tokens < _FEWEST_FLEX:
                backend = "sdpa"
        if backend in RAGGED:
            return ragged_attention(backend, call, self._bounds)
        if backend == "flex":
            return self._flex(call)
        return dense_runs(call, [(length, length) for length in self.lengths])

    def _flex(self, call: AttentionCall) -> torch.Tensor:
        (q, k, v), mask = call[:3], self._flex_mask(call.window, call.q.device)
        score_mod = softcap_mod(float(call.softcap), q.device) if call.softcap is not None else None
        grouped = q.shape[1] != k.shape[1]
        options: dict[str, Any] = {"scale": call.scaling, "enable_gqa": grouped}
        if call.sink is not None:
            from torch.nn.attention.flex_attention import AuxRequest

            options["return_aux"] = AuxRequest(lse=True)
        found: Any = compiled_flex()(q, k, v, score_mod=score_mod, block_mask=mask, **options)
        out: torch.Tensor = found if call.sink is None else gated(found[0], found[1].lse, call.sink)
        return out.transpose(1, 2)

    def _flex_mask(self, window: int | None, device: torch.device) -> Any:
        if window not in self._flex_masks:
            from torch.nn.attention.flex_attention import create_block_mask

            total = sum(self.lengths)
            lengths = self.cu_seqlens.diff().long()
            document = torch.repeat_interleave(
                torch.arange(len(self.lengths), device=device), lengths, output_size=total
            )

            def same_sequence_causal(b: Any, h: Any, i: Any, j: Any) -> Any:
                seen = (i >= j) & (document[i] == document[j])
                return seen if window is None else seen & (i - j < window)

            self._flex_masks[window] = create_block_mask(
                same_sequence_causal, None, None, total, total, device=device
            )
        return self._flex_masks[window]


def dense_runs(call: AttentionCall, lengths: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Dense attention over each run of neighbours with the same numbers of queries and keys (`lengths`): a run is an
    ordinary batch, and no token is copied. (`pack` lays sequences out by length, so that runs are long.)"""
    runs = [(each, sum(1 for _ in same)) for each, same in groupby(lengths)]
    split_q = call.q.split([queries * rows for (queries, _), rows in runs], dim=2)
    split_k, split_v = (x.split([keys * rows for (_, keys), rows in runs], dim=2) for x in (call.k, call.v))
    parts = []
    for (_, rows), *chunk in zip(runs, split_q, split_k, split_v, strict=True):
        q_r, k_r, v_r = (x[0].unflatten(1, (rows, -1)).transpose(0, 1) for x in chunk)  # [rows, H, L, D]
        out = dense_attention(call.on(q_r, k_r, v_r))
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)


def choose_backend(
    on_cuda: bool,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    uniform: bool,
    window: int | None,
    softcap: float | None,
    has_sinks: bool = False,
) -> Backend:
    """The kernel for a pack with heads of `sizes` (keys, values); `uniform`: all its sequences have one length.

    The varlen kernel is torch's fastest for a ragged pack in half precision, and its only one that knows a sliding
    window without a mask of length times length. A pack of sequences of one length is an ordinary batch, for which the
    dense kernels are at least as good. FlexAttention serves soft-capping; float32 and large heads go by runs of one
    length. Sinks need a kernel that returns its log-sum-exp. (`verl.models.attention_backends` has the kernels of other
    packages.)"""
    # FlexAttention cannot compile inside a dispatch mode (`float32_arithmetic`).
    if not on_cuda or is_in_torch_dispatch_mode():
        return "sdpa"
    if softcap is not None:
        return "flex"
    if dtype not in (torch.bfloat16, torch.float16) or max(sizes) > _LARGEST_FLASH_HEAD:
        return "flex" if has_sinks else "sdpa"
    dense = uniform and window is None and sizes[0] == sizes[1] and not has_sinks
    return "sdpa" if dense else "varlen"


def dense_attention(call: AttentionCall) -> torch.Tensor:
    """Causal attention of [rows, H, L, D] with as little masking as the case allows. With more keys than queries, the
    last query sees the last key."""
    if call.asked in DENSE:
        return DENSE[call.asked](call)
    q, k, v, scaling, window, *_ = call
    length, before = q.shape[2], k.shape[2] - q.shape[2]
    if not call.plain:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return _by_blocks(call.on(q, k, v), written_attention)
    windowed = window is not None and window < length
    grouped = q.shape[1] != k.shape[1]
    flash = q.dtype != torch.float32 and q.shape[-1] == v.shape[-1] <= _LARGEST_FLASH_HEAD and not windowed
    flash = flash and not before
    if grouped and q.is_cuda and not flash:
        # The memory-efficient kernel knows no groups, and the fallback would build the whole score matrix.
        groups = q.shape[1] // k.shape[1]
        k, v, grouped = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), False
    if before:
        mask = _band(length, window, q.device, before)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
    if window is None or window >= length:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=length > 1, scale=scaling, enable_gqa=grouped
        )

    def fused(part: AttentionCall, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*part[:3], attn_mask=mask, scale=scaling, enable_gqa=grouped)

    return _by_blocks(call.on(q, k, v), fused)


def _by_blocks(
    call: AttentionCall, attend: Callable[[AttentionCall, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`attend` with a mask, for some queries at a time and the keys that they see: what is in memory grows with the
    length where there is a window, not with its square."""
    (q, k, v), window = call[:3], call.window
    length, before, parts = q.shape[2], k.shape[2] - q.shape[2], []
    for start in range(0, length, step := max(window or 0, _FEWEST_QUERIES)):
        stop = min(start + step, length)
        first = 0 if window is None else max(before + start - window + 1, 0)
        keys = slice(first, before + stop)
        part = call.on(q[:, :, start:stop], k[:, :, keys], v[:, :, keys])
        parts.append(attend(part, _band(stop - start, window, q.device, before + start - first)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _band(length: int, window: int | None, device: torch.device, before: int = 0) -> torch.Tensor:
    """[length, before + length]: which keys each query sees, where `before` keys come before the first query."""
    offset = torch.arange(before + length, device=device)
    behind = offset[before:, None] - offset[None, :]
    return (behind >= 0) if window is None else (behind >= 0) & (behind < window)


@dataclass(eq=False)
class RaggedBounds:
    """Where sequences that lie end to end begin on the device, and how many tokens the longest has at most."""

    queries: torch.Tensor
    longest: int
    keys: torch.Tensor | None = None
    """Of the keys, where they are not those of the queries: the last query of each sees its last key."""
    longest_keys: int = 0
    kept: dict[Any, Any] = field(default_factory=dict)
    """What a kernel derives from them; the first layer of a pass makes it anew."""

    @property
    def key_side(self) -> tuple[torch.Tensor, int]:
        return (self.queries, self.longest) if self.keys is None else (self.keys, self.longest_keys)


def ragged_attention(backend: Backend, call: AttentionCall, bounds: RaggedBounds) -> torch.Tensor:
    """Causal attention of sequences end to end by one of the kernels `RAGGED`."""
    filled, size, out = filled_heads(call), call.v.shape[-1], None
    if backend == "fa4":
        from verl.models.attention_backends import flash_attention_4

        out = flash_attention_4(filled, bounds)
    elif backend == "cudnn":
        from verl.models import cudnn_attention

        out = cudnn_attention.attend(filled, bounds)
    if out is None:
        out = varlen_attention(filled, bounds)
    return (out if out.shape[-1] == size else out[..., :size]).unsqueeze(0)


def filled_heads(call: AttentionCall) -> AttentionCall:
    """As [N, H, D] each, as wide as the flash kernels have them: they know one size for queries, keys and values, and
    only multiples of 8. Zeros change no score."""
    # Not x[0], nor slices of everything: their backward passes fill and copy a tensor.
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in call[:3])
    size = q.shape[-1]
    wide = -(-max(size, v.shape[-1]) // 8) * 8
    scaling = size**-0.5 if wide != size and call.scaling is None else call.scaling
    q, k, v = (x if x.shape[-1] == wide else F.pad(x, (0, wide - x.shape[-1])) for x in (q, k, v))
    return call._replace(q=q, k=k, v=v, scaling=scaling)


@lru_cache(maxsize=1)
def compiled_flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


@lru_cache(maxsize=8)
def softcap_mod(softcap: float, device: torch.device) -> Callable[..., torch.Tensor]:
    """The value is a tensor: torch 2.11 cannot compile FlexAttention for changing lengths with a number in it."""
    cap = torch.tensor(softcap, device=device)

    def capped(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return torch.tanh(score / cap) * cap

    return capped
