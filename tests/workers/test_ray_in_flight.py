"""A pool that takes weights while it generates: what is drawn by which weights, and whoever fails is named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.workers import faults
from verl.errors import WorkersLost
from verl.rollout.base import Request, Response, SamplingParams

pytestmark = [pytest.mark.components, pytest.mark.timeout(900)]

WAIT_S = 240
FACTOR = 1.25
STEPS = {0: 5, 1: 30}
"""Polls that versions may make while a request with the name `held...` is outstanding: 1 is enough for the probe."""
HELD = SamplingParams(max_tokens=80, ignore_eos=True)
PLUGIN = """
import os, time
from collections import Counter
from pathlib import Path
import torch
from verl.rollout.native import NativeRollout
from verl.workers.rollout_rank import RolloutRank
from verl.workers.train_rank import TrainRank

folder, steps, polls, _poll = Path({folder!r}), {steps}, Counter(), NativeRollout.poll

def poll(self, timeout_s=None):
    if not any(name.startswith("held") for name in self._outstanding):
        return _poll(self, timeout_s)
    if polls[self.version] >= steps.get(self.version, 10**9):
        (folder / f"stopped-{{self.version}}-{{os.getpid()}}").touch()
        while (folder / "hang").exists():
            time.sleep(100_000)
        time.sleep(0.01)
        return []
    polls[self.version] += 1
    return _poll(self, 0)

def learn(self):
    with self.group.actor_engine.weights().structure() as module, torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_({factor})

def train(self):
    (folder / "training").touch()
    while not (folder / "trained").exists():
        time.sleep(0.01)

_sync = TrainRank.do_sync_weights

def sync_weights(self, version):
    while (folder / "hang the trainer").exists():
        time.sleep(100_000)
    return _sync(self, version)

_link = RolloutRank.do_link

def link(self, size):
    NativeRollout.poll = poll  # not in the process of the test
    return _link(self, size)

def node(self):
    return os.getppid()

RolloutRank.do_link, TrainRank.do_sync_weights = link, sync_weights
RolloutRank.do_node = TrainRank.do_node = node
TrainRank.do_learn, TrainRank.do_train = learn, train
"""


@pytest.fixture
def second_node(joined: Any) -> Iterator[Any]:
    worker = str(Path(__file__).with_name("forked_worker.py"))
    node = joined.add_node(num_cpus=2, object_store_memory=100_000_000, worker_path=worker)
    yield node
    joined.remove_node(node, allow_graceful=False)


@pytest.fixture
def build(
    overrides: Any, tiny_tokenizer: Any, joined: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    from verl.config.load import load_ppo_config
    from verl.workers.ray_group import RayGroup

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "held_pool.py").write_text(PLUGIN.format(folder=str(tmp_path), steps=STEPS, factor=FACTOR))
    made: list[Any] = []

    def make(trainer: int, rollout: int, *extra: str) -> Any:
        settings = overrides(
            f"trainer.n_gpus_per_node={trainer}",
            "actor_rollout_ref.rollout.nnodes=1",
            f"actor_rollout_ref.rollout.n_gpus_per_node={rollout}",
            "actor_rollout_ref.rollout.max_num_seqs=16",
            f"data.max_response_length={HELD.max_tokens}",
            "trainer.plugins=[held_pool]",
            *extra,
        )
        group = RayGroup(load_ppo_config(settings), tiny_tokenizer, training_steps=9, run_folder=tmp_path)
        made.append(group)
        return group

    yield make
    (tmp_path / "trained").touch()
    for group in made:
        group.close()


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    threads = ThreadPoolExecutor(2)
    yield threads
    threads.shutdown(wait=False)  # after a failure they wait for what does not come


def do_learn(rank: Any) -> None:
    """Names the plug-in's method of a rank, as the two below."""


def do_train(rank: Any) -> None: ...
def do_node(rank: Any) -> Any: ...


def pids(calls: Any) -> list[int]:
    return [int(name.split("(process ")[1].rstrip(")")) for name in calls.names]


def held(count: int, first: int = 0) -> list[Request]:
    return [Request(f"held{i}", [3 + i % 7, 4], HELD, n=2, seed=7) for i in range(first, first + count)]


def poll_all(engine: Any, samples: int) -> dict[tuple[str, int], Response]:
    found: dict[tuple[str, int], Response] = {}
    deadline = time.monotonic() + WAIT_S
    while len(found) < samples:
        assert time.monotonic() < deadline, f"{len(found)} of {samples} came"
        for response in engine.poll(0.5):
            assert (response.request_id, response.sample) not in found, "answered twice"
            found[response.request_id, response.sample] = response
    return found


def stopped(folder: Path, version: int, ranks: int) -> Callable[[], bool]:
    return lambda: len(list(folder.glob(f"stopped-{version}-*"))) == ranks


def learn_and_sync(group: Any) -> dict[str, float]:
    """What `update` does, without a batch."""
    group.calls.all(do_learn)
    group.policy_version += 1
    return group.sync_weights()


def drawn(folder: Path, updates: int, requests: list[Request]) -> dict[tuple[str, int], Response]:
    """By an engine of this process, with the weights after that many updates."""
    import torch
    from transformers import AutoModelForCausalLM

    from verl.rollout.native import NativeRollout

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            for _ in range(updates):
                parameter.mul_(FACTOR)
    return {(r.request_id, r.sample): r for r in NativeRollout(model, None).generate(requests)}


@pytest.mark.parametrize("nodes", [1, 2])
def test_samples_go_on_with_new_weights(
    nodes: int,
    build: Callable[..., Any],
    aside: ThreadPoolExecutor,
    tmp_path: Path,
    tiny_model_dir: Path,
    request: pytest.FixtureRequest,
) -> None:
    if nodes == 1:
        group, ranks = build(1, 1), 1
    else:  # four places on the first node: two that generate fit on the second one only
        node = request.getfixturevalue("second_node")
        group, ranks = build(3, 2), 2
        (raylet,) = (info.process.pid for info in node.all_processes["raylet"])
        assert set(group.pool.calls.all(do_node)) == {raylet}
        assert raylet not in group.calls.all(do_node)
    engine = group.rollout
    requests = held(2 * ranks)
    engine.submit(requests)
    running = aside.submit(poll_all, engine, 4 * ranks + 2)
    assert faults.wait_for(stopped(tmp_path, 0, ranks), WAIT_S)
    assert learn_and_sync(group)["rollout/probe_gap"] < 1e-3, "compared although samples run"
    assert faults.wait_for(stopped(tmp_path, 1, ranks), WAIT_S)
    assert not running.done()
    assert learn_and_sync(group)["rollout/probe_gap"] < 1e-3
    after = [Request("after", [5, 6], HELD, n=2, seed=3)]
    engine.submit(after)
    found = running.result(WAIT_S)

    old, new = drawn(tiny_model_dir, 0, requests), drawn(tiny_model_dir, 2, after)
    for sample in range(2):
        response = found.pop(("after", sample))
        assert response.token_ids == new["after", sample].token_ids
        assert (response.policy_version, response.version_changes) == (2, [])
    for key, response in found.items():
        assert len(response.token_ids) == HELD.max_tokens and response.policy_version == 0
        assert [version for _, version in response.version_changes] == [1, 2]
        first = response.version_changes[0][0]
        assert 0 < first <= STEPS[0]
        assert response.token_ids[:first] == old[key].token_ids[:first]
        assert response.token_ids != old[key].token_ids

    # Nothing runs.
    assert engine.poll(0) == []
    learn_and_sync(group)
    again = [Request("again", [5, 6], HELD, n=2, seed=3)]
    fresh = drawn(tiny_model_dir, 3, again)
    for response in engine.generate(again):
        assert response.token_ids == fresh["again", response.sample].token_ids
        assert response.policy_version == 3


def test_an_abort_while_weights_are_awaited(
    build: Callable[..., Any], aside: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """The thread that generates calls samples off while the other one sends weights."""
    group = build(1, 1)
    engine = group.rollout
    engine.submit(held(2))
    running = aside.submit(poll_all, engine, 4)
    assert faults.wait_for(stopped(tmp_path, 0, 1), WAIT_S)
    synced = aside.submit(learn_and_sync, group)
    engine.abort(["held1"])
    assert synced.result(WAIT_S)
    assert faults.wait_for(stopped(tmp_path, 1, 1), WAIT_S)
    learn_and_sync(group)
    found = running.result(WAIT_S)
    reasons = {key: response.finish_reason for key, response in found.items()}
    assert reasons == {
        ("held0", 0): "length",
        ("held0", 1): "length",
        ("held1", 0): "abort",
        ("held1", 1): "abort",
    }


def error_of(call: Future[Any]) -> str:
    with pytest.raises(WorkersLost) as caught:
        call.result(WAIT_S)
    return str(caught.value)


@pytest.mark.parametrize("generates", [True, False])
def test_a_killed_rollout_rank_is_named_while_the_trainer_trains(
    generates: bool, build: Callable[..., Any], aside: ThreadPoolExecutor, tmp_path: Path
) -> None:
    group = build(1, 1)
    calls = [aside.submit(group.calls.all, do_train)]
    if generates:
        group.rollout.submit(held(2))
        calls.append(aside.submit(poll_all, group.rollout, 4))
        assert faults.wait_for(stopped(tmp_path, 0, 1), WAIT_S)
    assert faults.wait_for((tmp_path / "training").exists, WAIT_S)
    os.kill(*pids(group.pool.calls), signal.SIGKILL)
    for call, where in zip(calls, ["train of rank 0", "generate"], strict=False):
        message = error_of(call)
        assert message.startswith("rollout rank 0 on ") and f"died in {where}" in message, message
        assert "trainer.resume_mode=auto" in message


def watch(monkeypatch: pytest.MonkeyPatch, since: Path) -> None:
    """On a busy machine the start alone may take longer than a short limit: the watch begins with the fault."""
    from verl.workers.ray_calls import RankCalls

    look = RankCalls.check_progress
    monkeypatch.setattr(RankCalls, "check_progress", lambda *args: look(*args) if since.exists() else None)


def test_a_hung_rollout_rank_is_named_by_both_sides(
    build: Callable[..., Any],
    aside: ThreadPoolExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the one that waits for samples, while the trainer has nothing to do; by a sync to which it does not come."""
    watch(monkeypatch, tmp_path / "hang")
    group = build(1, 1, "trainer.watchdog_s=6")
    group.rollout.submit(held(2))
    running = aside.submit(poll_all, group.rollout, 4)
    assert faults.wait_for(stopped(tmp_path, 0, 1), WAIT_S)
    (tmp_path / "hang").touch()
    message = error_of(running)
    assert "no progress for 6 s (trainer.watchdog_s) in generate" in message, message
    assert "rollout rank 0 on " in message and "time.sleep(100_000)" in message, message
    assert "waits for generate of rollout rank 0." in message, message
    message = error_of(aside.submit(learn_and_sync, group))
    assert "in sync_weights." in message and ", in generate." in message, message
    assert "waits for rollout rank 0 at" in message, message


def test_a_trainer_that_does_not_come_to_a_sync_is_named_by_both_sides(
    build: Callable[..., Any],
    aside: ThreadPoolExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch(monkeypatch, tmp_path / "hang the trainer")
    group = build(1, 1, "trainer.watchdog_s=6")
    group.rollout.submit(held(2))
    running = aside.submit(poll_all, group.rollout, 4)
    assert faults.wait_for(stopped(tmp_path, 0, 1), WAIT_S)
    (tmp_path / "hang the trainer").touch()
    synced = aside.submit(learn_and_sync, group)
    for call, name in ((synced, "sync_weights"), (running, "generate")):
        message = error_of(call)
        assert f"no progress for 6 s (trainer.watchdog_s) in {name}" in message, message
        assert "\nrank 0 on " in message and "is stuck at" in message, message
        assert "waits for rank 0 at" in message and "Stack of rank 0" in message, message
