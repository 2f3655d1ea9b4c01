"""Triton kernels, used on CUDA only; the torch versions next to their callers are the reference and the fallback where
Triton is missing or cannot compile (`triton_fault`)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import get_ident
from typing import Any

import torch

log = logging.getLogger(__name__)


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


def compile_together(what: str, work: Callable[[], object]) -> int:
    """Compile the kernels that `work` launches in several threads, where it would compile one after the other, and
    return how many were not in Triton's cache.

    Kernels that this thread launches meanwhile, those of backward passes included, are not run: what they would have
    written is undefined, and `work` must use it for nothing but products and further kernels."""
    try:
        from triton import knobs
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.jit import JITFunction
    except ImportError:  # of a Triton that compiles a kernel only when it is launched
        return 0
    run, listener = JITFunction.run, getattr(knobs.compilation, "listener", None)
    mine, start = get_ident(), time.perf_counter()
    new: list[Any] = []

    def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, warmup=warmup or get_ident() == mine, **options)

    def count(*, src: Any, cache_hit: bool = True, **more: Any) -> None:
        if not cache_hit:
            new.append(src)

    JITFunction.run, knobs.compilation.listener = compile_only, count
    try:
        with (
            ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as threads,
            torch.autograd.set_multithreading_enabled(False),
            AsyncCompileMode(threads),
        ):
            work()
    except Exception as error:  # one that matters comes again when the kernel is launched
        log.debug("%s: a kernel was not compiled ahead: %s", what, error)
    finally:
        JITFunction.run, knobs.compilation.listener = run, listener
    if new:
        seconds, folder = time.perf_counter() - start, knobs.cache.dir
        log.info("%s: compiled %d kernels in %.1f s, kept in %s", what, len(new), seconds, folder)
    return len(new)
