"""How many weights a token is multiplied with: what the arithmetic of a pass grows with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((int(value) for value in found if isinstance(value, int) and value > 0), None)


def token_weights(module: nn.Module, config: Any) -> Iterator[tuple[nn.Parameter, float]]:
    """Each parameter and how many of its numbers one token meets: of a mixture's experts, those it is sent to.

    `config` is the model's text config."""
    experts, used = _first(config, _EXPERTS), _first(config, _USED)
    for name, param in module.named_parameters():
        count = float(param.numel())
        if experts and used:
            # Experts are a list of modules called `experts`, or one parameter whose first dimension they are.
            routed = ".experts." in f".{name}" or (param.ndim == 3 and param.shape[0] == experts)
            count = count * used / experts if routed else count
        yield param, count
