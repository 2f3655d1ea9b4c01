"""Places in the cluster: for all pools of a run or for none, and for a restart what is left, if the run fits there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from verl.config.load import load_ppo_config
from verl.config.parallelism import ROLLOUT, Pool

pytestmark = [pytest.mark.components, pytest.mark.timeout(300)]
PATIENCE_S = 120.0
TRAINER, ENGINES = Pool("trainer", 1, 2), Pool(ROLLOUT, 1, 1)


@pytest.fixture
def connected(joined: Any) -> Iterator[Any]:
    """To a cluster with 4 CPUs."""
    ray = pytest.importorskip("ray")
    ray.init(address=joined.address, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def test_two_runs_that_wait_for_the_same_places_get_them_one_after_the_other(
    connected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each needs 2 + 1 of 4 CPUs; when the job before them ends, Ray may give each its 2."""
    from verl.workers import ray_reservation
    from verl.workers.ray_reservation import Reservation

    monkeypatch.setattr(ray_reservation, "HOLD_S", 0.5)
    before = Reservation([Pool("trainer", 1, 4)], gpus=False)
    before.wait(PATIENCE_S)
    problems: list[Exception] = []
    got = []

    def run() -> None:
        reservation = Reservation([TRAINER, ENGINES], gpus=False)
        try:
            reservation.wait(PATIENCE_S)
            got.append(sorted(reservation.groups))
        except Exception as error:
            problems.append(error)
        reservation.release()

    runs = [threading.Thread(target=run) for _ in range(2)]
    for each in runs:
        each.start()
    time.sleep(1.0)  # both are queued
    before.release()
    for each in runs:
        each.join(2 * PATIENCE_S)
    assert not problems and got == [[ROLLOUT, "trainer"]] * 2


def test_places_that_other_jobs_use_are_said_to_be_in_use(connected: Any) -> None:
    from verl.workers.ray_reservation import ClusterError, Reservation

    others = Reservation([Pool("trainer", 1, 3)], gpus=False)
    others.wait(PATIENCE_S)
    try:
        with pytest.raises(ClusterError) as caught:
            Reservation([TRAINER], gpus=False).wait(2.0)
    finally:
        others.release()
    message = str(caught.value)
    assert message.startswith(
        "the cluster is in use by other jobs: trainer.nnodes=1 nodes with 2 CPU each are needed"
    )
    assert "1 of 4 CPU free" in message


def fake(room: Callable[[float], list[int]]) -> Any:
    """A reservation in a cluster whose nodes have `room(seconds)` for ranks."""
    from verl.workers.ray_reservation import Reservation

    class Fake(Reservation):
        def _ranks_by_node(self, pool: Pool) -> list[int]:
            return room(time.monotonic() - started)

        def _first_missing(self, pools: Sequence[Pool]) -> Pool | None:
            time.sleep(0.01)
            return None if self._fitting(pools[-1]) >= pools[-1].nodes else pools[-1]

        def too_small(self, pool: Pool) -> str:
            return f"no room for {pool.asked}"

    started = time.monotonic()
    return Fake([FOUR], gpus=False)


FOUR = Pool("trainer", 4, 2)


def pairs_of_nodes(nodes: int, per_node: int) -> bool:
    return nodes * per_node % 4 == 0


def test_a_restart_waits_for_a_node_to_come_back(caplog: pytest.LogCaptureFixture) -> None:
    reservation = fake(lambda seconds: [2, 2, 2] if seconds < 0.3 else [2, 2, 2, 2])
    with caplog.at_level("INFO"):
        assert reservation.capacity(FOUR, PATIENCE_S, PATIENCE_S, pairs_of_nodes) == (4, 2)
    assert "waiting for a node to come back: trainer.nnodes=4 trainer.n_gpus_per_node=2" in caplog.text


def test_a_restart_takes_the_most_nodes_for_which_the_layout_fits() -> None:
    def capacity(room: list[int], fits: Callable[[int, int], bool] = pairs_of_nodes) -> tuple[int, int]:
        answer: tuple[int, int] = fake(lambda _: room).capacity(FOUR, 0.0, 0.1, fits)
        return answer

    from verl.workers.ray_reservation import ClusterError

    assert capacity([2, 2, 2]) == (2, 2)
    assert capacity([2, 2, 2], lambda *_: True) == (3, 2)
    assert capacity([1, 1], lambda *_: True) == (1, 1)
    with pytest.raises(ClusterError, match="no room for trainer.nnodes=4"):
        capacity([2])
    with pytest.raises(ClusterError):
        capacity([])


def test_where_no_number_of_nodes_fits_a_restart_waits_longer() -> None:
    reservation = fake(lambda seconds: [2] if seconds < 0.3 else [2, 2])
    assert reservation.capacity(FOUR, 0.0, PATIENCE_S, pairs_of_nodes) == (2, 2)


def test_sizes_that_do_not_divide_the_ranks_left_are_known() -> None:
    from verl.config.checks import rank_errors

    cfg = load_ppo_config(
        [
            "data.train_files=a.parquet",
            "actor_rollout_ref.model.path=m",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=8",
            "trainer.nnodes=4",
            "trainer.n_gpus_per_node=2",
            "actor_rollout_ref.actor.fsdp_config.fsdp_size=4",
        ]
    )
    assert not rank_errors(cfg)
    cfg.trainer.nnodes = 3
    assert "fsdp_size' is 4, which does not divide the 6 ranks" in rank_errors(cfg)[0]
    cfg.actor_rollout_ref.actor.fsdp_config.fsdp_size = -1
    assert not rank_errors(cfg)
    cfg.actor_rollout_ref.actor.ulysses_sequence_parallel_size = 4
    assert "does not divide the 6 of" in rank_errors(cfg)[0]


def test_looking_for_places_writes_no_timeline(overrides: Any, joined: Any, tmp_path: Any) -> None:
    """A restart does it in a connection of its own; the file has the calls of the run before."""
    from verl.workers.ray_cluster import Cluster

    words = ["trainer.n_gpus_per_node=2", f"ray_kwargs.timeline_json_file={tmp_path}/timeline.json"]
    cluster = Cluster(load_ppo_config(overrides(*words)))
    cluster.connect()
    try:
        assert cluster.capacity(0.0, PATIENCE_S, lambda *_: True) == (1, 2)
    finally:
        cluster.close()
    assert not (tmp_path / "timeline.json").exists()
