"""Names that keys have in verl and in earlier versions, read as ours.

`verl_names.json` has a row for each: the key here (`alias`), why none is needed (`unneeded`) or what to use instead
(`refused`), and verl's own default, which says nothing. A name covers those below it; `*` stands for any text and, in
an alias, for the same text. An alias holds for every command that has its key, the other rows for reinforcement
learning (those of `reward.` also for evaluation, that of `hydra` everywhere) or, with `sft`, for training on given
answers. A `group` of Hydra is the name alone and covers nothing below it. A key of ours has a row where verl has
another default, or other names for some of its `values`. The names of `async_training` are applied to all sources
together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.build import finite_number
from verl.config.capabilities import engine_spec
from verl.config.keys import schema_keys, sections
from verl.config.schema import ActorConfig, OfflineConfig, PPOConfig
from verl.config.sources import get_path, leaves, resolve, set_path, take_path
from verl.errors import ConfigError
from verl.json_input import read_json

_POLICY = "actor_rollout_ref"
_DOT = "\0"  # in the place of a dot within one name of a mapping
_MODE = "trainer.async_training.mode"
_BATCH = "data.train_batch_size"
_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
_PARTIAL = "async_training.partial_rollout"
_REQUIRED_BATCHES = "async_training.require_batches"
# Any of these asks for fully_async where no mode is given.
_ASYNC_NAMES = ("staleness_threshold", "trigger_parameter_sync_step", "partial_rollout", "require_batches")


class Row(NamedTuple):
    """What one of verl's names means here."""

    name: str
    alias: str = ""
    unneeded: str = ""
    refused: str = ""
    default: tuple[Any, ...] = ()
    values: Mapping[str, Any] = {}
    per_gpu: bool = False
    """The value counts over all GPUs, that of the alias for one."""
    share_of: str = ""
    """The alias is the value divided by this key."""
    sft: bool = False
    group: bool = False

    def says_nothing(self, value: Any) -> bool:
        """Whether a value leaves the key here at its default: no value, or a default of verl that means ours."""
        starts = [each[:-1] for each in self.default if isinstance(each, str) and each.endswith("*")]
        nothing = value in (None, []) and value in self.default
        nothing = nothing or (value is None and bool(self.unneeded or self.refused))
        return nothing or any(str(value).startswith(start) for start in starts)

    def is_default(self, value: Any) -> bool:
        """Whether a value is verl's own default."""
        same = (each == value and isinstance(each, bool) == isinstance(value, bool) for each in self.default)
        return any(same) or self.says_nothing(value)


class Unread(NamedTuple):
    """A name of verl that is no other spelling of a key, as it was typed and with its row."""

    typed: str
    row: Row
    ours: str
    value: Any


@cache
def verl_names() -> dict[str, Row]:
    """The table, longer names before the sections that contain them."""
    table = read_json(Path(__file__).with_name("verl_names.json"))
    return {
        name: Row(name, **({"alias": row} if isinstance(row, str) else row)) for name, row in table.items()
    }


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(map(re.escape, name.split("*"))))


@cache
def _patterns() -> list[tuple[re.Pattern[str], Row]]:
    return [
        (re.compile(_pattern(row.name).pattern + (r"()" if row.group else r"(\..+)?")), row)
        for row in verl_names().values()
    ]


def _filled(name: str, parts: Iterable[str]) -> str:
    """The name with each `*` replaced by the next part."""
    parts = iter(parts)
    return re.sub(r"\*", lambda _: next(parts), name)


def _row_of(kind: type, name: str) -> tuple[Row, str] | None:
    """The first row about a name that is no key here, and the key or section its alias is for this command."""
    for pattern, row in _patterns():
        found = pattern.fullmatch(name)
        if found is None:
            continue
        if not row.alias:
            about_rewards = row.name.startswith("reward.") and "reward" in sections(kind)
            holds = issubclass(kind, OfflineConfig if row.sft else PPOConfig)
            if holds or about_rewards or row.name == "hydra":
                return row, ""
            continue
        *parts, below = found.groups()
        ours = _filled(row.alias, parts)
        if has_key(kind, ours):
            return row, ours + (below or "")
    return None


def has_key(kind: type, name: str) -> bool:
    """Whether a command has this key or section, or a key that takes anything below it."""
    keys = schema_keys(kind)
    return name in keys or name in sections(kind) or any(name.startswith(f"{key}.") for key in keys)


def full_name(kind: type, name: str) -> str:
    """The name with `actor_rollout_ref.` where it was left out, or without where a command has the section itself."""
    known, first = sections(kind), name.partition(".")[0]
    if first not in known and f"{_POLICY}.{first}" in known:
        return f"{_POLICY}.{name}"
    below = name.removeprefix(f"{_POLICY}.")
    return below if _POLICY not in known and below.partition(".")[0] in known else name


def is_verl_default(name: str, value: Any) -> bool:
    """Whether a key of ours has verl's default where that is another one."""
    row = verl_names().get(name)
    return row is not None and row.is_default(value)


@cache
def aliases(kind: type) -> Mapping[str, str]:
    """The other names of the keys and sections that a command has, and which they are."""
    found: dict[str, str] = {}
    for row in verl_names().values():
        pattern = _pattern(row.alias)
        for name in (*schema_keys(kind), *sections(kind)) if "*" in row.alias else [row.alias]:
            if row.alias and has_key(kind, name) and (match := pattern.fullmatch(name)):
                found[_filled(row.name, match.groups())] = name
    return {old: name for old, name in found.items() if our_name(kind, old) == name}


def our_name(kind: type, name: str) -> str:
    """What a key or section is called here."""
    name = full_name(kind, name)
    found = None if name in schema_keys(kind) else _row_of(kind, name)
    return found[1] if found and found[1] else name


class Names(NamedTuple):
    """What `resolve_aliases` found in one source."""

    typed: dict[str, str]
    """Our name -> the name typed."""
    notices: list[str]
    unread: dict[str, Unread]
    """What was taken out because it is no key here."""
    unset: list[str]
    """Keys of ours that are left at their defaults."""


def resolve_aliases(kind: type, tree: dict[str, Any]) -> Names:
    """Move every key of the tree (in place) that has another name here."""
    names = Names({}, [], {}, [])
    for name in (_PARTIAL, _REQUIRED_BATCHES) if kind is PPOConfig else ():
        take_path(tree, name)  # no keys of ours: see apply_async_names
    for path, value in list(leaves(tree)):
        name = ".".join(part.replace(".", _DOT) for part in path)
        theirs = ours = full_name(kind, name)
        if ours in schema_keys(kind):
            row = verl_names().get(ours)
            row = row if row is not None and issubclass(kind, OfflineConfig if row.sft else object) else None
        else:
            row, other = _row_of(kind, ours) or (None, "")
            ours = other or ours
        default = row is not None and row.is_default(value)
        key = schema_keys(kind).get(ours)
        if row and (row.per_gpu or row.share_of or row.unneeded or row.refused):
            take_path(tree, path)
            names.unread[theirs] = Unread(name, row, ours, value)
        elif value == "???" or (value in (None, {}) and not key) or (row and row.says_nothing(value)):
            take_path(tree, path)  # also what Hydra asks the user to give, and an empty section
            names.unset.extend([ours] if key else [])
        elif (ours != name and ("." in name or row)) or (row and str(value) in row.values):
            take_path(tree, path)
            if default and get_path(tree, ours) is not None:
                continue
            converted = _converted(name, row, value) if row else value
            silent = default or converted == value
            if row and row.alias:
                silent = default or (not row.values and key and key.default == converted)
                if key and get_path(tree, ours) == key.default:
                    take_path(tree, ours)  # a whole config of verl has both
            if _move(tree, ours, converted, name) and not silent:
                names.notices.append(_is_read_as(name, value, ours, converted))
            names.typed[ours] = name
    return names


def _converted(name: str, row: Row, value: Any) -> Any:
    """What the value of another name is in ours."""
    if row.name == "async_training.staleness_threshold":
        return math.ceil(_number(name, value, 0.0, "a number, at least 0 (a share of a step's samples)"))
    if not row.alias or not row.values:
        return row.values.get(str(value), value)
    if str(value).lower() not in row.values:
        if set(row.values) == {"true", "false"}:
            raise ConfigError(f"'{name}' is {value!r}; it must be true or false")
        known = ", ".join(f"{theirs} ({row.alias}={ours})" for theirs, ours in row.values.items())
        raise ConfigError(f"'{name}' is {value!r}, which is not known. Known: {known}")
    return row.values[str(value).lower()]


def _is_read_as(name: str, value: Any, ours: str, converted: Any) -> str:
    if value == converted:
        return f"'{name}' is read as '{ours}'"
    return f"'{name}={value}' is read as '{ours}={converted}'"


def _number(name: str, value: Any, least: float, allowed: str) -> float:
    number = None if isinstance(value, bool) else finite_number(value)
    if number is None or number < least:
        raise ConfigError(f"'{name}' is {value!r}; it must be {allowed}")
    return number


def _move(tree: dict[str, Any], new: str, value: Any, old: str) -> bool:
    """Put a value at a place that may already hold one; returns whether it holds none."""
    *parents, last = (part.replace(_DOT, ".") for part in new.split("."))
    for parent in parents:
        if tree.get(parent) is None:
            tree[parent] = {}
        if not isinstance(tree[parent], dict):
            raise ConfigError(
                f"'{parent}' (in '{new}') is a section, but it was given the value {tree[parent]!r}"
            )
        tree = tree[parent]
    given = tree.get(last)
    if given is not None and given != value:
        raise ConfigError(
            f"'{old}' is another name of '{new}', and both are given: {value!r} and {given!r}. Keep one of them"
        )
    tree[last] = value
    return given is None


def apply_unread(
    unread: Mapping[str, Unread], tree: dict[str, Any], context: Iterable[Mapping[str, Any]]
) -> tuple[list[str], list[str]]:
    """Judge what `resolve_aliases` took out, of all sources together: sizes for one GPU go into the tree. Returns
    notices and problems."""
    notices, problems = [], []
    without_effect: dict[str, list[str]] = {}
    unread = {name: each for name, each in unread.items() if not each.row.is_default(each.value)}
    context = list(context)
    values = resolve({"unread": {name: each.value for name, each in unread.items()}}, context)["unread"]

    def value_of(name: str) -> Any:
        given = get_path(tree, name)
        return get_path(context[0], name) if given is None else given

    for name, (typed, row, ours, _) in unread.items():
        value = values[name]
        if row.is_default(value):
            continue
        if row.refused:
            problems.append(f"'{typed}' is {value!r}, which is not available: {row.refused}")
        elif row.unneeded:
            without_effect.setdefault(row.unneeded, []).append(typed)
        elif row.share_of:
            whole = _number(row.share_of, value_of(row.share_of), 0.0, "a number, at least 0")
            share = _number(typed, value, 0.0, "a number, at least 0") / whole if whole else 0.0
            _move(tree, ours, share, typed)
            notices.append(_is_read_as(typed, value, ours, share))
        else:
            size = max(1, int(_number(typed, value, 1.0, "a whole number, at least 1")) // _gpus(tree))
            _move(tree, ours, size, typed)
            notices.append(_is_read_as(typed, value, ours, size))
    notices += [
        f"accepted without effect: {', '.join(names)}: {why}" for why, names in without_effect.items()
    ]
    return notices, problems


def _gpus(tree: Mapping[str, Any]) -> int:
    """The ranks that get different sequences."""
    nodes, per_node, split = (
        int(_number(name, get_path(tree, name) or 1, 1.0, "a whole number, at least 1"))
        for name in (
            "trainer.nnodes",
            "trainer.n_gpus_per_node",
            f"{_POLICY}.actor.ulysses_sequence_parallel_size",
        )
    )
    return max(1, nodes * per_node // split)


def apply_rollout_mode(kind: type, tree: dict[str, Any]) -> list[str]:
    """Read verl's `rollout.mode=async` as a server, with an engine that can be one; returns notices."""
    rollout = our_name(kind, f"{_POLICY}.rollout")
    mode, engine = (get_path(tree, f"{rollout}.{name}") for name in ("mode", "name"))
    if mode not in ("async", "sync"):
        return []
    ours = "server" if mode == "async" and engine_spec(str(engine)).server else "inprocess"
    set_path(tree, f"{rollout}.mode", ours)
    return [_is_read_as(f"{rollout}.mode", mode, f"{rollout}.mode", ours)]


def apply_async_names(as_typed: Mapping[str, Any], tree: dict[str, Any]) -> list[str]:
    """Add what follows from the names in `async_training` to the values of all sources; returns notices."""
    given, notices = as_typed.get("async_training"), []
    if not isinstance(given, Mapping):
        return []
    if "partial_rollout" in given:
        partial, always = (
            str(given["partial_rollout"]).lower(),
            f"with {_MODE}=fully_async running responses always take new weights",
        )
        if partial not in ("true", "false"):
            raise ConfigError(f"'{_PARTIAL}' is {given['partial_rollout']!r}; it must be true or false")
        notices.append(
            f"'{_PARTIAL}=True' needs no key: {always}"
            if partial == "true"
            else f"'{_PARTIAL}=False' has no effect: {always}. {_MODE}=one_step_off sends them only when none is "
            "running"
        )
    if any(name in given for name in _ASYNC_NAMES) and get_path(tree, _MODE) is None:
        set_path(tree, _MODE, "fully_async")
        notices.append(f"'async_training' without a mode is read as '{_MODE}=fully_async'")
    if "require_batches" in given:
        asked, allowed = given["require_batches"], "a whole number, at least 1"
        batches = _number(_REQUIRED_BATCHES, asked, 1.0, allowed)
        if batches != int(batches):
            raise ConfigError(f"'{_REQUIRED_BATCHES}' is {asked!r}; it must be {allowed}")
        mini = get_path(tree, _MINI_BATCH) or ActorConfig().ppo_mini_batch_size
        size = int(_number(_MINI_BATCH, mini, 1.0, "a whole number")) * int(batches)
        other = get_path(tree, _BATCH)
        if other is not None and other != size:
            raise ConfigError(
                f"'{_REQUIRED_BATCHES}={int(batches)}' asks for {int(batches)} x {_MINI_BATCH}={mini} = {size} prompts "
                f"per step, and {_BATCH}={other} is given as well. Keep one of them"
            )
        set_path(tree, _BATCH, size)
        notices.append(f"'{_REQUIRED_BATCHES}={int(batches)}' is read as '{_BATCH}={size}'")
    return notices
