"""What rollout engines and training strategies can do: each declares it once, nothing else compares their names.

Plug-ins declare theirs with `register_rollout` (verl.rollout) and `register_strategy` (verl.engines). Imports no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineSpec:
    """What a rollout engine declares."""

    owns_weights: bool = False
    """It holds a copy of the weights, which are sent to it under their Hugging Face names; otherwise it computes with
    the trainer's module."""
    tensor_parallel: bool = False
    """Several GPUs can share one copy (`rollout.tensor_model_parallel_size`)."""
    fp8: bool = True
    """It has eight-bit products (`rollout.dtype=fp8`)."""
    fp8_cache: bool = False
    """It stores keys and values in eight bits (`rollout.kv_cache_dtype=fp8`)."""
    adapters: bool = True
    """It takes LoRA adapters beside the weights; otherwise they arrive merged into them."""
    server: bool = False
    """It can run as a server in processes of its own (`rollout.mode=server`)."""
    in_process: bool = True
    """It can run in the trainer's process (`rollout.mode=inprocess`)."""
    streams: bool = True
    """It takes requests and weights while others run; otherwise it generates one batch of requests to its end."""
    sleep_argument: str | None = None
    """Which of its `engine_kwargs` lets it release its memory between steps."""
    exact: bool = False
    """Its log-probs can be the trainer's bit for bit (`trainer.exact`)."""
    closer: tuple[str, ...] = ()
    """Entries of its `engine_kwargs` that bring its log-probs closer to the trainer's, each with its case."""
    package: str | None = None
    """The distribution that must be installed."""


@dataclass(frozen=True)
class StrategySpec:
    """What a training strategy declares."""

    section: str = "fsdp_config"
    """The section of a role that has `param_offload` and `optimizer_offload`."""
    layout: Callable[[Any], dict[str, int]] = lambda role: {"cp": role.ulysses_sequence_parallel_size}
    """From a role's section to the degrees of parallelism of one copy of its model (fields of `Layout` without dp)."""
    checks: Callable[[Any, Any], Iterable[str]] = lambda config, role: ()
    """From a config and one of its roles (`ModelRole`) to what the strategy cannot do of what they ask for."""
    sizes: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"cp": ("ulysses_sequence_parallel_size",)}
    )
    """The keys of a role's section that are the degrees `tp`, `pp`, `cp` and `ep` of `layout`, for messages; a degree
    is the product of its keys."""
    fits: Callable[[Any, Mapping[str, Any]], Iterable[str]] | None = None
    """From a role and the config.json of its model to what of the layout does not fit the model; by default the ranks
    of a sequence must divide its attention heads."""
    exact: bool = False
    """Its forward passes can have the bits of those that generate (`trainer.exact`)."""
    full_shards: bool = True
    """Every rank holds rows of all weights, which can be gathered into one module (LoRA, reference by switching the
    adapter off, reward training); otherwise a rank holds slices of some layers."""
    package: str | None = None
    """The distribution that must be installed."""
    module: str | None = None
    """What that distribution is imported as."""


_engines: dict[str, EngineSpec] = {
    "native": EngineSpec(fp8_cache=True, exact=True),
    "hf": EngineSpec(streams=False, fp8=False),
    "vllm": EngineSpec(
        owns_weights=True,
        tensor_parallel=True,
        server=True,
        sleep_argument="enable_sleep_mode",
        closer=("disable_cascade_attn=True (long contexts)",),
        package="vllm",
    ),
    "sglang": EngineSpec(
        owns_weights=True,
        tensor_parallel=True,
        server=True,
        adapters=False,
        in_process=False,
        sleep_argument="enable_memory_saver",
        package="sglang",
    ),
}
# A module that declares a strategy is imported when the strategy is first asked for.
_strategies: dict[str, StrategySpec | str] = {
    "fsdp": StrategySpec(exact=True),
    "fsdp2": StrategySpec(exact=True),
    "megatron": "verl.config.megatron",
}

ENGINES, STRATEGIES = tuple(_engines), tuple(_strategies)  # ours


def engine_spec(name: str) -> EngineSpec:
    """What the rollout engine `rollout.name=name` declares; the default for one that declares nothing."""
    return _engines.get(name, EngineSpec())


def strategy_spec(name: str) -> StrategySpec:
    """What the training strategy `strategy=name` declares; the default for one that declares nothing."""
    declared = _strategies.get(name, StrategySpec())
    if isinstance(declared, str):
        importlib.import_module(declared)
        return strategy_spec(name)
    return declared


def declare_engine(name: str, spec: EngineSpec) -> None:
    """Let `engine_spec` answer `spec` for a rollout engine."""
    _engines[name] = spec


def declare_strategy(name: str, spec: StrategySpec) -> None:
    """Let `strategy_spec` answer `spec` for a training strategy."""
    _strategies[name] = spec
