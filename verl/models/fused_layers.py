"""RMS norms, gated MLPs and rotary positions of a Hugging Face model through our kernels.

A module's forward is replaced only if the module has exactly the parameters and attributes we know and, for a small
input on the device, gives the same numbers; parameters, names and classes stay. Without the attribute `forward` the
module has its old one again.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from verl.models.kernels import compile_together, triton_fault

log = logging.getLogger(__name__)

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


def _rms_forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    from verl.models.kernels.layers import rms_norm

    return rms_norm(hidden_states, module.weight, module.variance_epsilon)


def _mlp_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    from verl.models.kernels.layers import gated, two_products

    gate, up = module.gate_proj, module.up_proj
    if all(type(layer) is nn.Linear and layer.bias is None for layer in (gate, up)):
        return module.down_proj(gated(*two_products(x, gate.weight, up.weight)))  # type: ignore[no-any-return]
    return module.down_proj(gated(gate(x), up(x)))  # type: ignore[no-any-return]


_ROTARY = "apply_rotary_pos_emb"


def _rotates(module: Any) -> bool:
    """Whether its forward calls transformers' function for rotary positions by name."""
    names = getattr(getattr(type(module).forward, "__code__", None), "co_names", ())
    return _ROTARY in names and isinstance(getattr(module, "head_dim", None), int)


@lru_cache(maxsize=64)
def _with_rotary(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same code, with our function under that name."""
    from verl.models.kernels.layers import rotary

    plain = forward.__globals__[_ROTARY]

    def turned(q: Any, k: Any, cos: Any, sin: Any, *other: Any, **named: Any) -> Any:
        shape = (1, q.shape[-2], q.shape[-1])
        if other or named or q.ndim != 4 or q.shape[0] != 1 or cos.shape != shape or cos.dtype != q.dtype:
            return plain(q, k, cos, sin, *other, **named)
        return rotary(q, k, cos, sin)

    names = {**forward.__globals__, _ROTARY: turned}
    ours = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


@torch.no_grad()
def _rotates_alike(module: Any, device: torch.device) -> bool:
    forward, dtype = type(module).forward, next(module.parameters()).dtype
    generator = torch.Generator(device).manual_seed(0)
    q, k = (
        torch.randn(1, heads, 5, module.head_dim, generator=generator, device=device).to(dtype)
        for heads in (3, 1)
    )
    angles = torch.randn(1, 5, module.head_dim // 2, generator=generator, device=device).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    try:
        plain = forward.__globals__[_ROTARY](q, k, cos, sin)
        ours = _with_rotary(forward).__globals__[_ROTARY](q, k, cos, sin)
        return all(_close(left, right, dtype) for left, right in zip(plain, ours, strict=True))
    except (KeyError, TypeError, ValueError, RuntimeError):  # a function of that name with another signature
        return False


def _close(plain: torch.Tensor, ours: torch.Tensor, dtype: torch.dtype) -> bool:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    plain, ours = plain.float(), ours.float()
    return bool((plain - ours).abs().max() <= tolerance * (1 + plain.abs().max()))


def _known(module: Any) -> Forward | None:
    """Our forward for a module with exactly the children and parameters it needs."""
    parameters = {name for name, _ in module.named_parameters(recurse=False)}
    children = {name for name, _ in module.named_children()}
    if type(module).__name__.endswith("RMSNorm") and parameters == {"weight"} and not children:
        return _rms_forward if isinstance(getattr(module, "variance_epsilon", None), float) else None
    if {"gate_proj", "up_proj", "down_proj"} <= children <= {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        activation = type(getattr(module, "act_fn", None)).__name__
        return _mlp_forward if activation in ("SiLU", "SiLUActivation") else None
    return None


def _width(module: Any) -> int:
    norm = hasattr(module, "variance_epsilon")
    return int(module.weight.shape[0] if norm else module.gate_proj.in_features)


@torch.no_grad()
def _agrees(module: Any, forward: Forward, device: torch.device) -> bool:
    dtype = next(module.parameters()).dtype
    generator = torch.Generator(device).manual_seed(0)
    if next(module.parameters()).is_meta:  # its weights come later
        module = copy.deepcopy(module).to_empty(device=device)
        for param in module.parameters():
            param.normal_(0.0, param.shape[-1] ** -0.5, generator=generator)
    elif next(module.parameters()).device.type != device.type:  # sharding will move it later
        module = copy.deepcopy(module).to(device)
    x = torch.randn(3, _width(module), generator=generator, device=device).to(dtype)
    return _close(module(x), forward(module, x), dtype)


def fuse(model: nn.Module, device: torch.device, force: bool = False) -> int:
    """Replace what can be replaced and return how many modules. Call it before sharding.

    Does nothing on a CPU (`force`: with Triton's interpreter) or without a working Triton."""
    if device.type != "cuda" and not force:
        return 0
    fault = triton_fault(device)
    if fault:
        log.warning("no fused layers, training is slower: %s", fault)
        return 0
    checks: dict[tuple[type, int], Callable[[], bool]] = {}
    replaced: list[tuple[Any, tuple[type, int], Callable[..., Any]]] = []
    module: Any
    for module in model.modules():
        forward: Callable[..., Any] | None = _known(module)
        rotates = forward is None and _rotates(module)
        if forward is None and not rotates:
            continue
        kind = (type(module), module.head_dim if rotates else _width(module))
        if forward is None:
            forward = _with_rotary(type(module).forward)
            checks.setdefault(kind, partial(_rotates_alike, module, device))
        else:
            checks.setdefault(kind, partial(_agrees, module, forward, device))
        replaced.append((module, kind, forward))
    if device.type == "cuda":
        compile_together("layers", lambda: [check() for check in checks.values()])
    alike = {kind: check() for kind, check in checks.items()}
    for (differing, _), agrees in alike.items():
        if not agrees:
            log.warning("%s differs from the known one and is not fused", differing.__name__)
    replaced = [each for each in replaced if alike[each[1]]]
    for module, _, forward in replaced:
        module.forward = MethodType(forward, module)
    return len(replaced)
