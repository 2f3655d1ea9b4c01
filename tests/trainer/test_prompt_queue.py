"""The prompt queue: prompts ahead of training, and none lost or repeated whenever the run is killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data.loader import EpochOrder, Loader, MixturePart
from verl.data.proto import DataProto
from verl.trainer.admission import Admission, PromptQueue

ROWS = 10


class Numbers:
    def __len__(self) -> int:
        return ROWS

    def row_number(self, position: int) -> int:
        return position

    def batch(self, positions: Sequence[int], uids: Sequence[str]) -> DataProto:
        return DataProto.from_dict(non_tensors={"n": list(positions), "uid": list(uids)})


def loader(batch: int, *, drop_last: bool = True, workers: int = 0, mixture: bool = False) -> Loader:
    # The first part has fewer rows than draws: its rows come more than once in an epoch.
    parts = [MixturePart("a", 3.0, np.arange(2)), MixturePart("b", 1.0, np.arange(2, ROWS))]
    order = EpochOrder(ROWS, seed=3, mixture=parts if mixture else None)
    return Loader(Numbers(), batch, order=order, drop_last=drop_last, num_workers=workers)


def uid_of(prompt: DataProto) -> str:
    (uid,) = prompt.non_tensor_batch["uid"]
    (number,) = prompt.non_tensor_batch["n"]
    assert uid.split("-")[1].split(".")[0] == str(number)
    return str(uid)


def draw(queue: PromptQueue, count: int) -> list[str]:
    return [uid_of(prompt) for prompt in queue.draw(count)]


def in_order(count: int, source: Loader) -> list[str]:
    """What a synchronous run trains on."""
    uids: list[str] = []
    while len(uids) < count:
        for batch in source:
            uids += batch.non_tensor_batch["uid"].tolist()
    return uids[:count]


def saved(queue: PromptQueue) -> dict[str, Any]:
    return dict(json.loads(json.dumps(queue.state_dict())))


@pytest.mark.parametrize("drop_last", [True, False])
def test_prompts_come_in_the_loaders_order_epoch_after_epoch(drop_last: bool) -> None:
    source = loader(3, drop_last=drop_last)
    queue = PromptQueue(source)
    assert source.state_dict() == loader(3).state_dict()
    uids = draw(queue, 1) + draw(queue, 0) + draw(queue, 2)
    assert source.position == 3, "a batch is drawn when it is needed, no earlier"
    uids += draw(queue, 22)
    assert uids == in_order(25, loader(3, drop_last=drop_last)) and len(set(uids)) == 25


def test_with_nothing_ahead_the_state_is_the_loaders() -> None:
    source = loader(5)
    queue = PromptQueue(source)
    for _ in range(5):
        assert queue.state_dict() == {"loader": source.state_dict()}
        queue.trained(draw(queue, 5))


def test_the_state_is_before_the_oldest_batch_with_an_untrained_prompt() -> None:
    source = loader(2)
    queue = PromptQueue(source)
    first = source.state_dict()
    uids = draw(queue, 6)
    queue.trained([uids[4], uids[1], uids[2], uids[3]])
    assert queue.state_dict() == {"loader": first, "trained": uids[1:5]}
    queue.trained([uids[0]])
    assert queue.state_dict() == {"loader": {**first, "position": 4}, "trained": [uids[4]]}
    queue.trained([uids[5]])
    assert queue.state_dict() == {"loader": source.state_dict()}


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 10])
def test_another_batch_size_after_resuming(batch: int) -> None:
    whole = in_order(40, loader(2))
    queue = PromptQueue(loader(2))
    draw(queue, 17)
    queue.trained([*whole[:5], *whole[8:15]])
    again = PromptQueue(loader(batch, drop_last=False))
    again.load_state_dict(saved(queue))
    assert draw(again, 20) == [*whole[5:8], *whole[15:32]]


def test_a_state_saved_again_while_its_prompts_are_drawn_again_loses_nothing() -> None:
    queue = PromptQueue(loader(2))
    uids = draw(queue, 8)
    queue.trained([uids[0], uids[3], uids[6]])
    state = saved(queue)
    again = PromptQueue(loader(2))
    draw(again, 3)  # of no importance once a state is loaded
    again.load_state_dict(state)
    left = [uid for uid in uids if uid not in state["trained"]]
    for _ in left:
        assert saved(again) == state
        draw(again, 1)
    again.trained(left)
    assert saved(again) == {"loader": {**state["loader"], "position": 8}}


def test_after_resuming_with_smaller_batches_trained_ones_are_left_behind() -> None:
    queue = PromptQueue(loader(2))
    queue.trained(draw(queue, 2)[:1])
    again = PromptQueue(loader(1))
    again.load_state_dict(saved(queue))
    draw(again, 1)
    assert saved(again) == {"loader": {**saved(queue)["loader"], "position": 1}}


def test_the_state_of_a_synchronous_run_is_accepted() -> None:
    source = loader(2)
    next(iter(source))
    queue = PromptQueue(loader(2))
    draw(queue, 7)
    queue.load_state_dict({"loader": source.state_dict(), "step": 1})
    assert draw(queue, 5) == in_order(7, loader(2))[2:]


def test_only_a_prompt_that_was_drawn_can_be_trained_and_only_once() -> None:
    queue = PromptQueue(loader(2))
    uids = draw(queue, 2)
    queue.trained(uids[:1])
    for wrong in (uids[0], "7-1"):
        with pytest.raises(ValueError, match=f"'{wrong}' was not drawn"):
            queue.trained([wrong])


class Trainer:
    """Random starts and ends of groups, a checkpoint every few steps, and `kill`, after which it resumes from it."""

    def __init__(self, seed: int, steps: int, batch: int, save_every: int, **options: Any) -> None:
        self.random = Random(seed)
        self.steps, self.batch, self.save_every = steps, batch, save_every
        self.admission_options = {name: options.pop(name) for name in ("staleness", "window")}
        self.loader_options = options
        self.trained: list[str] = []
        self.resume({**PromptQueue(loader(batch, **options)).state_dict(), "clock": 0, "groups": []}, [])

    def resume(self, state: dict[str, Any], trained: list[str]) -> None:
        self.checkpoint = json.dumps([state, trained])
        self.queue = PromptQueue(loader(self.batch, **self.loader_options))
        self.queue.load_state_dict(state)
        self.admission = Admission(self.batch, total=self.steps * self.batch, **self.admission_options)
        self.admission.load_state_dict(state)
        assert draw(self.queue, self.admission.in_progress()) == self.admission.groups()
        self.running = self.admission.unfinished()
        self.trained = trained

    def kill(self) -> None:
        self.resume(*json.loads(self.checkpoint))

    def start(self) -> None:
        clock = self.admission.clock
        for uid in draw(self.queue, min(self.random.randint(1, 3), self.admission.capacity(clock))):
            self.admission.start(uid, clock)
            self.running.append(uid)

    def finish(self) -> None:
        if self.running:
            self.admission.finish(self.running.pop(self.random.randrange(len(self.running))))

    def train(self) -> None:
        clock = self.admission.clock
        batch = self.admission.take(clock)
        if batch is not None:
            self.trained += batch
            self.queue.trained(batch)
            if (clock + 1) % self.save_every == 0:
                state = {**self.queue.state_dict(), **self.admission.state_dict()}
                self.checkpoint = json.dumps([state, self.trained])

    def fit(self, kills: int) -> list[str]:
        while self.admission.clock < self.steps:
            events = [self.start, self.finish, self.finish, self.finish, self.train]
            event = self.random.choice(events if not kills else [*events, self.kill])
            kills -= event == self.kill
            event()
        return self.trained


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 4),
    save_every=st.integers(1, 3),
    kills=st.integers(0, 6),
    staleness=st.integers(0, 4),
    window=st.sampled_from([None, 1, 3]),
    drop_last=st.booleans(),
    mixture=st.booleans(),
)
def test_killed_runs_train_the_prompts_of_an_uninterrupted_one(
    seed: int, batch: int, save_every: int, kills: int, **options: Any
) -> None:
    steps = 9
    trained = Trainer(seed, steps, batch, save_every, **options).fit(kills)
    source = loader(batch, drop_last=options["drop_last"], mixture=options["mixture"])
    expected = in_order(steps * batch, source)
    assert sorted(trained) == sorted(expected)
    if options["window"] == 1:
        assert trained == expected


def test_a_killed_run_with_loader_threads_trains_every_prompt_once() -> None:
    trained = Trainer(5, 12, 3, 2, staleness=2, window=None, workers=2).fit(kills=4)
    assert sorted(trained) == sorted(in_order(36, loader(3)))
