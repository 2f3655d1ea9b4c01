# mypy: disable-error-code="no-untyped-def"
"""AdamW over many parameters in one launch: reads gradients as they are, updates masters and moments, writes the
rounded parameters. And sums of gradients, also over many parameters in one launch.

The arithmetic is that of torch's AdamW, in float32; every number is read and written once. The kernels find their
tensors in a table of addresses: a launch per parameter would take longer than the update of a small one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

_BLOCK = 2048
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _pointer(entry_ptr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in a table's entry; the compiler must be told that it may load several numbers at once from it."""
    pointer = tl.load(entry_ptr).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _inside(entry_ptr, at, ALIGNED: tl.constexpr):
    size = tl.load(entry_ptr)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    return at < size


@triton.jit
def _adamw(
    table_ptr,
    blocks_ptr,
    tensors,
    factor,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    rate,
    root_correction,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The table's rows: addresses of parameters, masters, first and second moments and gradients; sizes; whether the
    parameter decays."""
    which = tl.load(blocks_ptr + 2 * tl.program_id(0))
    at = tl.load(blocks_ptr + 2 * tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)
    column = table_ptr + which
    param_ptr = _pointer(column, PARAM, ALIGNED)
    master_ptr = _pointer(column + tensors, tl.float32, ALIGNED)
    first_ptr = _pointer(column + 2 * tensors, tl.float32, ALIGNED)
    second_ptr = _pointer(column + 3 * tensors, tl.float32, ALIGNED)
    grad_ptr = _pointer(column + 4 * tensors, GRAD, ALIGNED)
    inside = _inside(column + 5 * tensors, at, ALIGNED)
    keep = 1.0 - decay * tl.load(column + 6 * tensors).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32) * factor
    first = tl.load(first_ptr + at, mask=inside, other=0.0)
    second = tl.load(second_ptr + at, mask=inside, other=0.0)
    master = tl.load(master_ptr + at, mask=inside, other=0.0)
    first = first + (grad - first) * rest1
    second = second * beta2 + grad * grad * rest2
    master = master * keep - rate * first / (tl.sqrt(second) * root_correction + eps)
    tl.store(first_ptr + at, first, mask=inside)
    tl.store(second_ptr + at, second, mask=inside)
    tl.store(master_ptr + at, master, mask=inside)
    tl.store(param_ptr + at, master.to(PARAM), mask=inside)


@triton.jit
def _add(table_ptr, blocks_ptr, tensors, GRAD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """The table's rows: addresses of float32 sums and of gradients; sizes."""
    which = tl.load(blocks_ptr + 2 * tl.program_id(0))
    at = tl.load(blocks_ptr + 2 * tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)
    sum_ptr = _pointer(table_ptr + which, tl.float32, ALIGNED)
    grad_ptr = _pointer(table_ptr + tensors + which, GRAD, ALIGNED)
    inside = _inside(table_ptr + 2 * tensors + which, at, ALIGNED)
    total = tl.load(sum_ptr + at, mask=inside, other=0.0)
    total += tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(sum_ptr + at, total, mask=inside)


@lru_cache(maxsize=8)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[blocks, 2]: of each block of `_BLOCK` numbers its tensor and its place in it."""
    rows = [(which, at) for which, size in enumerate(sizes) for at in range(triton.cdiv(size, _BLOCK))]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 2).to(device)


def _aligned(rows: Sequence[Sequence[int]]) -> bool:
    """Whether all addresses and sizes are multiples of 16."""
    return not any(number % 16 for row in rows for number in row)


def _send(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    table = torch.tensor(rows, dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


class AdamWUpdate:
    """An update of many parameters that is ready to be launched. All tensors are contiguous, those of a parameter of
    one shape; parameters have one dtype, gradients another."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        masters: Sequence[torch.Tensor],
        firsts: Sequence[torch.Tensor],
        seconds: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        decays: Sequence[bool],
    ) -> None:
        sizes = tuple(master.numel() for master in masters)
        device = masters[0].device
        self._tensors = len(sizes)
        self._grads = grads  # which must not be freed before
        self._types = (_TYPES[params[0].dtype], _TYPES[grads[0].dtype])
        self._blocks = _blocks(sizes, device)
        addresses = [[x.data_ptr() for x in tensors] for tensors in (params, masters, firsts, seconds, grads)]
        self._aligned = _aligned([*addresses, sizes])
        self._table = _send([*addresses, sizes, [int(decay) for decay in decays]], device)

    def launch(
        self,
        *,
        updates: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        factor: float,
    ) -> None:
        """In place; `updates` counts this one."""
        if not len(self._blocks):
            return
        _adamw[(len(self._blocks),)](
            self._table,
            self._blocks,
            self._tensors,
            factor,
            # Differences from 1 are taken in double precision: float32 would lose half their digits.
            1 - betas[0],
            betas[1],
            1 - betas[1],
            eps,
            lr * weight_decay,
            lr / (1 - betas[0] ** updates),
            (1 - betas[1] ** updates) ** -0.5,
            PARAM=self._types[0],
            GRAD=self._types[1],
            ALIGNED=self._aligned,
            BLOCK=_BLOCK,
            num_warps=8,
        )


class AddAll:
    """sum += gradient for many tensors, in a pass that is captured: the addresses of gradients are known only once it
    has been, and the kernel reads them at each replay."""

    def __init__(self, sums: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        """`dtype`: of the gradients."""
        sizes = tuple(total.numel() for total in sums)
        self._device, self._dtype = sums[0].device, _TYPES[dtype]
        self._blocks = _blocks(sizes, self._device)
        self._table = torch.zeros(3, len(sums), dtype=torch.int64, device=self._device)
        self._rows = [[total.data_ptr() for total in sums], [0] * len(sums), list(sizes)]
        # Of gradients it is found out in `write_table`: torch's allocator puts them at multiples of 512.
        self._aligned = _aligned(self._rows)

    def launch(self, gradients: Sequence[torch.Tensor]) -> None:
        """Contiguous. They may be freed afterwards. Before `write_table` it adds nothing."""
        self._rows[1] = [gradient.data_ptr() for gradient in gradients]
        grid = (len(self._blocks),)
        settings = {"GRAD": self._dtype, "ALIGNED": self._aligned, "BLOCK": _BLOCK, "num_warps": 8}
        _add[grid](self._table, self._blocks, len(self._rows[0]), **settings)

    def write_table(self) -> None:
        """After the capture."""
        if self._aligned and not _aligned(self._rows):
            raise RuntimeError("a gradient does not begin at a multiple of 16 bytes")
        self._table.copy_(_send(self._rows, self._device))
