"""Warnings about a config that can run: keys the user set that have no effect, and settings that rarely help.

A key declares with `used_if` what must hold for it to have an effect: one condition, or several that must all hold.
A condition is `a or b` of these terms, where a leading dot means the key's own section and two the one around it:
`name` (is set and not False or 0), `!name`, `name=x|y`, `name!=x|y`, `@term` (one of `TERMS`). Where the first is
`@needs:column`, the condition is that a method or role of the run needs the column; the others say in words what does.
A key that has the value it would have anyway is never reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from verl.config.aliases import is_verl_default
from verl.config.build import finalize
from verl.config.capabilities import engine_spec
from verl.config.keys import Key, get, is_dtype, put, schema_keys
from verl.config.machine import cpu_has_bf16, on_cpu
from verl.config.methods import ADV_ESTIMATOR, find_method, methods_of, needed_columns
from verl.config.parallelism import counted, engine_size, pools, rollout_pool
from verl.config.roles import roles_of
from verl.config.schema import (
    AnyConfig,
    EvaluationConfig,
    GenerationConfig,
    PPOConfig,
)


def unused_keys(config: AnyConfig) -> list[str]:
    """One line for each key the user set that does nothing, and for each setting that rarely does what was meant."""
    lines = []
    for name in sorted(config.user_set - config.recipe_set):
        key, value = schema_keys(type(config))[name], get(config, name)
        if value == key.default or is_verl_default(name, value):
            continue
        why = next((why for condition in key.used_if if (why := _unmet(config, key, condition))), "")
        if why and not _has_value_anyway(config, name):
            lines.append(
                f"'{name}'={f'{value:g}' if isinstance(value, float) else value} has no effect: {why}"
            )
    return [*lines, *_slow_dtypes(config), *_advice(config)]


def _unmet(config: AnyConfig, key: Key, condition: str) -> str:
    """Why a condition does not hold; empty where it does."""
    terms = condition.split(" or ")
    column = terms.pop(0).removeprefix("@needs:") if condition.startswith("@needs:") else ""
    if (
        column
        and isinstance(config, PPOConfig)
        and (column in needed_columns(config) or any(column in role.columns for role in roles_of(config)))
    ):
        return ""
    reasons = [_unmet_term(config, key, term, of_column=bool(column)) for term in terms]
    return " and ".join(reasons) if all(reasons) else ""


def _unmet_term(config: AnyConfig, key: Key, term: str, *, of_column: bool) -> str:
    if term == "@never":
        return key.doc.removeprefix("no effect: ")
    if term.startswith("@"):
        holds, why = TERMS[term]
        return "" if holds(config, key) else why
    parsed = re.fullmatch(r"(!?)([\w.]+)(?:(!?=)(.*))?", term)
    assert parsed is not None, f"{key.name} declares used_if={term!r}"
    negated, name, sign, values = parsed.groups()
    value = get(config, name)
    if sign is None:
        shown = (
            "not set" if value in (None, "", [], {}) else "set" if isinstance(value, (list, dict)) else value
        )
        return f"{name} is {shown}" if bool(value) == bool(negated) else ""
    metadata = schema_keys(type(config))[name].metadata
    if metadata["plugin"] and isinstance(value, str) and value not in metadata["known"] and not of_column:
        return ""  # what a user's own loss, estimator or engine reads is not known
    found = any(str(each) in values.split("|") for each in (value if isinstance(value, list) else [value]))
    if sign == "=":
        return "" if found else f"it needs {name}={values.replace('|', ' or ')}"
    return f"{name} is {value}" if found else ""


def _has_value_anyway(config: AnyConfig, name: str) -> bool:
    """Whether the key would have its value without being set, because it follows another."""
    without = deepcopy(config)
    without.user_set = config.user_set - {name}
    put(without, name, schema_keys(type(config))[name].default)
    finalize(without)
    return bool(get(without, name) == get(config, name))


def _on_gpu(config: AnyConfig, key: Key) -> bool:
    return isinstance(config, EvaluationConfig) or not on_cpu(config)


def _processes(config: AnyConfig, key: Key) -> int:
    """Processes of the run on Ray: ranks, rollout engines and reward models."""
    return 1 if isinstance(config, EvaluationConfig) else sum(pool.processes for pool in pools(config))


def _has_workers(config: AnyConfig, key: Key) -> bool:
    """Whether there are processes that could die: on Ray, a rollout server, or the workers of one."""
    if _processes(config, key) > 1 or not isinstance(config, (PPOConfig, GenerationConfig)):
        return _processes(config, key) > 1
    rollout = config.actor_rollout_ref.rollout if isinstance(config, PPOConfig) else config.rollout
    spec = engine_spec(rollout.name)
    return (spec.server and rollout.mode == "server") or engine_size(config) > 1


def _has_16bit_weights(config: AnyConfig, key: Key) -> bool:
    role = key.name.partition(".optim.")[0].removesuffix(".actor")
    dtype = get(config, "model.dtype" if key.name.startswith("optim.") else f"{role}.model.dtype")
    return _on_gpu(config, key) if dtype == "auto" else dtype != "float32"


TERMS: dict[str, tuple[Callable[[Any, Key], bool], str]] = {
    "@gpu": (_on_gpu, "the run is on CPUs"),
    "@ranks": (lambda c, key: c.trainer.n_gpus_per_node * c.trainer.nnodes > 1, "there is one process"),
    "@ray": (lambda c, key: _processes(c, key) > 1, "one process runs without Ray"),
    "@workers": (_has_workers, "there are no other processes"),
    "@shared_gpus": (lambda c, key: not rollout_pool(c), "rollout has its own GPUs"),
    "@16bit": (_has_16bit_weights, "the weights are float32"),
}


def _slow_dtypes(config: AnyConfig) -> list[str]:
    """A line for each key that asks a CPU without bf16 instructions for bf16."""
    keys = [
        key.name
        for key in schema_keys(type(config)).values()
        if is_dtype(key.metadata) and key.name in config.user_set and get(config, key.name) == "bfloat16"
    ]
    if not keys or isinstance(config, EvaluationConfig) or cpu_has_bf16() or not on_cpu(config):
        return []
    return [
        f"'{key}'=bfloat16 is slow: this CPU has no bf16 instructions. Set {key}=float32, or leave it out"
        for key in keys
    ]


def _advice(config: AnyConfig) -> list[str]:
    """Settings that work but rarely do what was meant."""
    if isinstance(config, GenerationConfig) and config.rollout.n > 1 and config.rollout.temperature == 0:
        return [
            f"'rollout.n'={config.rollout.n} greedy responses are all the same; raise rollout.temperature"
        ]
    if not isinstance(config, PPOConfig):
        return []
    lines = _method_advice(config)
    rollout, algorithm, trainer = config.actor_rollout_ref.rollout, config.algorithm, config.trainer
    ahead, warmup = trainer.async_training, trainer.critic_warmup
    if ahead.mode != "off" and ahead.staleness and warmup and not trainer.val_only:
        lines.append(
            f"'trainer.critic_warmup'={warmup}: the policy does not change in the first {counted(warmup, 'step')}; "
            "responses are generated ahead all the same, and their age counts in steps "
            f"(trainer.async_training.staleness={ahead.staleness})"
        )
    val, name = rollout.val_kwargs, "actor_rollout_ref.rollout"
    if val.n > 1 and not val.do_sample and config.data.val_files:
        lines.append(
            f"'{name}.val_kwargs.n'={val.n} greedy responses are all the same; set {name}.val_kwargs.do_sample=True"
        )
    if rollout.temperature > 1.5:
        lines.append(f"'{name}.temperature'={rollout.temperature:g}: responses tend to degenerate above 1.5")
    if config.actor_rollout_ref.actor.use_kl_loss and algorithm.use_kl_in_reward:
        lines.append(
            "the KL counts twice: actor_rollout_ref.actor.use_kl_loss and algorithm.use_kl_in_reward"
        )
    return lines


def _method_advice(config: PPOConfig) -> list[str]:
    methods = methods_of(config)
    lines = [line for method in methods if method.advice for line in method.advice(config)]
    estimator = find_method(ADV_ESTIMATOR, config.algorithm.adv_estimator)
    if estimator is None or not config.critic.enable:
        return lines
    if "values" in estimator.needs:
        lines += [
            f"'{estimator.key}'={estimator.name} trains a critic, but {method.setting} reads no advantages; set it to "
            "grpo"
            for method in methods
            if not method.reads_advantages
        ]
    elif estimator.builtin and not any("values" in method.needs for method in methods):
        lines.append(f"'critic.enable'=True: {estimator.setting} uses no critic")
    return lines
