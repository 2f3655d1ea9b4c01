"""A model of half precision computed in float32, without changing it.

Inside `float32_arithmetic` every operation widens the half-precision tensors it reads: at any time at most one weight
exists twice, and the module is not touched, so that LoRA, tied, mixture-of-experts and FSDP2-sharded models work too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_HALF = (torch.bfloat16, torch.float16)


def is_half(model: nn.Module) -> bool:
    """Whether the model computes in half precision; a sharded one does so by its mixed-precision policy."""
    tensors = [*model.parameters(), *model.buffers()]
    return any(x.dtype in _HALF for x in tensors) or any(isinstance(x, FSDPModule) for x in model.modules())


@contextmanager
def float32_arithmetic(model: nn.Module) -> Iterator[None]:
    """Call the model's own code inside; with FSDP2, inside the root's forward (see `verl.models.packing.attach`)."""
    precision, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with ExitStack() as stack:
            if is_half(model):
                stack.enter_context(_WideConvolutions())
                mode = stack.enter_context(_Float32Mode())
                for module in model.modules():
                    if isinstance(module, FSDPModule):
                        stack.callback(_pause_in_fsdp_hooks(module, mode))
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = convolutions


class _WideConvolutions(TorchFunctionMode):
    """Convolutions compare the types of their arguments before they are dispatched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS:
            args, kwargs = tree_map(_widened, (args, kwargs))
        return func(*args, **kwargs)


_CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}


class _Float32Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or func.is_view:
            return func(*args, **kwargs)
        if func is torch.ops.aten.embedding.default:  # widening its rows equals widening the matrix
            return _widened(func(*args, **kwargs))
        written = _written(func)
        args = [x if at in written else tree_map(_widened, x) for at, x in enumerate(args)]
        kwargs = {name: x if name in written else tree_map(_widened, x) for name, x in kwargs.items()}
        return func(*args, **kwargs)


@lru_cache(maxsize=1024)
def _written(func: Any) -> frozenset[int | str]:
    """Positions and names of the arguments an operation writes to; these keep their type."""
    found: set[int | str] = set()
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found |= {at, argument.name}
    return frozenset(found)


def _widened(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.float() if x.dtype in _HALF else x
    return torch.float32 if isinstance(x, torch.dtype) and x in _HALF else x


def _pause_in_fsdp_hooks(module: nn.Module, mode: _Float32Mode) -> Callable[[], None]:
    """FSDP2's own hooks gather and free weights, which must stay in the sharded types, and round the module's inputs,
    which is undone. Returns what takes the hooks out again."""
    inputs: list[tuple[Any, Any]] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        mode.paused = True
        inputs.append((args, kwargs))

    def gathered(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        mode.paused = False
        return inputs.pop()

    def done(_: nn.Module, args: Any, output: Any) -> None:
        mode.paused = True

    def after(_: nn.Module, args: Any, output: Any) -> None:
        mode.paused = False

    handles = [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_pre_hook(gathered, with_kwargs=True),
        module.register_forward_hook(done, prepend=True),
        module.register_forward_hook(after),
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove
