"""A user's own dataloader as a source of prompts for the loop.

A batch may be a list of strings (prompts), a list of rows (dicts with the columns of a data file), a dict of
columns as torch's DataLoader collates them, or a DataProto with `prompt_ids`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from verl.data.files import Rows
from verl.data.proto import DataProto
from verl.data.rl_dataset import RLDataset
from verl.errors import DataError

if TYPE_CHECKING:
    from verl.config.schema import DataConfig


class GivenLoader:
    """The part of `verl.data.loader.Loader` the loop uses, over batches that come from outside."""

    def __init__(self, batches: Iterable[Any], config: DataConfig, tokenizer: Any) -> None:
        self._batches = batches if hasattr(batches, "__len__") else list(batches)
        if len(self._batches) == 0:  # type: ignore[arg-type]
            raise DataError("the dataloader given to train() has no batches")
        self._config = config
        self._tokenizer = tokenizer
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[DataProto]:
        epoch, skip = self.epoch, self.position
        for number, batch in enumerate(self._batches):
            if number < skip:
                continue
            last = number + 1 == len(self)
            self.epoch, self.position = (epoch + 1, 0) if last else (epoch, number + 1)
            yield self._prompts(batch, f"{epoch}-{number}")
        if self.epoch == epoch:
            raise DataError(
                f"the dataloader given to train() says that it has {len(self)} batches but gave {self.position}; "
                "its __len__ must be the number of batches it gives"
            )

    def _prompts(self, batch: Any, name: str) -> DataProto:
        if isinstance(batch, DataProto):
            return batch
        rows = rows_of(batch, self._config.prompt_key)
        dataset = RLDataset(self._config, Rows.from_list(rows, "the given batch"), self._tokenizer)
        positions = range(len(dataset))
        return dataset.batch(positions, [f"{name}-{position}" for position in positions])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.position = int(state["epoch"]), int(state["position"])


def rows_of(batch: Any, prompt_key: str) -> list[dict[str, Any]]:
    """Rows as a data file would have them."""
    if isinstance(batch, Mapping):
        if prompt_key not in batch:
            raise DataError(
                f"a batch of the dataloader has the columns {sorted(batch)} but no '{prompt_key}'; rename the column "
                f"or give TrainingConfig(overrides={{'data.prompt_key': ...}})"
            )
        return [
            {name: _pick(column, row) for name, column in batch.items()}
            for row in range(len(batch[prompt_key]))
        ]
    if isinstance(batch, (list, tuple)) and batch:
        if all(isinstance(item, Mapping) for item in batch) and "role" not in batch[0]:
            return [dict(item) for item in batch]
        if all(isinstance(item, (str, list, tuple)) for item in batch):
            return [{prompt_key: item} for item in batch]
    raise DataError(
        f"a batch of the dataloader is a {type(batch).__name__}; give a list of prompts, a list of rows (dicts), "
        "a dict of columns, or a DataProto"
    )


def _pick(column: Any, row: int) -> Any:
    if isinstance(column, Mapping):
        return {name: _pick(values, row) for name, values in column.items()}
    value = column[row]
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
