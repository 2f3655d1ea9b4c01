"""Building the reward manager that the config's reward section names.

Functions run in worker processes, a reward model on GPUs of its own where it is given some. In this process run only
functions with `reward.in_process=True`, functions that no other process can import (closures, lambdas), and a model on
the trainer's GPUs. The log says which functions and why.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from verl.config.keys import ConfigDict
from verl.config.sections.reward import REWARD_MANAGERS, RewardConfig
from verl.errors import ConfigError, RewardError
from verl.processes import usable_cores
from verl.reward import sandbox
from verl.reward.base import Backend, RewardManager, RewardResult, RewardSample
from verl.reward.functions import (
    DEFAULT_NAMES,
    SCORERS,
    FunctionSpec,
    ManagerArguments,
    RewardFunction,
    check_file,
    spec_of,
)
from verl.reward.pool import WorkerPool
from verl.reward.scorers import registered_scorers
from verl.reward.scoring import FunctionRewardManager, InProcessBackend, RewardTerm, load
from verl.user_code import importable_path

_log = logging.getLogger(__name__)

ManagerFactory = Callable[..., RewardManager]
RewardModelFactory = Callable[[], Backend]
"""Starts the reward model on separate GPUs."""
FACTORIES: dict[str, ManagerFactory] = {}
CLASSES: dict[str, type] = {}
"""Written for verl (`verl.reward.manager_classes.register`)."""


def register_reward_manager(name: str) -> Callable[[ManagerFactory], ManagerFactory]:
    """Decorator: `reward.reward_manager.name=NAME` then calls this with the arguments of `build_reward_manager`."""
    if not isinstance(name, str) or not name:
        raise RewardError(f"register_reward_manager takes a name, not {name!r}.")

    def add(factory: ManagerFactory) -> ManagerFactory:
        FACTORIES[name] = factory
        return factory

    return add


class NoRewards(RewardManager):
    """Scores everything 0: rewards are those of an environment, or nothing is learned from them."""

    def __init__(self) -> None:
        self._results: dict[int, RewardResult] = {}

    def submit(self, sample: RewardSample) -> None:
        self._results[sample.index] = RewardResult(0.0)

    def collect(self, indices: Collection[int] | None = None) -> dict[int, RewardResult]:
        wanted = list(self._results) if indices is None else sorted(set(indices))
        return {index: self._results.pop(index) for index in wanted}


def chooses_reward(cfg: RewardConfig, function: Any = None) -> bool:
    """Whether the user chose a reward, besides the scorers that data sources have."""
    chosen = cfg.custom_reward_function.path or cfg.functions or cfg.judge.base_url
    return bool(chosen or cfg.reward_model.enable or function is not None)


def require_streaming(manager: RewardManager, mode: str) -> None:
    """Raise RewardError where `trainer.async_training.mode` collects some of the submitted samples, and the manager, a
    user's, has a `collect` without arguments."""
    if mode == "off":
        return
    try:
        inspect.signature(manager.collect).bind([0])
    except TypeError:
        raise RewardError(
            f"trainer.async_training.mode={mode} collects the rewards of some samples while others are generated, but "
            f"{type(manager).__name__}.collect takes no argument. Write it as collect(self, indices=None), with the "
            f"results of these sample.index only, or set trainer.async_training.mode=off, or "
            f"reward.reward_manager.name to one of {', '.join(REWARD_MANAGERS)}."
        ) from None


def known_reward_managers() -> list[str]:
    return sorted({*FACTORIES, *CLASSES})


def build_reward_manager(
    reward_cfg: RewardConfig,
    *,
    max_response_length: int,
    tokenizer: Any = None,
    function: Any = None,
    reward_model_factory: RewardModelFactory | None = None,
    config: Any = None,
) -> RewardManager:
    """The manager the config names. `function`, a callable, or a list of them or of pairs of one and its weight,
    replaces the config's functions. `config`: the whole one, which managers written for verl read.
    `reward_model_factory` starts a reward model on separate GPUs; only where `reward.reward_model.n_gpus_per_node`
    is set is it passed on and called."""
    name = reward_cfg.reward_manager.name
    extra: dict[str, Any] = {}
    if reward_cfg.reward_manager.source == "importlib" or name in CLASSES:
        factory: ManagerFactory = of_class
        extra["config"] = config
    elif name in FACTORIES:
        factory = FACTORIES[name]
    else:
        raise RewardError(
            f"reward.reward_manager.name is {name!r}; known: {', '.join(known_reward_managers())}. "
            f"Add your own with register_reward_manager({name!r})."
        )
    gpus = reward_cfg.reward_model.n_gpus_per_node
    if reward_cfg.reward_model.enable and gpus:
        parameters = inspect.signature(factory).parameters.values()
        takes_it = any(p.kind is p.VAR_KEYWORD or p.name == "reward_model_factory" for p in parameters)
        if reward_model_factory is None or not takes_it:
            given = reward_model_factory is not None
            why = (
                f"with reward.reward_manager.name={name}, which takes no argument for it" if given else "here"
            )
            raise ConfigError(
                f"A reward model on separate GPUs (reward.reward_model.n_gpus_per_node={gpus}) is not possible "
                f"{why}; set it to 0 or use one of {', '.join(REWARD_MANAGERS)}."
            )
        extra["reward_model_factory"] = reward_model_factory
    return factory(
        reward_cfg, tokenizer=tokenizer, function=function, max_response_length=max_response_length, **extra
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
    manager = _build(reward_cfg, workers=1, **arguments)
    if single := [signature for signature in manager.signatures if not signature.is_batch]:
        manager.close()
        raise RewardError(
            f"reward.reward_manager.name=batch calls the function once for all responses, but {single[0].name} "
            f"takes one sample. Give it a parameter 'completions' and return a list, or use naive or prime."
        )
    return manager


def of_class(
    reward_cfg: RewardConfig, *, config: Any, tokenizer: Any, function: Any = None, **arguments: Any
) -> FunctionRewardManager:
    """A class written for verl, which calls the reward function itself."""
    manager, custom = reward_cfg.reward_manager, reward_cfg.custom_reward_function
    if tokenizer is None:
        raise RewardError(
            f"reward.reward_manager.name={manager.name} is a class that reads tokens, but there is no tokenizer here; "
            "try its reward function alone, with reward.reward_manager.name=naive."
        )
    if reward_cfg.functions:
        raise RewardError(
            f"reward.reward_manager.name={manager.name} is a class that calls one function: give "
            "reward.custom_reward_function.path instead of reward.functions."
        )
    called = None
    if function is not None:
        called = spec_of(function, kwargs=dict(custom.reward_kwargs))
        if called is None:
            raise RewardError(
                f"reward.reward_manager.name={manager.name} calls the reward function in another process, which cannot "
                "import it: define it in a file (not the script itself), not as a closure or lambda."
            )
    elif custom.path:
        called = FunctionSpec(custom.path, custom.name, dict(custom.reward_kwargs))
        check_file(called)
    given = ManagerArguments(
        tokenizer, ConfigDict.of(config or {"reward": reward_cfg}), called, arguments["max_response_length"]
    )
    path, name = str(manager.module.path), manager.name
    if manager.source != "importlib":
        known = CLASSES[name]
        path, name = importable_path(known), known.__qualname__
    spec = FunctionSpec(path, name, label=name, key="reward.reward_manager.module", manager=given)
    check_file(spec)
    return _build(reward_cfg, workers=reward_cfg.num_workers or 1, function=None, manager=spec, **arguments)


@register_reward_manager("none")
def none(reward_cfg: RewardConfig, *, function: Any = None, **_: Any) -> NoRewards:
    """Every response scores 0."""
    if chooses_reward(reward_cfg, function):
        raise RewardError(
            "reward.reward_manager.name=none scores every response 0, but a reward is given as well (a function, a "
            "reward model or a judge). Leave it out, or set reward.reward_manager.name=naive."
        )
    return NoRewards()


def _build(
    cfg: RewardConfig,
    *,
    workers: int,
    function: Any,
    max_response_length: int,
    tokenizer: Any = None,
    reward_model_factory: RewardModelFactory | None = None,
    manager: FunctionSpec | None = None,
) -> FunctionRewardManager:
    sandbox.configure(cfg)
    several = isinstance(function, Sequence) and not isinstance(function, str)
    given = list(function) if several else [] if function is None else [function]
    weighted = [each if isinstance(each, tuple) else (each, 1.0) for each in given]
    objects = [each for each, _ in weighted]
    specs = _specs_of_objects(weighted, cfg) if objects else [manager] if manager else _specs_of_config(cfg)
    terms: list[RewardTerm] = []
    try:
        terms += _function_terms(specs, objects, cfg, workers)
        if cfg.judge.base_url:
            from verl.reward.judge import JudgeBackend

            terms.append(RewardTerm(JudgeBackend(cfg.judge), "judge", cfg.judge.weight))
        if cfg.reward_model.enable:
            from verl.reward.model import ModelBackend

            model = reward_model_factory() if reward_model_factory else ModelBackend(cfg.reward_model)
            terms.append(RewardTerm(model, "reward_model", cfg.reward_model.weight))
        labels = [term.label for term in terms]
        for number, term in enumerate(terms):
            if earlier := labels[:number].count(term.label):
                term.label += f"_{earlier + 1}"
        # A class applies the penalty itself.
        overlong = cfg.overlong_buffer if cfg.overlong_buffer.enable and not manager else None
        return FunctionRewardManager(terms, overlong, max_response_length)
    except BaseException:
        for term in terms:
            term.backend.close()
        raise


def _specs_of_config(cfg: RewardConfig) -> list[FunctionSpec]:
    """The functions the config names; the scorers of the data sources when nothing else gives a reward."""
    custom = cfg.custom_reward_function
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


def _specs_of_objects(
    functions: list[tuple[Callable[..., Any], float]], cfg: RewardConfig
) -> list[FunctionSpec]:
    """Specs of functions and their weights; without a path where no other process can import the function."""
    if cfg.custom_reward_function.path or cfg.functions:
        _log.warning(
            "reward: the function given as an argument replaces reward.custom_reward_function.path and reward.functions"
        )
    kwargs = dict(cfg.custom_reward_function.reward_kwargs)
    specs = []
    for function, weight in functions:
        if not callable(function):
            raise RewardError(f"The reward function given is a {type(function).__name__}; give a callable.")
        name = getattr(function, "__qualname__", type(function).__name__)
        spec = spec_of(function, kwargs=kwargs, weight=weight)
        specs.append(spec or FunctionSpec("", name, kwargs, weight, label=name))
    return specs


def _function_terms(
    specs: list[FunctionSpec], objects: list[Callable[..., Any]], cfg: RewardConfig, workers: int
) -> list[RewardTerm]:
    """Start the functions in worker processes, or in this process where they can run nowhere else."""
    scorers = {name: spec_of(function) for name, function in registered_scorers().items()}
    closures = ", ".join(name for name, importable in scorers.items() if importable is None)
    local: dict[int, str] = {}
    """Why functions run here, by their numbers."""
    for number, spec in enumerate(specs):
        if cfg.in_process:
            local[number] = "reward.in_process=True"
        elif not spec.path:
            local[number] = (
                "no other process can import it (a closure, a lambda, or defined in the script itself)"
            )
        elif spec.is_scorers and closures:
            local[number] = f"the registered scorers of {closures} cannot be imported by another process"
    backends: dict[int, tuple[Backend, int]] = {}
    remote = [number for number in range(len(specs)) if number not in local]
    if remote:
        importable = {name: spec.path for name, spec in scorers.items() if spec}
        try:
            pool = WorkerPool(
                [specs[number] for number in remote], cfg, num_workers=workers, scorers=importable
            )
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


def _term(spec: FunctionSpec, backend: Backend, function: int) -> RewardTerm:
    label = backend.signatures[function].name.split(" (")[0]
    unnamed = not spec.is_scorers and spec.name == DEFAULT_NAMES[0] and ":" not in spec.path
    if unnamed and label not in DEFAULT_NAMES:
        wanted = " or ".join(DEFAULT_NAMES)
        instead = f"its only one, {label}, is used (set {spec.key}.name={label})"
        _log.info("reward: %s has no function %s; %s", spec.path, wanted, instead)
    return RewardTerm(backend, label, spec.weight, function, spec)
