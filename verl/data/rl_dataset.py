"""Prompts for reinforcement learning.

Where prompts must fit (`data.truncation=error`, the default, or `data.filter_overlong_prompts`) all are checked before
training starts. `prompt_text` is the text of `prompt_ids`; `index` is the row's number in the files.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from verl.config.schema import DataConfig
from verl.data.chat import ChatFormat, Tools
from verl.data.columns import as_number, extra_info_of, require_column, truth_of
from verl.data.files import Files, Rows, read_rows
from verl.data.loader import EpochOrder, Loader, MixturePart, SectionRows
from verl.data.proto import DataProto
from verl.data.tokenizer import Tokenizer, truncate
from verl.errors import DataError
from verl.json_input import replacing

logger = logging.getLogger(__name__)

ToolsOfRow = Callable[[Mapping[str, Any]], Tools]
"""The tools a row's prompt shows, where rows differ."""


class RLDataset(SectionRows):
    """The prompts of the data section's files. `training` says which of its settings apply."""

    def __init__(
        self,
        config: DataConfig,
        files: Files | Rows,
        tokenizer: Tokenizer,
        *,
        training: bool = True,
        tools: Tools | ToolsOfRow | None = None,
        files_key: str | None = None,
        answers: bool = False,
        teacher_template: str | None = None,
    ) -> None:
        """`tools`: the schemas shown to the policy by the chat template, for runs with tools; `files_key`: what
        messages call the files, where it is not data.train_files or data.val_files; `answers`: items have `answer_ids`,
        the ids of the answer in column `data.response_key`; `teacher_template`: items have `teacher_prompt_ids`, those
        of the prompt with this text in place of the last user message."""
        shown = None if callable(tools) else tools
        super().__init__(config, files, tokenizer, training, tools=shown, files_key=files_key)
        self._tools_of = tools if callable(tools) else None
        self.config = config
        self.own: Any = getattr(self.rows, "dataset", None)
        """A user's dataset, whose items are the rows (`data.custom_cls`)."""
        require_column(self.rows, config.prompt_key, "data.prompt_key", "prompt", self.files_key)
        self._teacher_template = teacher_template
        self._answers: AnswerColumn | None = None
        if answers:
            from verl.data.conversations import AnswerColumn

            self._answers = AnswerColumn(config, self.rows, self._chat, self.files_key)
        self.kept = self._fitting(self._chosen)
        if self._answers is not None:
            self._answers.check(self.kept.tolist())
        self.parts: list[tuple[str, int, int]] = []
        """Name, first and last row of each part of a mixture; batches then have a column `mixture`."""

    def _fitting(self, chosen: np.ndarray) -> np.ndarray:
        """The rows whose prompts may be used; refuses too long ones, or drops them, as the settings say."""
        config = self.config
        if self.rows.read_late or (not config.filter_overlong_prompts and config.truncation != "error"):
            return chosen
        lengths = prompt_lengths(
            self.rows, chosen, config.prompt_key, self._chat, config.cache_dir, self._tools_of
        )
        limit = config.max_prompt_length
        empty = np.flatnonzero(lengths == 0)
        if empty.size:
            raise DataError(
                f"{self.files_key}: the prompt of {self.rows.origin(int(chosen[empty[0]]))} is empty."
            )
        long = lengths > limit
        if not long.any():
            return chosen
        worst = int(lengths.argmax())
        seen = (
            f"{int(long.sum())} of {len(chosen)} prompts are longer than data.max_prompt_length={limit} tokens; "
            f"the longest, {self.rows.origin(int(chosen[worst]))}, has {int(lengths[worst])}"
        )
        if not config.filter_overlong_prompts:
            raise DataError(
                f"{self.files_key}: {seen}. Set data.max_prompt_length={int(lengths[worst])}, "
                "data.filter_overlong_prompts=True to drop them, or data.truncation=left, right or middle."
            )
        if long.all():
            raise DataError(f"{self.files_key}: no prompt is left: {seen}. Raise data.max_prompt_length.")
        logger.info("%s: %s; they are left out (data.filter_overlong_prompts)", self.files_key, seen)
        return chosen[~long]

    def __len__(self) -> int:
        return len(self.kept)

    def row_number(self, position: int) -> int:
        return int(self.kept[position])

    def __getitem__(self, position: int) -> dict[str, Any]:
        """One prompt as the names a batch has, without `uid`."""
        return self._items([position])[0]

    def _items(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        numbers = [self.row_number(position) for position in positions]
        rows = [self.rows[number] for number in numbers]
        prompts = [row.get(self.config.prompt_key) for row in rows]
        tools = [self._tools_of(row) for row in rows] if self._tools_of else None
        encoded = self._chat.encode_prompts(prompts, [self.rows.origin(number) for number in numbers], tools)
        items = [self._item(n, row, *prompt) for n, row, prompt in zip(numbers, rows, encoded, strict=True)]
        if self._answers is not None:
            for item, ids in zip(items, self._answers.ids(numbers), strict=True):
                item["answer_ids"] = ids
        if self._teacher_template is not None:
            origins = [self.rows.origin(number) for number in numbers]
            read = [self._teacher_prompt(*each) for each in zip(items, origins, strict=True)]
            for item, (*_, ids) in zip(items, self._chat.encode_prompts(read, origins, tools), strict=True):
                item["teacher_prompt_ids"] = ids
        return items

    def _teacher_prompt(self, item: Mapping[str, Any], origin: str) -> Any:
        """The prompt with what only a teacher reads in place of the last user message."""
        raw = item["raw_prompt"]
        place = None
        if not isinstance(raw, str):
            place = max((at for at, each in enumerate(raw) if each["role"] == "user"), default=None)
            if place is None or not isinstance(raw[place].get("content"), str):
                raise DataError(
                    f"{self.files_key}: the prompt of {origin} has no user message with a text, which "
                    "actor_rollout_ref.teacher.prompt_template would replace."
                )
        known = {
            **item["columns"],
            "prompt": raw if place is None else raw[place]["content"],
            "ground_truth": item["ground_truth"],
            "extra_info": item["extra_info"],
        }
        try:
            text = str(self._teacher_template).format_map(known)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise DataError(
                f"{self.files_key}: actor_rollout_ref.teacher.prompt_template cannot be filled from {origin}: "
                f"{type(error).__name__}: {error}; it has {', '.join(sorted(known))}. Braces of the text itself are "
                "written twice."
            ) from None
        if place is None:
            return text
        return [{**each, "content": text} if at == place else each for at, each in enumerate(raw)]

    def _item(self, number: int, row: dict[str, Any], raw: Any, text: str, ids: list[int]) -> dict[str, Any]:
        limit = self.config.max_prompt_length
        if not ids:
            raise DataError(f"{self.files_key}: the prompt of {self.rows.origin(number)} is empty.")
        if len(ids) > limit:
            ids = truncate(ids, limit, self.config.truncation)
            text = str(self._chat.tokenizer.decode(ids))
        source = row.get("data_source")
        named = (self.config.prompt_key, "data_source", "ground_truth", "extra_info")
        drawn_from = [name for name, first, end in self.parts if first <= number < end]
        return {
            "prompt_ids": ids,
            "raw_prompt": raw,
            "prompt_text": text,
            "data_source": "" if source is None else str(source),
            "ground_truth": truth_of(row),
            "extra_info": extra_info_of(row, self.rows.origin(number), self.files_key),
            "index": number,
            "columns": {name: value for name, value in row.items() if name not in named},
            **({"mixture": drawn_from[0]} if drawn_from else {}),
        }

    def batch(self, positions: Sequence[int], uids: Sequence[str]) -> DataProto:
        """The prompts at these positions as one batch of columns."""
        items = self._items(positions)
        columns = {name: [item[name] for item in items] for name in (items[0] if items else ())}
        return DataProto.from_dict(non_tensors={"uid": list(uids), **columns})

    def difficulty(self, column: str) -> np.ndarray:
        """`data.curriculum_key`: one number per usable row."""
        require_column(self.rows, column, "data.curriculum_key", "difficulty", self.files_key)
        column_values = list(self.rows.column(column))
        values = np.array([as_number(column_values[number]) for number in self.kept], dtype=np.float64)
        for number in self.kept[np.isnan(values)].tolist():
            raise DataError(
                f"data.curriculum_key={column}: {self.rows.origin(number)} has {column_values[number]!r}; "
                "a difficulty must be a number."
            )
        return values

    def data_sources(self) -> list[str]:
        """Every `data_source` among the usable rows, sorted; "" if a row has none. None of rows that are read late."""
        if self.rows.read_late:
            return []
        sources = list(self.rows.column("data_source"))
        kept = (sources[number] for number in self.kept.tolist())
        return sorted({"" if source is None else str(source) for source in kept})


def training_loader(
    config: DataConfig,
    tokenizer: Tokenizer,
    rows: Rows | None = None,
    *,
    tools: Tools | ToolsOfRow | None = None,
    fit: Callable[[int], None] | None = None,
    answers: bool = False,
    teacher_template: str | None = None,
) -> Loader:
    """The training prompts of the data section: `rows`, or files or mixture, shuffled or easiest first, resumable.

    `fit` is called with the rows per epoch before the size of a batch is read from `config`; `answers` and
    `teacher_template` as in `RLDataset`."""
    files_key = None if rows is None else "train()"
    if rows is None and (rows := _own_rows(config, tokenizer, training=True)) is not None and answers:
        raise DataError(
            "data.custom_cls: answers of the data (spin) are read from files, not from a dataset."
        )
    if config.dataloader_num_workers:
        # Calls with padding change a tokenizer while they last; the threads use a copy that nothing else calls.
        tokenizer = copy.deepcopy(tokenizer)
    mixture: list[tuple[str, float, int, int]] = []
    if rows is None:
        mixture, rows = mixture_rows(config)
    dataset = RLDataset(
        config,
        rows or config.train_files,
        tokenizer,
        tools=tools,
        files_key=files_key,
        answers=answers,
        teacher_template=teacher_template,
    )
    dataset.parts = [(name, first, end) for name, _, first, end in mixture]
    difficulty = dataset.difficulty(config.curriculum_key) if config.curriculum_key else None
    parts = [
        MixturePart(name, weight, np.flatnonzero((dataset.kept >= first) & (dataset.kept < end)))
        for name, weight, first, end in mixture
    ]
    order = EpochOrder(
        len(dataset), seed=config.seed, shuffle=config.shuffle, difficulty=difficulty, mixture=parts
    )
    build = None
    if config.sampler.class_path:
        from verl.data.samplers import SampledLoader, sampler_builder

        build = sampler_builder(config, dataset if dataset.own is None else dataset.own)
        order = EpochOrder(len(build()), shuffle=False)
    if fit is not None:
        fit(len(order))
    if build is not None:
        return SampledLoader(dataset, config.train_batch_size, build)
    if config.curriculum:
        from verl.data.curriculum import PassRateLoader

        return PassRateLoader(dataset, config, order)
    left_out = len(order) % config.train_batch_size
    if 0 < left_out < len(order):
        logger.info(
            "%d of %d prompts do not fill a batch (data.train_batch_size=%d) and are left out of an epoch: %s",
            left_out,
            len(order),
            config.train_batch_size,
            "others in each" if config.shuffle and difficulty is None else "its last ones, always the same",
        )
    workers = 0 if dataset.own is not None else config.dataloader_num_workers
    return Loader(dataset, config.train_batch_size, order=order, num_workers=workers)


def validation_loader(
    config: DataConfig, tokenizer: Tokenizer, *, tools: Tools | ToolsOfRow | None = None
) -> Loader | None:
    """All validation prompts in file order as one batch, or None without val_files."""
    if not config.val_files:
        return None
    rows = _own_rows(config, tokenizer, training=False)
    dataset = RLDataset(config, rows or config.val_files, tokenizer, training=False, tools=tools)
    workers = 0 if dataset.own is not None else config.dataloader_num_workers
    return Loader(dataset, len(dataset), drop_last=False, num_workers=workers)


def _own_rows(config: DataConfig, tokenizer: Tokenizer, *, training: bool) -> Rows | None:
    """The items of the dataset that `data.custom_cls` names."""
    if not config.custom_cls.path:
        return None
    from verl.data.own_dataset import own_rows

    return own_rows(config, tokenizer, training=training)


def mixture_rows(config: DataConfig) -> tuple[list[tuple[str, float, int, int]], Rows | None]:
    """Name, weight, first and last row of each part of `data.mixture`, and all their rows one after another."""
    if not config.mixture:
        return [], None
    parts: list[tuple[str, float, int, int]] = []
    loaded: list[Rows] = []
    for number, part in enumerate(config.mixture):
        rows = read_rows(part.files, key=f"data.mixture[{number}].files")
        first = parts[-1][3] if parts else 0
        parts.append((part.name or rows.stem, part.weight, first, first + len(rows)))
        loaded.append(rows)
    return parts, Rows.joined(loaded)


# -- lengths of prompts, cached between runs ------------------------------------------------------------------------


def prompt_lengths(
    rows: Rows,
    chosen: np.ndarray,
    prompt_key: str,
    chat: ChatFormat,
    cache_dir: str | None = None,
    tools_of: ToolsOfRow | None = None,
) -> np.ndarray:
    """Tokens of each chosen row's prompt; `chosen` must ascend. A cache that cannot be used costs time, never the
    run."""
    tools = [tools_of(rows[number]) for number in chosen.tolist()] if tools_of else None
    file = _cache_file(rows, chosen, prompt_key, chat, cache_dir, tools)
    if file is None:
        return measure_lengths(rows, chosen, prompt_key, chat, tools)
    with suppress(OSError, ValueError, EOFError, zipfile.BadZipFile):
        cached = np.load(file, allow_pickle=False)
        array = isinstance(cached, np.ndarray)  # an archive is not
        if array and cached.shape == chosen.shape and np.issubdtype(cached.dtype, np.integer):
            return cached
    lengths = measure_lengths(rows, chosen, prompt_key, chat, tools)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as draft, open(draft, "wb") as lines:
            np.save(lines, lengths, allow_pickle=False)
    except OSError as error:
        logger.warning("prompt lengths are not cached, %s cannot be written: %s", file, error)
    return lengths


def measure_lengths(
    rows: Rows, chosen: np.ndarray, prompt_key: str, chat: ChatFormat, tools: Sequence[Tools] | None = None
) -> np.ndarray:
    """Chunk by chunk: a fast tokenizer encodes a chunk on all cores. `tools`: those of each chosen row."""
    wanted = set(chosen.tolist())
    prompts = (pair for pair in enumerate(rows.column(prompt_key)) if pair[0] in wanted)
    lengths: list[int] = []
    while chunk := list(islice(prompts, 1024)):
        names = [rows.origin(number) for number, _ in chunk]
        shown = tools[len(lengths) : len(lengths) + len(chunk)] if tools is not None else None
        encoded = chat.encode_prompts([prompt for _, prompt in chunk], names, shown)
        lengths += [len(ids) for _, _, ids in encoded]
    return np.asarray(lengths, dtype=np.int64)


def _cache_file(
    rows: Rows,
    chosen: np.ndarray,
    prompt_key: str,
    chat: ChatFormat,
    cache_dir: str | None,
    tools: Sequence[Tools] | None,
) -> Path | None:
    """Named by everything that decides the lengths; None for rows that came from no file."""
    files = rows.fingerprint()
    if files is None:
        return None
    tokenizer: Any = chat.tokenizer
    vocabulary = (
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    )
    rows_digest = hashlib.sha256(chosen.tobytes()).hexdigest()
    inputs = [files, rows_digest, prompt_key, vocabulary, tokenizer.chat_template, *chat.cache_key()]
    if tools is not None:
        inputs.append(_tools_digest(tools))
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=repr).encode()).hexdigest()
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "verl" / "prompt_lengths"
    return Path(cache_dir or default).expanduser() / f"{key}.npy"


def _tools_digest(tools: Sequence[Tools]) -> str:
    """Of the tools of all rows; most rows share one of a few lists."""
    texts: dict[int, bytes] = {}
    digest = hashlib.sha256()
    for shown in tools:
        if id(shown) not in texts:
            text = json.dumps([dict(tool) for tool in shown], sort_keys=True, default=repr)
            texts[id(shown)] = hashlib.sha256(text.encode()).digest()
        digest.update(texts[id(shown)])
    return digest.hexdigest()
