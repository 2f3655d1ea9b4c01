"""Advantage estimators, policy losses, preference losses and corrections, ours and those of plug-ins.

Each is registered where it is written, with what it needs of a run; nothing else compares their names.

Importing this loads no torch, and looking up a method does not either: the modules of `verl.algorithms` are imported at
the first lookup and import torch when a method is called.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from verl.errors import ConfigError, MethodError

if TYPE_CHECKING:
    from torch import Tensor

    from verl.config.schema import PPOConfig

AdvEstimator = Callable[..., "tuple[Tensor, Tensor]"]
"""(token_level_rewards, response_mask, index, config, and what it needs) -> (advantages, returns), each [B, T]."""
PolicyLoss = Callable[..., "tuple[Tensor, dict[str, Any]]"]
"""(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, and what it needs)
-> (loss, metrics)."""
Prepare = Callable[..., "dict[str, Tensor]"]
"""(old_log_prob, log_prob, advantages, response_mask, config, generator, batch), those it has parameters for, of a
whole mini-batch; `batch` is the mini-batch itself (`ref_log_prob`, `uid`, ...) -> named tensors [B, ...]. A loss
registered with one gets the rows of its micro-batch back as the keyword `prepared`."""
Check = Callable[["PPOConfig"], Iterable[str]]

F = TypeVar("F", bound=Callable[..., Any])

ADV_ESTIMATOR = "algorithm.adv_estimator"
POLICY_LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
PREFERENCE_LOSS = "algorithm.loss"  # of `verl dpo`
_CORRECTION = "correction"  # each has a switch of its own
# Of an estimator that declares nothing: columns a role or a greedy response must provide.
_ASKED_BY_NAME = ("values", "reward_baselines", "ref_log_prob")
# The modules with ours, in the order of the names in --help and in the reference.
_BUILTIN = (
    "verl.algorithms.advantages",
    "verl.algorithms.losses",
    "verl.algorithms.preference_losses",
    "verl.algorithms.preference",
    "verl.algorithms.aggregation",
    "verl.algorithms.rollout_correction",
    "verl.algorithms.groups",
)


@dataclass(frozen=True)
class Method:
    """A function and what it needs of a run."""

    name: str
    key: str
    """The key of the config that names it, of a correction the one that turns it on."""
    function: Callable[..., Any]
    needs: tuple[str, ...] = ()
    """Columns of the batch beyond those every batch has: of a role (`ref_log_prob`, `values`, `process_rewards`,
    `teacher_log_probs`), of a separate pass of the policy (`old_log_probs`, `sum_pi_squared`), `reward_baselines` (the
    score of a greedy response to each prompt), `from_data` (the data's answers are rows of the batch),
    `rewards_by_key`, or a column of the data that holds numbers. The function gets them by name."""
    reads: tuple[str, ...] | None = None
    """Keys that only some methods read; None: not known, so it may be any."""
    whole_groups: bool = False
    """The responses to one prompt stay together in a mini-batch."""
    compares_responses: bool = False
    """One response to a prompt has nothing to be compared with."""
    reads_advantages: bool = True
    skips_zero_advantage: bool = False
    """Of a policy loss: a row whose advantages are zero adds nothing to the loss, whatever its ratios and weights."""
    prepare: Prepare | None = None
    config: type | None = None
    """The dataclass of its section."""
    check: Check | None = None
    """Why it cannot run with a config."""
    advice: Check | None = None
    """Settings that work with it but rarely do what was meant."""
    active: Callable[[PPOConfig], bool] | None = None
    """Of a correction: whether a config uses it; default: where its key is on."""

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return _parameters(self.function)

    def __call__(self, **available: Any) -> Any:
        """Call the function with those of `available` it has parameters for."""
        return call_with_known(self.function, available, self.setting)

    @property
    def setting(self) -> str:
        """The key and its value, for messages."""
        return f"{self.key}={self.name}"

    @property
    def builtin(self) -> bool:
        return self.function.__module__ in _BUILTIN


class MethodOptions(TypedDict, total=False):
    """What can be declared of a method, as of `Method`."""

    needs: tuple[str, ...]
    reads: tuple[str, ...] | None
    whole_groups: bool
    compares_responses: bool
    reads_advantages: bool
    skips_zero_advantage: bool
    config: type | None
    check: Check | None
    advice: Check | None


_tables: dict[str, dict[str, Method]] = {
    key: {} for key in (ADV_ESTIMATOR, POLICY_LOSS, PREFERENCE_LOSS, _CORRECTION)
}
_sections: dict[str, type] = {}


def _register(table: str, name: str, declared: MethodOptions, **more: Any) -> Callable[[F], F]:
    name = _text(name)
    key = name if table == _CORRECTION else table

    def decorate(fn: F) -> F:
        if table == ADV_ESTIMATOR and "needs" not in declared:
            required = [each.name for each in _parameters(fn).values() if each.default is each.empty]
            more["needs"] = ("old_log_probs", *(name for name in _ASKED_BY_NAME if name in required))
        method, known = Method(name, key, fn, **declared, **more), _tables[table].get(name)
        if known is not None and _place(known.function) != _place(fn):
            raise MethodError(
                f"{key}={name!r} is registered already, by {_place(known.function)}; rename {_place(fn)}"
            )
        _tables[table][name] = method
        if method.config is not None:
            register_section(f"{table.rpartition('.')[0]}.{name}", method.config)
        return fn

    return decorate


def _text(name: str) -> str:
    """Also of a member of an enum, as `AdvantageEstimator.GRPO`."""
    return str(name.value if isinstance(name, Enum) else name)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def register_adv_est(name: str, **declared: Unpack[MethodOptions]) -> Callable[[F], F]:
    """Decorator: make an advantage estimator known as `algorithm.adv_estimator=name`.

    The function is called by keyword, with those of its parameters that are available: `token_level_rewards` [B, T],
    `response_mask` [B, T], `index` (the `uid` of each row), `config` (the section `algorithm`), and the columns it
    needs. It returns `(advantages, returns)`, each [B, T]. The module or file that calls this is named in
    `trainer.plugins`.

    What it needs is declared by keyword:

    - `needs`: columns of the batch: `values` (the run then trains a critic), `ref_log_prob` (it then has a reference
      policy), `old_log_probs`, `sum_pi_squared`, `process_rewards`, `reward_baselines` (the score of a greedy response
      to each prompt), or a column of the data that holds numbers. Default: `old_log_probs`, and of `values`,
      `reward_baselines` and `ref_log_prob` those that are parameters without a default.
    - `reads`: keys of `algorithm` that only some estimators read; default: any.
    - `compares_responses`: `rollout.n=1` is refused.
    - `config`: dataclass of the section `algorithm.<name>`.
    - `check`, `advice`: functions of the whole config; a line for each reason why it cannot run, and for each setting
      that rarely does what was meant.
    """
    return _register(ADV_ESTIMATOR, name, declared)


def register_policy_loss(
    name: str, prepare: Prepare | None = None, **declared: Unpack[MethodOptions]
) -> Callable[[F], F]:
    """Decorator: make a policy loss known as `actor_rollout_ref.actor.policy_loss.loss_mode=name`.

    The function is called by keyword, with those of its parameters that are available: `old_log_prob`, `log_prob`,
    `advantages`, `response_mask` (each [B, T]), `loss_agg_mode`, `config` (the section `actor_rollout_ref.actor`),
    `rollout_is_weights`, and the columns it needs. It returns the loss, best by `verl.algorithms.agg_loss`, and a dict
    of metrics. The module or file that calls this is named in `trainer.plugins`.

    A loss that chooses tokens by comparing them across the mini-batch does so in `prepare`: called once per
    mini-batch with the whole of it, so that the loss does not depend on how the mini-batch is cut.

    What it needs is declared by keyword:

    - `needs`: columns of the batch, as of `register_adv_est`; default: none. With `teacher_log_probs` the run has a
      teacher, and the loss gets `kl` [B, T], the KL between policy and teacher.
    - `whole_groups`: the responses to one prompt stay together in a mini-batch, where `prepare` sees them; without
      `prepare` the loss itself is called with whole groups, one after the other.
    - `compares_responses`: `rollout.n=1` is refused.
    - `reads_advantages`: False: the estimator does not matter.
    - `skips_zero_advantage`: a row whose advantages are all zero adds nothing to the loss, whatever its log-probs and
      weights: such rows are then not computed (`actor_rollout_ref.actor.skip_zero_advantage`). Default: False.
    - `reads`: keys of `actor_rollout_ref.actor` that only some losses read; default: any.
    - `config`: dataclass of the section `actor_rollout_ref.actor.policy_loss.<name>`.
    - `check`, `advice`: as of `register_adv_est`.
    """
    return _register(POLICY_LOSS, name, declared, prepare=prepare)


def register_preference_loss(name: str, **declared: Unpack[MethodOptions]) -> Callable[[F], F]:
    """Decorator: make a preference loss known as `algorithm.loss=name` of `verl dpo`."""
    declared.setdefault("compares_responses", True)
    return _register(PREFERENCE_LOSS, name, declared)


def register_correction(
    key: str, active: Callable[[PPOConfig], bool] | None = None, **declared: Unpack[MethodOptions]
) -> Callable[[F], F]:
    """Decorator: what is done to rewards, masks or rows where `key` of the config turns it on needs this."""
    return _register(_CORRECTION, key, declared, active=active)


def register_section(key: str, section: type) -> None:
    """Make a section of a method or role known: `section` is its dataclass, `key` its full name."""
    _sections[key] = section


def plugin_sections() -> dict[str, type]:
    """The sections of registered methods and roles by their full names."""
    return dict(_sections)


def methods(table: str) -> list[Method]:
    """Those one key can name (or all corrections): the built-in ones in the order of their modules, then the others."""
    for module in _BUILTIN:
        importlib.import_module(module)
    order = {module: number for number, module in enumerate(_BUILTIN)}
    known = _tables[table].values()
    return sorted(known, key=lambda method: order.get(method.function.__module__, len(order)))


def find_method(table: str, name: str) -> Method | None:
    """The method of that name; None where there is none."""
    return next((method for method in methods(table) if method.name == name), None)


class MethodFunctions(MutableMapping[str, Callable[..., Any]]):
    """The functions one key can name, by name. What is taken out and put back keeps what was declared of it."""

    def __init__(self, table: str) -> None:
        self.table = table
        self._removed: dict[str, Method] = {}

    def _find(self, name: str) -> Method:
        method = find_method(self.table, _text(name))
        if method is None:
            raise KeyError(name)
        return method

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._find(name).function

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        removed = self._removed.get(_text(name))
        if removed is not None and removed.function is function:
            _tables[self.table][removed.name] = removed
        else:
            _register(self.table, name, {})(function)

    def __delitem__(self, name: str) -> None:
        method = self._find(name)
        self._removed[method.name] = _tables[self.table].pop(method.name)

    def __iter__(self) -> Iterator[str]:
        return iter([method.name for method in methods(self.table)])

    def __len__(self) -> int:
        return len(methods(self.table))

    def copy(self) -> dict[str, Callable[..., Any]]:
        return dict(self)


def _method(table: str, name: str) -> Method:
    name = _text(name)
    method = find_method(table, name)
    if method is None:
        names = sorted(_tables[table])
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise MethodError(
            f"{table}={name!r} is unknown; allowed: {', '.join(names)}, or what a module in trainer.plugins "
            f"registers.{hint}"
        )
    return method


def adv_estimator(name: str) -> Method:
    return _method(ADV_ESTIMATOR, name)


def policy_loss(name: str) -> Method:
    return _method(POLICY_LOSS, name)


def get_adv_estimator_fn(name: str) -> AdvEstimator:
    return adv_estimator(name).function


def get_policy_loss_fn(name: str) -> PolicyLoss:
    return policy_loss(name).function


def get_policy_loss_prepare(name: str) -> Prepare | None:
    """The mini-batch hook of a loss, None for the many that need none."""
    return policy_loss(name).prepare


def adv_estimator_names() -> tuple[str, ...]:
    return tuple(sorted(method.name for method in methods(ADV_ESTIMATOR)))


def policy_loss_names() -> tuple[str, ...]:
    return tuple(sorted(method.name for method in methods(POLICY_LOSS)))


def methods_of(config: PPOConfig) -> list[Method]:
    """The estimator, the loss and the corrections of a run; a name that is not known is left to the checks."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    named = (
        None if config.own_loop else find_method(ADV_ESTIMATOR, algorithm.adv_estimator),
        find_method(POLICY_LOSS, actor.policy_loss.loss_mode),
    )
    corrections = [
        method for method in methods(_CORRECTION) if (method.active or attrgetter(method.key))(config)
    ]
    return [method for method in named if method is not None] + corrections


def needed_columns(config: PPOConfig) -> tuple[str, ...]:
    """The columns that the methods of a run need beyond those every batch has."""
    columns = [column for method in methods_of(config) for column in method.needs]
    return tuple(dict.fromkeys("old_log_probs" if each == "old_log_prob" else each for each in columns))


def zero_advantage_counts(config: PPOConfig) -> str:
    """Why rows with advantage zero change an update of the policy; empty where they do not."""
    actor = config.actor_rollout_ref.actor
    if actor.use_kl_loss:
        return "actor_rollout_ref.actor.use_kl_loss adds the KL of every row to the loss"
    if actor.entropy_coeff:
        return "actor_rollout_ref.actor.entropy_coeff adds the entropy of every row to the loss"
    if config.actor_rollout_ref.teacher.coef:
        return "actor_rollout_ref.teacher.coef adds the KL to the teacher of every row to the loss"
    loss = find_method(POLICY_LOSS, actor.policy_loss.loss_mode)
    if loss is None or (loss.skips_zero_advantage and not (loss.whole_groups and loss.prepare is None)):
        return ""
    if loss.skips_zero_advantage:
        return f"{loss.setting} is called with whole groups"
    if loss.builtin:
        return f"{loss.setting} learns from rows with advantage zero too"
    return f"{loss.setting} is not registered with skips_zero_advantage=True"


def skips_zero_advantage(config: PPOConfig) -> bool:
    """Whether rows with advantage zero are left out of the policy's update."""
    wanted = config.actor_rollout_ref.actor.skip_zero_advantage
    return wanted is not False and not zero_advantage_counts(config)


def builtin_names(table: str, has: Callable[[Method], bool] = lambda method: True) -> tuple[str, ...]:
    """The names of our own methods, or of those of them that satisfy a condition."""
    return tuple(method.name for method in methods(table) if method.builtin and has(method))


def needed_by(table: str, column: str) -> Callable[[str], str]:
    """`used_if` of what is read beside a column: the chosen method needs the column."""
    return lambda key: f"{table}={'|'.join(builtin_names(table, lambda method: column in method.needs))}"


def provides(table: str, column: str, *switches: str) -> Callable[[str], str]:
    """`used_if` of what provides a column: a method or role of the run needs it. Messages name the methods of ours in
    `table` and the switches that do."""
    return lambda key: " or ".join((f"@needs:{column}", *switches, needed_by(table, column)(key)))


def read_by(table: str) -> Callable[[str], str]:
    """`used_if` of a key that only some methods read: the chosen one does, or is none of the few that do not."""

    def condition(key: str) -> str:
        readers = builtin_names(table, lambda method: key in (method.reads or ()))
        others = [name for name in builtin_names(table) if name not in readers]
        few = len(readers) <= len(others)
        return f"{table}={'|'.join(readers)}" if few else f"{table}!={'|'.join(others)}"

    return condition


def call_with_known(fn: Callable[..., Any], available: Mapping[str, Any], what: str) -> Any:
    """Call `fn` with those of `available` it has parameters for; a required one that is missing is an error that names
    it. This is how a user's estimator or loss takes only what it needs."""
    parameters = inspect.signature(fn).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    given = {name: value for name, value in available.items() if takes_all or name in parameters}
    for name, each in parameters.items():
        varying = each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        if not varying and each.default is each.empty and name not in given:
            raise ConfigError(
                f"{what} needs the argument {name!r}; available: {', '.join(sorted(available))}"
            )
    return fn(**given)
