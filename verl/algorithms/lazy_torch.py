"""torch for the modules that declare methods, imported when first used.

What a method needs is declared beside its function; checks of a config, --help and shell completion read the
declarations and must not wait seconds for torch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

__all__ = ["Tensor", "no_grad", "torch"]

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    Tensor = Any  # in annotations only

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("torch"), name)

    torch = _Torch()


def no_grad(fn: Callable[P, R]) -> Callable[P, R]:
    """`torch.no_grad()` as a decorator."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad():
            return fn(*args, **kwargs)

    return call
