"""What a Hugging Face module consists of: its class, its decoder layers, the weights a token is multiplied with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from verl.models.value_model import ValueModel

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")


def class_of(module: nn.Module) -> type:
    """The module's class, without the one FSDP2 puts in front of it (`FSDPLlamaDecoderLayer`)."""
    bases = type(module).__mro__
    return next(base for base in bases if not base.__module__.startswith("torch.distributed.fsdp"))


def decoder_layers(model: Any) -> list[nn.Module]:
    """The repeated blocks: the classes the model declares unsplittable, else the longest list of modules."""
    backbone = model.backbone if isinstance(model, ValueModel) else model
    names = set(getattr(backbone, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if class_of(module).__name__ in names]
    if layers:
        return layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max((list(found) for found in lists), key=len, default=[])


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((int(value) for value in found if isinstance(value, int) and value > 0), None)


def token_weights(module: nn.Module, config: Any) -> Iterator[tuple[nn.Parameter, float]]:
    """Each parameter and how many of its numbers one token is multiplied with: of a mixture's experts, those it is
    routed to. `config` is the model's text config."""
    experts, used = _first(config, _EXPERTS), _first(config, _USED)
    for name, param in module.named_parameters():
        count = float(param.numel())
        if experts and used:
            # Experts are a list of modules called `experts`, or one parameter whose first dimension they are.
            routed = ".experts." in f".{name}" or (param.ndim == 3 and param.shape[0] == experts)
            count = count * used / experts if routed else count
        yield param, count
