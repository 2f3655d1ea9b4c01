"""Reward managers: samples in as they finish, every score out at the end.

One class does the work for all four built-in names; they differ in how many processes it uses and in what the
function sees. `register_reward_manager` adds a user's own.

Every submitted sample gets exactly one result. With several rewards the score is their weighted sum, each own
score stands in `extra` under the reward's name, and a sample that one of them could not score has no score.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from verl.config.known import REWARD_MANAGERS
from verl.errors import ConfigError, RewardError
from verl.reward.base import RewardManager, RewardResult, RewardSample
from verl.reward.failures import causes
from verl.reward.functions import Signature
from verl.reward.overlong import Shaper
from verl.reward.scorers import check_data_sources

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig

_log = logging.getLogger(__name__)

ManagerFactory = Callable[..., RewardManager]
_FACTORIES: dict[str, ManagerFactory] = {}


class Backend(Protocol):
    """Runs functions by number. `drain` waits for everything submitted; every task gets a result per
    sample."""

    @property
    def signatures(self) -> list[Signature]: ...

    @property
    def calls(self) -> int | None:
        """Calls of functions so far, failed ones included; None for what is no function (a model, a judge)."""

    def submit(self, key: Hashable, function: int, samples: Sequence[RewardSample]) -> None: ...

    def drain(self) -> dict[Hashable, list[RewardResult]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Part:
    """One reward among those that are summed."""

    backend: Backend
    function: int
    label: str
    weight: float = 1.0
    check: Callable[[Sequence[str], Sequence[str] | None], None] | None = None
    by_data_source: bool = False


class FunctionRewardManager(RewardManager):
    """Scores with one or several parts and then shapes the sum."""

    def __init__(self, parts: Sequence[Part], shapers: Sequence[Shaper] = ()) -> None:
        if not parts:
            raise RewardError("A reward manager needs at least one reward.")
        self._parts = list(parts)
        self._shapers = list(shapers)
        self._samples: list[RewardSample] = []
        # Part of every key, so that what an interrupted batch left behind is never taken for a result of this one.
        self._batch = 0
        self._calls_taken = 0

    @property
    def reward_keys(self) -> list[str]:
        """Names under which `extra` holds the single scores; empty with only one reward."""
        return [part.label for part in self._parts] if len(self._parts) > 1 else []

    @property
    def reward_weights(self) -> list[float]:
        return [part.weight for part in self._parts] if len(self._parts) > 1 else []

    @property
    def signatures(self) -> list[Signature]:
        """What each reward takes."""
        return [part.backend.signatures[part.function] for part in self._parts]

    def check(self, data_sources: Collection[str] = (), columns: Collection[str] | None = None) -> None:
        """Refuse at start what could only fail later: rows nobody can score, parameters nothing provides.
        `columns` are the names of the dataset's columns; None where they are not known."""
        sources = sorted({str(name) for name in data_sources})
        listed = None if columns is None else sorted(columns)
        for part in self._parts:
            if part.by_data_source:
                check_data_sources(sources)
            if part.check is not None:
                part.check(sources, listed)

    def preflight(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Score a few rows before anything expensive; RewardError when none of them gets a score."""
        for sample in samples:
            self.submit(sample)
        by_index = self.collect()
        results = [by_index[sample.index] for sample in samples]
        if results and all(result.score is None for result in results):
            raise RewardError(
                f"The reward gave no score for any of {len(results)} rows tried before training. "
                + causes([result.error or "" for result in results])
            )
        return results

    def submit(self, sample: RewardSample) -> None:
        position = len(self._samples)
        self._samples.append(sample)
        for number, part in enumerate(self._parts):
            if not part.backend.signatures[part.function].is_batch:
                part.backend.submit((self._batch, number, position), part.function, [sample])

    def collect(self) -> dict[int, RewardResult]:
        samples, self._samples = self._samples, []
        if not samples:
            return {}
        batch, self._batch = self._batch, self._batch + 1
        for number, part in enumerate(self._parts):
            if part.backend.signatures[part.function].is_batch:
                part.backend.submit((batch, number, None), part.function, samples)
        done: dict[Hashable, list[RewardResult]] = {}
        for backend in _distinct(part.backend for part in self._parts):
            done.update(backend.drain())
        results = []
        for position in range(len(samples)):
            own = [
                done[batch, number, None][position]
                if (batch, number, None) in done
                else done[batch, number, position][0]
                for number in range(len(self._parts))
            ]
            results.append(self._join(own))
        for shaper in self._shapers:
            results = shaper(samples, results)
        return {sample.index: result for sample, result in zip(samples, results, strict=True)}

    def take_calls(self) -> int | None:
        counts = [backend.calls for backend in _distinct(part.backend for part in self._parts)]
        known = [count for count in counts if count is not None]
        if not known:
            return None
        before, self._calls_taken = self._calls_taken, sum(known)
        return self._calls_taken - before

    def close(self) -> None:
        for backend in _distinct(part.backend for part in self._parts):
            backend.close()

    def _join(self, own: list[RewardResult]) -> RewardResult:
        if len(own) == 1:
            weight = self._parts[0].weight
            if own[0].score is None or weight == 1.0:
                return own[0]
            return RewardResult(own[0].score * weight, own[0].extra)
        extra: dict[str, Any] = {}
        for part, result in zip(self._parts, own, strict=True):
            for key, value in result.extra.items():
                extra[f"{part.label}/{key}" if key in extra else key] = value
        for part, result in zip(self._parts, own, strict=True):
            if result.score is not None:
                extra[part.label] = result.score
        errors = [result.error for result in own if result.score is None]
        if errors:
            return RewardResult(None, extra, errors[0])
        score = sum(
            part.weight * (result.score or 0.0) for part, result in zip(self._parts, own, strict=True)
        )
        return RewardResult(score, extra)


def register_reward_manager(name: str) -> Callable[[ManagerFactory], ManagerFactory]:
    """Decorator: `reward.reward_manager.name=NAME` then calls this with the arguments of
    `build_reward_manager`."""
    if not isinstance(name, str) or not name:
        raise RewardError(f"register_reward_manager takes a name, not {name!r}.")

    def add(factory: ManagerFactory) -> ManagerFactory:
        _FACTORIES[name] = factory
        return factory

    return add


def known_reward_managers() -> list[str]:
    from verl.reward import build  # noqa: F401 - registers ours

    return sorted(_FACTORIES)


def build_reward_manager(
    reward_cfg: Any,
    *,
    tokenizer: Any = None,
    function: Any = None,
    max_response_length: int,
    run: PPOConfig | None = None,
) -> RewardManager:
    """The manager the config names. `function`, a callable or a list of them, goes before the config's
    functions. `run` is the whole configuration: a reward model on GPUs of its own is placed as it says; a manager
    that cannot do that need not take it."""
    from verl.reward import build  # noqa: F401 - registers ours

    name = reward_cfg.reward_manager.name
    if name not in _FACTORIES:
        raise RewardError(
            f"reward.reward_manager.name is {name!r}; known: {', '.join(sorted(_FACTORIES))}. "
            f"Add your own with register_reward_manager({name!r})."
        )
    factory = _FACTORIES[name]
    more: dict[str, Any] = {}
    if reward_cfg.reward_model.enable and reward_cfg.reward_model.n_gpus_per_node:
        if not _takes(factory, "run"):
            raise ConfigError(
                f"reward.reward_manager.name={name} takes no argument 'run', so it cannot place a reward model on "
                f"GPUs of its own (reward.reward_model.n_gpus_per_node="
                f"{reward_cfg.reward_model.n_gpus_per_node}); set that and reward.reward_model.nnodes to 0, or use "
                f"one of ours: {', '.join(REWARD_MANAGERS)}."
            )
        more["run"] = run
    return factory(
        reward_cfg, tokenizer=tokenizer, function=function, max_response_length=max_response_length, **more
    )


def _takes(factory: ManagerFactory, name: str) -> bool:
    parameters = inspect.signature(factory).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _distinct(backends: Any) -> list[Backend]:
    return list({id(backend): backend for backend in backends}.values())
