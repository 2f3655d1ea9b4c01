"""Triton kernels, used on CUDA only; the torch versions next to their callers are the reference and the fallback where
Triton is missing or cannot compile (`triton_fault`)."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=4)
def triton_fault(device: torch.device) -> str | None:
    """Why Triton cannot be used on `device`, or None; found out by running one small kernel."""
    try:
        from verl.models.kernels.layers import gated
    except ImportError as error:
        return f"the package triton cannot be imported ({error})"
    try:
        one = torch.ones(4, device=device)
        gated(one, one)
    except Exception as error:  # compilers fail with anything: no C compiler, no driver, a device too old
        return f"Triton does not work ({type(error).__name__}: {str(error).strip().splitlines()[0][:150]})"
    return None
