"""Datasets that a user's file defines (`data.custom_cls`), and the class that those written for verl inherit from.

Items are dictionaries whose prompt is under `raw_prompt`, else in the prompt column. They are asked for when their
batch is drawn, one after the other, never before: what an item holds may depend on what was drawn earlier.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from verl.config.keys import ConfigDict
from verl.config.schema import DataConfig
from verl.data.chat import ChatFormat
from verl.data.files import Rows, read_rows
from verl.data.loader import choose_rows
from verl.data.proto import object_column
from verl.errors import DataError
from verl.user_code import attribute, error_line, import_path

CLASS_KEY = "data.custom_cls"


class RowTable(Sequence[Any]):
    """Rows as dictionaries, with those methods of `datasets.Dataset` that choose and change rows."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], chosen: Iterable[int] | None = None) -> None:
        self._rows = rows
        self._chosen = list(range(len(rows)) if chosen is None else map(int, chosen))

    @property
    def column_names(self) -> list[str]:
        if isinstance(self._rows, Rows):
            return self._rows.column_names
        return list(dict.fromkeys(name for row in self._rows for name in row))

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, item: Any) -> Any:
        """A row by its number, a column by its name, the columns of several rows by a slice or list of numbers."""
        if isinstance(item, str):
            return [row.get(item) for row in self]
        if isinstance(item, slice | list):
            part = self.select(range(len(self))[item] if isinstance(item, slice) else item)
            return {name: part[name] for name in self.column_names}
        return dict(self._rows[self._chosen[item]])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    def select(self, indices: Iterable[int]) -> RowTable:
        return RowTable(self._rows, [self._chosen[number] for number in indices])

    def filter(
        self,
        function: Callable[..., Any],
        with_indices: bool = False,
        num_proc: int | None = None,
        desc: str = "",
    ) -> RowTable:
        """The rows for which `function` is true. `num_proc` and `desc`: nothing; this process calls it."""
        kept = [n for n, row in enumerate(self) if function(row, *([n] if with_indices else []))]
        return self.select(kept)

    def map(
        self,
        function: Callable[..., Any],
        with_indices: bool = False,
        num_proc: int | None = None,
        desc: str = "",
    ) -> RowTable:
        """Every row with the columns that `function` returns for it, as for `filter`."""
        return RowTable(
            [{**row, **(function(row, *([n] if with_indices else [])) or {})} for n, row in enumerate(self)]
        )


class RLHFDataset(Dataset[dict[str, Any]]):
    """The prompts of files. Subclasses override the methods; `dataframe` may be anything with rows by number and a
    length, as a `datasets.Dataset`."""

    def __init__(
        self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        """`config`: the section `data`."""
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.tokenizer, self.processor, self.config = tokenizer, processor, config
        self.max_samples = max_samples
        self.prompt_key = config.get("prompt_key", "prompt")
        self.max_prompt_length = config.get("max_prompt_length", 512)
        self.filter_overlong_prompts = config.get("filter_overlong_prompts", False)
        self.truncation = config.get("truncation", "error")
        self.apply_chat_template_kwargs = config.get("apply_chat_template_kwargs", {})
        self.shuffle, self.seed = config.get("shuffle", False), config.get("seed", 1)
        self._read_files_and_tokenize()

    def _read_files_and_tokenize(self) -> None:
        """Set `dataframe`."""
        rows = read_rows(self.data_files)
        chosen = choose_rows(len(rows), self.max_samples, self.shuffle, self.seed)
        self.dataframe: Any = self.maybe_filter_out_long_prompts(RowTable(rows, chosen))

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Without the rows whose prompts are too long, where `data.filter_overlong_prompts` asks for it."""
        dataframe = self.dataframe if dataframe is None else dataframe
        if not self.filter_overlong_prompts:
            return dataframe
        chat = ChatFormat.of(self.tokenizer, self.config)
        limit = self.max_prompt_length

        def fits(row: dict[str, Any]) -> bool:
            ((_, _, ids),) = chat.encode_prompts([self._messages(dict(row))], [""])
            return len(ids) <= limit

        return dataframe.filter(fits)

    def _build_messages(self, example: dict[str, Any], key: str | None = None) -> Any:
        """The prompt of a row."""
        return example[key or self.prompt_key]

    def _messages(self, row: dict[str, Any]) -> Any:
        several = len(inspect.signature(self._build_messages).parameters) > 1  # older ones take the row alone
        return self._build_messages(row, *([self.prompt_key] if several else []))

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row: dict[str, Any] = dict(self.dataframe[item])
        row["raw_prompt"] = self._messages(row)
        extra = row.get("extra_info")
        row["extra_info"] = extra = {} if extra is None else extra
        if isinstance(extra, Mapping):
            row["index"] = extra.get("index", 0)
            row["tools_kwargs"] = extra.get("tools_kwargs", {})
            row["interaction_kwargs"] = extra.get("interaction_kwargs", {})
        return row


def collate_fn(data_list: list[dict[str, Any]]) -> dict[str, Any]:
    """Items as columns: tensors stacked, everything else in arrays of objects."""
    columns: dict[str, list[Any]] = defaultdict(list)
    for item in data_list:
        for name, value in item.items():
            columns[name].append(value)
    return {
        name: torch.stack(values) if isinstance(values[0], torch.Tensor) else object_column(values)
        for name, values in columns.items()
    }


class DatasetRows(Rows):
    """The items of a user's dataset as rows. Tensors are left out: prompts are encoded here."""

    read_late = True

    def __init__(self, dataset: Any, prompt_key: str) -> None:
        super().__init__([])
        self.dataset, self._prompt_key = dataset, prompt_key

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: Any) -> Any:
        where = self.origin(row)
        try:
            item = self.dataset[row]
        except Exception as error:
            raise DataError(
                f"{CLASS_KEY}: {where} raised {type(error).__name__}: {error}{error_line(error)}"
            ) from error
        names = [
            name for name in ("raw_prompt", self._prompt_key) if isinstance(item, Mapping) and name in item
        ]
        if not names:
            seen = (
                f"has {', '.join(map(str, item))}"
                if isinstance(item, Mapping)
                else f"is a {type(item).__name__}"
            )
            raise DataError(
                f"{CLASS_KEY}: {where} {seen}; it must be a dictionary with messages or text under 'raw_prompt' or "
                f"'{self._prompt_key}' (data.prompt_key)."
            )
        prompt = item[names[0]]
        others = {
            name: value
            for name, value in item.items()
            if name != "raw_prompt" and not isinstance(value, torch.Tensor)
        }
        return {**others, self._prompt_key: prompt.tolist() if isinstance(prompt, np.ndarray) else prompt}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    def column(self, name: str) -> Iterator[Any]:
        return (row.get(name) for row in self)

    def origin(self, row: int) -> str:
        return f"item {row} of {type(self.dataset).__name__}"


def import_class(path: str, name: str | None, key: str, name_key: str) -> Any:
    """A user's class; `key` and `name_key` are those that name it."""
    module, name = import_path(path, name, key, DataError, "class")
    found = attribute(module, name) if name else None
    if not isinstance(found, type):
        classes = [each for each, value in vars(module).items() if isinstance(value, type)]
        raise DataError(
            f"{path} has no class {name!r} ({name_key}); classes there: {', '.join(classes) or 'none'}."
        )
    return found


def own_rows(config: DataConfig, tokenizer: Any, *, training: bool) -> DatasetRows | None:
    """The items of `data.custom_cls`, built for the training or the validation files; None where it is not given."""
    custom = config.custom_cls
    if not custom.path:
        return None
    kind = import_class(custom.path, custom.name, f"{CLASS_KEY}.path", f"{CLASS_KEY}.name")
    files = config.train_files if training else config.val_files
    given = {
        "data_files": list(files),
        "tokenizer": tokenizer,
        "config": ConfigDict.of(config),
        "processor": None,
        "max_samples": config.train_max_samples if training else config.val_max_samples,
    }
    parameters = inspect.signature(kind).parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):  # `max_samples` is newer than most
        given = {each.name: given[each.name] for each in parameters if each.name in given}
    try:
        dataset = kind(**given)
        rows = len(dataset)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{CLASS_KEY}: {kind.__name__} cannot be built: {type(error).__name__}: {error}{error_line(error)}"
        ) from error
    if not rows:
        raise DataError(f"{CLASS_KEY}: {kind.__name__} has no items.")
    return DatasetRows(dataset, config.prompt_key)
