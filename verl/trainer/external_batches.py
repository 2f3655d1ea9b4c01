"""A user's own rows or dataloader as a source of prompts for the loop.

Rows (dicts with the columns of a data file, in a list or a dataset) are trained on as those of a file are. A batch of a
dataloader may be a list of strings (prompts), a list of rows, a dict of columns as torch's DataLoader collates them, or
a DataProto with `prompt_ids`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, default_collate

from verl.data.files import Rows
from verl.data.messages import is_conversation
from verl.data.proto import DataProto
from verl.data.rl_dataset import RLDataset
from verl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from verl.config.schema import DataConfig


logger = logging.getLogger(__name__)


def rows_or_batches(given: Any, config: DataConfig, tokenizer: Any) -> Rows | ExternalLoader:
    """What was given to train(): rows, which are all read now, or a dataloader's batches."""
    if isinstance(given, (str, bytes, Mapping)) or not (
        hasattr(given, "__iter__") or (hasattr(given, "__getitem__") and hasattr(given, "__len__"))
    ):
        keys = f" of {', '.join(map(str, given))}: give one of them" if isinstance(given, Mapping) else ""
        raise DataError(
            f"train() got a {type(given).__name__}{keys}; expected rows (a list of dicts, a dataset) or a dataloader: "
            "an iterable of batches of prompts or rows. Files are trained on by `verl train data.train_files=...`"
        )
    if not hasattr(given, "__iter__"):  # a map-style dataset
        given = [given[number] for number in range(len(given))]
    loader = ExternalLoader(given, config, tokenizer)
    first = loader.peek()
    if isinstance(first, Mapping) and _is_row(first, config.prompt_key):
        return Rows.from_list(loader.left(), "the rows given to train()")
    if config.curriculum:
        raise ConfigError(
            f"data.curriculum={config.curriculum} chooses prompts, but a dataloader gives its own batches; give "
            "train() rows, or leave data.curriculum out"
        )
    return loader


class ExternalLoader:
    """The part of `verl.data.loader.Loader` the loop uses, over batches that come from outside."""

    def __init__(self, batches: Iterable[Any], config: DataConfig, tokenizer: Any) -> None:
        self._batches = _of_rows(batches) if hasattr(batches, "__len__") else list(batches)
        if len(self._batches) == 0:  # type: ignore[arg-type]
            raise DataError("train() got no rows and no batches: the data is empty")
        self._config = config
        self._tokenizer = tokenizer
        self.tools: Any = None
        """The schemas shown to the policy, or a function from a row to them."""
        self.answers = False
        self.teacher_template: str | None = None
        self.epoch = 0
        self.position = 0
        self._opened: Iterator[Any] | None = None
        self._first: RLDataset | None = None

    def peek(self) -> Any:
        """The first batch, or None. The iterator is kept for the first epoch, so that a sampler draws once."""
        opened = self.left()
        batch = next(opened, None)
        self._opened = opened if batch is None else chain([batch], opened)
        return batch

    def left(self) -> Iterator[Any]:
        """The batches of an epoch, as they were given."""
        opened, self._opened = self._opened or iter(self._batches), None
        return opened

    @property
    def dataset(self) -> RLDataset | None:
        """The rows of the first batch, checked before training; None for batches without rows."""
        if self._first is None and self.position == 0:
            batch = self.peek()
            if batch is not None and not isinstance(batch, DataProto):
                self._first = self._rows(batch)
                size = self._config.train_batch_size
                if len(self._first) != size:
                    logger.warning(
                        "the dataloader gives %d prompts a batch, TrainingConfig(batch_size=%d) counts on %d: a batch "
                        "is cut into optimiser steps by mini_batch_size (default: batch_size)",
                        len(self._first),
                        size,
                        size,
                    )
        return self._first

    @property
    def last_epoch(self) -> int:
        return max(self.epoch - (not self.position), 0)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[DataProto]:
        epoch, skip = self.epoch, self.position
        for number, batch in enumerate(self.left()):
            if number < skip:
                continue
            last = number + 1 == len(self)
            self.epoch, self.position = (epoch + 1, 0) if last else (epoch, number + 1)
            yield self._prompts(batch, f"{epoch}-{number}")
        if self.epoch == epoch:
            raise DataError(
                f"len(dataloader) is {len(self)}, but it yielded {self.position} batches; "
                "its __len__ must be the number of batches it gives"
            )

    def _prompts(self, batch: Any, name: str) -> DataProto:
        if isinstance(batch, DataProto):
            return batch
        return all_rows(self._rows(batch), name)

    def _rows(self, batch: Any) -> RLDataset:
        rows = Rows.from_list(rows_of(batch, self._config.prompt_key), "the batch")
        return RLDataset(
            self._config,
            rows,
            self._tokenizer,
            tools=self.tools,
            answers=self.answers,
            teacher_template=self.teacher_template,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.position = int(state["epoch"]), int(state["position"])


def all_rows(dataset: RLDataset, name: str) -> DataProto:
    """One batch of all rows, whose uids begin with `name`."""
    positions = range(len(dataset))
    return dataset.batch(positions, [f"{name}-{position}" for position in positions])


def _of_rows(batches: Any) -> Any:
    """A torch DataLoader of the same batches, in the same order, whose rows stay as they are: its default collation
    splits conversations into columns, and refuses those of different lengths."""
    if not isinstance(batches, DataLoader) or batches.collate_fn is not default_collate:
        return batches
    twin = copy.copy(batches)
    twin.collate_fn = list
    twin._iterator = None  # workers that are kept alive collate as before
    return twin


def rows_of(
    batch: Any, prompt_key: str, what: str = "a batch of the dataloader is a"
) -> list[dict[str, Any]]:
    """Rows as a data file would have them. `what`: how messages begin."""
    if isinstance(batch, Mapping):
        _require_prompt(batch, prompt_key)
        return [dict(batch)] if _is_row(batch, prompt_key) else _rows_of_columns(batch, prompt_key)
    items = list(batch) if isinstance(batch, (list, tuple)) else []
    if items and all(isinstance(item, Mapping) for item in items) and "role" not in items[0]:
        _require_prompt(items[0], prompt_key)
        return [dict(item) for item in items]
    if items and all(_is_prompt(item) for item in items):
        return [{prompt_key: item} for item in items]
    of = f" of {type(items[0]).__name__}" if items else ""
    raise DataError(
        f"{what} {type(batch).__name__}{of}; give a list of prompts, a list of rows (dicts), "
        "a dict of columns, or a DataProto"
    )


def _rows_of_columns(batch: Mapping[str, Any], prompt_key: str) -> list[dict[str, Any]]:
    """The rows of a batch whose values are columns: one value for each row."""
    prompts = batch[prompt_key]
    collated = _conversations_collated(prompts)
    if not isinstance(prompts, (list, tuple)) or not (collated or all(map(_is_prompt, prompts))):
        raise DataError(
            f"'{prompt_key}' of a batch is {str(prompts)[:80]!r} ({type(prompts).__name__}); in a row it is a text or "
            "a list of messages with 'role' and 'content', in a batch a list of those"
        )
    pick = _pick_collated if collated else _pick
    count = len(prompts[0]["role"]) if collated else len(prompts)
    for name, column in batch.items():
        if not isinstance(column, Mapping) and not collated and _length(column) != count:
            raise DataError(
                f"'{name}' of a batch of {count} prompts is {str(column)[:80]!r} ({type(column).__name__}); it must "
                "hold one value for each of them"
            )
    return [{name: pick(column, row) for name, column in batch.items()} for row in range(count)]


def _length(column: Any) -> int | None:
    """How many values a column has; None for what is no column."""
    try:
        return None if isinstance(column, (str, bytes)) else len(column)
    except TypeError:
        return None


def _is_row(item: Mapping[str, Any], prompt_key: str) -> bool:
    """Whether a mapping is one row: its prompt is a text or a conversation, not a column of them."""
    return _is_prompt(item.get(prompt_key))


def _require_prompt(row: Mapping[str, Any], prompt_key: str) -> None:
    if prompt_key not in row:
        raise DataError(
            f"the given rows have the columns {sorted(map(str, row))} but no '{prompt_key}'; rename the "
            "column or give TrainingConfig(overrides={'data.prompt_key': ...})"
        )


def _is_prompt(item: Any) -> bool:
    """A text, or a conversation."""
    return isinstance(item, str) or is_conversation(item)


def _conversations_collated(column: Any) -> bool:
    """Whether default collation has turned conversations into one list of messages that hold a list of contents."""
    first = column[0] if isinstance(column, (list, tuple)) and column else None
    return isinstance(first, Mapping) and isinstance(first.get("role"), (list, tuple))


def _pick(column: Any, row: int) -> Any:
    if isinstance(column, Mapping):
        return {name: _pick(values, row) for name, values in column.items()}
    value = column[row]
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def _pick_collated(column: Any, row: int) -> Any:
    """One row of a column collated by torch's default_collate."""
    if isinstance(column, Mapping):
        return {name: _pick_collated(values, row) for name, values in column.items()}
    if isinstance(column, (list, tuple)) and column and not isinstance(column[0], (str, bytes)):
        return [_pick_collated(values, row) for values in column]
    return _pick(column, row)
