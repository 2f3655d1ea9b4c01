"""The order of prompts from a user's sampler (`data.sampler`), drawn batch by batch, so that it may depend on what was
trained before."""

from __future__ import annotations

import copy
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sized
from itertools import islice
from typing import Any

from torch.utils.data import Sampler

from verl.config.keys import ConfigDict
from verl.config.schema import DataConfig
from verl.data.loader import BatchSource, EpochOrder, Loader
from verl.data.own_dataset import import_class
from verl.data.proto import DataProto
from verl.errors import DataError
from verl.user_code import error_line

logger = logging.getLogger(__name__)


class AbstractSampler(Sampler[int]):
    """Gives positions in the dataset; iterating begins an epoch."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any) -> None: ...


class AbstractCurriculumSampler(AbstractSampler):
    """Learns from what was trained."""

    @abstractmethod
    def update(self, batch: DataProto) -> None:
        """Called after each training step, with its batch."""


class SampledLoader(Loader):
    """Batches in a sampler's order.

    A sampler, or an iterator of one, with `state_dict` and `load_state_dict` continues a resumed run by itself; another
    begins anew, and what was drawn before is drawn again and left out."""

    def __init__(self, dataset: BatchSource, batch_size: int, build: Callable[[], Any]) -> None:
        self.build, self.sampler = build, build()
        self._iterator: Any = None
        self.name = type(self.sampler).__name__
        super().__init__(dataset, batch_size, order=EpochOrder(len(self.sampler), shuffle=False))

    def __iter__(self) -> Iterator[DataProto]:
        epoch = self.epoch
        while self.epoch == epoch:
            self._iterator = self._iterator or iter(self.sampler)
            drawn = [int(position) for position in islice(self._iterator, self._batch_size)]
            start, size = self.position, len(self.dataset)
            if len(drawn) < self._batch_size:
                if not start:
                    raise DataError(f"data.sampler: {self.name} gave only {len(drawn)} rows, not a batch.")
                self._end_epoch()
                return
            if not all(0 <= position < size for position in drawn):
                raise DataError(
                    f"data.sampler: {self.name} gave {drawn}; the dataset has rows 0 to {size - 1}."
                )
            # By the number of the draw: a sampler may draw a row several times.
            numbers = [self.dataset.row_number(position) for position in drawn]
            batch = self.dataset.batch(drawn, [f"{epoch}-{row}.{start + n}" for n, row in enumerate(numbers)])
            self.position = start + len(drawn)
            if not self.remaining:
                self._end_epoch()
            yield batch

    def _end_epoch(self) -> None:
        _skip(self._iterator, len(self._order) - self.position + 1)  # to its end, as with torch's loader
        self.epoch, self.position, self._iterator = self.epoch + 1, 0, None

    def restart(self) -> None:
        super().restart()
        self.sampler, self._iterator = self.build(), None

    @property
    def learns(self) -> bool:
        return hasattr(self.sampler, "update")

    def update(self, batch: DataProto) -> dict[str, float]:
        metrics = super().update(batch)
        if self.learns:
            try:
                self.sampler.update(batch)
            except Exception as error:
                what = f"{type(error).__name__}: {error}{error_line(error)}"
                raise DataError(f"data.sampler: {self.name}.update raised {what}") from error
        return metrics

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for name, holder in (("sampler", self.sampler), ("sampler_iterator", self._iterator)):
            if hasattr(holder, "state_dict"):
                state[name] = copy.deepcopy(holder.state_dict())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.sampler, self._iterator = self.build(), None
        if "sampler" in state and hasattr(self.sampler, "load_state_dict"):
            self.sampler.load_state_dict(state["sampler"])
            return
        if self.learns and (self.epoch or self.position):
            logger.warning(
                "data.sampler: %s has no state_dict and load_state_dict: what its update learned before the checkpoint "
                "is lost, and other rows may be drawn",
                self.name,
            )
        for _ in range(self.epoch):
            _skip(iter(self.sampler), len(self._order) + 1)
        self._iterator = iter(self.sampler)
        if "sampler_iterator" in state:
            self._iterator.load_state_dict(state["sampler_iterator"])
        else:
            _skip(self._iterator, self.position)


def _skip(drawn: Iterator[int], count: int) -> None:
    for _ in islice(drawn, count):
        pass


def sampler_builder(config: DataConfig, dataset: Any) -> Callable[[], Any]:
    """Builds the sampler of `data.sampler` for a dataset."""
    sampler = config.sampler
    kind = import_class(
        str(sampler.class_path), sampler.class_name, "data.sampler.class_path", "data.sampler.class_name"
    )

    def build() -> Any:
        try:
            built = kind(data_source=dataset, data_config=ConfigDict.of(config))
            len(built)
        except Exception as error:
            what = f"{type(error).__name__}: {error}{error_line(error)}"
            raise DataError(f"data.sampler: {kind.__name__} cannot be built: {what}") from error
        return built

    return build
