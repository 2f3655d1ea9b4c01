"""A reward model in processes of its own: a real cluster, real kills."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from verl.config.schema import PPOConfig
from verl.reward import RewardSample, build_reward_manager
from verl.workers.placement import build_reward_model

pytestmark = [pytest.mark.components, pytest.mark.timeout(900)]
pytest.importorskip("ray", reason="needs the package ray (pip install -e '.[ray]')")

for _name, _value in {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}.items():
    os.environ.setdefault(_name, _value)

_spec = importlib.util.spec_from_file_location(
    "small_models", Path(__file__).parents[1] / "reward" / "test_model.py"
)
assert _spec and _spec.loader
small_models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(small_models)

TITLE = b"RankProcess"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return small_models.build(tmp_path_factory.mktemp("rm"))


@pytest.fixture(scope="module")
def cluster(fork_server) -> Iterator[Any]:
    """One for all tests here: a start takes seconds. Its GPUs exist only for Ray's bookkeeping."""
    from ray.cluster_utils import Cluster

    os.environ["VERL_TEST_FORK_SERVER"] = fork_server.address
    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "num_gpus": 4,
            "object_store_memory": 100_000_000,
            "include_dashboard": False,
            "worker_path": str(Path(__file__).parents[1] / "workers" / "forked_worker.py"),
        },
    )
    yield made
    made.shutdown()


@pytest.fixture
def run(folder, cluster, monkeypatch) -> PPOConfig:
    """A run with two processes for its reward model, which joins that cluster."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    cfg = PPOConfig(reward=small_models.config(folder, micro_batch_size_per_gpu=2))
    cfg.trainer.device = "cpu"
    cfg.reward.reward_model.n_gpus_per_node, cfg.reward.reward_model.nnodes = 2, 1
    return cfg


def manager_of(run: PPOConfig) -> Any:
    factory = partial(build_reward_model, run)
    return build_reward_manager(run.reward, max_response_length=8, reward_model_factory=factory)


@pytest.fixture
def build(gone) -> Iterator[Any]:
    managers = []

    def make(run: PPOConfig) -> Any:
        manager = manager_of(run)
        managers.append(manager)
        return manager

    yield make
    left = [pid for manager in managers for pid in processes(manager)]
    for manager in managers:
        manager.close()
    assert all(gone(pid) for pid in left)


def processes(manager: Any) -> list[int]:
    """The processes of its pool, by rank."""
    names = manager.terms[0].backend.pool.calls.names
    return [process_of(name) for name in names]


def process_of(name: str) -> int:
    return int(name.rpartition("(process ")[2].rstrip(")"))


def samples(count: int) -> list[RewardSample]:
    question = [{"role": "user", "content": "a b"}]
    letters = "abcdefghijklmnop"
    return [
        RewardSample(7 * at, "", " ".join(letters[at % 11 : at % 11 + at % 5]), messages=question)
        for at in range(count)
    ]


def score(manager: Any, given: list[RewardSample]) -> list[float]:
    for sample in given:
        manager.submit(sample)
    results = manager.collect()
    return [results[sample.index].score for sample in given]


def test_scores_are_those_of_one_process_until_one_of_the_pool_is_killed(run, build, monkeypatch):
    from verl.errors import WorkersLost

    given = samples(40)
    in_process = small_models.config(run.reward.reward_model.model_path)
    expected = [result.score for result in small_models.run(in_process, given)]
    folder = Path(run.reward.reward_model.model_path)
    monkeypatch.chdir(folder.parent)  # where the cluster was not started
    run.reward.reward_model.model_path = folder.name
    manager = build(run)
    backend = manager.terms[0].backend
    results = backend.submit(0, given).result()
    assert [result.score for result in results] == pytest.approx(expected, abs=1e-5)
    assert set(backend.scored) == {0, 1} and backend.scored.total() == 40
    assert score(manager, given[:3]) == pytest.approx(expected[:3], abs=1e-5)  # and again, fewer than a batch

    # Scoring does not wait to be asked for: here nothing is collected before all is done.
    for sample in given:
        manager.submit(sample)
    assert within(240, lambda: backend.scored.total() == 83)
    assert manager.collect([14, 7])[7].score == pytest.approx(expected[1], abs=1e-5)
    assert len(manager.collect()) == 38

    victim = processes(manager)[1]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(
        WorkersLost,
        match=rf"^reward model rank 1 on .* \(process {victim}\) died in score: its process was killed",
    ):
        backend.submit(0, given).result()
    with pytest.raises(WorkersLost):  # no score is made up, now or later
        manager.submit(given[0])


def test_a_process_that_hangs_is_named_after_the_watchdogs_time(run, build, monkeypatch):
    from verl.errors import WorkersLost
    from verl.workers.reward_model_pool import ModelPool

    load = ModelPool.load_model

    def load_and_watch(pool: Any) -> Any:
        # On a busy machine this alone may take longer than the short limit of what follows.
        facts = load(pool)
        pool.calls.watchdog_s = 3.0
        return facts

    monkeypatch.setattr(ModelPool, "load_model", load_and_watch)
    run.reward.reward_model.n_gpus_per_node = 1
    manager = build(run)
    (victim,) = processes(manager)
    os.kill(victim, signal.SIGSTOP)
    with pytest.raises(WorkersLost) as caught:
        score(manager, samples(4))
    assert "no progress for 3 s (trainer.watchdog_s) in score" in str(caught.value)
    assert f"reward model rank 0 on {os.uname().nodename} (process {victim}) does not answer" in str(
        caught.value
    )


def test_what_a_process_cannot_load_is_said_with_its_place_and_nothing_stays(run, nobody_left, tmp_path):
    from verl.errors import ModelError

    run.reward.reward_model.n_gpus_per_node = 1
    run.reward.reward_model.model_path = small_models.build(tmp_path / "two", labels=2)
    with pytest.raises(
        ModelError, match=r"^reward model rank 0 on .* \(process \d+\), in build: .*has 2 labels"
    ):
        manager_of(run)
    assert nobody_left()


def test_the_gpus_of_this_process_are_not_given_away(run, monkeypatch):
    from verl.workers.reward_model_pool import ModelPool, RewardModelRank

    monkeypatch.setattr(ModelPool, "load_model", lambda self: None)
    run.trainer.device = "cuda"
    for visible, ours in ((None, {"0"}), ("2,3", {"2"})):
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        else:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        pool = ModelPool(run)
        try:
            given = [gpu for gpus in pool.calls.all(RewardModelRank.do_gpus) for gpu in gpus]
            assert len(given) == 2 and not set(given) & ours
        finally:
            pool.close()


def test_no_room_is_said_with_the_keys(run, monkeypatch):
    from verl.workers import reward_model_pool
    from verl.workers.ray_cluster import ClusterError

    monkeypatch.setattr(reward_model_pool, "START_S", 1.0)
    run.reward.reward_model.n_gpus_per_node = 9
    with pytest.raises(
        ClusterError, match=r"reward\.reward_model\.nnodes=1 nodes with 9 CPU each are needed"
    ):
        manager_of(run)


def test_a_cluster_of_our_own_that_is_too_small_is_refused_at_once(run, monkeypatch):
    from verl.workers.ray_cluster import Cluster, ClusterError

    cluster = Cluster(run, "reward.reward_model")
    cluster.connect()
    try:
        run.reward.reward_model.nnodes = 2
        with pytest.raises(ClusterError, match=r"1 node.*Set reward\.reward_model\.nnodes=1"):
            cluster.refuse_impossible()
        run.reward.reward_model.nnodes = 1
        cluster.refuse_impossible()
        run.trainer.device, run.reward.reward_model.n_gpus_per_node = "cuda", 4
        with pytest.raises(ClusterError, match=r"n_gpus_per_node=4 need 5 GPUs.*with 4 GPUs"):
            cluster.refuse_impossible()
    finally:
        cluster.close()


def test_a_killed_trainer_leaves_no_process(run, gone, tmp_path):
    script = (
        "import sys, time; from verl.config.load import load_ppo_config\n"
        "from verl.workers.placement import build_reward_model\n"
        "backend = build_reward_model(load_ppo_config(sys.argv[1:]))\n"
        "print(*backend.pool.calls.names, 'ready', sep='\\n', flush=True); time.sleep(600)\n"
    )
    keys = [
        "actor_rollout_ref.model.path=x",
        "data.train_files=x",
        "trainer.device=cpu",
        "reward.reward_model.enable=True",
        f"reward.reward_model.model_path={run.reward.reward_model.model_path}",
        "reward.reward_model.nnodes=1",
        "reward.reward_model.n_gpus_per_node=1",
    ]
    log = tmp_path / "log"
    with log.open("w") as file:
        trainer = subprocess.Popen(
            [sys.executable, "-c", script, *keys], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        assert within(240, lambda: "ready" in log.read_text() or trainer.poll() is not None), log.read_text()
        named = [line for line in log.read_text().splitlines() if "(process " in line]
        assert len(named) == 1, log.read_text()
    finally:
        trainer.kill()
        trainer.wait()
    assert within(240, lambda: gone(process_of(named[0])))


def within(seconds: float, happens: Any) -> bool:
    deadline = time.monotonic() + seconds
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(happens())


@pytest.fixture
def nobody_left(cluster) -> Any:
    """No process of a pool in this cluster, whatever else runs on the machine, once those just ended had a moment."""
    session = str(cluster.head_node.get_session_dir_path())

    def there() -> bool:
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                title, log = (entry / "cmdline").read_bytes(), os.readlink(entry / "fd" / "2")
            except OSError:
                continue
            # Ray writes the actor's class into the process title and its output into the session's folder.
            if TITLE in title and log.startswith(session):
                return True
        return False

    return lambda: within(120, lambda: not there())


@pytest.fixture
def train(tiny_model_dir, digits_data, folder, run, tmp_path) -> Any:
    from verl.config.load import load_ppo_config
    from verl.trainer.main_ppo import run as go

    def rows(name: str, *more: str) -> list[dict[str, Any]]:
        keys = [
            f"data.train_files={digits_data}/train.jsonl",
            "data.train_batch_size=4",
            "data.max_response_length=4",
            f"actor_rollout_ref.model.path={tiny_model_dir}",
            "actor_rollout_ref.rollout.n=2",
            "algorithm.adv_estimator=grpo",
            "algorithm.norm_adv_by_std_in_grpo=False",  # it would blow up the rounding of scores that are alike
            "reward.reward_model.enable=True",
            f"reward.reward_model.model_path={folder}",
            "trainer.device=cpu",
            "trainer.logger=[]",
            "trainer.total_training_steps=2",
            f"trainer.default_local_dir={tmp_path / name}",
            *more,
        ]
        result = go(load_ppo_config(keys))
        return [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]

    return rows


OWN = ("reward.reward_model.n_gpus_per_node=1", "reward.reward_model.nnodes=1")


def same_numbers(plain: list[dict[str, Any]], pooled: list[dict[str, Any]]) -> bool:
    assert [row["training/global_step"] for row in pooled] == [1, 2]
    for one, other in zip(plain, pooled, strict=True):
        assert other["reward/failed"] == 0
        for name in ("critic/score/mean", "critic/score/max", "actor/grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5)
    return True


def test_training_on_two_ranks_beside_the_pool_gives_the_numbers_of_one_process(train, nobody_left):
    assert same_numbers(train("plain"), train("pooled", *OWN, "trainer.n_gpus_per_node=2"))
    assert nobody_left()


def test_one_trainer_process_that_loses_its_reward_model_goes_on_from_its_checkpoint(
    train, nobody_left, monkeypatch, caplog
):
    from verl.workers.reward_model_pool import ModelPoolBackend

    submit, seen = ModelPoolBackend.submit, 0

    def submit_and_kill(self: Any, *arguments: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == 4 + 8 + 3:  # rows tried before training, the first step, and into the second
            os.kill(process_of(self.pool.calls.names[0]), signal.SIGKILL)
        return submit(self, *arguments)

    plain = train("plain")
    monkeypatch.setattr(ModelPoolBackend, "submit", submit_and_kill)
    pooled = train("killed", *OWN, "trainer.save_freq=1", "trainer.max_restarts=1")
    assert "reward model rank 0 on" in caplog.text and "restart 1 of 1" in caplog.text
    assert same_numbers(plain, pooled) and nobody_left()
