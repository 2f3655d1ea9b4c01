"""Two nodes with addresses of their own run the demo as one process does; then the cable between them is pulled."""

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
pytestmark = [pytest.mark.components, pytest.mark.timeout(1200)]

_spec = importlib.util.spec_from_file_location("namespaces", Path(__file__).with_name("namespaces.py"))
assert _spec and _spec.loader
namespaces = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(namespaces)

Start = Callable[[list[str], Path], "subprocess.Popen[bytes]"]
ACCURACY = "val-core/tasks/word_problems/reward/mean@1"
STEPS = 25
"""Of the demo's 45: enough to have learnt, and both runs take the same."""
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


def test_the_demo_learns_as_well_on_two_nodes_as_on_one_process(start, tmp_path):
    from verl.demo import stages
    from verl.demo.data import write_files
    from verl.demo.model import build_model_folder

    build_model_folder(tmp_path / "model", seed=0)
    files = write_files(tmp_path / "data", seed=0)
    quiet, steps = "trainer.logger=[]", f"trainer.total_training_steps={STEPS}"
    imitation = stages.sft_arguments(tmp_path / "model", files, tmp_path / "sft", seed=0)
    warm = stages.trained_model(stages.run_sft([*imitation, quiet]))

    arguments = stages.rl_arguments(warm, files, tmp_path / "two", seed=0)
    log = tmp_path / "two.txt"
    run = start(command([*arguments, quiet, steps, *TWO_NODES]), log)
    namespaces.wait_until(lambda: run.poll() == 0, run, log)
    alone = stages.run_rl([*stages.rl_arguments(warm, files, tmp_path / "one", seed=0), quiet, steps])

    one, two = rows_of(alone.folder), rows_of(tmp_path / "two")
    assert len(one) == len(two) == STEPS + 1
    for mine, other in zip(two[1:4], one[1:4], strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
            assert mine[name] == pytest.approx(other[name], rel=2e-3, abs=2e-5), name
    before, after = [rows[0][ACCURACY] for rows in (one, two)], [rows[-1][ACCURACY] for rows in (one, two)]
    assert max(before) <= 0.4 and before[0] == pytest.approx(before[1], abs=0.01)
    # Roundings differ, so that draws do after some steps: two runs of one task, not one run twice.
    assert min(after) >= 0.8 and after[0] == pytest.approx(after[1], abs=0.12), after


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
