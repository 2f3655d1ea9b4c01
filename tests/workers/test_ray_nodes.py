"""Two nodes (two raylets on this machine): the numbers of one process, and what happens when one is lost."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from verl.workers.outcome import WorkersLost

pytestmark = [pytest.mark.components, pytest.mark.timeout(600)]

_spec = importlib.util.spec_from_file_location("faults", Path(__file__).with_name("faults.py"))
assert _spec and _spec.loader
faults = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(faults)

PPO = ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3"]
TWO_NODES = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.save_freq=1", "trainer.watchdog_s=60"]


@pytest.fixture
def second_node(joined):
    node = joined.add_node(num_cpus=2, object_store_memory=100_000_000)
    yield node
    if node in joined.list_all_nodes():
        joined.remove_node(node, allow_graceful=False)


@pytest.fixture
def node_dies(second_node, tmp_path, monkeypatch):
    """A plugin that kills the second node's raylet from below, in a phase of the first step after a checkpoint."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (raylet,) = (info.process.pid for info in second_node.all_processes["raylet"])

    def plan(phase: str) -> str:
        saved: dict[str, Any] = {"after": tmp_path / "run" / "latest_checkpointed_iteration.txt"}
        # Which rank sits on which node is Ray's choice.
        name = faults.write(tmp_path, phase, "kill the node", rank=None, nth=None, node=raylet, **saved)
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
    assert text.startswith("[") and "RankActor.serve" in text


@pytest.mark.parametrize("phase", ["generate", "values", "train_actor", "save"])
def test_a_lost_node_ends_the_run_and_the_rest_goes_on(
    phase, train, joined, node_dies, session_folder, tmp_path
):
    with pytest.raises(WorkersLost) as caught:
        train(*PPO, "trainer.total_training_steps=3", *TWO_NODES, node_dies(phase))
    message = str(caught.value)
    assert message.startswith("rank ") and "trainer.resume_mode=auto" in message, message
    assert faults.wait_for(lambda: not faults.rank_processes(session_folder), 60)
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
    if phase == "train_actor":
        one_node = ["trainer.nnodes=1", "trainer.n_gpus_per_node=2", *TWO_NODES[2:]]
        rows, _ = train(*PPO, "trainer.total_training_steps=3", *one_node)
        assert [row["training/global_step"] for row in rows] == [1, 2, 3]


def test_a_restart_takes_the_nodes_that_are_left(train, joined, node_dies, caplog):
    steps = "trainer.total_training_steps=4"
    rows, _ = train(steps, *TWO_NODES, "trainer.max_restarts=1", node_dies("generate"))
    assert [row["training/global_step"] for row in rows] == [1, 2, 3, 4]
    assert "restart 1 of 1 (trainer.max_restarts) on 1 x 1 processes" in caplog.text
