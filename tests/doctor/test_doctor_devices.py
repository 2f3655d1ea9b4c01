"""GPUs and calculations: what nvidia-smi says is played by a script, the failures of calculations are real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.doctor import devices, together
from verl.doctor.finding import Finding
from verl.doctor.plan import probes_of_the_machine
from verl.doctor.runner import run_groups

LISTED = """0, GPU-aaa, NVIDIA H200, 143771, 143000, 570.86.15
1, GPU-bbb, NVIDIA H200, 143771, 20000, 570.86.15
"""
USERS = "GPU-bbb, 4242, /usr/bin/python3, 123000\n"
BANNER = "| NVIDIA-SMI 570.86.15    Driver Version: 570.86.15    CUDA Version: 12.8     |"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi first on the path; what it says lies in files beside it."""
    (tmp_path / "listed").write_text(LISTED)
    (tmp_path / "users").write_text(USERS)
    (tmp_path / "banner").write_text(BANNER)
    script = tmp_path / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\n"
        f"cd {tmp_path}\n"
        "[ -e broken ] && { echo 'NVIDIA-SMI could not communicate with the NVIDIA driver.'; exit 9; }\n"
        'case "$1" in --query-gpu=index) cut -d, -f1 listed;; --query-gpu*) cat listed;; '
        "--query-compute*) cat users;; *) cat banner;; esac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def by_subject(findings: object) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}  # type: ignore[attr-defined]


def test_gpus_their_memory_and_their_users_are_listed(smi: Path) -> None:
    found = by_subject(devices.gpus())
    assert found["gpu 0"].status == "ok" and "NVIDIA H200, 140 GiB free of 140 GiB" in found["gpu 0"].seen
    assert found["gpu 1"].status == "warning" and "python3 (process 4242, 120 GiB)" in found["gpu 1"].seen
    assert found["gpu 1"].do == "export CUDA_VISIBLE_DEVICES=0"
    assert found["driver"].data["cuda"] == "12.8"


def test_hidden_gpus_are_warned_of(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert by_subject(devices.gpus())["CUDA_VISIBLE_DEVICES"].status == "warning"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert by_subject(devices.gpus())["CUDA_VISIBLE_DEVICES"].status == "note"


def test_a_driver_that_does_not_answer_is_warned_of(smi: Path) -> None:
    (smi / "broken").touch()
    (finding,) = devices.gpus()
    assert finding.status == "warning" and "could not communicate with the NVIDIA driver" in finding.seen


@pytest.mark.slow(seconds=3)
def test_an_nvidia_smi_that_hangs_is_cut_off(smi: Path) -> None:
    (smi / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 100000\n")
    (group,) = [g for g in probes_of_the_machine(str(smi)) if any(p.name == "gpu" for p in g)]
    probe = next(p for p in group if p.name == "gpu")
    (answer,) = run_groups([[probe]], at_once=1, limit_s=3.0)
    assert answer.findings[0].status == "warning" and "no answer" in answer.findings[0].seen


def test_without_a_gpu_runs_compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(devices.Path, "exists", lambda self: False)
    (finding,) = devices.gpus()
    assert finding.status == "note" and "on the CPU" in finding.means
    monkeypatch.setattr(devices.Path, "exists", lambda self: True)
    (finding,) = devices.gpus()
    assert finding.status == "warning" and "no nvidia-smi" in finding.seen


@pytest.mark.parametrize(
    "driver, build, available, status, told",
    [
        ("12.8", None, False, "warning", "build for CPU"),
        ("12.2", "13.0", False, "fatal", "goes up to 12.2"),
        ("13.0", "12.8", False, "fatal", "is_available() is False"),
        ("12.2", "12.8", True, "ok", "CUDA 12.8"),
        (None, "12.8", True, "ok", "unknown"),
    ],
)
def test_torch_and_driver_must_fit(
    driver: str | None, build: str | None, available: bool, status: str, told: str
) -> None:
    (finding,) = devices.judge_driver(1, driver, build, available)
    assert finding.status == status and told in finding.seen


def test_torch_without_cuda_beside_a_gpu_is_warned_of(smi: Path) -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("needs a build of torch for CPU")
    (finding,) = devices.driver_fits_torch()
    assert finding.status == "warning" and "2 GPU" in finding.seen


# -- calculations -------------------------------------------------------------------------------------------------


def test_this_cpu_calculates_rightly() -> None:
    (finding,) = devices.calculations("cpu")
    assert finding.status == "ok", finding.seen
    assert set(finding.data["errors"]) == {
        "float32 product",
        "float32 attention",
        "bfloat16 product",
        "bfloat16 attention",
    }
    assert finding.data["errors"]["float32 product"] < finding.data["errors"]["bfloat16 product"]


def test_a_device_that_is_not_there_is_fatal() -> None:
    (finding,) = devices.calculations("cuda:77")
    assert finding.status == "fatal" and "trainer.device=cpu" in finding.do


@pytest.mark.parametrize("wrong", ["float32 product", "bfloat16 attention"])
def test_wrong_results_are_fatal(wrong: str) -> None:
    errors = {
        "float32 product": 1e-7,
        "float32 attention": 1e-7,
        "bfloat16 product": 4e-3,
        "bfloat16 attention": 4e-3,
    }
    right = {"errors": errors, "gflops": {"float32": 70.0, "bfloat16": 0.3}}
    assert devices.judge_calculation("compute on cpu", right).status == "ok"
    for error in (0.3, float("nan")):
        found = {"errors": {**errors, wrong: error}, "gflops": right["gflops"]}
        finding = devices.judge_calculation("compute on cpu", found)
        assert finding.status == "fatal" and wrong in finding.seen


def test_a_gpu_without_bf16_is_warned_of_and_a_cpu_is_not() -> None:
    slow = {"errors": {"float32 product": 0.0}, "gflops": {"float32": 9000.0, "bfloat16": 900.0}}
    finding = devices.judge_calculation("compute on cuda:0", slow)
    assert finding.status == "warning" and "model.dtype=float32" in finding.do
    assert devices.judge_calculation("compute on cpu", slow).status == "ok"


@pytest.mark.slow
def test_triton_runs_a_kernel_where_it_can_and_says_why_where_it_cannot() -> None:
    """In its interpreter it works on a CPU; compiled it does not."""
    pytest.importorskip("triton")
    program = (
        "from verl.doctor.devices import triton\n"
        "import sys\n"
        "(finding,) = triton('cpu'); sys.stdout.write(finding.status + ' ' + finding.seen)\n"
    )
    outcomes = {}
    for interpret in ("1", "0"):
        environment = {**os.environ, "TRITON_INTERPRET": interpret}
        answer = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        outcomes[interpret] = answer.stdout
    assert outcomes["1"].startswith("ok"), outcomes
    assert outcomes["0"].startswith("warning") and "Triton does not work here" in outcomes["0"]


# -- several processes --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gloo_adds_up_here_and_fails_where_the_network_does() -> None:
    program = (
        "from verl.doctor.together import gloo\n"
        "import sys\n"
        "(finding,) = gloo(); sys.stdout.write(finding.status + ' ' + finding.seen)\n"
    )
    outcomes = {}
    for interface in ("lo", "no-such-interface"):
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface}
        answer = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        outcomes[interface] = answer.stdout + answer.stderr
    assert outcomes["lo"].startswith("ok"), outcomes
    assert outcomes["no-such-interface"].startswith("warning"), outcomes


def test_a_wrong_sum_is_warned_of() -> None:
    assert together.judge_gloo(["the sum is [1.0]"]).status == "warning"
    assert together.judge_gloo([]).status == "ok"


def test_a_cluster_that_does_not_answer_is_warned_of() -> None:
    import socket

    with socket.socket() as held:  # bound and not listening: nobody else can answer there
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        (finding,) = together.ray_cluster(address)
    assert finding.status == "warning" and address in finding.seen and "RAY_ADDRESS" in finding.do


def test_without_an_address_there_is_no_cluster_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (finding,) = together.ray_cluster()
    assert finding.status == "note"


def test_nccl_is_not_tried_without_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (finding,) = together.nccl()
    assert finding.status == "note"
