"""torch for the modules that declare methods, imported when first used.

What a method needs is declared beside its function; checks of a config, --help and shell completion read the
declarations and must not wait seconds for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Tensor", "torch"]

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    Tensor = Any  # in annotations only

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("torch"), name)

    torch = _Torch()
