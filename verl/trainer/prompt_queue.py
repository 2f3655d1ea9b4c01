"""Single prompts from a loader, drawn ahead of the steps that train on them. The saved position is that of the oldest
prompt not trained yet, so that after resuming every prompt is trained exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from verl.data.loader import Loader
from verl.data.proto import DataProto
from verl.errors import CheckpointError


@dataclass
class _Drawn:
    """A batch of the loader."""

    position: dict[str, Any]
    """The loader's state before it."""
    uids: list[str]
    untrained: set[str]


class PromptQueue:
    """Prompts in the loader's order, epoch after epoch. Not for several threads at once."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._batches = self._all_batches()
        self._queue: deque[DataProto] = deque()
        self._drawn: deque[_Drawn] = deque()  # from the oldest batch with an untrained prompt on
        self._trained: dict[
            str, None
        ] = {}  # when the state was saved, and not drawn again since; a set in order

    def _all_batches(self) -> Iterator[DataProto]:
        while True:
            yield from self._loader

    def draw(self, count: int) -> list[DataProto]:
        """The next `count` prompts, one row each; after loading a state those that were not trained come again."""
        prompts: list[DataProto] = []
        while len(prompts) < count:
            while not self._queue:
                self._draw_batch()
            prompts.append(self._queue.popleft())
        return prompts

    def _draw_batch(self) -> None:
        position = self._loader.state_dict()
        batch = next(self._batches)
        uids = batch.non_tensor_batch["uid"].tolist()
        untrained = [row for row, uid in enumerate(uids) if uid not in self._trained]
        self._drawn.append(_Drawn(position, uids, {uids[row] for row in untrained}))
        self._queue.extend(batch[row] for row in untrained)
        for uid in uids:
            self._trained.pop(uid, None)
        self._forget_trained_batches()

    def trained(self, uids: Iterable[str]) -> None:
        """These prompts need not be drawn again."""
        for uid in uids:
            drawn = next((drawn for drawn in self._drawn if uid in drawn.untrained), None)
            if drawn is None:
                raise ValueError(f"prompt '{uid}' was not drawn, or has been trained before")
            drawn.untrained.remove(uid)
        self._forget_trained_batches()

    def _forget_trained_batches(self) -> None:
        while self._drawn and not self._drawn[0].untrained:
            self._drawn.popleft()

    def state_dict(self) -> dict[str, Any]:
        """The loader's state before the oldest untrained prompt's batch, and what is trained from there on."""
        position = self._drawn[0].position if self._drawn else self._loader.state_dict()
        trained = [uid for drawn in self._drawn for uid in drawn.uids if uid not in drawn.untrained]
        trained += self._trained
        return {"loader": position, "trained": trained} if trained else {"loader": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; that of a synchronous run is its loader's alone. Other keys are left to
        others. Another batch size is fine, as for the loader."""
        try:
            position, trained = state["loader"], state.get("trained", [])
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"The saved position in the prompts is damaged: {state!r}.") from error
        if not isinstance(trained, list) or not all(isinstance(uid, str) for uid in trained):
            raise CheckpointError(f"The saved list of trained prompts is damaged: {trained!r}.")
        self._loader.load_state_dict(position)
        self._batches = self._all_batches()
        self._queue.clear()
        self._drawn.clear()
        self._trained = dict.fromkeys(trained)
