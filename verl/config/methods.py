"""What the methods of a run need of it: columns of the batch, sections of the config."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.config.known import CRITIC_ESTIMATORS, GROUP_LOSSES, ONLINE_PAIR_LOSSES
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig

_sections: dict[str, type] = {}
NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(CRITIC_ESTIMATORS, ("values",)),
    **dict.fromkeys(ONLINE_PAIR_LOSSES, ("ref_log_prob",)),
    "distillation": ("teacher_log_probs",),
    "prime": ("process_rewards",),
    "optimal_token_baseline": ("old_log_probs", "sum_pi_squared"),
}


@dataclass(frozen=True)
class Method:
    name: str
    needs: tuple[str, ...] = ()
    whole_groups: bool = False
    function: Callable[..., Any] | None = None

    def __call__(self, **available: Any) -> Any:
        """Call the function with those of `available` it has parameters for."""
        assert self.function is not None
        return call_with_known(self.function, available, f"the policy loss {self.name!r}")


def policy_loss(name: str) -> Method:
    function = importlib.import_module("verl.algorithms").get_policy_loss_fn(name)
    return Method(name, NEEDS.get(name, ()), name in GROUP_LOSSES, function)


def adv_estimator(name: str) -> Method:
    return Method(name, NEEDS.get(name, ()))


def needed_columns(config: PPOConfig) -> tuple[str, ...]:
    """The columns that the methods of a run need beyond those every batch has."""
    actor = config.actor_rollout_ref.actor
    kl = ("ref_log_prob",) if actor.use_kl_loss or config.algorithm.use_kl_in_reward else ()
    estimator = adv_estimator(config.algorithm.adv_estimator).needs
    return tuple(dict.fromkeys((*estimator, *NEEDS.get(actor.policy_loss.loss_mode, ()), *kl)))


def register_section(key: str, section: type) -> None:
    """Make a section of a method or role known: `section` is its dataclass, `key` its full name."""
    _sections[key] = section


def plugin_sections() -> dict[str, type]:
    """The sections of registered methods and roles by their full names."""
    return dict(_sections)


def call_with_known(fn: Callable[..., Any], available: Mapping[str, Any], what: str) -> Any:
    """Call `fn` with those of `available` it has parameters for."""
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
