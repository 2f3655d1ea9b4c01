"""Training engines behind one interface, selected by `strategy`. Importing this package loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verl.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from verl.engines.base import TrainEngine

Builder = Callable[..., "TrainEngine"]

_strategies: dict[str, str | Builder] = {
    "fsdp": "verl.engines.build:build_fsdp",
    "fsdp2": "verl.engines.build:build_fsdp",
}


def register_strategy(name: str, builder: str | Builder) -> None:
    """Add an engine as `strategy=name`: a callable with the arguments of `build_engine`, or "module:callable"."""
    _strategies[name] = builder


def known_strategies() -> list[str]:
    return sorted(_strategies)


def build_engine(
    kind: Literal["actor", "ref", "critic"],
    model_cfg: Any,
    role_cfg: Any,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: str | torch.device,
    total_steps: int | None = None,
    seed: int = 0,
    log_prob_cfg: Any = None,
    max_skipped_steps: int = 3,
    bad_batch_dir: Path | None = None,
) -> TrainEngine:
    """The engine of one role on this rank.

    model_cfg, role_cfg: the model section and the actor, ref or critic section of the config; log_prob_cfg: for
    the actor, the rollout section, whose `log_prob_*` keys say how log-probabilities are recomputed. `model` is
    used instead of loading `model_cfg.path`; `optimizer`, made from its parameters, steps them at its own learning
    rate instead of the engine's AdamW (one rank only). `total_steps` counts optimiser steps (cosine and linear
    schedules, warm-up ratio). A batch with a non-finite gradient is saved under `bad_batch_dir`; `max_skipped_steps`
    of them in a row halt the run. A `ref` engine has no optimiser.
    """
    if role_cfg.strategy not in _strategies:
        raise ConfigError(
            f"strategy={role_cfg.strategy!r} has no training engine; allowed: {', '.join(known_strategies())}"
        )
    builder = _strategies[role_cfg.strategy]
    if isinstance(builder, str):
        module, _, name = builder.partition(":")
        builder = getattr(import_module(module), name)
    return builder(
        kind,
        model_cfg,
        role_cfg,
        model=model,
        optimizer=optimizer,
        device=device,
        total_steps=total_steps,
        seed=seed,
        log_prob_cfg=log_prob_cfg,
        max_skipped_steps=max_skipped_steps,
        bad_batch_dir=bad_batch_dir,
    )


__all__ = ["build_engine", "known_strategies", "register_strategy"]
