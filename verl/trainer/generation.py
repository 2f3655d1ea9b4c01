"""`python -m verl.trainer.main_generation`: a file of prompts in, a file of responses out; resumes after a kill.

Responses do not depend on batch sizes, the number of processes or interruptions: each is keyed by its row number and
the seed. The output appears complete or not at all.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.machine import machine_errors
from verl.config.model_path import context_length, folder_problem
from verl.config.parallelism import EXTERNAL_ENGINES, engines
from verl.config.schema import DataConfig
from verl.data.chat import load_tokenizer
from verl.data.files import absent, read_rows
from verl.data.rl_dataset import RLDataset
from verl.errors import ConfigError, RolloutError, missing_package
from verl.observe.console import Counter, counting
from verl.rollout.base import Request, Response, RolloutEngine
from verl.runtime import quiet_transformers, seed_everything
from verl.trainer.generation_journal import Journal
from verl.trainer.generation_model import ModelChoice, choose_model
from verl.trainer.preflight import hub_problems
from verl.trainer.row_output import ExtendedRows
from verl.workers.generation import open_engine, rollout_section
from verl.workers.rollout import GenerationSettings, training_settings

if TYPE_CHECKING:
    from verl.config.schema import GenerationConfig

logger = logging.getLogger(__name__)

_DECIDES = (
    "prompt_key",
    "max_prompt_length",
    "max_response_length",
    "truncation",
    "filter_overlong_prompts",
    "chat_template",
    "apply_chat_template_kwargs",
    "system_prompt",
    "raw_prompts",
    "save_token_ids",
    "save_log_probs",
)
"""Keys of the data section that change what is written for a row."""


@dataclass(frozen=True)
class GenerationResult:
    """What a finished generation leaves."""

    output: Path
    rows: int
    continued: int
    """Rows that were there from an interrupted generation."""
    tokens: int
    """Generated now."""
    seconds: float


def generate_file(cfg: GenerationConfig) -> GenerationResult:
    """Generate, resuming an interrupted generation."""
    quiet_transformers()
    seed_everything(cfg.trainer.seed)
    choice = choose_model(cfg.model)
    _preflight(cfg, choice)
    tokenizer = load_tokenizer(choice.tokenizer, cfg.model.trust_remote_code, cfg.data.chat_template)
    dataset = RLDataset(
        prompt_section(cfg),
        read_rows(cfg.data.path, key="data.path", split="test"),
        tokenizer,
        training=False,
        files_key="data.path",
    )
    output = Path(cfg.data.output_path)
    added = added_columns(cfg)
    extended = ExtendedRows(
        dataset.rows,
        dataset.kept.tolist(),
        output,
        added,
        key="data.output_path",
        if_taken="set data.response_key to another name",
    )
    settings = decisive_settings(cfg, choice, dataset)
    with Journal(output, settings, overwrite=cfg.data.overwrite) as journal:
        left = [place for place in range(len(dataset)) if dataset.row_number(place) not in journal]
        continued = len(dataset) - len(left)
        if continued:
            logger.info(
                "continuing: %d of %d rows are in %s already", continued, len(dataset), journal.folder
            )
        tokens, seconds = 0, 0.0
        if left:
            with (
                _log_kept_rows(journal, len(dataset)),
                open_engine(cfg, choice.path, choice.adapter, tokenizer) as engine,
            ):
                work = _Work(cfg, dataset, engine, tokenizer, journal)
                tokens, seconds = work.run(left)
        extended.write(_columns(journal, map(dataset.row_number, range(len(dataset))), cfg.data.response_key))
        journal.remove()
    result = GenerationResult(output, len(dataset), continued, tokens, seconds)
    logger.info("%s", _summary(cfg, result))
    return result


def _preflight(cfg: GenerationConfig, choice: ModelChoice) -> None:
    """Check everything that can be checked without loading the model; report all problems at once."""
    problems = [absent(entry, "data.path") for entry in cfg.data.path]
    problems.append(folder_problem(choice.path, "model.path"))
    packages = (
        {cfg.rollout.name: f"rollout.name={cfg.rollout.name}"} if cfg.rollout.name in EXTERNAL_ENGINES else {}
    )
    if engines(cfg) > 1:
        packages["ray"] = f"generating on {engines(cfg)} processes (trainer.n_gpus_per_node, trainer.nnodes)"
    for name, why in packages.items():
        if importlib.util.find_spec(name) is None:
            problems.append(str(missing_package(name, name, why)))
    found = [*machine_errors(cfg), *(problem for problem in problems if problem)]
    found = found or hub_problems({"model.path": choice.path})
    if found:
        raise ConfigError("\n".join(found))
    known, longest = context_length(choice.path, cfg.model.override_config), cfg.rollout.max_model_len
    if known is not None and longest is not None and longest > known:
        logger.warning(
            "data.max_prompt_length + data.max_response_length = %d, but the model was built for sequences of at most "
            "%d tokens: what lies beyond will be bad. Lower the lengths, or choose another model",
            longest,
            known,
        )


@contextmanager
def _log_kept_rows(journal: Journal, total: int) -> Iterator[None]:
    """On an error, log how many rows are kept."""
    try:
        yield
    except BaseException:
        if len(journal):
            logger.warning(
                "%d of %d rows are kept in %s; the same command resumes from there",
                len(journal),
                total,
                journal.folder,
            )
        raise


def prompt_section(cfg: GenerationConfig) -> DataConfig:
    """The data section of training that reads the same prompts."""
    names = {field.name for field in fields(DataConfig)} & {field.name for field in fields(cfg.data)}
    own = {name: getattr(cfg.data, name) for name in names if name != "response_key"}
    return DataConfig(**own, shuffle=False, val_max_samples=cfg.data.max_samples)


def added_columns(cfg: GenerationConfig) -> dict[str, str]:
    """Names and types of the added columns; each value is a list with one entry per response."""
    key, data = cfg.data.response_key, cfg.data
    columns = {key: "list<string>", f"{key}_finish_reason": "list<string>", f"{key}_length": "list<int64>"}
    if data.save_token_ids:
        columns[f"{key}_token_ids"] = "list<list<int64>>"
    if data.save_log_probs:
        columns[f"{key}_log_probs"] = "list<list<float64>>"
    return columns


def decisive_settings(cfg: GenerationConfig, choice: ModelChoice, dataset: RLDataset) -> dict[str, Any]:
    """Everything a response depends on; rows are reused only if all of it is equal."""
    settings = training_settings(rollout_section(cfg), cfg.data.max_response_length, step=0)
    return {
        "model.path": choice.path,
        "model.lora_path": str(choice.adapter) if choice.adapter else None,
        "the model's files": choice.fingerprint(),
        "data.path": dataset.rows.names,
        "the data's files": dataset.rows.fingerprint(),
        **{f"data.{name}": getattr(cfg.data, name) for name in _DECIDES},
        **{f"rollout.{name}": value for name, value in asdict(settings.sampling).items()},
        "rollout.n": settings.n,
        "rollout.seed": settings.seed,
        "rollout.name": cfg.rollout.name,
        "rollout.dtype": cfg.rollout.dtype,
        "model.override_config": cfg.model.override_config,
    }


class _Work:
    """Runs the remaining rows through the engine into the journal."""

    def __init__(
        self,
        cfg: GenerationConfig,
        dataset: RLDataset,
        engine: RolloutEngine,
        tokenizer: Any,
        journal: Journal,
    ) -> None:
        self._cfg, self._dataset, self._engine = cfg, dataset, engine
        self._tokenizer, self._journal = tokenizer, journal
        self._settings: GenerationSettings = training_settings(
            rollout_section(cfg), cfg.data.max_response_length, step=0
        )
        self._tokens = 0

    def run(self, places: Sequence[int]) -> tuple[int, float]:
        """Generate for these prompts; returns tokens and seconds."""
        began = time.monotonic()
        size = self._cfg.data.batch_size
        total = len(self._dataset)
        with counting("prompts", total, total - len(places)) as counter:
            for start in range(0, len(places), size):
                self._answer(places[start : start + size], counter, began)
        return self._tokens, time.monotonic() - began

    def _answer(self, places: Sequence[int], counter: Counter, began: float) -> None:
        names = [str(self._dataset.row_number(place)) for place in places]
        prompts = self._dataset.batch(places, names).non_tensor_batch["prompt_ids"]
        settings = self._settings
        requests = [
            Request(name, ids, settings.sampling, n=settings.n, seed=settings.seed)
            for name, ids in zip(names, prompts, strict=True)
        ]
        waiting: dict[str, dict[int, Response]] = {name: {} for name in names}
        for response in self._engine.generate(requests):
            samples = waiting[response.request_id]
            samples[response.sample] = response
            self._tokens += len(response.token_ids)
            if len(samples) == settings.n:
                del waiting[response.request_id]
                self._journal.add(
                    int(response.request_id), self._record([samples[i] for i in range(settings.n)])
                )
                rate = self._tokens / max(time.monotonic() - began, 1e-9)
                counter.advance(about=f"{rate:,.0f} tokens/s")
        if waiting:
            raise RolloutError(
                f"{type(self._engine).__name__} left {len(waiting)} prompts unanswered; this is a defect of the "
                "engine: use rollout.name=hf and report it"
            )

    def _record(self, responses: Sequence[Response]) -> dict[str, Any]:
        data = self._cfg.data
        record: dict[str, Any] = {
            "": [self._tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in responses],
            "_finish_reason": [r.finish_reason for r in responses],
            "_length": [len(r.token_ids) for r in responses],
        }
        if data.save_token_ids:
            record["_token_ids"] = [r.token_ids for r in responses]
        if data.save_log_probs:
            record["_log_probs"] = [r.log_probs for r in responses]
        return record


def _columns(journal: Journal, rows: Iterator[int], key: str) -> Iterator[Mapping[str, Any]]:
    """Each row's record under the output's column names."""
    for row in rows:
        yield {f"{key}{name}": value for name, value in journal.read(row).items()}


def _summary(cfg: GenerationConfig, result: GenerationResult) -> str:
    text = f"{result.output}: {result.rows} prompts with {cfg.rollout.n} responses each"
    rows = result.rows - result.continued
    if not rows:
        return text
    now = f"{rows * cfg.rollout.n} of them now, " if result.continued else ""
    rate = result.tokens / max(result.seconds, 1e-9)
    return f"{text}; {now}{result.tokens:,} tokens in {result.seconds:.1f} s ({rate:,.0f} tokens/s)"
