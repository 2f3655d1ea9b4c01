"""What all datasets of a data section share, and their batches, epoch after epoch, with a position that can be saved.

The order of an epoch (shuffled, easiest first, or a weighted mixture) depends on the seed and its number alone, so a
position is all that a checkpoint saves; it counts batches yielded, not those prepared ahead. Workers are threads:
tokenizers encode outside the GIL.
"""

from __future__ import annotations

import copy
import logging
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from verl.data.chat import ChatFormat, Tools
from verl.data.files import Files, Rows, read_rows
from verl.data.proto import DataProto
from verl.data.tokenizer import Tokenizer, read_template
from verl.errors import CheckpointError, ConfigError, DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MixturePart:
    """Rows (positions in the dataset) that are drawn together with one weight."""

    name: str
    weight: float
    positions: np.ndarray


class EpochOrder:
    """The positions an epoch visits."""

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        difficulty: np.ndarray | None = None,
        mixture: Sequence[MixturePart] | None = None,
    ) -> None:
        """`difficulty` (one number per row) puts easy rows first, equal ones shuffled; `mixture` draws each
        part's share, `size` rows in all, and visits every row of a part equally often."""
        self._all_rows = MixturePart("all", 1.0, np.arange(size))
        self._parts = list(mixture or ())
        for part in self._parts:
            if not len(part.positions):
                raise DataError(
                    f"data.mixture: the part '{part.name}' has no usable rows (filtered away, or empty files)."
                )
        self._seed = seed
        self._shuffle = shuffle
        self._difficulty = difficulty
        self._size = size
        self._turns = _turns([part.weight for part in self._parts], self._size) if self._parts else None

    def __len__(self) -> int:
        return self._size

    def _pass(self, part: MixturePart, which: int, number: int) -> np.ndarray:
        """All rows of a part once, in the order of its pass `number`."""
        rows = part.positions
        if self._shuffle:
            rows = np.random.default_rng([self._seed, which, number]).permutation(rows)
        if self._difficulty is not None:
            rows = rows[np.argsort(self._difficulty[rows], kind="stable")]
        return rows

    def fingerprint(self, epoch: int) -> str:
        """Changes with the order of this epoch."""
        return f"{zlib.crc32(np.ascontiguousarray(self.positions(epoch), dtype=np.int64).tobytes()):08x}"

    def positions(self, epoch: int) -> np.ndarray:
        """What this epoch visits, in order."""
        if self._turns is None:
            return self._pass(self._all_rows, 0, epoch)
        out = np.empty(self._size, dtype=np.int64)
        for which, part in enumerate(self._parts):
            slots = np.flatnonzero(self._turns == which)
            # A part's passes continue across epochs, so that every row is visited equally often.
            first = epoch * len(slots)
            wanted = np.arange(first, first + len(slots))
            passes = wanted // len(part.positions)
            for number in np.unique(passes):
                rows = self._pass(part, which, int(number))
                inside = passes == number
                out[slots[inside]] = rows[wanted[inside] % len(part.positions)]
        return out


def _turns(weights: Sequence[float], size: int) -> np.ndarray:
    """Which part each draw comes from: every prefix holds each part's share to within one or two draws.

    Each draw goes to the part that is furthest behind its share (smooth weighted round robin)."""
    shares = np.asarray(weights, dtype=np.float64) / float(sum(weights))
    credit = np.zeros(len(shares))
    turns = np.empty(size, dtype=np.int64)
    for draw in range(size):
        credit += shares
        turns[draw] = which = int(credit.argmax())
        credit[which] -= 1.0
    return turns


class BatchSource(Protocol):
    """What a loader needs of a dataset."""

    def __len__(self) -> int: ...

    def batch(self, positions: Sequence[int], uids: Sequence[str]) -> DataProto:
        """The rows at these positions; `uids` names each draw."""

    def row_number(self, position: int) -> int:
        """The number of a row in its files."""


class Loader:
    """Iterating gives the rest of the current epoch and moves on to the next one.

    `epoch` is the epoch of the next batch: after the last batch of an epoch it is already the next one's. `last_epoch`
    is that of the newest batch. With `drop_last` an epoch leaves out the rows that do not fill a batch; otherwise its
    last batch has fewer rows."""

    def __init__(
        self,
        dataset: BatchSource,
        batch_size: int,
        *,
        order: EpochOrder | None = None,
        drop_last: bool = True,
        num_workers: int = 0,
        key: str = "data.train_batch_size",
    ) -> None:
        self.dataset = dataset
        self._order = order or EpochOrder(len(dataset), shuffle=False)
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._workers = num_workers
        if not len(self._order):
            raise DataError("The dataset has no rows.")
        if batch_size > len(self._order):
            raise DataError(
                f"{key}={batch_size} is larger than the dataset: an epoch has {len(self._order)} usable rows. "
                f"Set {key} to at most {len(self._order)}, or add data."
            )
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self._batches_after(0)

    def _batches_after(self, position: int) -> int:
        left = len(self._order) - position
        return left // self._batch_size if self._drop_last else -(-left // self._batch_size)

    @property
    def last_epoch(self) -> int:
        return max(self.epoch - (not self.position), 0)

    @property
    def remaining(self) -> int:
        """Batches left in the current epoch."""
        return self._batches_after(self.position)

    def _plan(self, epoch: int, start: int) -> Iterator[tuple[int, np.ndarray, list[str]]]:
        """The batches from `start` on: where each ends, its rows and their names."""
        positions = self._order.positions(epoch)
        seen: Counter[int] = Counter(int(p) for p in positions[:start])
        while start < len(positions):
            drawn = positions[start : start + self._batch_size]
            if self._drop_last and len(drawn) < self._batch_size:
                return
            uids = []
            for position in map(int, drawn):
                uid = f"{epoch}-{self.dataset.row_number(position)}"
                uids.append(uid if not seen[position] else f"{uid}.{seen[position]}")
                seen[position] += 1
            start += len(drawn)
            yield start, drawn, uids

    def __iter__(self) -> Iterator[DataProto]:
        epoch = self.epoch
        for end, batch in self._made(self._plan(epoch, self.position)):
            done = self._batches_after(end) == 0
            self.epoch, self.position = (epoch + 1, 0) if done else (epoch, end)
            yield batch

    def _made(self, plan: Iterator[tuple[int, np.ndarray, list[str]]]) -> Iterator[tuple[int, DataProto]]:
        """Where each batch ends, and the batch; made ahead by workers, where there are any."""
        if not self._workers:
            yield from ((end, self.dataset.batch(drawn.tolist(), uids)) for end, drawn, uids in plan)
            return
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="verl-loader")
        ahead: deque[tuple[int, Future[DataProto]]] = deque()
        try:
            for end, drawn, uids in plan:
                ahead.append((end, pool.submit(self.dataset.batch, drawn.tolist(), uids)))
                if len(ahead) > self._workers:
                    end, future = ahead.popleft()
                    yield end, future.result()
            for end, future in ahead:
                yield end, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def scored(self, batch: DataProto) -> None:
        """The responses to the newest batch of prompts have their scores, also those that no step trains on."""

    def update(self, batch: DataProto) -> dict[str, float]:
        """A batch is trained: a user's dataset may want to know. Metrics of what was drawn for it."""
        own: Any = getattr(self.dataset, "own", None)
        if hasattr(own, "on_batch_end"):
            own.on_batch_end(batch=batch)
        return {}

    def _stateful(self) -> Any:
        """A user's dataset that has a state."""
        own: Any = getattr(self.dataset, "own", None)
        return own if hasattr(own, "state_dict") and hasattr(own, "load_state_dict") else None

    def restart(self) -> None:
        """Back to the first row of the first epoch, with the names its draws had then."""
        self.epoch, self.position = 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch starts; plain values only, besides the state of a user's dataset."""
        own = self._stateful()
        return {
            **({} if own is None else {"dataset": copy.deepcopy(own.state_dict())}),
            "epoch": self.epoch,
            "position": self.position,
            "rows": len(self.dataset),
            "order": self._order.fingerprint(self.epoch),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Another batch size is fine; other data is not."""
        try:
            epoch, position, rows = (int(state[name]) for name in ("epoch", "position", "rows"))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"The saved loader position is damaged: {state!r}.") from error
        if rows != len(self.dataset):
            raise CheckpointError(
                f"The checkpoint was made with {rows} usable rows of training data, now there are {len(self.dataset)}: "
                "use the same data.train_files, filter and data.train_max_samples, or set trainer.resume_mode=disable."
            )
        if not 0 <= epoch < 1 << 31 or not 0 <= position <= len(self._order):
            raise CheckpointError(f"The saved loader position is outside the data: {state!r}.")
        self.epoch, self.position = epoch, position
        if "dataset" in state and (own := self._stateful()) is not None:
            own.load_state_dict(state["dataset"])
        if position and state.get("order", "") != self._order.fingerprint(epoch):
            logger.warning(
                "epoch %d has another order than when its position was saved (data.seed, data.shuffle, data.mixture or "
                "data.curriculum_key changed): some of its rows repeat, some are skipped",
                epoch,
            )
        if not self.remaining:
            self.epoch, self.position = epoch + 1, 0


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
        tokenizer: Tokenizer,
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

    @classmethod
    def loader(
        cls,
        config: Any,
        tokenizer: Tokenizer,
        *,
        training: bool = True,
        fit: Callable[[int], None] | None = None,
        **options: Any,
    ) -> Loader | None:
        """The loader of the data section's training or validation rows; None without val_files.

        `fit` is called with the rows per epoch before the size of a batch is read from `config`; `options` are those of
        the dataset."""
        files: Sequence[str] = config.train_files if training else config.val_files
        if not files and not training:
            return None
        dataset: Any = cls(config, files, tokenizer, training=training, **options)
        order = EpochOrder(len(dataset), seed=config.seed, shuffle=config.shuffle and training)
        if fit is not None:
            fit(len(order))
        size = config.train_batch_size if training else min(config.train_batch_size, len(order))
        workers = config.dataloader_num_workers
        return Loader(dataset, size, order=order, drop_last=False, num_workers=workers)
