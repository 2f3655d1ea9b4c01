# mypy: disable-error-code="no-untyped-def"
"""Starting a kernel while the one before it still runs (programmatic dependent launch).

A kernel launched with `early_launch` may start as soon as every program of the kernel before it has; it waits in
`wait_for_inputs` until that kernel has ended and its writes are visible. Since each kernel waits before it reads or
writes anything, nothing of two kernels in a row overlaps but the time a launch takes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

EARLY = True
"""Whether kernels of a decode step start early where the device can (compute capability 9)."""


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@lru_cache
def _can_start_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def early_launch(device: torch.device) -> dict[str, bool]:
    """The launch settings of a kernel that begins with `wait_for_inputs`."""
    if EARLY and _can_start_early(device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
