"""`docs/config-reference.md`, from the schema: `python -m docs.generators.config_reference` writes it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from verl.config.aliases import aliases
from verl.config.keys import Key, schema_keys, sections
from verl.config.load import import_plugins
from verl.config.schema import (
    DPOConfig,
    EvaluationConfig,
    GenerationConfig,
    PPOConfig,
    RewardTrainingConfig,
    SFTConfig,
)

PAGE = Path(__file__).resolve().parents[1] / "config-reference.md"
COMMANDS: dict[str, tuple[type, str, str]] = {
    "train": (PPOConfig, "main_ppo", "Reinforcement learning"),
    "sft": (SFTConfig, "sft_trainer", "Supervised fine-tuning"),
    "dpo": (DPOConfig, "dpo_trainer", "Preference training: DPO, IPO, KTO, SimPO, ORPO and others"),
    "reward train": (
        RewardTrainingConfig,
        "reward_trainer",
        "Training a reward model on pairs of answers or on steps",
    ),
    "generate": (GenerationConfig, "main_generation", "Responses for a file of prompts"),
    "eval": (EvaluationConfig, "main_eval", "Scores for a file of responses"),
}
"""The words after `verl`: config, module and purpose."""

_HEAD = """# Configuration reference

Every key of every command. A key is set on the command line (`verl train trainer.total_epochs=3`) or in a YAML file
(`--config-path DIR --config-name FILE`); the command line has precedence. `verl train --help SECTION` prints the same
text in the terminal, `--cfg job` prints the resolved config. An unknown key is an error that names the nearest known
one. A key that has no effect in a run is reported at the start.

This page is made from the schema in `verl/config/sections/` by `python -m docs.generators.config_reference`.

| command | keys | |
|---|---|---|
"""
_LEGEND = """
Defaults: **required** means that there is none. A key with a link to another one has that key's value unless it is set
itself. `null` is YAML's empty value, `None` in Python. "Only with" says what must hold for a key or a section to have
an effect; it uses names of the same section and full names. "Also" lists other spellings that are accepted, most of
them names of earlier versions; the log says when one is used.
"""
_BOUNDS = {"ge": "at least {:g}", "gt": "above {:g}", "le": "at most {:g}", "lt": "below {:g}"}
TERMS = {
    "@gpu": "a GPU",
    "@ranks": "more than one process in training",
    "@ray": "more than one process (Ray)",
    "@workers": "worker processes",
    "@shared_gpus": "generation on the trainer's GPUs",
    "@16bit": "16-bit weights",
}
"""What the terms of `verl.config.unused_keys` mean, in words."""


def page() -> str:
    """The whole page."""
    rows = [
        f"| [`verl {word}`](#verl-{word.replace(' ', '-')}) | {len(schema_keys(kind))} | {about} |\n"
        for word, (kind, _, about) in COMMANDS.items()
    ]
    return "".join([_HEAD, *rows, _LEGEND, *(_command(word) for word in COMMANDS)])


def anchor(word: str, key: str) -> str:
    """Where a key is on the page: `config-reference.md#train.data.train_files`."""
    return f"{word.replace(' ', '-')}.{key}"


def _command(word: str) -> str:
    kind, module, purpose = COMMANDS[word]
    parts = [
        f"\n## verl {word}\n\n{purpose}: `verl {word} key=value ...`, or `python -m verl.trainer.{module}`.\n"
    ]
    by_section: dict[str, list[Key]] = {}
    for key in schema_keys(kind).values():
        by_section.setdefault(key.section, []).append(key)
    docs = {name: doc for name, (_, doc) in sections(kind).items()}
    for section, keys in by_section.items():
        parent = by_section.get(section.rpartition(".")[0])
        about = _about_section(
            kind, section, docs[section], keys, len(_inherited(parent[0])) if parent else 0
        )
        parts.append(f"\n### {word}: {section}\n\n{about}\n\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|\n")
        parts += [_row(word, kind, key) for key in keys]
    return "".join(parts)


def _about_section(kind: type, section: str, doc: str, keys: list[Key], above: int) -> str:
    """What it configures; the conditions all of its keys share, less those of sections above; its other spellings."""
    lines = [_sentence(doc)]
    lines += _only_with(kind, _inherited(keys[0])[above:], section)
    also = [old for old, new in aliases(kind).items() if new == section]
    return " ".join([*lines, *_also(also)])


def _row(word: str, kind: type, key: Key) -> str:
    about = [_sentence(_plain(key.doc)), *_allowed(key)]
    about += _only_with(kind, _own(key), key.section)
    about += _also(old for old, new in aliases(kind).items() if new == key.name)
    name = f'<a id="{anchor(word, key.name)}"></a>`{key.last}`'
    return f"| {name} | {type_name(key.type)} | {_default(word, kind, key)} | {' '.join(about)} |\n"


def _own(key: Key) -> tuple[str, ...]:
    """The conditions of the key itself; the others are its sections'."""
    declared = key.metadata["used_if"]
    count = 1 if isinstance(declared, str) else len(declared)
    return key.used_if[len(key.used_if) - count :]


def _inherited(key: Key) -> tuple[str, ...]:
    return key.used_if[: len(key.used_if) - len(_own(key))]


def type_name(kind: Any) -> str:
    """A type in words: `int or null`, `list of str`."""
    if get_origin(kind) is UnionType:
        names = [type_name(each) for each in get_args(kind) if each is not NoneType]
        return " or ".join([*names, "null"] if NoneType in get_args(kind) else names)
    if get_origin(kind) is list:
        inner = get_args(kind)[0]
        return "list of mappings" if is_dataclass(inner) else f"list of {type_name(inner)}"
    return "mapping" if get_origin(kind) is dict else str(kind.__name__)


def _default(word: str, kind: type, key: Key) -> str:
    if key.required and not key.used_if:
        return "**required**"
    follows = key.metadata["follows"]
    if follows:
        return f"[`{follows}`](#{anchor(word, follows)})" if follows in schema_keys(kind) else f"`{follows}`"
    return f"`{_value(key.default)}`"


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).replace("\n", "\\n") if value != "" else '""'


def _allowed(key: Key) -> list[str]:
    lines = []
    if key.metadata["known"]:
        names = [f"`{each}`" for each in key.metadata["known"]]
        if plugin := key.metadata["plugin"]:
            names.append(f"a name registered with `register_{plugin}`")
        first = "Any of" if "list" in type_name(key.type) else "One of"
        lines.append(f"{first} {_listed(names, 'or')}." if len(names) > 1 else f"Only {names[0]}.")
    given = [
        (word, key.metadata[bound]) for bound, word in _BOUNDS.items() if key.metadata[bound] is not None
    ]
    if given:
        lines.append(_sentence(_listed([word.format(number) for word, number in given], "and")))
    inner = next(iter(get_args(key.type)), None)
    if is_dataclass(inner):
        lines.append(f"Keys of each: {', '.join(f'`{each.name}`' for each in fields(inner))}.")
    return lines


def _only_with(kind: type, conditions: Iterable[str], section: str) -> list[str]:
    words = [_condition(kind, each, section) for each in conditions if each != "@never"]
    return [f"Only with {', and only with '.join(words)}."] if words else []


def _condition(kind: type, condition: str, section: str) -> str:
    return " or ".join(
        _term(kind, term, section) for term in condition.split(" or ") if term[:7] != "@needs:"
    )


def _term(kind: type, term: str, section: str) -> str:
    if term.startswith("@"):
        return TERMS[term]
    parsed = re.fullmatch(r"(!?)([\w.]+)(?:(!?=)(.*))?", term)
    assert parsed is not None, term
    negated, name, sign, values = parsed.groups()
    shown = name.removeprefix(f"{section}.")
    if sign is None:
        return _switch(shown, schema_keys(kind)[name].type, bool(negated))
    wanted = [f"`{'null' if each == 'None' else each}`" for each in values.split("|")]
    if sign == "!=":
        return f"`{shown}` other than {_listed(wanted, 'and')}"
    return f"`{shown}=" + _listed(wanted, "or").removeprefix("`")


def _switch(name: str, kind: Any, off: bool) -> str:
    """A key that must be on or set, or must not be."""
    kinds = {kind, *get_args(kind)}
    if bool in kinds:
        return f"`{name}={'false' if off else 'true'}`"
    if kinds & {int, float}:
        return f"`{name}=0`" if off else f"`{name}` above 0"
    return f"`{name}` {'not set' if off else 'set'}"


def _also(names: Iterable[str]) -> list[str]:
    listed = ", ".join(f"`{name}`" for name in names)
    return [f"Also {listed}."] if listed else []


def _listed(words: list[str], last: str) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def _sentence(text: str) -> str:
    if not text:
        return text
    if re.match(r"[a-z]+('s)?([ ,;.]|$)", text):  # not a value that is explained, such as `auto: ...`
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _plain(text: str) -> str:
    """Text of the schema with nothing that markdown reads as markup."""
    return re.sub(r"([\\|<>*\[\]])", r"\\\1", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the reference of the config keys as a markdown page.")
    parser.add_argument("--plugins", nargs="*", default=[], help="plug-ins whose sections it has, too")
    parser.add_argument("--output", type=Path, default=PAGE)
    args = parser.parse_args()
    import_plugins({"trainer": {"plugins": args.plugins}})
    args.output.write_text(page(), encoding="utf-8")
