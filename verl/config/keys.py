"""Declaring config keys, and walking the schema they form.

A declaration is the only home of a default, its documentation and what the key allows: loading, `--help`, the checks
and the warnings all read the metadata written here.

Passwords and tokens are neither shown nor written: an address loses its user and password (`http://***@host/v1`), and a
text under a name such as `api_key` is `***`. A value that was masked cannot be used again: loading a config with one
says which key to give.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from verl.config.methods import plugin_sections
from verl.errors import ConfigError
from verl.json_input import read_json

Condition = str | Callable[[str], str]
"""In words of `verl.config.unused_keys`, or a function of the key's name that asks the registered methods."""
Conditions = Condition | tuple[Condition, ...]
Names = tuple[str, ...] | Callable[[], tuple[str, ...]]
# What a field of a plug-in's section is that is declared without `key`.
_PLAIN: dict[str, Any] = {
    "doc": "", "known": None, "plugin": None, "follows": None, "used_if": (), "required": False, "path": False,
    "defaults": {}, "ge": None, "gt": None, "le": None, "lt": None,
}  # fmt: skip
# Sections in which each plug-in's own one is read while a key has its name.
_CHOICES = {
    "actor_rollout_ref.actor.policy_loss": "actor_rollout_ref.actor.policy_loss.loss_mode",
    "algorithm": "algorithm.adv_estimator",
}

# Names (without a plural s) for keys that no similarity of spelling finds; those of TRL are in trl_names.json.
OTHER_NAMES = {
    "lr": "actor_rollout_ref.actor.optim.lr critic.optim.lr optim.lr",
    "model": "actor_rollout_ref.model.path model.path",
    "model_path": "actor_rollout_ref.model.path model.path",
    "model_name_or_path": "actor_rollout_ref.model.path model.path",
    "total_step": "trainer.total_training_steps",
    "num_epoch": "trainer.total_epochs",
    "dataset": "data.train_files",
    "eval_dataset": "data.val_files",
    "max_new_token": "data.max_response_length",
    "reward_fn": "reward.custom_reward_function.path",
    "reward_func": "reward.custom_reward_function.path",
}


def key(
    default: Any,
    doc: str,
    *,
    known: Names | None = None,
    plugin: str | None = None,
    follows: str | None = None,
    used_if: Conditions = (),
    required: bool = False,
    path: bool = False,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """Declare a key.

    known: the values allowed; plugin: the registry whose user-registered names are allowed as well;
    follows: the key whose value this one takes unless the user sets it; used_if: see `verl.config.unused_keys`;
    required: the user must give it; path: a leading ~ means the user's home folder;
    ge, gt, le, lt: bounds (checked for numbers, and for each number of a list; None is never checked).
    """
    metadata = {
        "doc": doc, "known": known, "plugin": plugin, "follows": follows,
        "used_if": used_if, "required": required, "path": path, "ge": ge, "gt": gt, "le": le, "lt": lt,
    }  # fmt: skip
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: Callable[..., Any], doc: str, *, used_if: Conditions = (), **defaults: Any) -> Any:
    """Declare a nested section; `defaults` are the keys whose default differs from the section's own."""
    metadata = {"doc": doc, "defaults": defaults, "used_if": used_if}
    return field(default_factory=lambda: kind(**deepcopy(defaults)), metadata=metadata)


def shared(
    kind: Any,
    name: str,
    doc: str | None = None,
    used_if: Conditions | None = None,
    follows: str | None = None,
) -> Any:
    """Declare a key that another section declares too: its default and what it allows stay declared there."""
    other = kind.__dataclass_fields__[name]
    changed = {"doc": doc, "used_if": used_if, "follows": follows}
    metadata = other.metadata | {name: value for name, value in changed.items() if value is not None}
    if other.default_factory is not MISSING:
        return field(default_factory=other.default_factory, metadata=metadata)
    return field(default=other.default, metadata=metadata)


class Section:
    """A section that plug-ins get as `config`: keys are attributes, and `get` takes a default for others."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class ConfigDict(dict[str, Any]):
    """A config as plug-ins written for verl read it: what it holds is an attribute, `config[name]` and `get(name)`."""

    @classmethod
    def of(cls, config: Any) -> Any:
        """Of a config, a section, or values that hold some."""
        values = to_dict(config)
        if isinstance(values, Mapping):
            return cls({name: cls.of(value) for name, value in values.items()})
        return [cls.of(value) for value in values] if isinstance(values, list) else values

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the config has no {name!r}; it has {', '.join(self)}")
        return self[name]


@dataclass(frozen=True)
class Key:
    """One key of the schema by its full name, e.g. `actor_rollout_ref.actor.clip_ratio`."""

    name: str
    type: Any
    default: Any
    metadata: Mapping[str, Any]
    used_if: tuple[str, ...]  # the conditions of its sections and its own, with full names

    @property
    def doc(self) -> str:
        return str(self.metadata["doc"])

    @property
    def required(self) -> bool:
        """Whether the user must give it: the model of another role is by default the actor's."""
        follows = self.name.endswith(".model.path") and self.name != "actor_rollout_ref.model.path"
        return bool(self.metadata["required"]) and not follows

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]


class Declared(NamedTuple):
    """A key or a section as its section declares it."""

    type: Any
    default: Any
    metadata: Mapping[str, Any]


@cache
def declared(kind: Any) -> Mapping[str, Declared]:
    """The keys and sections that a section declares, by name. A plug-in may do without `key` and `section`."""
    types, found = get_type_hints(kind), {}
    for each in fields(kind):
        if each.metadata.get("internal"):
            continue
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if default is MISSING:
            raise ConfigError(f"{kind.__qualname__}.{each.name}: a key of a section needs a default")
        found[each.name] = Declared(types[each.name], default, {**_PLAIN, **each.metadata})
    return found


class Schema(NamedTuple):
    """The keys of a config by their full names, in order; its sections with their dataclasses and documentation."""

    keys: dict[str, Key]
    sections: dict[str, tuple[Any, str]]

    def add(self, kind: Any, prefix: str, defaults: Mapping[str, Any], used_if: tuple[str, ...]) -> None:
        """Add what a section declares, with the names and conditions that registered methods give; `defaults` are those
        of the section around it, `used_if` its conditions."""
        for last, (wanted, default, metadata) in declared(kind).items():
            name, known, own = prefix + last, metadata.get("known"), metadata["used_if"]
            own = tuple(
                each(last) if callable(each) else each for each in (own if isinstance(own, tuple) else (own,))
            )
            metadata = {**metadata, "known": known() if callable(known) else known, "used_if": own}
            conditions = used_if + tuple(_absolute(condition, prefix) for condition in own)
            if is_dataclass(wanted):
                self.sections[name] = (wanted, metadata["doc"])
                self.add(wanted, f"{name}.", metadata["defaults"], conditions)
            else:
                self.keys[name] = Key(name, wanted, defaults.get(last, default), metadata, conditions)


def added_sections(kind: Any) -> dict[str, type]:
    """The sections that plug-ins add to a config, by their full names."""
    return plugin_sections() if getattr(kind, "takes_plugin_sections", False) else {}


def declared_at(root: Any, kind: Any, prefix: str) -> dict[str, Declared]:
    """What a section declares, and the sections that plug-ins add to it; `prefix` is its full name and a dot."""
    added = {
        name.removeprefix(prefix): Declared(section, None, _PLAIN)
        for name, section in added_sections(root).items()
        if name.rpartition(".")[0] == prefix[:-1]
    }
    return {**declared(kind), **added}


def _schema(kind: Any) -> Schema:
    return _build_schema(kind, tuple(added_sections(kind).items()))


@cache
def _build_schema(kind: Any, added: tuple[tuple[str, Any], ...]) -> Schema:
    schema = Schema({}, {})
    schema.add(kind, "", {}, ())
    for name, section in added:
        parent, _, last = name.rpartition(".")
        choice = _CHOICES.get(parent)
        schema.sections[name] = (section, str(section.__doc__ or "").strip().partition("\n")[0].rstrip("."))
        schema.add(section, f"{name}.", {}, (f"{choice}={last}",) if choice else ())
    return schema


def sections(kind: Any) -> Mapping[str, tuple[Any, str]]:
    """Every section of a config by its full name: its dataclass and its documentation."""
    return _schema(kind).sections


def schema_keys(kind: Any) -> Mapping[str, Key]:
    """Every key of a config by its full name; those of a section follow each other, those of plug-ins are the last."""
    return _schema(kind).keys


def _absolute(condition: str, prefix: str) -> str:
    """A condition with full names: `.name` is a key of the section `prefix`, `..name` one of the section around it."""
    around = "".join(re.findall(r"[^.]+\.", prefix)[:-1])
    condition = re.sub(r"(?<![\w.])\.\.(?=\w)", around, condition)
    return re.sub(r"(?<![\w.])\.(?=\w)", prefix, condition)


def is_dtype(metadata: Mapping[str, Any]) -> bool:
    """Whether a key's values are names of dtypes."""
    return isinstance(metadata["known"], tuple) and "bfloat16" in metadata["known"]


def get(config: Any, name: str) -> Any:
    """The value of a key by its full name."""
    for attribute in name.split(".") if name else ():
        config = getattr(config, attribute)
    return config


def put(config: Any, name: str, value: Any) -> None:
    """Set a key by its full name."""
    parent, _, last = name.rpartition(".")
    setattr(get(config, parent), last, value)


def to_dict(config: Any) -> Any:
    """A config, a section of one, or nested values, as plain nested dicts, lists and values."""
    if is_dataclass(config) and not isinstance(config, type):
        internal = {field.name for field in fields(config) if field.metadata.get("internal")}
        return {name: to_dict(value) for name, value in vars(config).items() if name not in internal}
    if isinstance(config, Mapping):
        return {name: to_dict(value) for name, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_dict(each) for each in config]
    return config


@cache
def trl_names() -> dict[str, Any]:
    """TRL's names: the `keys` here for each, or `notes` why there is none."""
    names: dict[str, Any] = read_json(Path(__file__).with_name("trl_names.json"))
    return names


def nearest(kind: Any, name: str, limit: int = 3) -> list[str]:
    """The keys, or the section, that an unknown name probably means: another trainer's name for it, similar ones in
    its section or with all of its words, the same last name elsewhere, similar ones anywhere. Empty where none is
    close."""
    keys = list(schema_keys(kind))
    section, _, last = name.rpartition(".")
    if name in sections(kind):
        return [other for other in keys if other.startswith(name + ".")][:limit]
    first = name.partition(".")[0]
    word = last.lower()
    theirs = OTHER_NAMES.get(word.removesuffix("s"), "").split()
    theirs = theirs or trl_names()["keys"].get(word) or trl_names()["keys"].get(f"{word}s", [])
    known = [other for other in theirs if other in keys]
    found = [other for other in known if other.partition(".")[0] == first]
    siblings = {other.rpartition(".")[2]: other for other in keys if other.rpartition(".")[0] == section}
    found += [siblings[match] for match in difflib.get_close_matches(last, siblings, limit, 0.7)]
    words = set(word.split("_"))
    found += [other for sibling, other in siblings.items() if words <= set(sibling.split("_"))]
    found += known
    same_last = [other for other in keys if other.rpartition(".")[2] == last]
    found += sorted(same_last, key=lambda other: -difflib.SequenceMatcher(None, name, other).ratio())
    lasts = {other.rpartition(".")[2]: other for other in reversed(keys)}
    found = found or [lasts[match] for match in difflib.get_close_matches(last, lasts, limit, 0.75)]
    if "." not in name:
        found = found or difflib.get_close_matches(name, sections(kind), 1, 0.75)
    return list(dict.fromkeys(found))[:limit]


def did_you_mean(kind: Any, name: str) -> str:
    """A question that names the keys an unknown one probably means; empty where none is close."""
    found = nearest(kind, name)
    return f" Did you mean {' or '.join(map(repr, found))}?" if found else ""


MASK = "***"
# No character class before `://`: the search stays linear in the length of a text.
_USER = re.compile(r"""://[^\s/?#"'\\]*@""")
_SECRET_NAME = re.compile(
    r"(?i)(^|_)(api_?key|access_?key|secret_?key|private_?key|password|passwd|secret|credentials?)$"
    r"|^(auth|access|api|bearer|hf|hub|wandb|swanlab|secret)?_?token$|_(auth|access|api|hf)_token$"
)


def mask_text(text: str) -> str:
    """The same text without users and passwords of addresses; `${oc.env:NAME}` in their place stays."""
    return _USER.sub(lambda found: found[0] if "${" in found[0] else f"://{MASK}@", text)


def mask_values(values: Any, name: str = "") -> Any:
    """Nested values without passwords and keys. A text that names an environment variable has none."""
    if isinstance(values, Mapping):
        return {each: mask_values(value, str(each)) for each, value in values.items()}
    if isinstance(values, list | tuple):
        return [mask_values(value, name) for value in values]
    if not isinstance(values, str):
        return values
    hidden = values and "${" not in values and _SECRET_NAME.search(name)
    return MASK if hidden else mask_text(values)


def mask_override(override: str) -> str:
    """The same for `key=value` of a command line."""
    name, equals, value = override.partition("=")
    return f"{name}{equals}{mask_values(value, name.rpartition('.')[2])}"


def masked_keys(values: Any, prefix: str = "") -> Iterator[str]:
    """The names of the keys whose values were masked."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from masked_keys(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from masked_keys(value, prefix)
    elif isinstance(values, str) and (values == MASK or f"://{MASK}@" in values):
        yield prefix
