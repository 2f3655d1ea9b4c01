"""Two nodes (two raylets on this machine): the numbers of one process, and what happens when one is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.workers import faults
from tests.workers.faults import PPO, extended
from verl.errors import WorkersLost

pytestmark = [pytest.mark.components, pytest.mark.timeout(600)]

TWO_NODES = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.save_freq=1", "trainer.watchdog_s=180"]
MISSED_IN = {"testing": "open_generation", "reward": "log_probs", "adv": "train_critic"}
"""Phases in which the controller works itself, and the call in which it misses the rank of a node that died then."""


@pytest.fixture
def second_node(joined):
    worker = str(Path(__file__).with_name("forked_worker.py"))
    node = joined.add_node(num_cpus=2, object_store_memory=100_000_000, worker_path=worker)
    yield node
    if node in joined.list_all_nodes():
        joined.remove_node(node, allow_graceful=False)


@pytest.fixture
def raylet(second_node):
    (process,) = (info.process.pid for info in second_node.all_processes["raylet"])
    return process


@pytest.fixture
def node_dies(raylet, tmp_path, monkeypatch):
    """A plugin by which the second node's raylet is killed from below, by a rank in the middle of a call. `after`: not
    before this file is there."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def plan(phase: str, after: Path | None = None) -> str:
        # Which rank sits on which node is Ray's choice.
        name = faults.write(tmp_path, phase, "kill the node", rank=None, nth=None, node=raylet, after=after)
        return f"trainer.plugins=[{name}]"

    return plan


def test_two_nodes_give_the_numbers_of_one_process(train, second_node, tmp_path):
    steps = "trainer.total_training_steps=3"
    alone, _ = train(steps, folder="alone")
    timeline = tmp_path / "timeline.json"
    rows, _ = train(steps, *TWO_NODES, f"ray_kwargs.timeline_json_file={timeline}", folder="two")
    for mine, one in zip(rows, alone, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
            assert mine[name] == pytest.approx(one[name], rel=2e-3, abs=2e-5), name
    text = timeline.read_text()
    assert text.startswith("[") and "RankProcess.serve" in text


def test_a_lost_node_ends_the_run_and_the_rest_goes_on(train, node_dies, session_folder, tmp_path):
    saved = tmp_path / "run" / "latest_checkpointed_iteration.txt"
    with pytest.raises(WorkersLost) as caught:
        train(*PPO, "trainer.total_training_steps=3", *TWO_NODES, node_dies("train_actor", after=saved))
    message = str(caught.value)
    assert message.startswith("rank ") and "died in train_actor: its node was lost." in message, message
    assert "trainer.resume_mode=auto" in message, message
    assert faults.wait_for(lambda: not faults.rank_processes(session_folder), 240)
    assert saved.read_text().strip() == "1"
    one_node = ["trainer.nnodes=1", "trainer.n_gpus_per_node=2", *TWO_NODES[2:]]
    rows, _ = train(*PPO, "trainer.total_training_steps=3", *one_node)
    assert [row["training/global_step"] for row in rows] == [1, 2, 3]


@pytest.mark.parametrize("phase", extended(["generate", "update_weights", "save"], ["update_weights"]))
def test_a_node_that_dies_in_a_call_is_missed(phase, train, node_dies, session_folder):
    """One call of each kind: results that come in parts, none, and files. A rank that dies is missed in every call:
    test_ray_faults.py."""
    with pytest.raises(WorkersLost) as caught:
        train(*PPO, "trainer.total_training_steps=1", *TWO_NODES, node_dies(phase))
    message = str(caught.value)
    assert message.startswith("rank ") and f"died in {phase}: its node was lost." in message, message
    assert faults.wait_for(lambda: not faults.rank_processes(session_folder), 240)


@pytest.mark.parametrize("phase", extended(MISSED_IN, ["reward"]))
def test_a_node_that_dies_while_the_controller_works_is_missed(
    phase, train, raylet, session_folder, digits_data, monkeypatch
):
    validation = [f"data.val_files={digits_data}/val.jsonl", "trainer.val_before_train=True"]
    more = validation if phase == "testing" else []

    def node_dies() -> None:
        """With its rank, which outlives its daemon by a moment: on a fast machine the run could end in it."""
        os.kill(raylet, signal.SIGKILL)
        assert faults.wait_for(lambda: len(faults.rank_processes(session_folder)) < 2, 120)

    with (
        faults.before_phase(monkeypatch, phase, node_dies),
        pytest.raises(WorkersLost) as caught,
    ):
        train(*PPO, "trainer.total_training_steps=1", *TWO_NODES, *more)
    message = str(caught.value)
    assert message.startswith("rank ") and f"died in {MISSED_IN[phase]}: its node was lost." in message, (
        message
    )
    assert faults.wait_for(lambda: not faults.rank_processes(session_folder), 240)


def test_a_restart_takes_the_nodes_that_are_left(train, node_dies, caplog, tmp_path):
    steps, saved = "trainer.total_training_steps=4", tmp_path / "run" / "latest_checkpointed_iteration.txt"
    restarts = ["trainer.max_restarts=1", "trainer.restart_wait_s=1"]
    rows, _ = train(steps, *TWO_NODES, *restarts, node_dies("generate", after=saved))
    assert [row["training/global_step"] for row in rows] == [1, 2, 3, 4]
    assert "restart 1 of 1 (trainer.max_restarts) on 1 x 1 processes" in caplog.text
