"""Rollout engines: token ids in, token ids out, behind one interface (`base`).

Engines are made by name; a user adds one with `register_rollout`. Names are resolved when asked for, so that
an engine's packages are imported only by those who use it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from verl.config.capabilities import EngineSpec, declare_engine
from verl.errors import ConfigError
from verl.rollout.base import BatchEngine, FinishReason, Request, Response, RolloutEngine, SamplingParams

if TYPE_CHECKING:
    from torch import nn

    from verl.models.weight_source import WeightSource

RolloutFactory = Callable[..., RolloutEngine]
"""Called with (weight source, tokenizer, rollout config section), and by name, where it has such an argument, with
`watchdog_s` (an engine in other processes counts as hung after this many seconds without progress) and `run_folder`
(a Path for the logs of such processes; None outside of a run)."""

_registry: dict[str, str | RolloutFactory] = {
    "hf": "verl.rollout.hf:HFRollout",
    "native": "verl.rollout.native:NativeRollout",
    "vllm": "verl.rollout.vllm.engine:build_vllm",
    "sglang": "verl.rollout.sglang:build_sglang",
}


def register_rollout(name: str, spec: EngineSpec | None = None) -> Callable[[RolloutFactory], RolloutFactory]:
    """Make an engine known under `rollout.name=<name>`; the class or function is called with
    (source, tokenizer, config). `spec` declares what it can do; without one it computes with the trainer's module."""

    def add(factory: RolloutFactory) -> RolloutFactory:
        _registry[name] = factory
        if spec is not None:
            declare_engine(name, spec)
        return factory

    return add


def known_rollouts() -> list[str]:
    return sorted(_registry)


def build_rollout(
    name: str,
    source: WeightSource | nn.Module,
    tokenizer: Any,
    rollout_cfg: Any,
    *,
    watchdog_s: float | None = None,
    run_folder: Path | None = None,
) -> RolloutEngine:
    """The engine `rollout.name` asks for; `watchdog_s` is `trainer.watchdog_s` (None: its default)."""
    from verl.config.sections.trainer import TrainerConfig
    from verl.rollout.source import as_source

    if name not in _registry:
        raise ConfigError(f"rollout.name={name!r} is unknown; known engines: {', '.join(known_rollouts())}")
    factory = _registry[name]
    if isinstance(factory, str):
        module, _, attribute = factory.partition(":")
        factory = cast(RolloutFactory, getattr(import_module(module), attribute))
    watchdog_s = TrainerConfig().watchdog_s if watchdog_s is None else watchdog_s
    known, given = signature(factory).parameters, {"watchdog_s": watchdog_s, "run_folder": run_folder}
    return factory(
        as_source(source), tokenizer, rollout_cfg, **{name: given[name] for name in given if name in known}
    )


__all__ = [
    "BatchEngine",
    "EngineSpec",
    "FinishReason",
    "Request",
    "Response",
    "RolloutEngine",
    "SamplingParams",
    "build_rollout",
    "known_rollouts",
    "register_rollout",
]
