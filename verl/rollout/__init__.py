"""Rollout engines: token ids in, token ids out, behind one interface (`base`).

Engines are made by name; a user adds one with `register_rollout`. Names are resolved when asked for, so that
an engine's packages are imported only by those who use it.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from verl.errors import ConfigError
from verl.rollout.base import BatchEngine, FinishReason, Request, Response, RolloutEngine, SamplingParams

RolloutFactory = Callable[..., RolloutEngine]
"""Called with (source, tokenizer, rollout config section), and with `watchdog_s` by name where it has such an argument:
an engine in other processes counts as dead after so many seconds without a sign of life."""

WATCHDOG_S = 600.0

_registry: dict[str, RolloutFactory] = {}


def register_rollout(name: str) -> Callable[[RolloutFactory], RolloutFactory]:
    """Make an engine known under `rollout.name=<name>`; the class or function is called with
    (source, tokenizer, config)."""

    def add(factory: RolloutFactory) -> RolloutFactory:
        _registry[name] = factory
        return factory

    return add


@register_rollout("hf")
def _hf(source: Any, tokenizer: Any, config: Any) -> RolloutEngine:
    from verl.rollout.hf import HFRollout

    return HFRollout(source, tokenizer, config)


@register_rollout("native")
def _native(source: Any, tokenizer: Any, config: Any) -> RolloutEngine:
    from verl.rollout.native import NativeRollout

    return NativeRollout(source, tokenizer, config)


@register_rollout("vllm")
def _vllm(source: Any, tokenizer: Any, config: Any, *, watchdog_s: float) -> RolloutEngine:
    from verl.rollout.vllm import build

    return build(source, tokenizer, config, watchdog_s)


@register_rollout("sglang")
def _sglang(source: Any, tokenizer: Any, config: Any, *, watchdog_s: float) -> RolloutEngine:
    from verl.rollout.sglang import SGLangRollout

    return SGLangRollout(source, tokenizer, config, watchdog_s=watchdog_s)


def known_rollouts() -> list[str]:
    return sorted(_registry)


def build_rollout(
    name: str, source: Any, tokenizer: Any, rollout_cfg: Any, *, watchdog_s: float = WATCHDOG_S
) -> RolloutEngine:
    """The engine `rollout.name` asks for. `source` is a TrainEngine or a causal language model; `watchdog_s` is
    `trainer.watchdog_s`."""
    if name not in _registry:
        raise ConfigError(f"rollout.name={name!r} is unknown; known engines: {', '.join(known_rollouts())}")
    factory = _registry[name]
    watched = {"watchdog_s": watchdog_s} if "watchdog_s" in signature(factory).parameters else {}
    return factory(source, tokenizer, rollout_cfg, **watched)


__all__ = [
    "BatchEngine",
    "FinishReason",
    "Request",
    "Response",
    "RolloutEngine",
    "SamplingParams",
    "build_rollout",
    "known_rollouts",
    "register_rollout",
]
