"""A small command line, one Ray cluster for the whole session, and a look at which processes are left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import read_metrics, tiny_run

for _name, _value in {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)


@pytest.fixture(scope="session")
def ray_cluster(fork_server: Any) -> Iterator[Any]:
    """An existing cluster, which runs join by RAY_ADDRESS. Starting one for every test would cost seconds each, and so
    would a worker that imports torch by itself."""
    pytest.importorskip("ray", reason="needs the package ray (pip install -e '.[ray]')")
    from ray.cluster_utils import Cluster

    os.environ["VERL_TEST_FORK_SERVER"] = fork_server.address
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "object_store_memory": 200_000_000,
            "include_dashboard": False,
            "worker_path": str(Path(__file__).with_name("forked_worker.py")),
            # A dead node is noticed after five seconds instead of fifteen.
            "_system_config": {"health_check_period_ms": 1000, "health_check_failure_threshold": 5},
        },
    )
    yield cluster
    cluster.shutdown()


@pytest.fixture
def session_folder(ray_cluster: Any) -> str:
    """Where the processes of the session's cluster write: it tells them from those of any other cluster."""
    return str(ray_cluster.head_node.get_session_dir_path())


@pytest.fixture
def joined(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs join the session's cluster."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    return ray_cluster


@pytest.fixture
def overrides(tiny_model_dir: Path, digits_data: Path, tmp_path: Path) -> Callable[..., list[str]]:
    def make(*extra: str, folder: str = "run") -> list[str]:
        usual = ("data.train_batch_size=10", "trainer.total_training_steps=5")
        return tiny_run(tiny_model_dir, digits_data, *usual, *extra, folder=tmp_path / folder)

    return make


@pytest.fixture
def train(overrides: Callable[..., list[str]]) -> Callable[..., tuple[list[dict[str, Any]], Path]]:
    """Run the command's code path; the rows of metrics.jsonl and the run folder."""
    from verl.config.load import load_ppo_config
    from verl.trainer.main_ppo import run

    def go(*extra: str, folder: str = "run") -> tuple[list[dict[str, Any]], Path]:
        result = run(load_ppo_config(overrides(*extra, folder=folder)))
        return read_metrics(result.folder), result.folder

    return go
