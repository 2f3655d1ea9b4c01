"""Registries of advantage estimators and policy losses, ours and those of plug-ins.

Importing this loads no torch. Every registered function is called by keyword.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from verl.config.methods import NEEDS
from verl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

AdvEstimator = Callable[..., "tuple[Tensor, Tensor]"]
"""(token_level_rewards, response_mask, index, config, and what it needs) -> (advantages, returns), each [B, T]."""
PolicyLoss = Callable[..., "tuple[Tensor, dict[str, Any]]"]
"""(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
-> (loss, metrics)."""
Prepare = Callable[..., "dict[str, Tensor]"]
"""(old_log_prob, log_prob, advantages, response_mask, config, generator, batch), those it has parameters for, of a
whole mini-batch; `batch` is the mini-batch itself (`ref_log_prob`, `uid`, ...) -> named tensors [B, ...]. A loss
registered with one gets the rows of its micro-batch back as the keyword `prepared`."""

F = TypeVar("F", bound=Callable[..., Any])

_adv_estimators: dict[str, AdvEstimator] = {}
_policy_losses: dict[str, PolicyLoss] = {}
_prepare: dict[str, Prepare] = {}


def _register(table: dict[str, Any], name: str, fn: Any, what: str) -> None:
    known = table.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (fn.__module__, fn.__qualname__):
        raise ConfigError(
            f"{what} {name!r} is registered already, by {known.__module__}.{known.__qualname__}; "
            f"rename {fn.__module__}.{fn.__qualname__}"
        )
    table[name] = fn


def register_adv_est(name: str) -> Callable[[F], F]:
    """Decorator: make an advantage estimator known as `algorithm.adv_estimator=name`.

    The function is called by keyword, with those of its parameters that are available: `token_level_rewards` [B, T],
    `response_mask` [B, T], `index` (the `uid` of each row), `config` (the section `algorithm`) and others. It returns
    `(advantages, returns)`, each [B, T]. The module that calls this is named in `trainer.plugins`.
    """

    def decorate(fn: F) -> F:
        _register(_adv_estimators, name, fn, "advantage estimator")
        return fn

    return decorate


def register_policy_loss(
    name: str, prepare: Prepare | None = None, *, needs: tuple[str, ...] = ()
) -> Callable[[F], F]:
    """Decorator: make a policy loss known as `actor_rollout_ref.actor.policy_loss.loss_mode=name`.

    The function is called by keyword with `old_log_prob`, `log_prob`, `advantages`, `response_mask` (each [B, T]),
    `loss_agg_mode`, `config` (the section `actor_rollout_ref.actor`) and `rollout_is_weights`. It returns the loss,
    best by `verl.algorithms.agg_loss`, and a dict of metrics. The module that calls this is named in `trainer.plugins`.

    A loss that chooses tokens by comparing them across the mini-batch does so in `prepare`: called once per
    mini-batch with the whole of it, so that the loss does not depend on how the mini-batch is cut."""

    def decorate(fn: F) -> F:
        _register(_policy_losses, name, fn, "policy loss")
        if needs:
            NEEDS[name] = needs
        if prepare is not None:
            _prepare[name] = prepare
        return fn

    return decorate


def _find(table: Mapping[str, Any], name: str, key: str) -> Any:
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{key}={name!r} is unknown; allowed: {', '.join(sorted(table))}, or what a module in trainer.plugins "
            f"registers.{hint}"
        )
    return table[name]


def _load_builtin() -> None:
    importlib.import_module("verl.algorithms.advantages")
    importlib.import_module("verl.algorithms.losses")
    importlib.import_module("verl.algorithms.prime")
    importlib.import_module("verl.algorithms.preference_losses")


def get_adv_estimator_fn(name: str) -> AdvEstimator:
    _load_builtin()
    return _find(_adv_estimators, name, "algorithm.adv_estimator")


def get_policy_loss_fn(name: str) -> PolicyLoss:
    _load_builtin()
    return _find(_policy_losses, name, "actor_rollout_ref.actor.policy_loss.loss_mode")


def get_policy_loss_prepare(name: str) -> Prepare | None:
    """The mini-batch hook of a loss, None for the many that need none."""
    get_policy_loss_fn(name)
    return _prepare.get(name)


def adv_estimator_names() -> tuple[str, ...]:
    _load_builtin()
    return tuple(sorted(_adv_estimators))


def policy_loss_names() -> tuple[str, ...]:
    _load_builtin()
    return tuple(sorted(_policy_losses))


def call_with_known(fn: Callable[..., Any], available: Mapping[str, Any], what: str) -> Any:
    """Call `fn` with those of `available` it has parameters for; a required one that is missing (or None) is an
    error that names it. This is how a user's estimator or loss takes only what it needs."""
    parameters = inspect.signature(fn).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    given = {name: value for name, value in available.items() if takes_all or name in parameters}
    for name, parameter in parameters.items():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        if parameter.default is inspect.Parameter.empty and name not in given:
            raise ConfigError(
                f"{what} needs the argument {name!r}; available: {', '.join(sorted(available))}"
            )
    return fn(**given)
