"""Builds the reward manager that the config's reward section describes.

Functions run in worker processes, a reward model on GPUs of its own where it is given some. In this process run only
functions with `reward.in_process=True`, functions that no other process can import (closures, lambdas), and a model on
the trainer's GPUs. The log says which functions and why.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from verl.config.known import REWARD_MANAGERS
from verl.config.sections.reward import RewardConfig
from verl.errors import ConfigError, RewardError
from verl.processes import usable_cores
from verl.reward import sandbox
from verl.reward.base import Backend, RewardManager
from verl.reward.evaluate import InProcessBackend
from verl.reward.functions import RewardFunction, ScorerFunction, Signature, load
from verl.reward.loading import DEFAULT_NAMES, SCORERS, FunctionSpec, check_file, spec_of
from verl.reward.managers import FunctionRewardManager, RewardTerm, overlong_shaper
from verl.reward.pool import WorkerPool
from verl.reward.scorers import check_data_sources, registered_scorers, uses_sandbox

_log = logging.getLogger(__name__)

_CUSTOM = "reward.custom_reward_function"

ManagerFactory = Callable[..., RewardManager]
RewardModelFactory = Callable[[], Backend]
"""Starts the reward model on GPUs of its own."""
_FACTORIES: dict[str, ManagerFactory] = {}


def register_reward_manager(name: str) -> Callable[[ManagerFactory], ManagerFactory]:
    """Decorator: `reward.reward_manager.name=NAME` then calls this with the arguments of `build_reward_manager`."""
    if not isinstance(name, str) or not name:
        raise RewardError(f"register_reward_manager takes a name, not {name!r}.")

    def add(factory: ManagerFactory) -> ManagerFactory:
        _FACTORIES[name] = factory
        return factory

    return add


def known_reward_managers() -> list[str]:
    return sorted(_FACTORIES)


def build_reward_manager(
    reward_cfg: RewardConfig,
    *,
    max_response_length: int,
    tokenizer: Any = None,
    function: Any = None,
    reward_model_factory: RewardModelFactory | None = None,
) -> RewardManager:
    """The manager the config names. `function`, a callable or a list of them, replaces the config's functions.
    `reward_model_factory` starts a reward model on GPUs of its own; only where `reward.reward_model.n_gpus_per_node`
    is set is it passed on and called."""
    name = reward_cfg.reward_manager.name
    if name not in _FACTORIES:
        raise RewardError(
            f"reward.reward_manager.name is {name!r}; known: {', '.join(sorted(_FACTORIES))}. "
            f"Add your own with register_reward_manager({name!r})."
        )
    factory = _FACTORIES[name]
    more: dict[str, Any] = {}
    gpus = reward_cfg.reward_model.n_gpus_per_node
    if reward_cfg.reward_model.enable and gpus:
        parameters = inspect.signature(factory).parameters
        any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if reward_model_factory is None or not (any_keyword or "reward_model_factory" in parameters):
            raise ConfigError(
                f"A reward model on GPUs of its own (reward.reward_model.n_gpus_per_node={gpus}) is not possible "
                + (
                    "here; set it to 0."
                    if reward_model_factory is None
                    else f"with reward.reward_manager.name={name}, which takes no argument 'reward_model_factory'; set "
                    f"it to 0 or use one of {', '.join(REWARD_MANAGERS)}."
                )
            )
        more["reward_model_factory"] = reward_model_factory
    return factory(
        reward_cfg, tokenizer=tokenizer, function=function, max_response_length=max_response_length, **more
    )


@register_reward_manager("naive")
def naive(reward_cfg: RewardConfig, **arguments: Any) -> FunctionRewardManager:
    """One worker process, one sample after the other."""
    if (reward_cfg.num_workers or 1) > 1:
        _log.warning(
            "reward.num_workers=%d has no effect with reward.reward_manager.name=naive; prime scores in parallel",
            reward_cfg.num_workers,
        )
    return _build(reward_cfg, workers=1, **arguments)


@register_reward_manager("prime")
def prime(reward_cfg: RewardConfig, **arguments: Any) -> FunctionRewardManager:
    """`reward.num_workers` processes; by default one per CPU core, at most 8."""
    return _build(reward_cfg, workers=reward_cfg.num_workers or min(usable_cores(), 8), **arguments)


@register_reward_manager("dapo")
def dapo(reward_cfg: RewardConfig, **arguments: Any) -> RewardManager:
    """As prime, with the overlong penalty."""
    if not reward_cfg.overlong_buffer.enable:
        _log.warning(
            "reward.reward_manager.name=dapo without reward.overlong_buffer.enable=True: no length penalty is applied"
        )
    return prime(reward_cfg, **arguments)


@register_reward_manager("batch")
def batch(reward_cfg: RewardConfig, **arguments: Any) -> FunctionRewardManager:
    """The function gets the whole batch in one call."""
    return _build(reward_cfg, workers=1, whole_batch=True, **arguments)


def _build(
    cfg: RewardConfig,
    *,
    workers: int,
    function: Any,
    max_response_length: int,
    tokenizer: Any = None,
    whole_batch: bool = False,
    reward_model_factory: RewardModelFactory | None = None,
) -> FunctionRewardManager:
    sandbox.configure(sandbox.Settings.from_config(cfg))
    shaper = overlong_shaper(max_response_length, cfg.overlong_buffer) if cfg.overlong_buffer.enable else None
    objects = _functions_of(function)
    specs = _specs_of_objects(objects, cfg) if objects else _specs_of_config(cfg)
    terms: list[RewardTerm] = []
    try:
        terms += _function_terms(specs, objects, cfg, workers)
        if whole_batch:
            _require_batch(terms)
        if cfg.judge.base_url:
            from verl.reward.judge import JudgeBackend

            terms.append(RewardTerm(JudgeBackend(cfg.judge), "judge", cfg.judge.weight))
        if cfg.reward_model.enable:
            from verl.reward.model import ModelBackend

            model = reward_model_factory() if reward_model_factory else ModelBackend(cfg.reward_model)
            terms.append(RewardTerm(model, "reward_model", cfg.reward_model.weight))
        _make_labels_unique(terms)
        return FunctionRewardManager(terms, shaper)
    except BaseException:
        for term in terms:
            term.backend.close()
        raise


def _specs_of_config(cfg: RewardConfig) -> list[FunctionSpec]:
    """The functions the config names; the scorers of the data sources when nothing else gives a reward."""
    custom = cfg.custom_reward_function
    if custom.path and cfg.functions:
        raise ConfigError(
            "reward.custom_reward_function.path and reward.functions are both set; list all in reward.functions."
        )
    specs = [
        FunctionSpec(
            item.path, item.name, dict(item.reward_kwargs), item.weight, key=f"reward.functions[{number}]"
        )
        for number, item in enumerate(cfg.functions)
    ]
    if custom.path or not (specs or cfg.reward_model.enable or cfg.judge.base_url):
        specs.append(FunctionSpec(custom.path or SCORERS, custom.name, dict(custom.reward_kwargs)))
    for spec in specs:
        if not spec.is_scorers:
            check_file(spec)
    return specs


def _functions_of(function: Any) -> list[Callable[..., Any]]:
    several = isinstance(function, Sequence) and not isinstance(function, str)
    functions = list(function) if several else [] if function is None else [function]
    for item in functions:
        if not callable(item):
            raise RewardError(
                f"The reward function given is {item!r}, a {type(item).__name__}; give a callable, or set "
                f"{_CUSTOM}.path to a file."
            )
    return functions


def _specs_of_objects(functions: list[Callable[..., Any]], cfg: RewardConfig) -> list[FunctionSpec]:
    """Specs of functions given as objects; without a path where no other process can import them."""
    if cfg.custom_reward_function.path or cfg.functions:
        _log.warning(
            "reward: the function given as an argument replaces reward.custom_reward_function.path and reward.functions"
        )
    kwargs = dict(cfg.custom_reward_function.reward_kwargs)
    specs = []
    for function in functions:
        name = getattr(function, "__qualname__", type(function).__name__)
        specs.append(spec_of(function, kwargs=kwargs) or FunctionSpec("", name, kwargs, label=name))
    return specs


def _function_terms(
    specs: list[FunctionSpec], objects: list[Callable[..., Any]], cfg: RewardConfig, workers: int
) -> list[RewardTerm]:
    """Start the functions in worker processes, or in this process where they can run nowhere else."""
    local: dict[int, str] = {}
    for number, spec in enumerate(specs):
        if reason := _why_in_process(spec, cfg):
            local[number] = reason
    backends: dict[int, tuple[Backend, int]] = {}
    remote = [number for number in range(len(specs)) if number not in local]
    if remote:
        try:
            pool = _pool([specs[number] for number in remote], cfg, workers)
            backends |= {number: (pool, position) for position, number in enumerate(remote)}
        except RewardError as error:
            if not objects:
                raise
            # Objects whose module another process cannot import after all (a test, a notebook): we have them here.
            local |= dict.fromkeys(remote, str(error))
    for number, reason in local.items():
        name = "the scorers" if specs[number].is_scorers else specs[number].describe()
        _log.warning("reward: %s runs in the trainer's process, without a deadline: %s", name, reason)
    if local:
        functions = [
            RewardFunction(objects[number], specs[number].kwargs, specs[number].describe())
            if objects
            else load(specs[number])
            for number in local
        ]
        in_process = InProcessBackend(functions, cfg.timeout_s, cfg.max_concurrency)
        backends |= {number: (in_process, position) for position, number in enumerate(local)}
    return [_term(spec, *backends[number]) for number, spec in enumerate(specs)]


def _why_in_process(spec: FunctionSpec, cfg: RewardConfig) -> str:
    if cfg.in_process:
        return "reward.in_process=True"
    if not spec.path:
        return "no other process can import it (a closure, a lambda, or defined in the script itself)"
    closures = [name for name, function in registered_scorers().items() if spec_of(function) is None]
    if spec.is_scorers and closures:
        return f"the registered scorers of {', '.join(closures)} cannot be imported by another process"
    return ""


def _pool(specs: list[FunctionSpec], cfg: RewardConfig, workers: int) -> WorkerPool:
    importable = {name: spec_of(function) for name, function in registered_scorers().items()}
    settings = sandbox.settings()
    return WorkerPool(
        specs,
        num_workers=workers,
        timeout_s=cfg.timeout_s,
        memory_limit_mb=cfg.memory_limit_mb,
        max_concurrency=cfg.max_concurrency,
        scorers={name: spec.path for name, spec in importable.items() if spec},
        sandbox_settings=replace(settings, max_concurrent=max(1, settings.max_concurrent // workers)),
    )


def _term(spec: FunctionSpec, backend: Backend, function: int) -> RewardTerm:
    signature = backend.signatures[function]
    label = signature.name.split(" (")[0]
    unnamed = not spec.is_scorers and spec.name == DEFAULT_NAMES[0] and ":" not in spec.path
    if unnamed and label not in DEFAULT_NAMES:
        _log.info(
            "reward: %s has no function %s; its only one, %s, is used (set %s.name=%s)",
            spec.path,
            " or ".join(DEFAULT_NAMES),
            label,
            spec.key,
            label,
        )

    def check(data_sources: Sequence[str], columns: Sequence[str] | None) -> None:
        if not spec.is_scorers:
            signature.check(spec.kwargs, columns, spec.key)
            return
        check_data_sources(data_sources)
        ScorerFunction(spec.kwargs).check(data_sources, columns, spec.key)
        if any(uses_sandbox(name) for name in data_sources):
            sandbox.require()

    return RewardTerm(backend, label, spec.weight, function, check)


def _require_batch(terms: list[RewardTerm]) -> None:
    for term in terms:
        signature: Signature = term.signature
        if not signature.is_batch:
            raise RewardError(
                f"reward.reward_manager.name=batch calls the function once for all responses, but {signature.name} "
                f"takes one sample. Give it a parameter 'completions' and return a list, or use naive or prime."
            )


def _make_labels_unique(terms: list[RewardTerm]) -> None:
    seen: Counter[str] = Counter()
    for term in terms:
        seen[term.label] += 1
        if seen[term.label] > 1:
            term.label += f"_{seen[term.label]}"
