"""Probes of a config: the way a run goes, stopped before any weight is loaded.

What always holds: what is looked at is looked at by the code a run uses, so the verdict is the run's own; of data
the first rows are tried, of weights the headers are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from verl.doctor.finding import Finding, one_line, size
from verl.errors import VerlError

TRIED_ROWS = 64
_SCORED_ROWS = 4
_SFT_ONLY = ("model.", "optim.", "checkpoint.")


def is_sft(arguments: list[str]) -> bool:
    """Whether a command line, or the YAML it names, is one of fine-tuning."""
    from verl.config.sources import parse_command_line, read_yaml

    line = parse_command_line(arguments)
    tree = read_yaml(line.config_path, line.config_name)
    if "actor_rollout_ref" in tree or "algorithm" in tree:
        return False
    keys = [override.lstrip("+~").partition("=")[0] for override in line.overrides]
    if any(key.startswith(("actor_rollout_ref", "algorithm", "critic", "reward")) for key in keys):
        return False
    return bool({"model", "optim"} & set(tree)) or any(key.startswith(_SFT_ONLY) for key in keys)


@cache
def _config(*arguments: str) -> Any:
    from verl.config.load import load_ppo_config, load_sft_config

    return (load_sft_config if is_sft(list(arguments)) else load_ppo_config)(list(arguments))


def config(arguments: list[str]) -> Iterator[Finding]:
    """The keys, what the run would lack, and what the plan has to say."""
    from verl.config.packages import needed
    from verl.config.plan import plan
    from verl.config.ranks import world_size
    from verl.config.schema import PPOConfig
    from verl.trainer.preflight import preflight

    cfg = _config(*arguments)
    kind = "reinforcement learning" if isinstance(cfg, PPOConfig) else "fine-tuning"
    result = plan(cfg)
    data = {
        "needs": sorted(needed(cfg)),
        "processes": world_size(cfg),
        "run_folder": cfg.trainer.default_local_dir,
    }
    said: set[str] = set()
    try:
        preflight(cfg)
    except VerlError as error:
        said = set(str(error).splitlines())
        for line in str(error).splitlines():
            yield Finding("config", "fatal", line, "the run would stop at once", data=data)
    if not said:
        where = f"{result.device.name}, {world_size(cfg)} process{'es' if world_size(cfg) > 1 else ''}"
        yield Finding("config", "ok", f"{kind} on {where}: every key is known and the batches fit", data=data)
    for line in result.warnings:
        if line not in said:
            yield Finding("plan", "warning", line)
    peak = max(result.memory.phases, key=lambda phase: phase.total, default=None) if result.memory else None
    room = result.device.memory
    if peak is not None and (room is None or peak.total <= 0.9 * room):  # beyond, the plan has warned
        limit = f" of {size(room)}" if room else ""
        yield Finding(
            "plan", "ok", f"'{peak.name}' needs most memory, about {size(peak.total)}{limit} (an estimate)"
        )


@cache
def _tokenizer(*arguments: str) -> Any:
    from verl.config.schema import PPOConfig
    from verl.data.chat import load_tokenizer
    from verl.models.quiet import quiet_transformers

    cfg = _config(*arguments)
    section = cfg.actor_rollout_ref.model if isinstance(cfg, PPOConfig) else cfg.model
    with quiet_transformers():
        return load_tokenizer(
            section.tokenizer_path or section.path, section.trust_remote_code, cfg.data.chat_template
        )


def model(arguments: list[str]) -> Iterator[Finding]:
    """Tokenizer, chat template, padding, and that the weight files hold what the architecture wants."""
    import torch

    from verl.config.schema import PPOConfig
    from verl.models.loading import load_config
    from verl.models.meta_init import CannotStream, open_causal_lm

    cfg = _config(*arguments)
    section = cfg.actor_rollout_ref.model if isinstance(cfg, PPOConfig) else cfg.model
    if not Path(section.path).expanduser().is_dir() and not _in_cache(section.path):
        yield Finding(
            "model",
            "warning",
            f"'{section.path}' is neither a folder nor in the Hugging Face cache",
            "the run would download it",
            f"hf download {section.path}",
            data={"needs": ["hugging face"]},
        )
        return
    tokenizer = _tokenizer(*arguments)
    described = load_config(
        section.path, trust_remote_code=section.trust_remote_code, override_config=section.override_config
    )
    seen = f"{type(described).__name__.removesuffix('Config')}, {len(tokenizer)} tokens"
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        seen += f", padded with the end token {tokenizer.pad_token!r}"
    vocabulary = getattr(described, "vocab_size", None)
    if isinstance(vocabulary, int) and len(tokenizer) > vocabulary:
        yield Finding(
            "tokenizer",
            "fatal",
            f"it has {len(tokenizer)} tokens, the model an embedding of {vocabulary}",
            "tokens beyond the embedding crash the model",
            "take the tokenizer that came with the model (model.tokenizer_path)",
        )
        return
    if not tokenizer.chat_template:
        yield Finding(
            "tokenizer",
            "note",
            f"{seen}, no chat template",
            "rows with messages are refused, strings are not",
            "data.chat_template=FILE, or data.raw_prompts=True",
        )
    else:
        yield Finding("tokenizer", "ok", f"{seen}, with a chat template")
    try:
        skeleton, _ = open_causal_lm(
            section.path,
            dtype=torch.float32,
            trust_remote_code=section.trust_remote_code,
            override_config=section.override_config,
        )
    except CannotStream as reason:
        yield judge_weights(str(reason))
        return
    count = sum(parameter.numel() for parameter in skeleton.parameters())
    yield Finding(
        "weights", "ok", f"{count:,} parameters, every one in the files", data={"parameters": count}
    )


def judge_weights(reason: str) -> Finding:
    """Why the weights could not be laid beside the architecture: because they differ, or because it is not done."""
    if "its files do not hold" in reason or "in its files, not" in reason:
        return Finding(
            "weights",
            "fatal",
            reason,
            "the files belong to another model, or some are missing; what is missing would be random",
            "take config.json and the weights from one place",
        )
    return Finding("weights", "note", f"not compared with the architecture: {reason}")


def _in_cache(path: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(path, "config.json"), str)
    except ValueError:  # not the form of an id
        return False


@cache
def _rows(key: str, *arguments: str) -> Any:
    from verl.data.files import read_rows

    cfg = _config(*arguments)
    name = key.rpartition(".")[2]
    mixture = getattr(cfg.data, "mixture", None)
    if name == "train_files" and mixture:
        files = [file for part in mixture for file in part.files]
    else:
        files = getattr(cfg.data, name)
    return read_rows(files, key=key, split="train" if name == "train_files" else "test")


@cache
def _dataset(key: str, *arguments: str) -> Any:
    from verl.config.schema import PPOConfig
    from verl.data.files import Rows
    from verl.data.rl_dataset import RLDataset
    from verl.data.sft_dataset import SFTDataset

    cfg = _config(*arguments)
    rows = _rows(key, *arguments)
    # Rows without a file behind them: their lengths are not written to the cache.
    first = Rows.from_list(rows[: min(TRIED_ROWS, len(rows))], name=rows.names[0])
    kind = RLDataset if isinstance(cfg, PPOConfig) else SFTDataset
    settings = dataclasses.replace(cfg.data, shuffle=False)
    return kind(settings, first, _tokenizer(*arguments), training=key == "data.train_files")


def data(arguments: list[str], key: str) -> Iterator[Finding]:
    """The files, and what the trainer makes of their first rows."""
    cfg = _config(*arguments)
    name = key.rpartition(".")[2]
    if not getattr(cfg.data, name) and not (name == "train_files" and getattr(cfg.data, "mixture", None)):
        yield Finding(key, "note", "not given", "there is no validation", "data.val_files=FILE")
        return
    try:
        rows = _rows(key, *arguments)
        dataset = _dataset(key, *arguments)
    except VerlError as error:
        text = one_line(str(error), 1200).removeprefix(f"{key}: ")
        yield Finding(key, "fatal", text, "the run would stop before training")
        return
    seen = f"{len(rows):,} rows; the first {min(TRIED_ROWS, len(rows))} can be used"
    chosen = "data.train_batch_size" in cfg.user_set
    if name == "train_files" and chosen and len(rows) < cfg.data.train_batch_size:
        yield Finding(
            key,
            "fatal",
            f"{len(rows)} rows, fewer than data.train_batch_size={cfg.data.train_batch_size}",
            "there is not one whole batch",
            f"data.train_batch_size={len(rows)}, or more data",
        )
        return
    text = _first_text(dataset)
    yield Finding(key, "ok", f"{seen}, e.g. {one_line(text, 90)!r}" if text else seen)


def _first_text(dataset: Any) -> str:
    item = dataset.items[0] if hasattr(dataset, "items") else dataset[0]
    if isinstance(item, dict):
        return str(item["prompt_text"])
    return str(dataset.tokenizer.decode(item.input_ids))


def reward(arguments: list[str]) -> Iterator[Finding]:
    """The reward is found, its parameters can be filled, and the truth of a few rows gets a score."""
    from verl.config.schema import PPOConfig
    from verl.reward import build_reward_manager
    from verl.reward.managers import FunctionRewardManager
    from verl.trainer.assembly import perfect_answer

    cfg = _config(*arguments)
    if not isinstance(cfg, PPOConfig):
        return
    section = dataclasses.replace(cfg.reward, num_workers=1, reward_model=type(cfg.reward.reward_model)())
    named = section.custom_reward_function.path or section.functions or section.judge.base_url
    if cfg.reward.reward_model.enable and not named:
        yield Finding(
            "reward", "note", f"a reward model, {cfg.reward.reward_model.model_path}: not loaded here"
        )
        return
    try:
        dataset = _dataset("data.train_files", *arguments)
    except VerlError:
        yield Finding("reward", "note", "not tried: data.train_files cannot be used", together="not tried")
        return
    count = min(_SCORED_ROWS, len(dataset))
    manager = build_reward_manager(
        section, tokenizer=_tokenizer(*arguments), max_response_length=cfg.data.max_response_length
    )
    if not isinstance(manager, FunctionRewardManager):
        yield Finding(
            "reward", "note", f"a manager of your own, {cfg.reward.reward_manager.name}: not tried here"
        )
        return
    try:
        manager.check(dataset.data_sources(), dataset.rows.column_names)
        rows = dataset.batch(range(count), [f"try-{number}" for number in range(count)])
        results = manager.preflight([perfect_answer(rows, row) for row in range(count)])
    finally:
        manager.close()
    scores = [result.score for result in results if result.score is not None]
    failed = [result.error for result in results if result.score is None]
    names = ", ".join(signature.name for signature in manager.signatures)
    seen = f"{names} gives the truth of {len(scores)} rows {', '.join(f'{score:g}' for score in scores)}"
    if failed:
        yield Finding(
            "reward",
            "warning",
            f"{seen}; {len(failed)} of {count} got no score: {failed[0]}",
            "those samples would be left out",
            "verl reward test",
        )
    elif not any(scores):
        yield Finding(
            "reward",
            "warning",
            seen,
            "even the truth is worth nothing: the function may not read this data",
            "verl reward test --fn FILE --data FILE",
        )
    else:
        yield Finding("reward", "ok", seen)
