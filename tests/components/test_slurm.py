"""The Slurm script on a real Slurm: one controller and one node, started here from the system's packages."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiny_run import tiny_run

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.components, pytest.mark.slow(seconds=25), pytest.mark.timeout(1200)]
PATIENCE_S = 180.0
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which sbatch talks to our own Slurm."""
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (Debian: slurm-wlm and munge)")
    if os.geteuid() != 0:
        pytest.skip("starting slurmd needs root")
    pytest.importorskip("ray", reason="needs ray")
    folder = tmp_path_factory.mktemp("slurm")
    host = socket.gethostname().split(".")[0]
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (folder / "spool").mkdir()
    (folder / "state").mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(
        f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port()}
SlurmdPort={port()}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.txt
SlurmdLogFile={folder}/slurmd.txt
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
    )
    env = {**os.environ, "SLURM_CONF": str(conf), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    commands = [
        [
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.txt",
            f"--seed-file={folder}/seed",
        ],
        ["slurmctld", "-D", "-f", str(conf)],
        ["slurmd", "-D", "-f", str(conf), "-N", host],
    ]
    started = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("wb") as out:
                started.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))
            if command[0] == "munged":
                _wait_for_socket(folder / "munge.socket", started[-1], folder)
        _wait_for_node(env, folder)
        yield env
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _logs(folder: Path) -> str:
    files = [*sorted(folder.glob("*.txt")), *sorted(folder.glob("*.out"))]
    return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in files)


def _wait_for_socket(path: Path, process: subprocess.Popen[bytes], folder: Path) -> None:
    """The daemons of Slurm ask munge for a credential as soon as they start."""
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"munged did not open {path}\n{_logs(folder)}")
        time.sleep(0.1)


def _wait_for_node(env: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    state = ""
    while time.monotonic() < deadline:
        answer = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True, timeout=PATIENCE_S
        )
        state = answer.stdout.strip() or answer.stderr.strip()
        if state == "idle":
            return
        time.sleep(0.5)
    pytest.fail(f"Slurm's node did not come up: {state}\n{_logs(folder)}")


def small_run(model: Path, data: Path, folder: Path) -> list[str]:
    return tiny_run(model, data, "actor_rollout_ref.rollout.n=2", folder=folder / "run")


def metrics(folder: Path) -> list[dict[str, float]]:
    """Complete rows only: the last one may be half written."""
    file = folder / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def submit(
    env: dict[str, str], folder: Path, script: Path, overrides: list[str], wait: bool = True
) -> tuple[int, str]:
    """Run the job to its end (or only start it); sbatch's status, and what the job wrote (or its number)."""
    command = [
        "sbatch", "--parsable", *(["--wait"] if wait else []),
        "--nodes=1", "--gpus-per-node=0", f"--cpus-per-task={os.cpu_count()}", "--mem=0",
        f"--output={folder}/job.txt", f"--chdir={ROOT}", str(script), *overrides,
    ]  # fmt: skip
    settings = {"VERL_PYTHON": sys.executable, "VERL_RANKS_PER_NODE": "2", "PYTHONPATH": str(ROOT)}
    output = folder / "job.txt"
    try:
        done = subprocess.run(
            command, env={**env, **settings}, cwd=ROOT, capture_output=True, text=True, timeout=900
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"the job does not end: {output.read_text()[-4000:] if output.exists() else 'no output'}")
    if not wait:
        return done.returncode, done.stdout.strip()
    text = output.read_text(errors="replace") if output.exists() else done.stdout + done.stderr
    return done.returncode, text


def test_a_run_on_two_ranks_through_slurm(
    slurm: dict[str, str], tiny_model_dir: Path, digits_data: Path, tmp_path: Path
) -> None:
    overrides = [*small_run(tiny_model_dir, digits_data, tmp_path), "trainer.total_training_steps=2"]
    status, text = submit(slurm, tmp_path, ROOT / "examples/slurm/ray_on_slurm.slurm", overrides)
    assert status == 0, text[-4000:]
    assert sum("actor/grad_norm" in row for row in metrics(tmp_path)) == 2
    assert "head on" in text and "1 node(s)" in text


def test_a_bad_key_ends_the_job_with_its_message(slurm: dict[str, str], tmp_path: Path) -> None:
    """Through examples/tutorial/slurm, which runs the same script."""
    script = ROOT / "examples/tutorial/slurm/ray_on_slurm.slurm"
    status, text = submit(slurm, tmp_path, script, ["trainer.devise=cpu"])
    assert status == 2 and "trainer.devise" in text


def test_a_job_near_its_time_limit_saves_and_ends(
    slurm: dict[str, str], tiny_model_dir: Path, digits_data: Path, tmp_path: Path
) -> None:
    """The signal Slurm sends to the script before the limit reaches the trainer."""
    script = ROOT / "examples/slurm/ray_on_slurm.slurm"
    overrides = [*small_run(tiny_model_dir, digits_data, tmp_path), "trainer.total_epochs=100000"]
    status, job = submit(slurm, tmp_path, script, overrides, wait=False)
    assert status == 0 and job.isdigit(), job

    def job_output() -> str:
        output = tmp_path / "job.txt"
        return output.read_text(errors="replace")[-4000:] if output.exists() else "the job wrote nothing"

    def wait_for(reached: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not reached() and time.monotonic() < deadline:
            time.sleep(0.5)
        assert reached(), job_output()

    def ended() -> bool:
        state = subprocess.run(
            ["squeue", "-h", "-j", job, "-o", "%T"],
            env=slurm,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        return state.stdout.strip() in ("", "COMPLETED", "FAILED", "CANCELLED")

    wait_for(lambda: any("actor/grad_norm" in row for row in metrics(tmp_path)), 600)
    subprocess.run(["scancel", "--batch", "--signal=TERM", job], env=slurm, check=True, timeout=PATIENCE_S)
    wait_for(ended, 400)
    assert list((tmp_path / "run").glob("global_step_*")), job_output()
    assert "Exit code 75" in job_output()
