"""Collecting some of the submitted samples, while another thread submits more."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import pytest

from verl.config.schema import RewardConfig
from verl.errors import RewardError
from verl.reward import RewardManager, RewardResult, RewardSample, build_reward_manager, scoring
from verl.reward.managers import NoRewards, require_streaming

WAIT_S = 600.0
GATED = """
import asyncio, os
async def compute_score(response, extra_info):
    while response == "held" and not os.path.exists(extra_info["gate"]):
        await asyncio.sleep(0.01)
    return {"score": float(extra_info["worth"])}
"""


def sample(index: int, response: str = "", gate: Path | None = None, worth: float = 0.0) -> RewardSample:
    return RewardSample(index, "p", response, extra_info={"gate": str(gate), "worth": worth})


def in_process(function) -> RewardManager:
    return build_reward_manager(RewardConfig(in_process=True), function=function, max_response_length=8)


@pytest.fixture
def gated(tmp_path):
    """A manager whose function runs in a worker process and holds some calls until the file `gate` is there."""
    path = tmp_path / "gated.py"
    path.write_text(GATED)
    config = RewardConfig(timeout_s=WAIT_S, max_concurrency=64)
    config.custom_reward_function.path = str(path)
    manager = build_reward_manager(config, max_response_length=8)
    yield manager, tmp_path / "gate"
    manager.close()


def scores(results: dict[int, RewardResult]) -> dict[int, float | None]:
    return {index: result.score for index, result in results.items()}


def test_only_the_wanted_are_waited_for_and_the_others_stay(gated):
    manager, gate = gated
    manager.submit(sample(4, "held", gate, worth=4))
    for index in (7, 2, 9):
        manager.submit(sample(index, gate=gate, worth=index))
    assert scores(manager.collect([9, 2])) == {2: 2.0, 9: 9.0}  # the held one cannot have ended
    gate.touch()
    assert scores(manager.collect([4])) == {4: 4.0}
    assert scores(manager.collect()) == {7: 7.0}
    assert manager.collect() == {} == manager.collect([])


@pytest.mark.parametrize("indices", [None, [0]])
def test_samples_submitted_during_a_collect_belong_to_a_later_one(gated, monkeypatch, indices):
    manager, gate = gated
    waiting = threading.Event()
    wait = scoring.wait

    def announced(calls):
        waiting.set()
        return wait(calls)

    monkeypatch.setattr(scoring, "wait", announced)
    manager.submit(sample(0, "held", gate, worth=5))
    collected: list[dict[int, RewardResult]] = []
    thread = threading.Thread(target=lambda: collected.append(manager.collect(indices)))
    thread.start()
    assert waiting.wait(WAIT_S)
    for index in range(1, 20):
        manager.submit(sample(index, gate=gate, worth=index))
    assert scores(manager.collect([3])) == {3: 3.0}  # two threads may wait at the same time
    gate.touch()
    thread.join(WAIT_S)
    assert [scores(each) for each in collected] == [{0: 5.0}]
    assert scores(manager.collect()) == {index: float(index) for index in range(1, 20) if index != 3}


@pytest.mark.parametrize("where", ["workers", "here", "batch"])
def test_every_sample_gets_exactly_one_result(gated, where):
    managers = {
        "workers": gated[0],
        "here": in_process(lambda extra_info: extra_info["worth"]),
        "batch": in_process(lambda completions, extra_info: [each["worth"] for each in extra_info]),
    }
    manager, groups = managers[where], queue.Queue()

    def generate() -> None:
        for first in range(0, 400, 4):
            indices = [first + (offset * 3) % 4 for offset in range(4)]
            for index in indices:
                manager.submit(sample(index, worth=index))
            groups.put(indices)

    thread = threading.Thread(target=generate)
    thread.start()
    found: dict[int, float | None] = {}
    for _ in range(50):  # two groups make a batch
        results = scores(manager.collect(groups.get(timeout=WAIT_S) + groups.get(timeout=WAIT_S)))
        assert not results.keys() & found.keys()
        found |= results
    thread.join(WAIT_S)
    assert found == {index: float(index) for index in range(400)} and manager.collect() == {}


def test_a_batch_function_gets_the_samples_of_the_call_by_their_index():
    calls = []

    def batch(completions):
        calls.append(completions)
        return [float(text) for text in completions]

    manager = in_process(batch)
    for index in (5, 3, 9, 1):
        manager.submit(sample(index, str(index)))
    assert scores(manager.collect([9, 3])) == {3: 3.0, 9: 9.0}
    assert scores(manager.collect()) == {5: 5.0, 1: 1.0}
    assert calls == [["3", "9"], ["5", "1"]]  # without indices in the order of submit


def test_functions_in_this_process_are_called_for_the_wanted_only():
    calls = []
    manager = in_process(lambda response: calls.append(response) or 1.0)
    for index in range(4):
        manager.submit(sample(index, str(index)))
    manager.collect([2, 1])
    assert calls == ["1", "2"] and manager.take_calls() == 2
    manager.collect()
    assert calls == ["1", "2", "0", "3"]


def test_what_an_interrupted_batch_left_is_no_result_of_the_next():
    def function(response):
        if response == "stop":
            raise KeyboardInterrupt
        return float(response)

    manager = in_process(function)
    for index, response in enumerate(["1", "stop", "2"]):
        manager.submit(sample(index, response))
    with pytest.raises(KeyboardInterrupt):
        manager.collect([0, 1])
    for index, response in enumerate(["10", "11", "12"]):  # index 2 was submitted before and never collected
        manager.submit(sample(index, response))
    assert scores(manager.collect([2, 1])) == {1: 11.0, 2: 12.0}
    assert scores(manager.collect()) == {0: 10.0}


def test_samples_nobody_submitted_are_an_error_and_cost_the_others_nothing():
    manager = in_process(lambda response: 1.0)
    manager.submit(sample(3))
    with pytest.raises(RewardError, match="not submitted.*: 4, 8"):
        manager.collect([8, 3, 4])
    assert scores(manager.collect([3])) == {3: 1.0}


def test_without_a_reward_the_wanted_are_0_and_the_others_stay():
    manager = NoRewards()
    for index in (4, 2, 3):
        manager.submit(sample(index))
    assert scores(manager.collect([3, 2])) == {2: 0.0, 3: 0.0}
    assert scores(manager.collect()) == {4: 0.0}


class AllAtOnce(RewardManager):
    """A user's manager written for synchronous training."""

    def submit(self, sample: RewardSample) -> None:
        raise NotImplementedError

    def collect(self) -> dict[int, RewardResult]:  # type: ignore[override]
        raise NotImplementedError


class Partial(AllAtOnce):
    def collect(self, wanted=None) -> dict[int, RewardResult]:
        raise NotImplementedError


def test_a_manager_that_can_only_collect_all_is_refused_where_batches_overlap():
    require_streaming(in_process(lambda response: 1.0), "fully_async")
    require_streaming(AllAtOnce(), "off")
    require_streaming(Partial(), "fully_async")
    with pytest.raises(RewardError, match=r"mode=one_step_off .*AllAtOnce.*indices=None.*mode=off") as error:
        require_streaming(AllAtOnce(), "one_step_off")
    assert "reward.reward_manager.name" in str(error.value)
