"""From the config's reward section to a manager: which rewards there are and where each of them runs.

Functions run in worker processes, a reward model on GPUs of its own where it is given some. In this process run
only: everything with `reward.in_process=True`, functions given as objects that no other process could import
(closures, lambdas), and a model on the trainer's GPUs. The log says which functions and why.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl.config.schema import PPOConfig
from verl.errors import ConfigError, RewardError, missing_package
from verl.reward import processes, sandbox
from verl.reward.evaluate import SCORERS, Function, ScorerFunction, load
from verl.reward.functions import RewardFunction, Signature
from verl.reward.inprocess import InProcessBackend
from verl.reward.loading import DEFAULT_NAMES, FunctionSpec, check_file, spec_of
from verl.reward.managers import Backend, FunctionRewardManager, Part, register_reward_manager
from verl.reward.overlong import overlong_shaper
from verl.reward.pool import WorkerPool
from verl.reward.scorers import registered_scorers, uses_sandbox

_log = logging.getLogger(__name__)

_CUSTOM = "reward.custom_reward_function"


@register_reward_manager("naive")
def naive(reward_cfg: Any, **arguments: Any) -> FunctionRewardManager:
    """One worker process, one sample after the other."""
    if (reward_cfg.num_workers or 1) > 1:
        _log.warning(
            "reward.num_workers=%d has no effect with reward.reward_manager.name=naive, which scores in "
            "turn; "
            "prime scores in parallel",
            reward_cfg.num_workers,
        )
    return _build(reward_cfg, workers=1, **arguments)


@register_reward_manager("prime")
def prime(reward_cfg: Any, **arguments: Any) -> FunctionRewardManager:
    """`reward.num_workers` processes."""
    return _build(reward_cfg, workers=reward_cfg.num_workers or _default_workers(), **arguments)


@register_reward_manager("dapo")
def dapo(reward_cfg: Any, **arguments: Any) -> FunctionRewardManager:
    """As prime; made for the overlong penalty, so it says when that is off."""
    if not reward_cfg.overlong_buffer.enable:
        _log.warning(
            "reward.reward_manager.name=dapo without reward.overlong_buffer.enable=True: no length penalty "
            "is applied"
        )
    return _build(reward_cfg, workers=reward_cfg.num_workers or _default_workers(), **arguments)


@register_reward_manager("batch")
def batch(reward_cfg: Any, **arguments: Any) -> FunctionRewardManager:
    """The function sees the whole batch in one call."""
    return _build(reward_cfg, workers=1, whole_batch=True, **arguments)


def _default_workers() -> int:
    """One per CPU core, at most 8."""
    return max(1, min(processes.usable_cores(), 8))


def _build(
    reward_cfg: Any,
    *,
    workers: int,
    function: Any,
    max_response_length: int,
    tokenizer: Any = None,
    whole_batch: bool = False,
    run: PPOConfig | None = None,
) -> FunctionRewardManager:
    sandbox.configure(sandbox.Settings.from_config(reward_cfg))
    buffer = reward_cfg.overlong_buffer
    shapers = (
        [overlong_shaper(max_response_length, buffer.len, buffer.penalty_factor, buffer.log)]
        if buffer.enable
        else []
    )
    sources = _given(function, reward_cfg) if function is not None else _named(reward_cfg)
    parts: list[Part] = []
    try:
        parts += _function_parts(sources, reward_cfg, workers)
        if whole_batch:
            _require_batch(parts)
        parts += _model_parts(reward_cfg, run)
        return FunctionRewardManager(_relabel(parts), shapers)
    except BaseException:
        for part in parts:
            part.backend.close()
        raise


Source = tuple[FunctionSpec, Callable[..., Any] | None]
"""Where a function is and, when it was handed over as an object, the object."""


def _named(reward_cfg: Any) -> list[Source]:
    """The functions the config names; the scorers of the data sources when nothing else gives a reward."""
    custom = reward_cfg.custom_reward_function
    several = list(reward_cfg.functions or [])
    if custom.path and several:
        raise ConfigError(
            "reward.custom_reward_function.path and reward.functions are both set; list all functions in "
            "reward.functions."
        )
    specs = [
        FunctionSpec(
            path=item.path,
            name=item.name,
            kwargs=dict(item.reward_kwargs or {}),
            weight=float(item.weight),
            key=f"reward.functions[{number}]",
        )
        for number, item in enumerate(several)
    ]
    if custom.path or not (several or reward_cfg.reward_model.enable or reward_cfg.judge.base_url):
        kwargs = dict(custom.reward_kwargs or {})
        specs.append(FunctionSpec(custom.path or SCORERS, custom.name, kwargs, key=_CUSTOM))
    for spec in specs:
        if spec.path != SCORERS:
            check_file(spec)
    return [(spec, None) for spec in specs]


def _given(function: Any, reward_cfg: Any) -> list[Source]:
    """Functions handed over as objects."""
    kwargs = dict(reward_cfg.custom_reward_function.reward_kwargs or {})
    if reward_cfg.custom_reward_function.path or reward_cfg.functions:
        _log.warning(
            "reward: the function given as an argument replaces reward.custom_reward_function.path and "
            "reward.functions"
        )
    several = isinstance(function, Sequence) and not isinstance(function, str)
    sources: list[Source] = []
    for item in function if several else [function]:
        if not callable(item):
            raise RewardError(
                f"The reward function given is {item!r}, a {type(item).__name__}; give a callable, or set "
                f"{_CUSTOM}.path to a file."
            )
        name = getattr(item, "__qualname__", type(item).__name__)
        fallback = FunctionSpec("", name, kwargs, label=name, key=_CUSTOM)
        sources.append((spec_of(item, kwargs=kwargs, key=_CUSTOM) or fallback, item))
    return sources


def _function_parts(sources: list[Source], reward_cfg: Any, workers: int) -> list[Part]:
    scorers, unsendable = _user_scorers()
    here: list[Source] = []
    there: list[Source] = []
    for spec, item in sources:
        why = _why_in_process(spec, reward_cfg, unsendable)
        if why:
            name = "the scorers" if spec.path == SCORERS else spec.describe()
            _log.warning("reward: %s runs in the trainer's process, without a deadline: %s", name, why)
        (here if why else there).append((spec, item))
    parts: list[Part] = []
    if there:
        try:
            pool = _pool([spec for spec, _ in there], reward_cfg, workers, scorers)
        except RewardError as error:
            if any(item is None for _, item in there):
                raise
            # Objects whose module another process cannot import after all (a test, a notebook): we hold them here.
            _log.warning("reward: functions run in the trainer's process, without a deadline: %s", error)
            here += there
        else:
            for number, (spec, _) in enumerate(there):
                parts.append(_part(pool, number, spec, pool.signatures[number]))
    if here:
        functions: list[Function] = [
            load(spec) if item is None else RewardFunction(item, spec.kwargs, spec.describe())
            for spec, item in here
        ]
        backend = InProcessBackend(functions, reward_cfg.timeout_s, reward_cfg.max_concurrency)
        for number, (spec, _) in enumerate(here):
            parts.append(_part(backend, number, spec, functions[number].signature))
    return parts


def _why_in_process(spec: FunctionSpec, reward_cfg: Any, unsendable: list[str]) -> str:
    if reward_cfg.in_process:
        return "reward.in_process=True"
    if not spec.path:
        return "no other process can import it (a closure, a lambda, or defined in the script itself)"
    if spec.path == SCORERS and unsendable:
        return f"the registered scorers of {', '.join(unsendable)} cannot be imported by another process"
    return ""


def _user_scorers() -> tuple[dict[str, str], list[str]]:
    """Scorers registered in this process: how a worker finds them, and those it cannot."""
    specs = {name: spec_of(function) for name, function in registered_scorers().items()}
    return {name: spec.path for name, spec in specs.items() if spec}, [
        n for n, spec in specs.items() if not spec
    ]


def _pool(specs: list[FunctionSpec], reward_cfg: Any, workers: int, scorers: Mapping[str, str]) -> WorkerPool:
    return WorkerPool(
        specs,
        num_workers=workers,
        timeout_s=reward_cfg.timeout_s,
        memory_limit_mb=reward_cfg.memory_limit_mb,
        max_concurrency=reward_cfg.max_concurrency,
        scorers=scorers,
        sandbox_settings=replace(
            sandbox.settings(), max_concurrent=max(1, sandbox.settings().max_concurrent // workers)
        ),
    )


def _part(backend: Any, number: int, spec: FunctionSpec, signature: Signature) -> Part:
    def check(data_sources: Sequence[str], columns: Sequence[str] | None) -> None:
        if spec.path == SCORERS:
            ScorerFunction(spec.kwargs).check(data_sources, columns, spec.key)
            if any(uses_sandbox(name) for name in data_sources):
                sandbox.require()
        else:
            signature.check(spec.kwargs, columns, spec.key)

    label = signature.name.split(" (")[0]
    if (
        spec.path != SCORERS
        and spec.name == DEFAULT_NAMES[0]
        and label not in DEFAULT_NAMES
        and ":" not in spec.path
    ):
        _log.info(
            "reward: %s has no function %s; its only one, %s, is used (%s.name=%s says so without this notice)",
            spec.path,
            " or ".join(DEFAULT_NAMES),
            label,
            spec.key,
            label,
        )
    return Part(backend, number, label, spec.weight, check, by_data_source=spec.path == SCORERS)


def _require_batch(parts: list[Part]) -> None:
    for part in parts:
        signature = part.backend.signatures[part.function]
        if not signature.is_batch:
            what = (
                "The scorers of the data sources take" if part.by_data_source else f"{signature.name} takes"
            )
            raise RewardError(
                f"reward.reward_manager.name=batch calls the function once for all responses, but {what} "
                f"one sample. "
                f"Give it a parameter 'completions' (a list) and return a list, or use naive or prime."
            )


def _model_parts(reward_cfg: Any, run: PPOConfig | None) -> list[Part]:
    parts: list[Part] = []
    if reward_cfg.judge.base_url:
        from verl.reward.judge import JudgeBackend

        parts.append(Part(JudgeBackend(reward_cfg.judge), 0, "judge", reward_cfg.judge.weight))
    if reward_cfg.reward_model.enable:
        model = _model_backend(reward_cfg, run)
        parts.append(Part(model, 0, "reward_model", reward_cfg.reward_model.weight))
    return parts


def _model_backend(reward_cfg: Any, run: PPOConfig | None) -> Backend:
    if not reward_cfg.reward_model.n_gpus_per_node:
        from verl.reward.model import ModelBackend

        return ModelBackend(reward_cfg.reward_model)
    if importlib.util.find_spec("ray") is None:
        asked = f"reward.reward_model.n_gpus_per_node={reward_cfg.reward_model.n_gpus_per_node}"
        raise missing_package("ray", "ray", f"a reward model on GPUs of its own ({asked})")
    from verl.workers.placement import require_ray

    run = run if run is not None else PPOConfig(reward=reward_cfg)
    require_ray(run)
    from verl.workers.reward_model_pool import ModelPoolBackend

    return ModelPoolBackend.for_run(run)


def _relabel(parts: list[Part]) -> list[Part]:
    """Different names for different rewards."""
    seen: dict[str, int] = {}
    named = []
    for part in parts:
        seen[part.label] = seen.get(part.label, 0) + 1
        number = seen[part.label]
        named.append(part if number == 1 else replace(part, label=f"{part.label}_{number}"))
    return named
