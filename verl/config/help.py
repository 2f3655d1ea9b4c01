"""The text of --help: what a command does, its options, and every key with its default and documentation."""

from __future__ import annotations

import textwrap

from verl.config.keys import Key, nearest, schema_keys, sections
from verl.config.recipes import Recipe
from verl.config.schema import (
    DPOConfig,
    EvaluationConfig,
    GenerationConfig,
    PPOConfig,
    RewardTrainingConfig,
    SFTConfig,
)
from verl.errors import ConfigError

_WIDTH = 110


def help_text(kind: type, about: list[str], recipe: Recipe | None = None) -> str:
    """What the command does, its options, and the keys (of the named sections or keys, where any are named). With a
    recipe, the keys it sets stand first."""
    keys = schema_keys(kind)
    chosen = list(keys.values())
    if about:
        chosen = [
            key
            for key in chosen
            if any(key.name == name or key.name.startswith(f"{name}.") for name in about)
        ]
        for name in about:
            if name not in keys and name not in sections(kind):
                raise ConfigError(f"no key or section '{name}'. Nearest: {', '.join(nearest(kind, name))}")
    lines = _head(kind)
    if recipe is not None:
        lines += [f"recipe={recipe.name}: {recipe.about}", f"{recipe.paper}. It sets, below your own keys:"]
        for name, value in recipe.keys.items():
            lines.append(f"  {name}={str(value).lower() if isinstance(value, bool) else value}")
        lines.append("")
    return "\n".join([*lines, "Keys (default, meaning):", *_key_lines(kind, chosen)]) + "\n"


_COMMANDS: dict[type, tuple[str, str, str]] = {
    PPOConfig: (
        "main_ppo",
        "Trains a language model by reinforcement learning.",
        "actor_rollout_ref.model.path=MODEL data.train_files=train.parquet algorithm.adv_estimator=grpo "
        "actor_rollout_ref.rollout.n=8",
    ),
    SFTConfig: (
        "sft_trainer",
        "Fine-tunes a language model on prompt and response pairs or conversations.",
        "model.path=MODEL data.train_files=train.parquet",
    ),
    DPOConfig: (
        "dpo_trainer",
        "Trains a language model on pairs of a chosen and a rejected answer.",
        "model.path=MODEL data.train_files=pairs.parquet",
    ),
    RewardTrainingConfig: (
        "reward_trainer",
        "Trains a reward model on pairs of a chosen and a rejected answer.",
        "model.path=MODEL data.train_files=pairs.parquet",
    ),
    GenerationConfig: (
        "main_generation",
        "Samples responses for a file of prompts; after an interruption the same command resumes.",
        "model.path=MODEL data.path=test.parquet data.output_path=responses.parquet rollout.n=4",
    ),
    EvaluationConfig: (
        "main_eval",
        "Scores a file of responses, by your reward function or by the scorer of each data_source.",
        "data.path=responses.parquet custom_reward_function.path=my_reward.py",
    ),
}  # the module, what it does, and the keys of an example


def _head(kind: type) -> list[str]:
    module, does, keys = _COMMANDS[kind]
    command = f"python -m verl.trainer.{module}"
    return [
        f"{command} [options] key=value ...",
        "",
        does,
        "",
        "Example:",
        f"  {command} {keys}",
        "",
        "Options:",
        "  --config-path DIR --config-name FILE  take keys from your own YAML file; key=value on the command line wins",
        "  recipe=NAME                           start from a published method's keys; `verl recipes` lists them",
        "  --cfg job                             print the resolved config and exit",
        "  --check                               check everything, print the plan (batches, memory) and exit",
        "  --help [SECTION ...]                  this text, or only the named sections",
        "",
    ]


def _key_lines(kind: type, chosen: list[Key]) -> list[str]:
    docs = {name: doc for name, (_, doc) in sections(kind).items()}
    lines: list[str] = []
    last_section: str | None = None
    for key in chosen:
        if key.section != last_section:
            last_section = key.section
            lines += ["", f"{key.section}: {docs.get(key.section, '')}"]
        doc = key.doc
        if key.metadata["known"]:
            doc += f" [{', '.join(key.metadata['known'])}]"
        left = f"  {key.last:<33} {_default(key):<14} "
        wrapped = textwrap.wrap(doc, _WIDTH - 51) or [""]
        lines += [left + wrapped[0], *(" " * 51 + line for line in wrapped[1:])]
    return lines


def _default(key: Key) -> str:
    if key.required:
        return "(required)"
    if key.metadata["follows"]:
        return "(follows)"
    if key.default is None or key.default == "":
        return "-"
    if isinstance(key.default, bool):
        return str(key.default).lower()
    if isinstance(key.default, list):
        return f"[{', '.join(str(each) for each in key.default)}]"
    return f"{key.default:g}" if isinstance(key.default, float) else str(key.default)
