"""The Slurm script with stand-ins for Slurm, Apptainer and Python: what it passes to them, and how it ends. On a real
Slurm: tests/components/test_slurm.py."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "slurm" / "ray_on_slurm.slurm"
TOKEN = "5ec7e7"
SRUN = """
echo "srun $*" >> "$CALLS"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
APPTAINER = """
echo "apptainer $*" >> "$CALLS"
while [[ $1 != *.sif ]]; do shift; done
shift
echo "token inside: $APPTAINERENV_RAY_AUTH_TOKEN, address $APPTAINERENV_RAY_ADDRESS" >> "$CALLS"
exec "$@"
"""
PYTHON = """
echo "python $*" >> "$CALLS"
case "$*" in
    -c*) echo 10.0.0.1 ;;
    *ray.scripts*) exec sleep 100 ;;
    *main_ppo*) exit 75 ;;
esac
"""


@pytest.mark.parametrize("image", ["", "verl.sif"])
def test_the_script_keeps_its_token_to_itself_and_cleans_every_node(image: str, tmp_path: Path) -> None:
    stand_ins = {"srun": SRUN, "apptainer": APPTAINER, "python": PYTHON, "scontrol": "echo node1; echo node2"}
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "RAY_AUTH_TOKEN": TOKEN,
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "VERL_PYTHON": "python",
        "VERL_APPTAINER_IMAGE": image,
    }
    done = subprocess.run(
        ["bash", str(SCRIPT), "trainer.device=cpu"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 75, done.stderr
    lines = calls.read_text().splitlines()
    started = [line for line in lines if line.startswith(("srun", "apptainer", "python"))]
    assert not [line for line in started if TOKEN in line]
    assert "srun --overlap --nodes=2 --ntasks-per-node=1 rm -rf /tmp/ray-4711" in lines
    trainer = next(line for line in lines if line.startswith("python") and "main_ppo" in line)
    assert trainer.endswith("trainer.nnodes=2 trainer.n_gpus_per_node=1 trainer.device=cpu")
    address = f"10.0.0.1:{20000 + 4711}"
    assert (f"token inside: {TOKEN}, address {address}" in lines) == bool(image)
