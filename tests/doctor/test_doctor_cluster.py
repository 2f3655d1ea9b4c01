"""`verl doctor` beside a real Ray cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytestmark = pytest.mark.components

ROOT = Path(__file__).resolve().parents[2]
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
CLUSTER = """
import sys
import ray
context = ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
sys.stdout.write(context.address_info["gcs_address"] + "\\n")
sys.stdout.flush()
sys.stdin.readline()
ray.shutdown()
"""


def test_a_cluster_that_answers_is_counted(tmp_path: Path) -> None:
    from verl.doctor.cli import machine_probes
    from verl.doctor.runner import run_groups

    pytest.importorskip("ray")
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **TOKEN},
    )
    assert cluster.stdin is not None and cluster.stdout is not None and cluster.stderr is not None
    try:
        address = cluster.stdout.readline().strip()
        assert address, cluster.stderr.read()
        (group,) = [g for g in machine_probes(".") if g[0].name == "ray cluster"]
        probe = replace(group[0], arguments={"address": address}, environment=TOKEN, limit_s=240.0)
        (answer,) = run_groups([[probe]])
        (finding,) = answer.findings
        assert finding.status == "ok" and "1 nodes, 1 CPUs, 0 GPUs" in finding.seen, finding
    finally:
        cluster.communicate("\n")
