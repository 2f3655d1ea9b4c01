"""RMS norms and gated MLPs of a Hugging Face model through our kernels.

A module's forward is replaced only if the module has exactly the parameters and attributes we know and, for a small
input on the device, gives the same numbers; parameters, names and classes stay. `unfuse` restores the old forward.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from verl.models.kernels import triton_fault

log = logging.getLogger(__name__)

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


def _rms_forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    from verl.models.kernels.layers import rms_norm

    return rms_norm(hidden_states, module.weight, module.variance_epsilon)


def _mlp_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    from verl.models.kernels.layers import gated

    return module.down_proj(gated(module.gate_proj(x), module.up_proj(x)))  # type: ignore[no-any-return]


def _known(module: Any) -> Forward | None:
    """Our forward for a module with exactly the children and parameters it needs."""
    parameters = {name for name, _ in module.named_parameters(recurse=False)}
    children = {name for name, _ in module.named_children()}
    if type(module).__name__.endswith("RMSNorm") and parameters == {"weight"} and not children:
        return _rms_forward if isinstance(getattr(module, "variance_epsilon", None), float) else None
    if {"gate_proj", "up_proj", "down_proj"} <= children <= {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return (
            _mlp_forward
            if type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
            else None
        )
    return None


def _width(module: Any) -> int:
    return (
        int(module.weight.shape[0])
        if hasattr(module, "variance_epsilon")
        else int(module.gate_proj.in_features)
    )


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
    plain, ours = module(x).float(), forward(module, x).float()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    return bool((plain - ours).abs().max() <= tolerance * (1 + plain.abs().max()))


def fuse(model: nn.Module, device: torch.device, force: bool = False) -> int:
    """Replace what can be replaced and return how many modules. Call it before sharding.

    Does nothing on a CPU (`force`: with Triton's interpreter) or without a working Triton."""
    if device.type != "cuda" and not force:
        return 0
    fault = triton_fault(device)
    if fault:
        log.warning("no fused layers, training is slower: %s", fault)
        return 0
    checked: dict[tuple[type, int], bool] = {}
    count = 0
    for module in model.modules():
        forward = _known(module)
        if forward is None:
            continue
        kind = (type(module), _width(module))
        if kind not in checked:
            checked[kind] = _agrees(module, forward, device)
            if not checked[kind]:
                log.warning("%s differs from the known one and is not fused", type(module).__name__)
        if checked[kind]:
            module.forward = MethodType(forward, module)  # type: ignore[method-assign]
            count += 1
    return count


def unfuse(model: nn.Module) -> None:
    for module in model.modules():
        patched = module.__dict__.get("forward")
        if getattr(patched, "__func__", None) in (_rms_forward, _mlp_forward):
            del module.__dict__["forward"]
