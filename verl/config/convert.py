"""From plain values (of YAML, overrides, dicts) to the types of the schema.

Nothing is guessed: a value either has one plain reading in the wanted type, or it is a problem whose text names
the key, the value seen and the type wanted. All problems of a config are collected before one error is raised.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin

from verl.config.keys import field_types, nearest, schema_keys
from verl.config.known import MODEL_DTYPES, ROLLOUT_DTYPES, UNAVAILABLE_FEATURES

DTYPE_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32", "float8": "fp8",
}  # fmt: skip


class Mismatch(Exception):
    """The value has no reading in the wanted type."""


def build(root: type, tree: Mapping[str, Any], problems: list[str], typed: Mapping[str, str]) -> Any:
    """The dataclass `root` filled from a nested mapping; `typed` maps our names to what the user typed."""
    return _section(root, root, tree, "", {}, problems, typed)


def _section(
    root: Any,
    kind: Any,
    tree: Mapping[str, Any],
    prefix: str,
    defaults: Mapping[str, Any],
    problems: list[str],
    typed: Mapping[str, str],
) -> Any:
    values = dict(defaults)
    known = {field.name: field for field in fields(kind) if not field.metadata.get("internal")}
    for name, value in tree.items():
        full = f"{prefix}{name}"
        if name not in known:
            if "[" in prefix:
                problems.append(
                    f"unknown key '{full}' (value {value!r}). Known keys of an item of "
                    f"'{prefix.partition('[')[0]}': {', '.join(known)}"
                )
            else:
                problems += [_unknown(root, each, below, typed) for each, below in _leaves(full, value)]
            continue
        wanted = field_types(kind)[name]
        if is_dataclass(wanted):
            if value is None:
                continue
            if not isinstance(value, Mapping):
                problems.append(
                    f"'{_as_typed(full, typed)}' is a section and takes keys "
                    f"({_names(wanted)}), not the value {value!r}"
                )
                continue
            inner = known[name].metadata["defaults"]
            values[name] = _section(root, wanted, value, f"{full}.", inner, problems, typed)
            continue
        try:
            values[name] = convert(root, wanted, value, full, problems, typed)
            if known[name].metadata["known"] in (MODEL_DTYPES, ROLLOUT_DTYPES):
                values[name] = DTYPE_NAMES.get(values[name], values[name])
        except Mismatch:
            problems.append(f"'{_as_typed(full, typed)}' is {value!r}; it must be {type_name(wanted)}")
    return kind(**values)


def convert(
    root: type, wanted: Any, value: Any, name: str, problems: list[str], typed: Mapping[str, str]
) -> Any:
    """The value in the wanted type, or Mismatch."""
    origin = get_origin(wanted)
    if origin in (Union, types.UnionType):
        options = get_args(wanted)
        if type(None) in options and (value is None or value == "None"):
            return None
        if isinstance(value, str) and "_" in value and str in options:
            return value  # Python would read the bounds 0.5_2 as the number 0.52
        for option in options:
            if option is type(None):
                continue
            try:
                return convert(root, option, value, name, problems, typed)
            except Mismatch:
                continue
        raise Mismatch
    if origin is list:
        (item,) = get_args(wanted)
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        return [convert(root, item, each, f"{name}[{i}]", problems, typed) for i, each in enumerate(items)]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise Mismatch
        return dict(value)
    if is_dataclass(wanted) and isinstance(wanted, type):
        if not isinstance(value, Mapping):
            raise Mismatch
        return _section(root, wanted, value, f"{name}.", {}, problems, typed)
    return _scalar(wanted, value)


def _scalar(wanted: Any, value: Any) -> Any:
    if wanted is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
    elif wanted is int and not isinstance(value, bool):
        if isinstance(value, int):
            return value
        number = _number(value)
        if number is not None and number == int(number):
            return int(number)
    elif wanted is float and not isinstance(value, bool):
        number = _number(value)
        if number is not None:
            return number
    elif wanted is str:
        if isinstance(value, str):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
    raise Mismatch


def _number(value: Any) -> float | None:
    """The value as a finite number."""
    if not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def type_name(wanted: Any) -> str:
    """A type in words."""
    origin = get_origin(wanted)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if each is type(None) else type_name(each) for each in get_args(wanted))
    if origin is list:
        return f"a list, each item {type_name(get_args(wanted)[0])}"
    if origin is dict:
        return "a mapping of names to values"
    if is_dataclass(wanted):
        return f"a mapping with the keys {_names(wanted)}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[wanted]


def _unknown(root: type, name: str, value: Any, typed: Mapping[str, str]) -> str:
    shown = _as_typed(name, typed)
    line = f"unknown key '{shown}'{f' (that is {name!r})' if shown != name else ''} (value {value!r})"
    for feature, names in UNAVAILABLE_FEATURES.items():
        if set(names) & set(name.lower().split(".")):
            return f"{line}: {feature} is not available in this version"
    first, *others = nearest(root, name)
    section = schema_keys(root)[first].section
    where = f"section '{section}'" if section else "the top level"
    alternatives = f", or {' or '.join(repr(each) for each in others)}" if others else ""
    return f"{line}. Nearest known key: '{first}' in {where}{alternatives}"


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    """The keys below a name, or the name itself."""
    if not isinstance(value, Mapping) or not value:
        return [(name, value)]
    return [leaf for each, below in value.items() for leaf in _leaves(f"{name}.{each}", below)]


def _as_typed(name: str, typed: Mapping[str, str]) -> str:
    """What the user wrote for this key, where an alias was used."""
    for ours, theirs in typed.items():
        if name == ours or name.startswith(ours + "."):
            return theirs + name[len(ours) :]
    return name


def _names(kind: Any) -> str:
    return ", ".join(field.name for field in fields(kind))
