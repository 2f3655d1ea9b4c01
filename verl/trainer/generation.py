"""`python -m verl.trainer.main_generation`: a file of prompts in, a file of responses out; resumes after a kill.

Responses do not depend on batch sizes, the number of processes or interruptions: each is keyed by its row number and
the seed. The output appears complete or not at all; until then finished rows are in the journal `OUTPUT.unfinished`.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.agents.conversation import Conversation
from verl.checkpoint.files import lock, sync_file
from verl.config.capabilities import engine_spec
from verl.config.keys import mask_values, to_dict
from verl.config.machine import machine_errors
from verl.config.model_path import folder_problem
from verl.config.parallelism import counted, engines
from verl.config.schema import DataConfig
from verl.data.file_search import absent
from verl.data.files import read_rows
from verl.data.rl_dataset import RLDataset
from verl.data.tokenizer import load_tokenizer
from verl.errors import ConfigError, DataError, missing_package
from verl.observe.console import counting, show_lines, shown_path, typed
from verl.observe.jsonl import parse_row
from verl.observe.run_reader import duration
from verl.rollout.base import Response
from verl.rollout.sampler import Sampler
from verl.runtime import quiet_transformers, seed_everything
from verl.trainer.generation_model import ModelChoice, choose_model
from verl.trainer.preflight import PROMPT_AND_RESPONSE, hub_problems, warn_of_length
from verl.trainer.row_output import ExtendedRows
from verl.trainer.setup import open_agents
from verl.workers.generation import open_engine, rollout_section
from verl.workers.roles import training_settings

if TYPE_CHECKING:
    from verl.agents.runner import ConversationRunner
    from verl.config.schema import GenerationConfig

logger = logging.getLogger(__name__)

Columns = dict[str, tuple[str, Callable[[Any], Any]]]
"""pyarrow type, and the value of a response, by the end of a column's name; a row has a list of them."""
SYNC_S = 1.0
"""Seconds between fsyncs of the journal: a power cut may lose that much, a kill loses nothing."""
_CONTENT_KEYS = (
    "prompt_key",
    "max_prompt_length",
    "max_response_length",
    "truncation",
    "filter_overlong_prompts",
    "chat_template",
    "apply_chat_template_kwargs",
    "system_prompt",
    "apply_chat_template",
    "parse_special_tokens",
    "save_token_ids",
    "save_log_probs",
)
"""Keys of the data section that change what is written for a row."""


def generate_file(cfg: GenerationConfig) -> None:
    """Generate, resuming an interrupted generation."""
    started = time.monotonic()
    quiet_transformers()
    seed_everything(cfg.trainer.seed)
    choice = choose_model(cfg.model)
    _preflight(cfg, choice)
    tokenizer = load_tokenizer(choice.tokenizer, cfg.model.trust_remote_code, cfg.data.chat_template)
    agents = open_agents(cfg, cfg.rollout, tokenizer, choice.path, Path(cfg.data.output_path).parent)
    with nullcontext() if agents is None else closing(agents):
        summary = _generate_file(cfg, choice, tokenizer, agents)
    output, key = shown_path(Path(cfg.data.output_path)), cfg.data.response_key
    rows = [
        ("finished", f"in {duration(time.monotonic() - started)}: {summary}"),
        ("model", choice.path if choice.adapter is None else f"{choice.path} with {choice.adapter}"),
        ("responses", f"{output} (column {key})"),
    ]
    keys = [f"data.path={output}", f"data.response_key={key}", "reward.custom_reward_function.path=FILE.py"]
    show_lines([*rows, ("next", typed("eval", *keys))])


def _generate_file(
    cfg: GenerationConfig, choice: ModelChoice, tokenizer: Any, agents: ConversationRunner | None
) -> str:
    """Write the output; returns what was generated."""
    # The data section of training that reads the same prompts.
    shared = {field.name for field in fields(DataConfig)} & {field.name for field in fields(cfg.data)}
    own = {name: getattr(cfg.data, name) for name in shared - {"response_key"}}
    dataset = RLDataset(
        DataConfig(**own, shuffle=False, val_max_samples=cfg.data.max_samples),
        read_rows(cfg.data.path, key="data.path", split="test"),
        tokenizer,
        training=False,
        tools=None if agents is None else agents.schemas,
        files_key="data.path",
    )
    if agents is not None:
        agents.check_data(dataset)
    output, key, columns = Path(cfg.data.output_path), cfg.data.response_key, _columns(cfg, tokenizer)
    extended = ExtendedRows(
        dataset.rows,
        dataset.kept.tolist(),
        output,
        {f"{key}{suffix}": kind for suffix, (kind, _) in columns.items()},
        key="data.output_path",
        if_taken="set data.response_key to another name",
        overwrite=cfg.data.overwrite,
    )
    total, summary = (
        len(dataset),
        f"{counted(len(dataset), 'prompt')} with {counted(cfg.rollout.n, 'response')} each",
    )
    with Journal(output, decisive_settings(cfg, choice, dataset), overwrite=cfg.data.overwrite) as journal:
        left = [position for position in range(total) if dataset.row_number(position) not in journal]
        if len(left) < total:
            logger.info("continuing: %d of %d rows are in %s already", total - len(left), total, journal.path)
        if left:
            try:
                with open_engine(cfg, choice.path, choice.adapter, tokenizer) as engine:
                    sampler = partial(Sampler if agents is None else agents.sampler, engine)
                    summary += f"; {_generate(cfg, dataset, sampler, columns, journal, left)}"
            except BaseException:
                if len(journal):
                    kept = "%d of %d rows are kept in %s; the same command resumes from there"
                    logger.warning(kept, len(journal), total, journal.path)
                raise
        rows = map(dataset.row_number, range(total))
        extended.write({f"{key}{n}": value for n, value in journal.read(row).items()} for row in rows)
        journal.remove()
    return summary


def _generate(
    cfg: GenerationConfig,
    dataset: RLDataset,
    sampler: Callable[[], Sampler],
    columns: Columns,
    journal: Journal,
    positions: Sequence[int],
) -> str:
    """Responses for these prompts, into the journal as each prompt's are complete; returns what was generated."""
    settings = training_settings(rollout_section(cfg), cfg.data.max_response_length, step=0)
    tokens, started, n = 0, time.monotonic(), settings.n

    def rate() -> str:
        return f"{tokens / max(time.monotonic() - started, 1e-9):,.0f} tokens/s"

    with counting("prompts", len(dataset), len(dataset) - len(positions)) as counter:
        for start in range(0, len(positions), cfg.data.batch_size):
            batch = positions[start : start + cfg.data.batch_size]
            numbers = [dataset.row_number(position) for position in batch]
            waiting: dict[int, dict[int, Any]] = {number: {} for number in numbers}

            def add(
                row: int,
                response: Response | Conversation,
                numbers: list[int] = numbers,
                waiting: dict[int, dict[int, Any]] = waiting,
            ) -> None:
                nonlocal tokens
                number = numbers[row // n]
                waiting[number][row % n] = response
                tokens += len(response.token_ids)
                if len(waiting[number]) == n:
                    samples = waiting.pop(number)
                    values = {
                        suffix: [of(samples[i]) for i in range(n)] for suffix, (_, of) in columns.items()
                    }
                    journal.add(number, values)
                    counter.advance(about=rate())

            sampler().collect(dataset.batch(batch, [str(number) for number in numbers]), settings, add)
    count = len(positions) * n
    return f"{count} generated now, {tokens:,} tokens in {time.monotonic() - started:.1f} s ({rate()})"


def _columns(cfg: GenerationConfig, tokenizer: Any) -> Columns:
    """The new columns by what follows `data.response_key` in their names."""

    def text(response: Any) -> str:
        drawn = response.drawn_ids if isinstance(response, Conversation) else [response.token_ids]
        return "\n".join(str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in drawn)

    columns: Columns = {
        "": ("list<string>", text),
        "_finish_reason": ("list<string>", attrgetter("finish_reason")),
        "_length": ("list<int64>", lambda response: len(response.token_ids)),
    }
    if cfg.data.save_token_ids:
        columns["_token_ids"] = "list<list<int64>>", attrgetter("token_ids")
    if cfg.data.save_log_probs:
        columns["_log_probs"] = "list<list<float64>>", attrgetter("log_probs")
    if cfg.rollout.converses:
        columns["_turns"] = "list<string>", lambda talk: json.dumps(talk.transcript(), ensure_ascii=False)
    return columns


def _preflight(cfg: GenerationConfig, choice: ModelChoice) -> None:
    """Check everything that can be checked without loading the model; report all problems at once."""
    problems = [absent(entry, "data.path") for entry in cfg.data.path]
    problems.append(folder_problem(choice.path, "model.path"))
    packages = {}
    if engine_spec(cfg.rollout.name).package:
        packages[cfg.rollout.name] = f"rollout.name={cfg.rollout.name}"
    if engines(cfg) > 1:
        packages["ray"] = f"generating on {engines(cfg)} processes (trainer.n_gpus_per_node, trainer.nnodes)"
    absent_packages = {name: why for name, why in packages.items() if importlib.util.find_spec(name) is None}
    problems += [str(missing_package(name, name, why)) for name, why in absent_packages.items()]
    found = machine_errors(cfg) + [problem for problem in problems if problem]
    found = found or hub_problems({"model.path": choice.path})
    if found:
        raise ConfigError("\n".join(found))
    if cfg.rollout.max_model_len is not None:
        warn_of_length(cfg.model, PROMPT_AND_RESPONSE, cfg.rollout.max_model_len, choice.path)


def decisive_settings(cfg: GenerationConfig, choice: ModelChoice, dataset: RLDataset) -> dict[str, Any]:
    """Everything a response depends on; rows are reused only if all of it is equal."""
    settings = training_settings(rollout_section(cfg), cfg.data.max_response_length, step=0)
    multi_turn = mask_values(to_dict(cfg.rollout.multi_turn))  # it is written to a file
    return {
        "model.path": choice.path,
        "model.lora_path": str(choice.adapter) if choice.adapter else None,
        "the model's files": choice.fingerprint(),
        "data.path": dataset.rows.names,
        "the data's files": dataset.rows.fingerprint(),
        **{f"data.{name}": getattr(cfg.data, name) for name in _CONTENT_KEYS},
        **{f"rollout.{name}": value for name, value in asdict(settings.sampling).items()},
        "rollout.n": settings.n,
        "rollout.seed": settings.seed,
        "rollout.name": cfg.rollout.name,
        "rollout.dtype": cfg.rollout.dtype,
        "rollout.multi_turn": multi_turn if cfg.rollout.converses else None,
        "rollout.agent": to_dict(cfg.rollout.agent) if cfg.rollout.agent.given else None,
        "model.override_config": cfg.model.override_config,
    }


class Journal:
    """Finished rows by number, one JSON line each, after a first line with the settings. Use as a context.

    A complete line survives any kill; a partial or damaged one is dropped on reopening and its row is generated again.
    Rows of other settings are never mixed in. One process at a time."""

    def __init__(self, output: Path, settings: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self.path = output.with_name(f"{output.name}.unfinished")
        self._index: dict[int, tuple[int, int]] = {}
        try:
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise DataError(f"data.output_path: {self.path} cannot be opened: {error.strerror}") from error
        self._synced, self._end = time.monotonic(), 0
        try:
            if not lock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB):
                raise DataError(
                    f"another process writes to {self.path}; wait, or set another data.output_path"
                )
            self._recover(json.loads(json.dumps(dict(settings))), overwrite)
        except BaseException:
            self._file.close()
            raise

    def _recover(self, settings: dict[str, Any], overwrite: bool) -> None:
        """Index complete lines and truncate after the last one; refuse those of other settings."""
        size, damaged = self._file.seek(0, os.SEEK_END), 0
        self._file.seek(0)
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            first = lines.readline()
            changed = _changes(first, settings) if size > len(first) else []
            if changed and not overwrite:
                raise DataError(
                    f"{self.path} holds responses of an interrupted generation with other settings:\n  "
                    + "\n  ".join(changed)
                    + "\nUse those settings, another data.output_path, or data.overwrite=True"
                )
            if size > len(first) and not changed:
                self._end = len(first)
                for line in lines:
                    if not line.endswith(b"\n"):
                        break  # interrupted write
                    row = (parse_row(line) or {}).get("row")
                    if isinstance(row, int):
                        self._index[row] = (self._end, len(line))
                    else:
                        damaged += 1
                    self._end += len(line)
        if damaged:
            logger.warning("%d lines of %s are damaged: their rows are generated again", damaged, self.path)
        self._file.truncate(self._end)
        if not self._end:
            self._append({"settings": settings})

    def __contains__(self, row: int) -> bool:
        return row in self._index

    def __len__(self) -> int:
        return len(self._index)

    def add(self, row: int, record: Mapping[str, Any]) -> None:
        self._index[row] = self._append({"row": row, **record})
        if time.monotonic() - self._synced > SYNC_S:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def _append(self, value: Mapping[str, Any]) -> tuple[int, int]:
        """Write a line; returns its offset and length."""
        line = (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8")
        written, offset = 0, self._end
        try:
            while written < len(line):  # an unbuffered write may take less than it was given
                written += self._file.write(line[written:]) or 0
        except OSError:
            with suppress(OSError):
                self._file.truncate(offset)
            raise
        self._end += len(line)
        return offset, len(line)

    def read(self, row: int) -> dict[str, Any]:
        """The record of a finished row."""
        offset, length = self._index[row]
        record: dict[str, Any] = json.loads(os.pread(self._file.fileno(), length, offset))
        del record["row"]
        return record

    def remove(self) -> None:
        """Delete the journal: the output is complete."""
        self.path.unlink()
        sync_file(self.path.parent)

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _changes(first_line: bytes, now: Mapping[str, Any]) -> list[str]:
    """Settings in which the journal's rows differ."""
    before = (parse_row(first_line) or {}).get("settings")
    if not isinstance(before, dict):
        return ["its first line, the settings, cannot be read"]
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [f"{name}: {_short(before.get(name))} -> {_short(now.get(name))}" for name in changed]


def _short(value: Any, limit: int = 160) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 3] + "..."
