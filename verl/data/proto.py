"""A batch: named tensors, named object columns, and a dictionary of values about all rows.

Every tensor and column has the same number of rows; a column is a one-dimensional numpy array of dtype object. Every
operation but `pop` returns a new DataProto. Rows are views where possible, so shared tensors must not be changed in
place. What does not fit raises `DataError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl.errors import DataError

Index = int | slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor


def object_column(values: Iterable[Any]) -> np.ndarray:
    """A one-dimensional object array with one element per row, whatever the elements (lists stay lists)."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    rows = list(values)
    column = np.empty(len(rows), dtype=object)
    for row, value in enumerate(rows):
        column[row] = value
    return column


def same_value(left: Any, right: Any) -> bool:
    """Deep equality that understands tensors, arrays and containers of them; NaN equals NaN."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        both = right.to(left.device)
        return bool(((left == both) | ((left != left) & (both != both))).all())
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.shape == right.shape and same_value(left.tolist(), right.tolist())
    if isinstance(left, torch.Tensor | np.ndarray) or isinstance(right, torch.Tensor | np.ndarray):
        return False
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same_value(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(same_value, left, right))
    return bool(left == right or (left != left and right != right))


def _whole_number(value: Any, least: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= least


def _names(keys: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, keys))) or "(none)"


@dataclass(eq=False, repr=False)
class DataProto:
    """Rows of a batch. Build one with `from_dict`; `len(data)` is the number of rows, `data[3]`, `data[:8]` and
    `data[mask]` are batches again. Every operation but `pop` returns a new batch; tensors are shared where possible.

    >>> data = DataProto.from_dict({"x": torch.arange(4)}, {"name": ["a", "b", "c", "d"]})
    >>> data[[0, 2]].non_tensor_batch["name"].tolist()
    ['a', 'c']
    """

    batch: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors by name; the first dimension is the rows."""
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    """Columns of Python objects by name: one-dimensional arrays of dtype object."""
    meta_info: dict[str, Any] = field(default_factory=dict)
    """Values about all rows."""

    def __post_init__(self) -> None:
        self.check()

    @staticmethod
    def from_dict(
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Iterable[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """From tensors (first dimension: rows), columns of any Python values, and values about all rows."""
        columns: dict[str, np.ndarray] = {}
        for name, values in (non_tensors or {}).items():
            if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
                raise DataError(
                    f"Column '{name}' must be a sequence with one element per row, got {type(values).__name__}."
                )
            columns[name] = object_column(values)
        return DataProto(dict(tensors or {}), columns, dict(meta_info or {}))

    def check(self) -> None:
        """Raise `DataError` unless all tensors and columns have the same number of rows; operations call it."""
        rows: dict[str, int] = {}
        for name, tensor in self.batch.items():
            if not isinstance(tensor, torch.Tensor):
                raise DataError(
                    f"Tensor '{name}' of a batch is a {type(tensor).__name__}; other values belong in non_tensors."
                )
            if tensor.dim() == 0:
                raise DataError(
                    f"Tensor '{name}' has no dimensions; the first must be the rows (one number belongs in meta_info)."
                )
            rows[name] = tensor.shape[0]
        for name, column in self.non_tensor_batch.items():
            if not isinstance(column, np.ndarray) or column.dtype != object or column.ndim != 1:
                raise DataError(
                    f"Column '{name}' must be a one-dimensional object array (verl.data.proto.object_column), got "
                    f"{type(column).__name__} {getattr(column, 'dtype', '')} {getattr(column, 'shape', '')}."
                )
            if name in self.batch:
                raise DataError(f"'{name}' is both a tensor and a column of the batch.")
            rows[name] = len(column)
        if len(set(rows.values())) > 1:
            listed = ", ".join(f"{name}: {count}" for name, count in rows.items())
            raise DataError(
                f"Tensors and columns of a batch must have the same number of rows, got {listed}."
            )

    def __len__(self) -> int:
        for tensor in self.batch.values():
            return int(tensor.shape[0])
        for column in self.non_tensor_batch.values():
            return len(column)
        return 0

    def __repr__(self) -> str:
        tensors = ", ".join(f"{name} {list(t.shape)} {str(t.dtype)[6:]}" for name, t in self.batch.items())
        return (
            f"DataProto({len(self)} rows; tensors: {tensors or '(none)'}; "
            f"columns: {_names(self.non_tensor_batch)}; meta: {_names(self.meta_info)})"
        )

    def __iter__(self) -> Iterator[DataProto]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, index: Index) -> DataProto:
        """The rows asked for, in the order asked for; always a DataProto, also for a single number."""
        return self._take(index if isinstance(index, slice) else self._positions(index))

    def _positions(self, index: Any) -> np.ndarray:
        """Row numbers from any index that is not a slice; a boolean mask must cover all rows."""
        if isinstance(index, int | np.integer) and not isinstance(index, bool):
            index = [index]
        try:
            wanted = index.detach().cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
            if wanted.ndim != 1:
                raise IndexError(f"shape {wanted.shape} is not one-dimensional")
            rows = np.arange(len(self), dtype=np.int64)
            return rows[wanted] if wanted.size or wanted.dtype == bool else rows[:0]
        except (IndexError, TypeError, ValueError) as error:
            raise DataError(f"Cannot index a batch of {len(self)} rows with {index!r}: {error}") from error

    def _take(self, rows: slice | np.ndarray) -> DataProto:
        self.check()
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step < 0:  # tensors have no negative strides
                return self._take(np.arange(start, stop, step))
            tensors = {name: tensor[start:stop:step] for name, tensor in self.batch.items()}
        else:
            picked = torch.from_numpy(rows)
            tensors = {name: t.index_select(0, picked.to(t.device)) for name, t in self.batch.items()}
        columns = {name: column[rows] for name, column in self.non_tensor_batch.items()}
        return DataProto(tensors, columns, dict(self.meta_info))

    @property
    def _parts(self) -> tuple[dict[str, Any], ...]:
        return self.batch, self.non_tensor_batch, self.meta_info

    def _kinds(self, *keys: Iterable[str] | None) -> Iterator[tuple[dict[str, Any], Iterable[str] | None]]:
        """Tensors, columns and meta entries, each with the names asked for, which must be there."""
        self.check()
        for kind, values, wanted in zip(("tensor", "column", "meta entry"), self._parts, keys, strict=True):
            wanted = [wanted] if isinstance(wanted, str) else wanted and list(dict.fromkeys(wanted))
            for key in wanted or ():
                if key not in values:
                    raise DataError(f"The batch has no {kind} '{key}'; it has: {_names(values)}.")
            yield values, wanted

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_keys: Iterable[str] | None = None,
        meta_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """Only what is named; None keeps all of that kind, an empty list none."""
        kinds = self._kinds(batch_keys, non_tensor_keys, meta_keys)
        return DataProto(
            *(dict(values) if keys is None else {k: values[k] for k in keys} for values, keys in kinds)
        )

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_keys: Iterable[str] | None = None,
        meta_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """Remove what is named from this batch and return it as another one."""
        kinds = [
            *self._kinds(batch_keys, non_tensor_keys, meta_keys)
        ]  # all names are right before any is removed
        return DataProto(*({key: values.pop(key) for key in keys or ()} for values, keys in kinds))

    def union(self, other: DataProto) -> DataProto:
        """Both side by side, row for row; what both have must be equal."""
        has_rows = [bool(p.batch or p.non_tensor_batch) for p in (self, other)]
        if all(has_rows) and len(self) != len(other):
            raise DataError(f"Cannot join batches side by side: {len(self)} rows and {len(other)} rows.")
        joined: list[dict[str, Any]] = []
        for mine, theirs in zip(self._parts, other._parts, strict=True):
            for key in mine.keys() & theirs.keys():
                if not same_value(mine[key], theirs[key]):
                    raise DataError(f"Cannot join batches: '{key}' differs between them; rename or pop one.")
            joined.append({**mine, **theirs})
        return DataProto(*joined)

    def repeat(self, n: int, interleave: bool = True) -> DataProto:
        """Every row n times: a a b b when interleaved, a b a b when not."""
        if not _whole_number(n, 1):
            raise DataError(f"repeat takes a whole number of at least 1, got {n!r}.")
        rows = np.arange(len(self), dtype=np.int64)
        return self._take(np.repeat(rows, n) if interleave else np.tile(rows, n))

    def chunk(self, k: int) -> list[DataProto]:
        """k parts of equal length, in order."""
        if not _whole_number(k, 1) or len(self) % k:
            raise DataError(f"{len(self)} rows cannot be cut into {k!r} equal parts.")
        return self.split(len(self) // k) if len(self) else [self._take(slice(0, 0)) for _ in range(k)]

    def split(self, size: int) -> list[DataProto]:
        """Parts of `size` rows, in order; the last may be shorter."""
        if not _whole_number(size, 1):
            raise DataError(f"split takes a part size of at least 1, got {size!r}.")
        return [self._take(slice(start, start + size)) for start in range(0, len(self), size)]

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """All rows of all parts, in order. Names must agree; so must meta entries that several parts have."""
        if not parts:
            raise DataError("concat needs at least one batch, got none.")
        first = parts[0]
        meta: dict[str, Any] = {}
        for part in parts:
            for mine, theirs in ((first.batch, part.batch), (first.non_tensor_batch, part.non_tensor_batch)):
                if mine.keys() != theirs.keys():
                    differing = _names(mine.keys() ^ theirs.keys())
                    raise DataError(f"Cannot append batches: {differing} is not in all of them.")
            for key, value in part.meta_info.items():
                if key in meta and not same_value(meta[key], value):
                    raise DataError(f"Cannot append batches: meta entry '{key}' differs; pop it first.")
                meta[key] = value
        for name, tensor in first.batch.items():
            for part in parts:
                other = part.batch[name]
                if other.shape[1:] != tensor.shape[1:] or other.dtype != tensor.dtype:
                    raise DataError(
                        f"Cannot append batches: tensor '{name}' is {list(tensor.shape)} {tensor.dtype} and "
                        f"{list(other.shape)} {other.dtype}; pad them to one width first."
                    )
        return DataProto(
            {name: torch.cat([part.batch[name] for part in parts]) for name in first.batch},
            {
                name: np.concatenate([p.non_tensor_batch[name] for p in parts])
                for name in first.non_tensor_batch
            },
            meta,
        )

    def reorder(self, index: Index) -> DataProto:
        """The same rows in another order: `index` must name every row exactly once."""
        order = self._positions(index)
        if len(order) != len(self) or not np.array_equal(np.sort(order), np.arange(len(self))):
            raise DataError(f"An order of {len(self)} rows must name each once, got {len(order)} indices.")
        return self._take(order)

    def rename(self, names: Mapping[str, str]) -> DataProto:
        """Other names for tensors and columns: {old: new}."""
        known = self.batch.keys() | self.non_tensor_batch.keys()
        for old in names:
            if old not in known:
                raise DataError(f"Cannot rename '{old}': the batch has {_names(known)}.")
        renamed = [names.get(name, name) for name in (*self.batch, *self.non_tensor_batch)]
        twice = {name for name in renamed if renamed.count(name) > 1}
        if twice:
            raise DataError(f"Cannot rename: {_names(twice)} would name two columns of the batch.")
        tensors, columns = ({names.get(name, name): v for name, v in p.items()} for p in self._parts[:2])
        return DataProto(tensors, columns, dict(self.meta_info))

    def to(self, device: torch.device | str) -> DataProto:
        """The tensors on `device`; columns and meta stay where they are."""
        target = torch.device(device)
        ahead = target.type != "cpu"  # towards the host such a copy could be read before it has arrived
        moved = {name: tensor.to(target, non_blocking=ahead) for name, tensor in self.batch.items()}
        return DataProto(moved, dict(self.non_tensor_batch), dict(self.meta_info))
