"""Probes of a config and of a run folder, by the code a run uses; no weights are loaded, only file headers are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from verl.doctor.runner import Check, Status, one_line, size
from verl.errors import VerlError

TRIED_ROWS = 64
_SCORED_ROWS = 4


_TRAINING = {
    "PPOConfig": "reinforcement learning",
    "SFTConfig": "fine-tuning",
    "DPOConfig": "preference training",
    "RewardTrainingConfig": "training of a reward model",
}


def class_of(arguments: list[str]) -> type[Any]:
    """The config of the command that a command line, or the YAML it names, is for."""
    from verl.config.sources import parse_command_line, read_yaml
    from verl.observe.run_facts import config_class

    line = parse_command_line(arguments)
    keys = {override.lstrip("+~").partition("=")[0] for override in line.overrides}
    for section, value in read_yaml(line.config_path, line.config_name).items():
        keys |= {f"{section}.{name}" for name in value} if isinstance(value, dict) else {section}
    return config_class(keys)


@cache
def _config(*arguments: str) -> Any:
    from verl.config.load import load_config

    return load_config(class_of(list(arguments)), list(arguments))


def config(arguments: list[str]) -> Iterator[Check]:
    """The keys, what stops the run before it starts, and the estimate of memory."""
    from verl.config.machine import needed_packages
    from verl.config.parallelism import world_size
    from verl.config.plan import RunPlan
    from verl.config.plan_report import warnings
    from verl.trainer.preflight import preflight

    cfg = _config(*arguments)
    result, processes = RunPlan(cfg), world_size(cfg)
    data = {"needs": sorted(needed_packages(cfg)), "processes": processes}
    problems: list[str] = []
    try:
        preflight(cfg)
    except VerlError as error:
        problems = str(error).splitlines()
    yield from (Check("config", "fatal", line, data=data) for line in problems)
    if not problems:
        kind = _TRAINING[type(cfg).__name__]
        seen = f"{kind} on {result.device.name}, {processes} process(es): keys and batches are valid"
        yield Check("config", "ok", seen, data=data)
    yield from (Check("plan", "warning", line) for line in warnings(result) if line not in problems)
    peak = max(result.memory.phases, key=lambda phase: phase.total, default=None) if result.memory else None
    limit = result.device.memory
    if peak is not None and (limit is None or peak.total <= 0.9 * limit):  # above, the plan has warned
        of = f" of {size(limit)}" if limit else ""
        yield Check("plan", "ok", f"about {size(peak.total)}{of} at the peak ({peak.name}, an estimate)")


def _model_section(cfg: Any) -> Any:
    return cfg.actor_rollout_ref.model if hasattr(cfg, "actor_rollout_ref") else cfg.model


@cache
def _tokenizer(*arguments: str) -> Any:
    from verl.data.tokenizer import load_tokenizer
    from verl.runtime import quiet_transformers

    quiet_transformers()
    cfg = _config(*arguments)
    model = _model_section(cfg)
    return load_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code, cfg.data.chat_template)


def model(arguments: list[str]) -> Iterator[Check]:
    """Tokenizer, chat template, and that the weight files hold what the architecture needs."""
    import torch

    from verl.models.loading import CannotStream, load_config
    from verl.models.meta_init import WeightsDiffer, open_causal_lm, open_value_model

    section = _model_section(_config(*arguments))
    if not Path(section.path).expanduser().is_dir() and not _in_cache(section.path):
        where = f"'{section.path}' is neither a folder nor in the Hugging Face cache"
        needs, fix = {"needs": ["hugging face"]}, f"hf download {section.path}"
        yield Check("model", "warning", f"{where}: the run would download it", fix, data=needs)
        return
    tokenizer = _tokenizer(*arguments)
    options = {"trust_remote_code": section.trust_remote_code, "override_config": section.override_config}
    vocabulary = getattr(load_config(section.path, **options), "vocab_size", None)
    if isinstance(vocabulary, int) and len(tokenizer) > vocabulary:
        seen = f"it has {len(tokenizer)} tokens, the model's embedding {vocabulary}"
        yield Check("tokenizer", "fatal", seen, "use the tokenizer that came with the model")
        return
    if tokenizer.chat_template:
        yield Check("tokenizer", "ok", f"{len(tokenizer)} tokens, with a chat template")
    else:
        seen = f"{len(tokenizer)} tokens, no chat template: rows with messages are refused"
        yield Check("tokenizer", "note", seen, "data.chat_template=FILE, or data.apply_chat_template=never")
    try:
        opened = open_causal_lm
        if class_of(arguments).__name__ == "RewardTrainingConfig":
            opened = partial(open_value_model, reward=True)
        empty_model, _ = opened(section.path, dtype=torch.float32, **options)
    except CannotStream as reason:
        if isinstance(reason, WeightsDiffer):
            yield Check("weights", "fatal", one_line(str(reason)), "take the files of one and the same model")
        else:
            yield Check("weights", "note", f"not compared with the architecture: {one_line(str(reason))}")
        return
    count = sum(parameter.numel() for parameter in empty_model.parameters())
    yield Check("weights", "ok", f"{count:,} parameters, all in the files", data={"parameters": count})


def _in_cache(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # no name the hub could have
        return False


@cache
def _dataset(key: str, *arguments: str) -> tuple[Any, int]:
    """The dataset of the first rows, and the number of all."""
    from verl.config.schema import OfflineConfig
    from verl.data.files import Rows, read_rows
    from verl.data.preference_dataset import dataset_of
    from verl.data.rl_dataset import RLDataset

    cfg = _config(*arguments)
    training = key == "data.train_files"
    rows = read_rows(_files(cfg, key), key=key, split="train" if training else "test")
    # Rows without a file behind them: their lengths are not written to the cache.
    first = Rows.from_list(rows[: min(TRIED_ROWS, len(rows))], name=rows.names[0])
    settings = dataclasses.replace(cfg.data, shuffle=False)
    kind: Any = dataset_of(cfg) if isinstance(cfg, OfflineConfig) else RLDataset
    return kind(settings, first, _tokenizer(*arguments), training=training), len(rows)


def _files(cfg: Any, key: str) -> list[str]:
    files = list(getattr(cfg.data, key.rpartition(".")[2]))
    if key == "data.train_files":
        files = [file for part in getattr(cfg.data, "mixture", []) for file in part.files] or files
    return files


def data(arguments: list[str], key: str) -> Iterator[Check]:
    """The files, and the first rows as the trainer reads them."""
    cfg = _config(*arguments)
    if not _files(cfg, key):
        yield Check(key, "note", "not set: there is no validation", "data.val_files=FILE")
        return
    try:
        dataset, count = _dataset(key, *arguments)
    except VerlError as error:
        yield Check(key, "fatal", one_line(str(error), 1200).removeprefix(f"{key}: "))
        return
    batch = cfg.data.train_batch_size
    if key == "data.train_files" and "data.train_batch_size" in cfg.user_set and count < batch:
        seen = f"{count} rows, fewer than data.train_batch_size={batch}"
        yield Check(key, "fatal", seen, f"data.train_batch_size={count}, or more data")
        return
    item = dataset.items[0] if hasattr(dataset, "items") else dataset[0]
    if isinstance(item, dict):
        text = item["prompt_text"]
    else:
        text = dataset.tokenizer.decode(item.rows[0][0] if hasattr(item, "rows") else item.input_ids)
    tried = min(TRIED_ROWS, count)
    yield Check(key, "ok", f"{count:,} rows; the first {tried} are valid, e.g. {one_line(str(text), 90)!r}")


def reward(arguments: list[str]) -> Iterator[Check]:
    """Call the reward function with the ground truth of a few rows as the response."""
    from verl.reward import build_reward_manager
    from verl.reward.managers import FunctionRewardManager
    from verl.trainer.assembly import perfect_answer

    cfg = _config(*arguments)
    if not hasattr(cfg, "reward"):
        return
    section = dataclasses.replace(cfg.reward, num_workers=1, reward_model=type(cfg.reward.reward_model)())
    named = section.custom_reward_function.path or section.functions or section.judge.base_url
    if cfg.reward.reward_model.enable and not named:
        yield Check("reward", "note", f"reward model {cfg.reward.reward_model.model_path}: not loaded here")
        return
    try:
        dataset, _ = _dataset("data.train_files", *arguments)
    except VerlError:
        yield Check("reward", "note", "not tried: data.train_files cannot be used")
        return
    manager = build_reward_manager(
        section, tokenizer=_tokenizer(*arguments), max_response_length=cfg.data.max_response_length
    )
    if not isinstance(manager, FunctionRewardManager):
        yield Check("reward", "note", f"your reward manager {cfg.reward.reward_manager.name}: not tried here")
        return
    count = min(_SCORED_ROWS, len(dataset))
    try:
        manager.check(dataset.data_sources(), dataset.rows.column_names)
        rows = dataset.batch(range(count), [f"try-{number}" for number in range(count)])
        results = manager.preflight([perfect_answer(rows, row) for row in range(count)])
    finally:
        manager.close()
    scores = [result.score for result in results if result.score is not None]
    failed = [result.error for result in results if result.score is None]
    names = ", ".join(signature.name for signature in manager.signatures)
    seen = f"{names} scores the ground truth of {len(scores)} rows {', '.join(f'{s:g}' for s in scores)}"
    if failed:
        seen += f"; {len(failed)} of {count} got no score: {failed[0]}"
    elif not any(scores):
        seen += ": even the ground truth gets 0, the function may not read this data"
    good = bool(any(scores) and not failed)
    yield Check("reward", "ok" if good else "warning", seen, "" if good else "verl reward test")


# -- run folders --------------------------------------------------------------------------------------------------


def run_folder(path: str) -> Iterator[Check]:
    """What became of the run, and whether its checkpoints are intact."""
    from verl.observe.run_reader import open_run, read_crash, state_of

    run = open_run(Path(path))
    state, crash = state_of(run), read_crash(run.path)
    fix = crash[1] if crash and state.name == "crashed" else ""
    bad = state.name in ("crashed", "killed", "stopped")
    yield Check("run", "warning" if bad else "ok", state.text, fix)
    damaged = f"{run.log.damaged} lines of metrics.jsonl cannot be read" if run.log.damaged else ""
    if damaged or run.config_problem:
        yield Check("run files", "warning", run.config_problem or damaged)
    from verl.checkpoint.steps import list_steps, problems

    # Sizes and manifests only: `verl ckpt verify` reads every byte.
    entries = list_steps(run.path)
    broken = {entry.path.name: found[0] for entry in entries if (found := problems(entry, checksums=False))}
    if not entries:
        yield Check("checkpoints", "note", "none: a run that is stopped starts over", "trainer.save_freq=N")
    elif broken:
        name, problem = next(iter(broken.items()))
        seen = f"{len(broken)} of {len(entries)} are damaged and skipped on resume; {name}: {problem}"
        status: Status = "fatal" if len(broken) == len(entries) else "warning"
        yield Check("checkpoints", status, seen, f"verl ckpt prune --damaged {path}")
    else:
        yield Check("checkpoints", "ok", f"{len(entries)} intact, the newest {entries[0].path.name}")
