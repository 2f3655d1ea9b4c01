"""From the config's reward section to a manager: which rewards there are, where they run, what is built
in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from verl.errors import ConfigError, RewardError
from verl.reward.evaluate import SCORERS, Function, ScorerFunction, load
from verl.reward.functions import RewardFunction
from verl.reward.inprocess import InProcessBackend
from verl.reward.loading import FunctionSpec, check_file
from verl.reward.managers import FunctionRewardManager, Part, register_reward_manager
from verl.reward.shaping import Shaper, overlong_shaper

_log = logging.getLogger(__name__)

_CUSTOM = "reward.custom_reward_function"


def function_specs(reward_cfg: Any) -> list[FunctionSpec]:
    """The functions the config names; the scorers of the data sources when it names none."""
    custom = reward_cfg.custom_reward_function
    several = list(reward_cfg.functions or [])
    if custom.path and several:
        raise ConfigError(
            "reward.custom_reward_function.path and reward.functions are both set; put the one into the "
            "other."
        )
    if several:
        return [
            FunctionSpec(
                path=item.path,
                name=item.name,
                kwargs=dict(item.reward_kwargs or {}),
                weight=float(item.weight),
                key=f"reward.functions[{number}]",
            )
            for number, item in enumerate(several)
        ]
    path = custom.path or SCORERS
    return [FunctionSpec(path=path, name=custom.name, kwargs=dict(custom.reward_kwargs or {}), key=_CUSTOM)]


def _naive(reward_cfg: Any, **arguments: Any) -> FunctionRewardManager:
    return _build(reward_cfg, **arguments)


def _dapo(reward_cfg: Any, **arguments: Any) -> FunctionRewardManager:
    return _build(reward_cfg, **arguments)


register_reward_manager("naive")(_naive)
register_reward_manager("prime")(_naive)
register_reward_manager("dapo")(_dapo)
register_reward_manager("batch")(_naive)


def _build(
    reward_cfg: Any, *, tokenizer: Any, function: Any, max_response_length: int
) -> FunctionRewardManager:
    functions = _load_here(reward_cfg, function)
    backend = InProcessBackend([f for f, _ in functions], reward_cfg.timeout_s, reward_cfg.max_concurrency)
    labels = unique_labels([f.name for f, _ in functions])
    parts = [
        Part(backend, number, label, spec.weight, checker(f, spec.key), isinstance(f, ScorerFunction))
        for number, ((f, spec), label) in enumerate(zip(functions, labels, strict=True))
    ]
    return FunctionRewardManager(parts, shapers(reward_cfg, max_response_length))


def _load_here(reward_cfg: Any, function: Any) -> list[tuple[Function, FunctionSpec]]:
    given = given_functions(function)
    if given:
        kwargs = dict(reward_cfg.custom_reward_function.reward_kwargs or {})
        return [(RewardFunction(f, kwargs), FunctionSpec(path="", kwargs=kwargs, key=_CUSTOM)) for f in given]
    specs = function_specs(reward_cfg)
    for spec in specs:
        if spec.path != SCORERS:
            check_file(spec)
    return [(load(spec), spec) for spec in specs]


def given_functions(function: Any) -> list[Callable[..., Any]]:
    """Functions handed over as objects."""
    if function is None:
        return []
    functions = (
        list(function) if isinstance(function, Sequence) and not isinstance(function, str) else [function]
    )
    for item in functions:
        if not callable(item):
            raise RewardError(
                f"The reward function given is {item!r}, a {type(item).__name__}; give a callable, or set "
                f"{_CUSTOM}.path to a file."
            )
    return functions


def checker(function: Function, key: str) -> Callable[[Sequence[str], Sequence[str] | None], None]:
    def check(data_sources: Sequence[str], columns: Sequence[str] | None) -> None:
        if isinstance(function, ScorerFunction):
            function.check(data_sources, columns, key)
        else:
            function.signature.check(function.kwargs, columns, key)

    return check


def shapers(reward_cfg: Any, max_response_length: int) -> list[Shaper]:
    buffer = reward_cfg.overlong_buffer
    return [overlong_shaper(max_response_length, buffer.len, buffer.penalty_factor)] if buffer.enable else []


def unique_labels(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    labels = []
    for name in names:
        short = name.split(" (")[0].rpartition(":")[2].rpartition("/")[2] or name
        seen[short] = seen.get(short, 0) + 1
        labels.append(short if seen[short] == 1 else f"{short}_{seen[short]}")
    return labels
