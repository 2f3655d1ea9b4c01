"""Rollout engines: token ids in, token ids out, behind one interface (`base`).

Engines are made by name; a user adds one with `register_rollout`. Names are resolved when asked for, so that
an engine's packages are imported only by those who use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.errors import ConfigError
from verl.rollout.base import FinishReason, Request, Response, RolloutEngine, SamplingParams

RolloutFactory = Callable[[Any, Any, Any], RolloutEngine]
"""Called with (source, tokenizer, rollout config section)."""

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
def _vllm(source: Any, tokenizer: Any, config: Any) -> RolloutEngine:
    from verl.rollout.vllm import build

    return build(source, tokenizer, config)


@register_rollout("sglang")
def _sglang(source: Any, tokenizer: Any, config: Any) -> RolloutEngine:
    from verl.rollout.sglang import SGLangRollout

    return SGLangRollout(source, tokenizer, config)


def known_rollouts() -> list[str]:
    return sorted(_registry)


def build_rollout(name: str, source: Any, tokenizer: Any, rollout_cfg: Any) -> RolloutEngine:
    """The engine `rollout.name` asks for. `source` is a TrainEngine or a causal language model."""
    if name not in _registry:
        raise ConfigError(f"rollout.name={name!r} is unknown; known engines: {', '.join(known_rollouts())}")
    return _registry[name](source, tokenizer, rollout_cfg)


__all__ = [
    "FinishReason",
    "Request",
    "Response",
    "RolloutEngine",
    "SamplingParams",
    "build_rollout",
    "known_rollouts",
    "register_rollout",
]
