"""Which prompts asynchronous training may start, and which finished groups a step trains on; a group is one prompt
with all its samples. Every started group is trained exactly once, and none is older than the staleness allows; after
resuming, too, because the saved position is that of the oldest prompt not trained yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from verl.data.loader import Loader
from verl.data.proto import DataProto
from verl.trainer.experience import epochs


@dataclass
class _Group:
    started: int
    """The clock when the weights it began with were sent."""
    finished: bool = False


@dataclass
class Admission:
    """The clock counts batches taken. A group started at clock c is taken at clock c + staleness at the latest.

    Not for several threads at once: the caller holds a lock where it has them.

    Why the bound holds and `take` never has to wait for more than is running: with c batches taken, a group that is
    started now finds fewer than (staleness + synced + 1 - c) * batch others before it (`capacity`), so that batches of
    the oldest reach it in time. `take` leaves a group behind only where this is still so without the batch it gives.
    """

    batch: int
    staleness: int
    _: KW_ONLY
    window: int | None = None
    """A batch comes from this many of the oldest groups (1: in the order of their start; None: from all)."""
    total: int | None = None
    """Groups of the whole run."""
    limit: int | None = None
    """The most groups started and not yet taken; at least a batch."""
    clock: int = field(default=0, init=False)
    _groups: dict[str, _Group] = field(default_factory=dict, init=False)
    """Not yet taken, in the order of their start."""

    def capacity(self, synced: int) -> int:
        """How many groups may start with the weights that were sent at clock `synced`.

        A batch needs `synced` >= clock - staleness: with older weights there is no capacity for the groups it lacks."""
        most = (self.staleness + synced + 1) * self.batch
        if self.total is not None:
            most = min(most, self.total)
        capacity = most - self.clock * self.batch - len(self._groups)
        if self.limit is not None:
            capacity = min(capacity, self.limit - len(self._groups))
        return max(capacity, 0)

    def start(self, group: str, synced: int) -> None:
        if group in self._groups:
            raise ValueError(f"group '{group}' has been started before")
        if not self.capacity(synced):
            raise ValueError(
                f"no capacity for group '{group}' at clock {self.clock}, weights of clock {synced}"
            )
        self._groups[group] = _Group(synced)

    def finish(self, group: str) -> None:
        self._groups[group].finished = True

    def fail(self, group: str) -> None:
        """Its samples are lost: the caller generates them again. It keeps its place and its latest clock."""
        self._groups[group].finished = False

    def take(self, clock: int) -> list[str] | None:
        """A batch in the order of start: the oldest finished groups within the window. None: not yet, because they
        are too few or because a group that is not finished could then no longer be taken in time."""
        if clock != self.clock:
            raise ValueError(f"{self.clock} batches have been taken, so the clock cannot be {clock}")
        picked, needed = self._oldest(clock)
        if len(picked) < self.batch or needed:
            return None
        for group in picked:
            del self._groups[group]
        self.clock += 1
        return picked

    def _oldest(self, clock: int) -> tuple[list[str], list[str]]:
        """The oldest finished groups within the window, at most a batch, and the unfinished ones to wait for.

        The window is `window` untaken groups from the oldest on; each group picked moves it on by one."""
        picked: list[str] = []
        passed: list[str] = []
        for name, group in self._groups.items():
            if len(picked) == self.batch or len(passed) == self.window:
                break
            (picked if group.finished else passed).append(name)
        full = len(picked) == self.batch
        if full and not any(self._late(self._groups[name], i, clock + 1) for i, name in enumerate(passed)):
            passed = []
        return picked, passed

    def _late(self, group: _Group, older: int, clock: int) -> bool:
        """Whether a group with so many older ones may be too old when the batches from `clock` on take the oldest."""
        return group.started + self.staleness < clock + older // self.batch

    def waiting_for(self, clock: int) -> list[str]:
        """The unfinished groups that `take` waits for; none when it gives a batch or when too few are started."""
        return self._oldest(clock)[1]

    def in_progress(self) -> int:
        """Groups started and not yet taken."""
        return len(self._groups)

    def groups(self) -> list[str]:
        """Groups started and not yet taken, in the order of their start."""
        return list(self._groups)

    def unfinished(self) -> list[str]:
        """Those that are generated, or after `load_state_dict` must be generated again, in the order of start."""
        return [name for name, group in self._groups.items() if not group.finished]

    def state_dict(self) -> dict[str, Any]:
        """Plain values only. The samples of finished groups are the caller's to save."""
        groups = [[name, group.started, group.finished] for name, group in self._groups.items()]
        return {"clock": self.clock, "groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. With another batch, staleness or limit, groups beyond the capacity are left
        out (their prompts are drawn again) and those that would be too old must be generated again.
        A run that was synchronous until now has {"clock": its steps, "groups": []}."""
        clock = state["clock"]
        saved = {name: _Group(started, finished) for name, started, finished in state["groups"]}
        self.clock, self._groups = clock, {}
        for older, (name, group) in enumerate(list(saved.items())[: self.capacity(clock)]):
            self._groups[name] = _Group(clock) if self._late(group, older, clock) else group


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
        self._batches = epochs(loader)
        self._queue: deque[DataProto] = deque()
        self._drawn: deque[_Drawn] = deque()  # from the oldest batch with an untrained prompt on
        self._trained: dict[str, None] = {}
        """When the state was saved, and not drawn again since; a set in order."""

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
        """Continue where `state` was taken; that of a synchronous run is its loader's alone. Another batch
        size is fine, as for the loader."""
        self._loader.load_state_dict(state["loader"])
        self._batches = epochs(self._loader)
        self._queue.clear()
        self._drawn.clear()
        self._trained = dict.fromkeys(state.get("trained", ()))
