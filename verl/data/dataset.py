"""What all datasets of a data section share: its rows and chat format, the choice of rows, loaders of encoded rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from verl.data.chat import ChatFormat, Tools
from verl.data.files import Files, Rows, read_rows
from verl.data.loader import BatchSource, EpochOrder, Loader
from verl.data.tokenizer import read_template
from verl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")


def choose_rows(total: int, limit: int, shuffle: bool, seed: int) -> np.ndarray:
    """At most `limit` row numbers (-1: all), ascending: a seeded sample when shuffling, else the first ones."""
    if limit < 0 or limit >= total:
        return np.arange(total)
    if limit == 0:
        raise ConfigError(
            "data.train_max_samples and data.val_max_samples must be at least 1, or -1 for all rows."
        )
    if shuffle:
        return np.sort(np.random.default_rng([seed, total]).choice(total, size=limit, replace=False))
    return np.arange(limit)


class SectionRows:
    """Rows of a data section's files, and how they are read. `training` says which of its settings apply."""

    def __init__(
        self,
        config: Any,
        files: Files | Rows,
        tokenizer: PreTrainedTokenizerBase,
        training: bool,
        *,
        tools: Tools | None = None,
        files_key: str | None = None,
    ) -> None:
        if config.chat_template:
            tokenizer.chat_template = read_template(config.chat_template)
        self.tokenizer = tokenizer
        self.files_key = files_key or ("data.train_files" if training else "data.val_files")
        self._chat = ChatFormat.of(tokenizer, config, tools=tools)
        split = "train" if training else "test"
        self.rows = files if isinstance(files, Rows) else read_rows(files, key=self.files_key, split=split)
        limit = config.train_max_samples if training else config.val_max_samples
        self._chosen = choose_rows(len(self.rows), limit, config.shuffle, config.seed)


class EncodedRows(SectionRows, Generic[Item]):
    """A dataset whose rows are all encoded at start. An item knows its row by `index`."""

    items: list[Item]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, position: int) -> Item:
        return self.items[position]

    def row_number(self, position: int) -> int:
        index: int = self.items[position].index  # type: ignore[attr-defined]
        return index


def encoded_loader(
    config: Any, open_rows: Callable[[Files], BatchSource], training: bool, fit: Callable[[int], None] | None
) -> Loader | None:
    """The loader of the data section's training or validation rows, which `open_rows` encodes; None without val_files.

    `fit` is called with the rows per epoch before the size of a batch is read from `config`."""
    files: Sequence[str] = config.train_files if training else config.val_files
    if not files and not training:
        return None
    dataset = open_rows(files)
    order = EpochOrder(len(dataset), seed=config.seed, shuffle=config.shuffle and training)
    if fit is not None:
        fit(len(order))
    size = config.train_batch_size if training else min(config.train_batch_size, len(order))
    workers = config.dataloader_num_workers
    return Loader(dataset, size, order=order, drop_last=False, num_workers=workers)
