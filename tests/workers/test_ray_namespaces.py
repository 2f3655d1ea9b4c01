"""Two nodes with addresses of their own learn as one process does; then the cable between them is pulled."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Each starts a cluster of its own; a slow machine gets the time it needs, and a limit that says what hung comes first.
pytestmark = [pytest.mark.components, pytest.mark.slow(seconds=45), pytest.mark.timeout(1200)]

_spec = importlib.util.spec_from_file_location("namespaces", Path(__file__).with_name("namespaces.py"))
assert _spec and _spec.loader
namespaces = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(namespaces)

Start = Callable[[list[str], Path], "subprocess.Popen[bytes]"]
STEPS = 32
TWO_NODES = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    pytest.importorskip("ray", reason="needs ray")
    # Not below pytest's folder: a socket's path has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="verlns", dir="/tmp"))
    found = namespaces.Nodes(folder)
    try:
        found.open()
        found.start_ray()
        yield found
    except namespaces.NotAllowed as reason:
        pytest.skip(str(reason))
    finally:
        found.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts a command on the first of two nodes: in namespaces, or where these are not allowed as two raylets."""
    try:
        nodes = request.getfixturevalue("nodes")
        yield lambda words, log: nodes.run(0, words, log)
        return
    except pytest.skip.Exception:
        cluster = request.getfixturevalue("ray_cluster")
    second = cluster.add_node(num_cpus=2, object_store_memory=100_000_000)

    def begin(words: list[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            environment = {**os.environ, "RAY_ADDRESS": cluster.address}
            return subprocess.Popen(words, env=environment, stdout=output, stderr=subprocess.STDOUT)

    yield begin
    cluster.remove_node(second)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Whole rows only: the last one may be in the middle of being written."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]


def test_two_nodes_learn_as_one_process_does(start, train, overrides, tmp_path):
    settings = [
        "data.train_batch_size=32",
        "actor_rollout_ref.rollout.n=8",
        f"trainer.total_training_steps={STEPS}",
    ]
    log = tmp_path / "two.txt"
    run = start(command(overrides(*settings, *TWO_NODES, "trainer.total_epochs=4", folder="two")), log)
    namespaces.wait_until(lambda: run.poll() == 0, run, log)
    one, _ = train(*settings, "trainer.total_epochs=4", folder="one")
    two = rows_of(tmp_path / "two")
    assert len(one) == len(two) == STEPS
    for mine, other in zip(two[:3], one[:3], strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
            assert mine[name] == pytest.approx(other[name], rel=2e-3, abs=2e-5), name
    # Roundings differ, so that draws do after some steps: two runs of one task, not one run twice.
    for rows in (one, two):
        rewards = [row["reward/mean"] for row in rows]
        assert sum(rewards[:3]) / 3 < 0.2 and sum(rewards[-3:]) / 3 > 0.6, rewards


def test_a_pulled_cable_ends_the_run_and_it_goes_on_on_one_node(nodes, train, overrides, tmp_path):
    """The last test of these nodes."""
    log, folder = tmp_path / "log.txt", tmp_path / "run"
    settings = [*TWO_NODES, "trainer.watchdog_s=90", "trainer.save_freq=1"]
    run = nodes.run(0, command(overrides(*settings, "trainer.total_training_steps=100000")), log)
    namespaces.wait_until(lambda: len(rows_of(folder)) >= 3, run, log)

    nodes.pull_the_cable()
    namespaces.wait_until(lambda: run.poll() is not None, None, log)
    message = log.read_text(errors="replace")
    assert run.returncode == 3, message[-4000:]
    # Which rank sits on which node is Ray's choice.
    assert re.search(r"error: .*rank [01] on ", message, re.DOTALL), message[-4000:]
    assert "trainer.resume_mode=auto" in message, message[-4000:]

    saved = int((folder / "latest_checkpointed_iteration.txt").read_text())
    rows, _ = train("trainer.save_freq=1", f"trainer.total_training_steps={saved + 2}")
    steps = [row["training/global_step"] for row in rows]
    assert steps == list(range(1, saved + 3))
