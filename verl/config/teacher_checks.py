"""What a run with a teacher needs of a config and of its two models. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.config.capabilities import strategy_spec
from verl.config.methods import methods_of
from verl.config.model_path import cached_config, text_config
from verl.config.parallelism import TEACHER, needs_teacher
from verl.config.schema import PPOConfig
from verl.json_input import read_json


def teacher_errors(config: PPOConfig) -> list[str]:
    """What is wrong whatever the models are."""
    asking = [
        method for method in methods_of(config) if any(name.startswith("teacher_") for name in method.needs)
    ]
    if not asking:
        return []
    policy, lines, setting = config.actor_rollout_ref, [], asking[0].setting
    if not policy.teacher.path:
        lines.append(f"'{TEACHER}.path' is required with {setting}; give the teacher's folder")
    for name, role in (("actor_rollout_ref.actor", policy.actor), (TEACHER, policy.teacher)):
        if not strategy_spec(role.strategy).full_shards:
            lines.append(
                f"'{name}.strategy' is {role.strategy}, which {setting} does not have; set it to fsdp"
            )
        if role.ulysses_sequence_parallel_size > 1:
            lines.append(
                f"'{name}.ulysses_sequence_parallel_size' is {role.ulysses_sequence_parallel_size}, but "
                f"{setting} takes whole sequences; set it to 1"
            )
    return lines


def teacher_model_errors(config: PPOConfig, *, given_model: bool = False) -> list[str]:
    """What does not fit the two models, as far as their files are here. `given_model`: the student is an object, whose
    size is compared when it is built."""
    if not needs_teacher(config):
        return []
    policy = config.actor_rollout_ref
    path, model = policy.teacher.path, policy.model
    theirs = text_config(path).get("vocab_size")
    top_k = policy.teacher.top_k
    if top_k and isinstance(theirs, int) and top_k > theirs:
        return [
            f"'{TEACHER}.top_k' is {top_k}, but the teacher has {theirs} tokens; set it to at most {theirs}"
        ]
    if given_model:
        return []
    own = text_config(model.path, model.override_config).get("vocab_size")
    tokens, other = _tokens(model.tokenizer_path or model.path), _tokens(path)
    known = tokens is not None and other is not None
    if known and tokens != other:
        assert tokens is not None and other is not None
        differ = sum(tokens.get(token) != number for token, number in other.items())
        detail = (
            f"{len(other)} tokens, of which {differ} are not the same tokens of the student ({len(tokens)})"
        )
    elif not known and isinstance(own, int) and isinstance(theirs, int) and own != theirs:
        detail = f"{theirs} tokens, the student {own}, and no tokenizer.json says that they are the same"
    else:
        return []
    return [
        f"'{TEACHER}.path': the model '{path}' has {detail}; distillation compares token by token: give a teacher "
        f"with the tokenizer of actor_rollout_ref.model.path={model.path}"
    ]


def _tokens(path: str) -> dict[str, int] | None:
    """Each token and its number, from tokenizer.json; None where that is not here or has another form."""
    cached = None if Path(path).expanduser().is_dir() else cached_config(path)
    folder = Path(path).expanduser() if cached is None else cached.parent
    try:
        found: Any = read_json(folder / "tokenizer.json")
        tokens = found["model"]["vocab"]
        if isinstance(tokens, list):  # of a unigram model: pairs of token and score
            tokens = {token: number for number, (token, _) in enumerate(tokens)}
        return {**tokens, **{each["content"]: each["id"] for each in found["added_tokens"]}}
    except (OSError, ValueError, KeyError, TypeError):
        return None
