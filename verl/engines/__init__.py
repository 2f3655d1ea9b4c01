"""Training engines behind one interface, selected by `strategy`. Importing this package loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from verl.config.capabilities import StrategySpec, declare_strategy
from verl.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from verl.engines.base import TrainEngine

Builder = Callable[..., "TrainEngine"]

_strategies: dict[str, str | Builder] = {
    "fsdp": "verl.engines.build:build_fsdp",
    "fsdp2": "verl.engines.build:build_fsdp",
    "megatron": "verl.engines.megatron.build:build_megatron",
}


def register_strategy(name: str, builder: str | Builder, spec: StrategySpec | None = None) -> None:
    """Add an engine as `strategy=name`: a callable with the arguments of `build_engine`, or "module:callable". `spec`
    declares its layout, its section and its checks; without one they are those of `fsdp`."""
    _strategies[name] = builder
    if spec is not None:
        declare_strategy(name, spec)


def known_strategies() -> list[str]:
    return sorted(_strategies)


def build_engine(
    kind: Literal["actor", "ref", "critic", "reward"],
    model_cfg: Any,
    role_cfg: Any,
    *,
    device: str | torch.device,
    **options: Any,
) -> TrainEngine:
    """The engine of one role on this rank.

    model_cfg, role_cfg: the model section and the actor, ref or critic section of the config. A `ref` engine has no
    optimiser. Options, for every strategy:

    - `model`: used instead of loading `model_cfg.path`;
    - `optimizer`: made from the parameters of `model`; steps them at its own learning rate instead of the engine's
      AdamW (one rank only);
    - `total_steps`: of the optimiser (cosine and linear schedules, warm-up ratio);
    - `log_prob_cfg`: for the actor, the rollout section, whose `log_prob_*` keys say how log-probs are recomputed;
    - `bad_batch_dir`: where batches with a non-finite gradient are saved; `max_skipped_steps` of them in a row (default
      3) halt the run;
    - `seed`: of newly initialised weights and of stochastic rounding.
    """
    if role_cfg.strategy not in _strategies:
        raise ConfigError(
            f"strategy={role_cfg.strategy!r} has no training engine; allowed: {', '.join(known_strategies())}"
        )
    builder = _strategies[role_cfg.strategy]
    if isinstance(builder, str):
        module, _, name = builder.partition(":")
        builder = getattr(import_module(module), name)
    return builder(kind, model_cfg, role_cfg, device=device, **options)


__all__ = ["StrategySpec", "build_engine", "known_strategies", "register_strategy"]
