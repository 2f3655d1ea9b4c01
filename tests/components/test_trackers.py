"""mlflow, trackio and swanlab with the real packages, on this machine only, in one run with wandb and tensorboard."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from verl.errors import ConfigError
from verl.observe.run_folder import RunFolder
from verl.observe.trackers import build_trackers

pytestmark = pytest.mark.components
for _package in ("mlflow", "trackio", "swanlab", "wandb", "tensorboard"):
    pytest.importorskip(_package, reason="make test-components runs this file in .venv-trackers")

ALL = ["wandb", "tensorboard", "mlflow", "trackio", "swanlab"]
PROGRAM = """
import sys
from verl.observe.run_folder import RunFolder
from verl.observe.trackers import build_trackers

with RunFolder(sys.argv[1]) as run:
    config = {"trainer": {"project_name": "digits"}, "list": [1, 2]}
    fan = build_trackers(sys.argv[2:], "digits", "first", config, run)
    for step in (1, 2):
        fan.log_samples(step, [{"prompt": "1+1", "score": None}, {"prompt": "2+2", "score": 1.0, "more": [1]}])
        fan.log(step, {"reward/mean": step / 4, "val-core/x/acc/mean@1": 0.5, "bad": float("nan")})
    fan.close()
    print("still on:", sorted(fan.trackers))
"""


def environment(folder: Path) -> dict[str, str]:
    """Everything local, nothing of whoever runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "SWANLAB"))}
    local = {
        "HOME": str(folder),
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return {**kept, **local}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that all five followed."""
    folder = tmp_path_factory.mktemp("trackers")
    command = [sys.executable, "-c", PROGRAM, str(folder / "run"), *ALL]
    done = subprocess.run(
        command, env=environment(folder), cwd=folder, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert f"still on: {sorted([*ALL, 'file'])}" in done.stdout, done.stderr
    return folder


def test_mlflow_has_parameters_metrics_and_a_table(run: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run}/mlflow.db")
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("first", "FINISHED")
    assert found.data.params == {"trainer.project_name": "digits", "list": "[1, 2]"}
    history = client.get_metric_history(found.info.run_id, "reward/mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.25), (2, 0.5)]
    assert found.data.metrics["val-core/x/acc/mean_1"] == 0.5 and math.isnan(found.data.metrics["bad"])
    (table,) = run.rglob("samples_2.json")
    assert json.loads(table.read_text())["data"] == [["1+1", None], ["2+2", 1.0]]


def test_trackio_has_metrics_and_a_table(run: Path) -> None:
    (database,) = (run / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics order by id").fetchall()
    logged = [(name, step, json.loads(text)) for name, step, text in rows]
    rewards = [(name, step, each["reward/mean"]) for name, step, each in logged if "reward/mean" in each]
    assert rewards == [("first", 1, 0.25), ("first", 2, 0.5)]
    tables = [each["validation/samples"] for _, _, each in logged if "validation/samples" in each]
    assert len(tables) == 2 and tables[0]["_type"] == "trackio.table"


def test_swanlab_keeps_the_run_in_the_run_folder(run: Path) -> None:
    files = [path for path in (run / "run" / "swanlog").rglob("*") if path.is_file()]
    kept = b"".join(path.read_bytes() for path in files)
    assert b"reward/mean" in kept and b"validation/samples" in kept


def test_the_others_in_the_same_run_have_theirs(run: Path) -> None:
    assert list((run / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert list((run / "run" / "tensorboard").iterdir())
    assert len((run / "run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        ("mlflow", {"MLFLOW_TRACKING_URI": "nonsense://x"}, "MLFLOW_TRACKING_URI .now nonsense://x"),
        ("trackio", {"TRACKIO_SERVER_URL": "http://127.0.0.1:1/"}, "TRACKIO_SERVER_URL"),
        ("swanlab", {"SWANLAB_MODE": "nonsense"}, "SWANLAB_MODE=offline"),
    ],
)
def test_one_that_cannot_start_is_an_error_with_what_to_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, variables: dict[str, str], message: str
) -> None:
    for key, value in {**environment(tmp_path), **variables}.items():
        monkeypatch.setenv(key, value)
    with RunFolder(tmp_path / "run") as folder, pytest.raises(ConfigError, match=message):
        build_trackers(name, "p", "e", {}, folder)
