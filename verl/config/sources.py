"""Reading a command line and YAML files into one plain nested dict; a later source wins.

Hydra's grammar parses the overrides and OmegaConf resolves interpolations; composing is ours, because only the schema
knows which keys exist. YAML is read as people write it: a number is a decimal number, `1e-6` included; what plain
YAML 1.1 also takes for numbers or dates (`0.5_2.0`, `1:30`, `2024-01-31`) is a text; a key given twice is an error.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl.config.keys import to_dict
from verl.errors import ConfigError
from verl.json_input import MAX_DEPTH, check_nesting, read_text

# The config files of the commands, by name: the schema's defaults, which are always there, and what one changes.
BUILT_IN: dict[str, dict[str, Any]] = {
    "ppo_trainer": {},
    "ppo_megatron_trainer": {
        "actor_rollout_ref": {"actor": {"strategy": "megatron"}}
    },  # the other roles follow
    **{
        name: {}
        for name in ("sft_trainer", "dpo_trainer", "reward_trainer", "generation", "evaluation", "_self_")
    },
}
# Keys whose one text value is a comma list; anywhere else commas would ask for several runs.
COMMA_KEYS = (".rollout_rs", ".rollout_rs_threshold")
_UNDERSCORED = re.compile(r"^[0-9.]+_[0-9_.]*$")


OPTIONS = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
OPTIONS.add_argument("--config-path", "-cp")
OPTIONS.add_argument("--config-name", "-cn")
OPTIONS.add_argument("--cfg", "-c", choices=["job"])
OPTIONS.add_argument("--check", action="store_true")
OPTIONS.add_argument("--help", "-h", action="store_true")


def parse_command_line(argv: list[str]) -> argparse.Namespace:
    """Options, `overrides` and `help_about` (the sections named after --help), given in any order."""
    try:
        line, words = OPTIONS.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; --help lists the options") from None
    files = [word for word in words if word.endswith((".yaml", ".yml")) and Path(word).is_file()]
    if len(files) == 1 and not (line.config_path or line.config_name or line.help):
        line.config_path = files[0]
        words.remove(files[0])
    for number, word in enumerate(words):
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            rest = words[number + 1 : number + 2]
            if not equals and rest and not rest[0].startswith("-") and "=" not in rest[0]:
                equals, value = "=", rest[0]
            raise ConfigError(
                f"unknown option '{word}' (--help lists them); keys are written key=value"
                + (f": write {name.replace('-', '_')}={value}" if equals else "")
            )
    line.help_about = [word for word in words if "=" not in word] if line.help else []
    line.overrides = [word for word in words if word not in line.help_about]
    return line


_INT = re.compile(r"^[-+]?[0-9]+$")
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
_MAX_VALUES = 100_000  # keys and values of a YAML file, aliases expanded


class _Loader(yaml.SafeLoader):
    """SafeLoader with decimal numbers only and keys that must differ."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            plain = isinstance(key, yaml.ScalarNode)
            if not plain or key.value in seen:
                problem = f"duplicate key '{key.value}'" if plain else "a key must be a plain text"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_REPLACED = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(str(node.value)))
_Loader.add_constructor(
    "tag:yaml.org,2002:float",
    lambda loader, node: float(str(node.value).lower().replace(".inf", "inf").replace(".nan", "nan")),
)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes every text our loader, or any other, would take for something else."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def dump_yaml(values: Any) -> str:
    """Plain values as YAML, in their order."""
    return yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110
    )


def load_yaml(path: Path) -> dict[Any, Any]:
    """The mapping in a file, at most `MAX_DEPTH` levels deep; {} for an empty file."""
    try:
        loaded = yaml.load(read_text(path), Loader=_Loader)
        check_nesting(loaded, _MAX_VALUES)
    except RecursionError:
        raise ConfigError(f"cannot read '{path}': nested deeper than {MAX_DEPTH} levels") from None
    # PyYAML's own constructors raise the last three for explicit tags, such as `!!bool maybe`.
    except (yaml.YAMLError, OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        what = " ".join(str(error).split()).replace('in "<unicode string>", ', "at ")
        raise ConfigError(f"cannot read '{path}': {what}") from None
    if loaded is not None and not isinstance(loaded, dict):
        kind = "a list" if isinstance(loaded, list) else f"the value {loaded!r}"
        raise ConfigError(f"'{path}' must hold keys and values at its top level, not {kind}")
    return loaded or {}


def read_yaml(config_path: str | None, config_name: str | None) -> dict[str, Any]:
    """The user's YAML file as a nested dict, with the files of its `defaults:` list; {} without a file."""
    if config_name is None:
        if config_path is None:
            return {}
        path = Path(config_path).expanduser()
        if path.is_file():
            return _read(path, ())
        raise ConfigError(f"--config-path {config_path} needs --config-name as well.{_yaml_files(path)}")
    return _read_named(Path(config_path or ".").expanduser(), config_name, ())


def _read_named(folder: Path, name: str, parents: tuple[Path, ...]) -> dict[str, Any]:
    """A file of the folder or, where that has none of this name, the config of a command."""
    built_in = BUILT_IN.get(name.removesuffix(".yaml"))
    if built_in is not None and not (folder / name).is_file() and not (folder / f"{name}.yaml").is_file():
        return to_dict(built_in)  # type: ignore[no-any-return]
    return _read(_find(folder, name), parents)


def _find(folder: Path, name: str) -> Path:
    candidates = [folder / name, folder / f"{name}.yaml", folder / f"{name}.yml"]
    for path in candidates:
        if path.is_file():
            return path
    if not folder.is_dir():
        raise ConfigError(f"no folder '{folder}' (--config-path)")
    raise ConfigError(f"no file '{candidates[1]}' (--config-path, --config-name).{_yaml_files(folder)}")


def _yaml_files(folder: Path) -> str:
    names = sorted(each.name for each in folder.glob("*.y*ml"))
    return f" YAML files in that folder: {', '.join(names) or 'none'}"


def _read(path: Path, parents: tuple[Path, ...]) -> dict[str, Any]:
    if path in parents:
        raise ConfigError(
            f"'{path}' is in its own defaults list: {' -> '.join(str(p) for p in (*parents, path))}"
        )
    own = from_mapping(load_yaml(path), str(path))
    own.pop("hydra", None)  # settings of Hydra itself (run folder, sweeps), not of the training
    defaults = own.pop("defaults", None) or []
    if not isinstance(defaults, list):
        raise ConfigError(f"'defaults' in '{path}' must be a list, not {defaults!r}")
    result: dict[str, Any] = {}
    placed = False
    for entry in defaults:
        if entry == "_self_":
            merge(result, own)
            placed = True
        else:
            merge(result, _default_entry(path, entry, (*parents, path)))
    if not placed:
        merge(result, own)
    return result


def _default_entry(path: Path, entry: Any, parents: tuple[Path, ...]) -> dict[str, Any]:
    """One line of a `defaults:` list: `name`, `group/name`, or `group: name`."""
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((group, name),) = entry.items()
        group = str(group).removeprefix("override ").removeprefix("optional ")
        if name is None or group.startswith("hydra/"):
            return {}
        group, _, package = group.partition("@")
        return set_path(
            {}, (package or group).replace("/", "."), _read(_find(path.parent / group, str(name)), parents)
        )
    if isinstance(entry, str):
        return _read_named(path.parent, entry.partition("@")[0], parents)
    raise ConfigError(f"'{path}': cannot read the entry {entry!r} of its defaults list")


def from_mapping(values: Mapping[Any, Any], where: str = "the config") -> dict[str, Any]:
    """A copy of a nested mapping, with dotted names at the top split."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise ConfigError(f"the key {name!r} in {where} must be a text")
        set_path(result, name, value)
    return result


def merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Merge a copy of another tree into this one; lists and values are replaced, mappings are merged."""
    for name, value in other.items():
        if isinstance(value, Mapping) and isinstance(tree.get(name), dict):
            merge(tree[name], value)
        elif value is not None or not isinstance(tree.get(name), dict):
            tree[name] = to_dict(value)


def set_path(tree: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Set a dotted name in the tree."""
    *parents, last = name.split(".")
    inner = tree
    for parent in parents:
        if not isinstance(inner.get(parent), dict):
            inner[parent] = {}
        inner = inner[parent]
    merge(inner, {last: value})
    return tree


def get_path(tree: Any, name: str) -> Any:
    """The value of a dotted name; None where it is not there."""
    for part in name.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The names on the way to each value of a nested mapping, and the value; an empty mapping is one."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


def take_path(tree: dict[str, Any], name: str | tuple[str, ...]) -> tuple[bool, Any]:
    """Remove a key, by its dotted name or the names on the way to it; sections left empty by it go as well."""
    first, *rest = name.split(".") if isinstance(name, str) else name
    if first not in tree:
        return False, None
    if not rest:
        return True, tree.pop(first)
    inner = tree[first]
    if not isinstance(inner, dict):
        return False, None
    found, value = take_path(inner, tuple(rest))
    if found and not inner:
        del tree[first]
    return found, value


@dataclass(frozen=True)
class Override:
    """One `key=value` (or `~key`, then without value) of the command line."""

    name: str
    value: Any = None
    delete: bool = False


def parse_overrides(overrides: Iterable[str]) -> list[Override]:
    """Hydra-style overrides, in order; `key=`, `+key=` and `++key=` are the same, since the schema is strict."""
    overrides = list(overrides)
    if not overrides:
        return []
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import OverrideType, Sweep

    parser = OverridesParser.create()
    parsed: list[Override] = []
    for number, text in enumerate(overrides):
        if "=" not in text and not text.startswith("~"):
            raise ConfigError(f"'{text}' is not an override; {_as_override(overrides[number:])}")
        override = _parse(parser, text)
        name, value = override.key_or_group, override.value()
        if override.package is not None:
            raise ConfigError(f"'{text}' names a package (@), which keys do not have; write key=value")
        if override.type is OverrideType.DEL:
            parsed.append(Override(name, delete=True))
        elif isinstance(value, Sweep) and name.endswith(COMMA_KEYS):
            parsed.append(Override(name, text.split("=", 1)[1]))
        elif isinstance(value, Sweep):
            raise ConfigError(f"'{text}' gives several values; a list is written {name}=[a,b]")
        elif override.type in (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD):
            raw = text.partition("=")[2]
            # Hydra reads 0.5_2 as 0.52; here it is a pair of bounds, or a number the schema asks for.
            parsed.append(Override(name, raw if _UNDERSCORED.match(raw) else _unquote(value)))
        else:
            raise ConfigError(f"'{text}' extends a list; give the whole list instead")
    return parsed


def _as_override(words: list[str]) -> str:
    """How the first of these words was probably meant."""
    if len(words) > 2 and words[1] == "=":
        return f"write it without spaces: {words[0]}={words[2]}"
    if len(words) > 1 and words[1].startswith("="):
        return f"write it without spaces: {words[0]}{words[1]}"
    if words[0].endswith((".yaml", ".yml")):
        return "a file of keys must exist, and there can be one, also by --config-path DIR --config-name NAME"
    return "write key=value, e.g. trainer.total_epochs=3"


def _parse(parser: Any, text: str) -> Any:
    """One override by Hydra's grammar; a bare text the grammar has no word for (~/models, a=b, <x>) is that text."""
    from hydra.errors import HydraException

    name, _, raw = text.partition("=")
    try:
        override = parser.parse_override(text)
        override.value()
        return override
    except (HydraException, RecursionError, ValueError) as error:  # ValueError: a number of too many digits
        why = str(error).partition("\n")[0]
    if raw and raw[0] not in "[{'\"" and "${" not in raw and "\\" not in raw:
        quoted = raw.replace("'", "\\'")
        try:
            return parser.parse_override(f"{name}='{quoted}'")
        except HydraException:
            pass
    quoted = f"""{name}=["~/a","b"]""" if raw[:1] in "[{" else f"""'{name}="{raw}"'"""
    raise ConfigError(f"cannot read the override '{text}': {why}. Quote its texts, e.g. {quoted}") from None


def _unquote(value: Any) -> Any:
    """Hydra keeps quoted strings inside lists and mappings as objects; make them plain."""
    from hydra.core.override_parser.types import QuotedString

    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, dict):
        return {_unquote(name): _unquote(below) for name, below in value.items()}
    return [_unquote(each) for each in value] if isinstance(value, list) else value


def resolve(tree: dict[str, Any], context: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The tree with its interpolations replaced; they may name keys of the tree or of the context (later wins)."""
    if "${" not in str(tree):
        return tree
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    whole: dict[str, Any] = {}
    for each in (*context, tree):
        merge(whole, each)
    try:
        resolved: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(whole), resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise ConfigError(f"cannot resolve an interpolation: {' '.join(str(error).split())}") from None
    return _pick(resolved, tree)


def _pick(resolved: Any, tree: Any) -> Any:
    """Of the resolved values, those whose names the tree has."""
    if isinstance(tree, dict) and isinstance(resolved, dict):
        return {name: _pick(resolved[name], below) for name, below in tree.items()}
    return resolved
