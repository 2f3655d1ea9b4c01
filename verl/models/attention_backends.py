"""Attention kernels of packages that need not be installed: flash-attn-4 (`fa4`) and cuDNN's graphs (`cudnn`).

`choose_installed` says which kernel computes an attention, from the key `model.attention_backend` or, where that is
`auto`, from a table of measurements. Neither package is imported before one of its kernels is used.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from verl.errors import ModelError
from verl.requirements import (
    ATTENTION_PACKAGES,
    attention_package_installed,
    install_command,
    missing_attention,
)

if TYPE_CHECKING:
    from verl.models.attention import AttentionCall, Backend, RaggedBounds

log = logging.getLogger(__name__)

KEY = "model.attention_backend"
_LARGEST_HEAD = 256
_GENERATIONS = (9, 10)
"""Hopper and Blackwell: what both packages have forward and backward kernels for."""


ANY_LENGTH = 1 << 30
"""The longest row where the choice must not depend on it."""


class Measured(NamedTuple):
    """Which kernels were the fastest for packs up to a head size and a longest sequence, from so many rows on."""

    generation: int
    head_size: int
    longest: int
    fewest_rows: int
    order: tuple[Backend, ...]


MEASURED = (  # with the packages called without verl: benchmarks/results/h200-2026-11-18.md
    # 75 rows of 219 tokens, 9 / 3 heads of 64: varlen 0.92 ms forward and backward, fa4 0.64, cudnn 0.27.
    Measured(9, 64, 512, 16, ("cudnn", "fa4")),
    # 1 x 16,384, 14 / 2 heads of 64: 6.13, 3.14, 4.20. 28 / 4 of 128: 21.4, 11.3, 13.1.
    # 9 rows of 488 to 4,096, 12 / 2 heads of 128: 2.04, 0.95, 1.04.
    Measured(9, 128, ANY_LENGTH, 1, ("fa4", "cudnn")),
)
"""The first that covers a pack counts; for others torch's own kernels are taken."""


GAIN = "this GPU computes packed attention up to twice as fast with the packages of the extra attention"


def gains(generation: int) -> bool:
    """Whether other kernels than torch's were measured to be faster on a GPU of this compute capability."""
    return any(row.generation == generation for row in MEASURED)


def fastest(generation: int, head_size: int, rows: int, longest: int) -> tuple[Backend, ...]:
    for row in MEASURED:
        covered = head_size <= row.head_size and longest <= row.longest and rows >= row.fewest_rows
        if covered and generation == row.generation:
            return row.order
    return ()


@lru_cache(maxsize=1)
def installed_backends() -> tuple[str, ...]:
    """Those of packages that are installed; nothing is imported."""
    return tuple(name for name in ATTENTION_PACKAGES if attention_package_installed(name))


def choose_installed(call: AttentionCall, own: Backend, rows: int, longest: int) -> Backend:
    """The kernel for a pack of so many rows of at most `longest` keys; `own`: what torch itself would be asked for."""
    asked = call.asked
    if asked == "auto" and not installed_backends():
        return own
    if asked != "auto":
        if asked != "sdpa" and (fault := backend_fault(asked, HeadForm.of(call))):
            raise ModelError(f"{KEY}={asked}: {fault}; auto takes a kernel that can")
        return asked
    size = max(call.q.shape[-1], call.v.shape[-1])
    for name in fastest(_generation(call.q.device), size, rows, longest):
        if name == "cudnn" and (own == "sdpa" or longest >= ANY_LENGTH):
            return own  # torch's dense kernel for rows of one length is cuDNN's; and its graphs are chosen by shape
        if backend_fault(name, HeadForm.of(call)) is None:
            return name
    return own


@lru_cache(maxsize=16)
def advise(device: torch.device, backend: Backend) -> None:
    """Say once what to install on a GPU that would gain from it."""
    if (
        backend == "auto"
        and device.type == "cuda"
        and gains(_generation(device))
        and not installed_backends()
    ):
        log.info("attention: %s: %s", GAIN, install_command("attention"))


@lru_cache(maxsize=16)
def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


class HeadForm(NamedTuple):
    """What of an attention decides whether a kernel has it."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    size: int
    windowed: bool = False
    softcap: float | None = None
    has_sinks: bool = False

    @staticmethod
    def of(call: AttentionCall) -> HeadForm:
        size = max(call.q.shape[-1], call.v.shape[-1])
        heads, windowed = (call.q.shape[1], call.k.shape[1]), call.window is not None
        has_sinks = call.sink is not None
        return HeadForm(call.q.device, call.q.dtype, *heads, size, windowed, call.softcap, has_sinks)


def backend_fault(name: Backend, form: HeadForm) -> str | None:
    """Why a kernel cannot compute such an attention, or None."""
    if form.device.type != "cuda":
        return "it computes on GPUs only"
    if name == "flex":
        return None
    if form.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not in {str(form.dtype).removeprefix('torch.')}"
    if form.size > _LARGEST_HEAD:
        return f"its kernels have heads of at most {_LARGEST_HEAD}, the model's have {form.size}"
    if form.softcap is not None and name != "fa4":
        return "it does not cap scores as the model does; fa4 and flex do"
    if form.has_sinks and name != "varlen":
        return "it does not compute the model's attention sinks; varlen and flex do"
    if name == "varlen":
        return None
    if name not in installed_backends():
        return missing_attention(name)
    generation = _generation(form.device)
    if generation not in _GENERATIONS:
        return f"it needs a GPU of compute capability 9 or 10, this one has {generation}"
    if name == "cudnn":
        return None  # each graph says for itself
    return _fa4_fault(form, torch.are_deterministic_algorithms_enabled())


def check_backend(backend: Backend, config: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse `model.attention_backend` where it cannot compute the attention of a model with this text config, and say
    where another kernel is to be had."""
    advise(device, backend)
    if backend in ("auto", "sdpa"):
        return
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    softcap = getattr(config, "attn_logit_softcapping", None)
    if fault := backend_fault(backend, HeadForm(device, dtype, heads, kv_heads, size, softcap=softcap)):
        raise ModelError(f"{KEY}={backend}: {fault}; auto takes a kernel that can")


# -- flash-attn-4 ---------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "verl" / "flash_attn_4"


@lru_cache(maxsize=1)
def _flash_attention() -> Callable[..., Any]:
    # Read when the package is imported.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_folder()))
    from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]

    return flash_attn_varlen_func  # type: ignore[no-any-return, unused-ignore]


class _Side(NamedTuple):
    """Bounds of the sequences of the queries or the keys, and the tokens of the longest."""

    bounds: torch.Tensor
    longest: int


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: _Side,
    keys: _Side,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    found = _flash_attention()(
        q,
        k,
        v,
        cu_seqlens_q=queries.bounds,
        cu_seqlens_k=keys.bounds,
        max_seqlen_q=queries.longest,
        max_seqlen_k=keys.longest,
        softmax_scale=scaling,
        causal=True,
        window_size=(None, None) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out


def flash_attention_4(call: AttentionCall, bounds: RaggedBounds) -> torch.Tensor:
    """From [N, H, D] each to [N, H, D]."""
    sides = _Side(bounds.queries, bounds.longest), _Side(*bounds.key_side)
    return _flash(*call[:3], *sides, call.scaling, call.window, call.softcap)


_TRIED = ((3, 3), (300, 350), (1, 40), (2400, 2500))
"""Queries and keys of the rows that a kernel is tried on."""
_LARGEST_ERROR = 0.02
"""Half precision has 0.003."""


def _fa4_error(form: HeadForm, size: int) -> float:
    """The largest error, relative to float32, of an output and its gradients. (4.0.0b19 has wrong gradients of queries
    with heads of 80.) Of all groups of heads one is computed: the kernels are the same."""
    device, window = form.device, 100 if form.windowed else None
    queries, keys = (list(side) for side in zip(*_TRIED, strict=True))
    sides = [
        _Side(torch.tensor([0, *accumulate(side)], dtype=torch.int32, device=device), max(side))
        for side in (queries, keys)
    ]
    generator = torch.Generator(device).manual_seed(0)
    counts = ((sum(queries), form.heads // form.kv_heads), (sum(keys), 1), (sum(keys), 1))
    given = [torch.randn(*count, size, device=device, generator=generator) for count in counts]
    halves = [x.to(form.dtype).requires_grad_() for x in given]
    wide = [x.detach().float().requires_grad_() for x in halves]
    grad = given[0].to(form.dtype)
    with torch.cuda.device(device):
        out = _flash(halves[0], halves[1], halves[2], sides[0], sides[1], None, window, form.softcap)
        q, k, v = (x.split(side) for x, side in zip(wide, (queries, keys, keys), strict=True))
        rows = (_plain(*row, window, form.softcap) for row in zip(q, k, v, strict=True))
        right = torch.cat(list(rows))
        found = [out, *torch.autograd.grad(out, halves, grad)]
        wanted = [right, *torch.autograd.grad(right, wide, grad.float())]
    errors = [(a - b).detach().norm() / b.detach().norm() for a, b in zip(found, wanted, strict=True)]
    return float(torch.stack(errors).max())  # NaN where one is


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, softcap: float | None
) -> torch.Tensor:
    """The causal attention of [queries, H, D] to [keys, 1, D]."""
    scores = torch.einsum("qhd,kd->hqk", q, k[:, 0]) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    last = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
    behind = last - torch.arange(len(k), device=q.device)
    hidden = (behind < 0) | (behind >= (window or len(k)))
    return torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v[:, 0])


@lru_cache(maxsize=64)
def _fa4_fault(form: HeadForm, deterministic: bool) -> str | None:
    """Why flash-attn-4 cannot compute it, or None: its kernels are compiled when first used, and a backward pass could
    no longer choose another; what they compute is compared with torch. (`deterministic` is what torch says; other
    kernels are compiled for it.)"""
    size = -(-form.size // 8) * 8
    start = time.perf_counter()
    folder = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", cache_folder())
    log.info(
        "attention: flash-attn-4 loads its kernels for heads of %d, or compiles them into %s", size, folder
    )
    try:
        # A thread of its own: hooks on saved tensors and modes of this one, such as those of checkpointing, are not
        # meant for it.
        with ThreadPoolExecutor(1) as thread:
            worst = thread.submit(_fa4_error, form, size).result()
    except Exception as error:  # compilers fail with anything
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        fault = f"flash-attn-4 cannot compute with heads of {size} here ({type(error).__name__}: {reason})"
        log.warning("attention: %s", fault)
        return fault
    if not worst <= _LARGEST_ERROR:
        fault = f"flash-attn-4 computes heads of {size} wrongly here (error {worst:.2g} against torch)"
        log.warning("attention: %s", fault)
        return fault
    log.info(
        "attention: flash-attn-4's kernels for heads of %d took %.1f s", size, time.perf_counter() - start
    )
    return None
