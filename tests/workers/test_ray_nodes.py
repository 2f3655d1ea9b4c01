"""Two nodes (two raylets on this machine): the numbers of one process, and what happens when one is lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from verl.workers.outcome import WorkersLost

pytestmark = pytest.mark.components

TWO_NODES = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]


@pytest.fixture
def second_node(joined):
    node = joined.add_node(num_cpus=2, object_store_memory=100_000_000)
    yield node
    if node in joined.list_all_nodes():
        joined.remove_node(node)


def lose_node_after_first_step(cluster, node, folder: Path) -> threading.Thread:
    def watch() -> None:
        metrics = folder / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") >= 1):
            time.sleep(0.05)
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


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


def test_a_lost_node_ends_the_run_and_the_rest_goes_on(train, joined, second_node, tmp_path):
    many = "trainer.total_training_steps=60", "trainer.save_freq=1", "trainer.watchdog_s=60"
    killer = lose_node_after_first_step(joined, second_node, tmp_path / "run")
    with pytest.raises(WorkersLost) as caught:
        train(*many, *TWO_NODES)
    killer.join()
    assert "rank 1 on" in str(caught.value) and "trainer.resume_mode=auto" in str(caught.value)
    saved = int((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text())
    steps = f"trainer.total_training_steps={saved + 2}"
    rows, _ = train(*many[1:], steps, "trainer.nnodes=1", "trainer.n_gpus_per_node=2")
    assert [row["training/global_step"] for row in rows] == list(range(1, saved + 3))


def test_a_restart_takes_the_nodes_that_are_left(train, joined, second_node, tmp_path, caplog):
    killer = lose_node_after_first_step(joined, second_node, tmp_path / "run")
    rows, _ = train(
        "trainer.total_training_steps=40", "trainer.save_freq=1", *TWO_NODES, "trainer.max_restarts=1"
    )
    killer.join()
    assert [row["training/global_step"] for row in rows] == list(range(1, 41))
    assert "restart 1 of 1 (trainer.max_restarts) on 1 x 1 processes" in caplog.text
