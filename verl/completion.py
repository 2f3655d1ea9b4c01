"""`verl completion bash|zsh|fish`: scripts that complete commands, options, config keys and their values.

The scripts ask `verl completion suggest WORD ...`, which answers from the schema and the commands' own parsers, so they
need no update with verl. Suggestions import no torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

Suggestion = tuple[str, str]
"""A word, and what it is. A word that ends in `.` or `=` is continued; every other one is complete."""
Programs = Mapping[str, tuple[str, str] | dict[str, tuple[str, str]]]

# Commands that take keys: the class of their config.
_CONFIGS = {
    "train": "PPOConfig",
    "sft": "SFTConfig",
    "dpo": "DPOConfig",
    "reward train": "RewardTrainingConfig",
    "generate": "GenerationConfig",
    "eval": "EvaluationConfig",
    "fork": "PPOConfig",
    "plan": "PPOConfig",
    "env test": "PPOConfig",
    "doctor": "PPOConfig",
}
_OTHER_WORDS = dict.fromkeys(("completion", "--help", "--version"), ("", ""))

_BASH = r"""# verl completion bash
_verl() {
    local before=${COMP_LINE:0:COMP_POINT} words program current suggested
    read -ra words <<< "$before"
    case $before in *[[:space:]]) words+=("") ;; esac
    while [[ ${words[0]} == *=* ]]; do words=("${words[@]:1}"); done
    program=${words[0]/#\~/$HOME}
    current=${words[${#words[@]}-1]}
    COMPREPLY=()
    while IFS=$'\t' read -r suggested _; do
        case $suggested in *[.=]) ;; *) suggested+=" " ;; esac
        # Readline replaces only what follows the last `=`.
        case $COMP_WORDBREAKS in *=*) suggested=${suggested#"${current%"${current##*=}"}"} ;; esac
        COMPREPLY+=("$suggested")
    done < <("$program" completion suggest "${words[@]:1}" 2>/dev/null)
}
complete -o nospace -o default -F _verl verl
"""
_ZSH = r"""#compdef verl
# verl completion zsh
_verl() {
    local line word
    local -a whole whole_about part part_about
    local program=${words[1]/#\~/$HOME}
    for line in "${(@f)$("$program" completion suggest "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)}"; do
        word=${line%%$'\t'*}
        case $word in
            '') ;;
            *[.=]) part+=("$word"); part_about+=("$word  ${line#*$'\t'}") ;;
            *) whole+=("$word"); whole_about+=("$word  ${line#*$'\t'}") ;;
        esac
    done
    if (( ${#whole} + ${#part} )); then
        compadd -Q -l -d whole_about -a whole
        compadd -Q -S '' -l -d part_about -a part
    else
        compset -P '*='
        _files
    fi
}
# As a file of $fpath the function completes at once; after `source` it is registered.
if [[ ${funcstack[1]-} == _verl ]]; then _verl "$@"; else compdef _verl verl; fi
"""
_FISH = r"""# verl completion fish
function __verl_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l found ($words[1] completion suggest $words[2..-1] "$current" 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        set -l prefix (string match -r '^.*=' -- "$current")
        for path in (__fish_complete_path (string replace -r '^.*=' '' -- "$current"))
            echo "$prefix$path"
        end
    end
end
complete -c verl -f -a '(__verl_complete)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_HELP = """usage: verl completion bash|zsh|fish

Prints a script for the shell. To use it in every new shell:
  bash  echo 'eval "$(verl completion bash)"' >> ~/.bashrc
  zsh   echo 'eval "$(verl completion zsh)"' >> ~/.zshrc   (after compinit)
  fish  verl completion fish > ~/.config/fish/completions/verl.fish
"""


def main(arguments: list[str], programs: Programs) -> int:
    if arguments[:1] == ["suggest"]:
        words = arguments[1:] or [""]
        for word, about in suggest(words, programs):
            sys.stdout.write(f"{word}\t{' '.join(about.split())}\n")
        return 0
    if len(arguments) == 1 and arguments[0] in SCRIPTS:
        sys.stdout.write(SCRIPTS[arguments[0]])
        return 0
    asked = arguments in (["-h"], ["--help"])
    (sys.stdout if asked else sys.stderr).write(_HELP)
    return 0 if asked else 2


def suggest(words: list[str], programs: Programs) -> Iterator[Suggestion]:
    """What the last of the words can become; the others are complete. Nothing where file names should be offered."""
    *before, current = words
    commands: dict[str, Any] = dict(programs)
    name = ""
    while before and isinstance(commands, dict) and before[0] in commands:
        name, commands = f"{name} {before[0]}".strip(), commands[before.pop(0)]
    if isinstance(commands, dict):
        if before == ["completion"] and not name:
            yield from ((shell, "") for shell in SCRIPTS if shell.startswith(current))
        elif not before:
            for word, entry in {**commands, **({} if name else _OTHER_WORDS)}.items():
                if word.startswith(current):
                    yield word, entry[1] if isinstance(entry, tuple) else ", ".join(entry)
        return
    found = list(_arguments(name, commands[0], before, current))
    if not found and name in _CONFIGS and (before or name != "fork"):  # after `fork` comes a run folder
        found = list(_keys(name, current))
    yield from found


def _arguments(name: str, module: str, before: list[str], current: str) -> Iterator[Suggestion]:
    """Options, and the values and names that a parser allows."""
    parser = _parser(module)
    subcommands = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    for action in subcommands:
        chosen = next((word for word in before if word in action.choices), None)
        if chosen is None:
            about = {each.dest: each.help or "" for each in action._choices_actions}
            yield from ((word, about.get(word, "")) for word in action.choices if word.startswith(current))
            return
        parser = action.choices[chosen]
    waiting = next((each for each in parser._actions if before and before[-1] in each.option_strings), None)
    if waiting is not None and waiting.nargs != 0:
        yield from ((str(each), "") for each in waiting.choices or () if str(each).startswith(current))
    elif current.startswith("-"):
        words = ((word, option.help or "") for option in parser._actions for word in option.option_strings)
        yield from ((word, about) for word, about in words if word.startswith(current))
    elif not before and name in ("recipes", "prepare"):
        yield from ((each, "") for each in _names(name) if each.startswith(current))


def _parser(module: str) -> argparse.ArgumentParser:
    program = importlib.import_module(module)
    if hasattr(program, "build_parser"):
        return program.build_parser()  # type: ignore[no-any-return]
    if not hasattr(program, "add_arguments"):
        from verl.config.sources import OPTIONS

        return OPTIONS
    parser = argparse.ArgumentParser()
    program.add_arguments(parser)
    return parser


def _names(command: str) -> list[str]:
    if command == "recipes":
        from verl.config.recipes import recipe_names

        return recipe_names()
    return list(importlib.import_module("verl.data.prepare.cli").known())


def _keys(command: str, current: str) -> Iterator[Suggestion]:
    """Keys up to their next dot; after `=`, the values that are allowed."""
    schema = importlib.import_module("verl.config.schema")
    from verl.config.keys import schema_keys, sections

    kind = getattr(schema, _CONFIGS[command])
    typed = current.lstrip("+~")  # Hydra's prefixes
    prefix = current[: len(current) - len(typed)]
    keys = schema_keys(kind)  # and their short names
    keys = {**keys, **{name.removeprefix("actor_rollout_ref."): key for name, key in keys.items()}}
    name, equals, value = typed.partition("=")
    if equals:
        allowed, key = [], keys.get(name)
        if name == "recipe" and command == "train":
            allowed = _names("recipes")
        elif key is not None:
            known = key.metadata["known"] or (("true", "false") if key.type is bool else ())
            allowed = list(map(str, known))
        yield from ((f"{prefix}{name}={each}", "") for each in allowed if each.startswith(value))
        return
    docs = {f"{section}.": doc for section, (_, doc) in sections(kind).items()}
    seen: dict[str, str] = {"recipe=": "start from a published method"} if command == "train" else {}
    for name, key in keys.items():
        rest, dot, _ = name[len(typed) :].partition(".")
        word = f"{name[: len(typed)]}{rest}{dot or '='}"
        seen.setdefault(word, docs.get(word, docs.get(f"actor_rollout_ref.{word}", "")) if dot else key.doc)
    yield from ((prefix + word, about) for word, about in seen.items() if word.startswith(typed))
