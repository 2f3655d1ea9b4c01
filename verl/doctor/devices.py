"""Probes of what computes: the driver, each GPU, and small calculations whose results are known."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.doctor.finding import Finding, one_line, size

_SMI_S = 20.0
_CUDA_BUILD = "install the build of torch for your CUDA: see pytorch.org/get-started"


@dataclass
class Gpu:
    """A GPU as the driver reports it; sizes in bytes."""

    index: str
    uuid: str
    name: str
    total: int
    free: int
    users: list[str] = field(default_factory=list)


def gpus() -> Iterator[Finding]:
    """What nvidia-smi says: driver, GPUs, their memory, who uses it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        if Path("/dev/nvidiactl").exists():
            yield Finding(
                "gpu",
                "warning",
                "there is a GPU device but no nvidia-smi",
                "its memory and users cannot be seen",
                "install the driver's tools (nvidia-utils)",
            )
        else:
            yield Finding("gpu", "note", "none seen", "runs compute on the CPU", "")
        return
    try:
        fields = "index,uuid,name,memory.total,memory.free,driver_version"
        listed = _ask(command, f"--query-gpu={fields}")
        users = _ask(command, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
        banner = _ask(command)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stdout", "") or "") + (getattr(error, "stderr", "") or "")
        yield Finding(
            "gpu",
            "warning",
            f"nvidia-smi fails: {one_line(said.strip() or error)}",
            "the driver is not loaded or does not fit its library; runs would compute on the CPU",
            "reboot, or install the driver again (in a container: --gpus all)",
        )
        return
    found, driver = parse_gpus(listed, users)
    supported = re.search(r"CUDA (?:UMD )?Version:\s*([\d.]+)", banner)
    yield from judge_gpus(
        found, driver, supported[1] if supported else None, os.environ.get("CUDA_VISIBLE_DEVICES")
    )


def _ask(command: str, *query: str) -> str:
    options = [*query, "--format=csv,noheader,nounits"] if query else []
    return subprocess.run(
        [command, *options], capture_output=True, text=True, timeout=_SMI_S, check=True
    ).stdout


def parse_gpus(listed: str, users: str) -> tuple[list[Gpu], str]:
    """The GPUs and the driver's version. Numbers are in MiB there."""
    found, driver = [], ""
    for line in listed.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 6:
            index, uuid, name, total, free, driver = parts
            found.append(Gpu(index, uuid, name, _mebibytes(total), _mebibytes(free)))
    for line in users.splitlines():
        parts = [part.strip() for part in line.split(",")]
        for gpu in found:
            if len(parts) == 4 and parts[0] == gpu.uuid:
                used = size(int(parts[3]) * 2**20) if parts[3].isdigit() else "unknown memory"
                gpu.users.append(f"{Path(parts[2]).name} (process {parts[1]}, {used})")
    return found, driver


def _mebibytes(text: str) -> int:
    return int(text) * 2**20 if text.isdigit() else 0


def judge_gpus(found: list[Gpu], driver: str, cuda: str | None, visible: str | None) -> Iterator[Finding]:
    if not found:
        yield Finding("gpu", "note", "nvidia-smi lists none", "runs compute on the CPU", "")
        return
    for gpu in found:
        seen = f"{gpu.name}, {size(gpu.free)} free of {size(gpu.total)}"
        data = {"index": gpu.index, "total": gpu.total, "free": gpu.free, "driver": driver, "cuda": cuda}
        name = f"gpu {gpu.index}"
        if gpu.users:
            seen += f", used by {', '.join(gpu.users[:3])}"
        if gpu.total and gpu.free < 0.8 * gpu.total:
            others = [other.index for other in found if other.total and other.free >= 0.8 * other.total]
            yield Finding(
                name,
                "warning",
                seen,
                "a run plans with 90 % of a GPU and would run out of memory",
                f"export CUDA_VISIBLE_DEVICES={','.join(others)}"
                if others
                else "end the programs that use it",
                data=data,
            )
        else:
            yield Finding(name, "ok", seen, data=data)
    yield Finding(
        "driver", "ok", f"{driver}, for CUDA up to {cuda or 'unknown'}", data={"driver": driver, "cuda": cuda}
    )
    if visible is not None:
        hidden = visible.strip() in ("", "-1")
        yield Finding(
            "CUDA_VISIBLE_DEVICES",
            "warning" if hidden else "note",
            f"is {visible!r}",
            "it hides every GPU: runs compute on the CPU" if hidden else "runs see only these GPUs",
            "unset CUDA_VISIBLE_DEVICES" if hidden else "",
        )


def driver_fits_torch() -> Iterator[Finding]:
    """Whether the torch at hand can use the GPUs at hand."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return
    try:
        supported = re.search(r"CUDA (?:UMD )?Version:\s*([\d.]+)", _ask(command))
        count = len(_ask(command, "--query-gpu=index").split())
    except (OSError, subprocess.SubprocessError):
        return  # `gpus` reports that
    import torch

    available = torch.cuda.is_available()
    yield from judge_driver(count, supported[1] if supported else None, torch.version.cuda, available)


def judge_driver(count: int, driver: str | None, build: str | None, available: bool) -> Iterator[Finding]:
    if not count:
        return
    if build is None:
        yield Finding(
            "torch and gpu",
            "warning",
            f"{count} GPU here, but torch is a build for CPU",
            "the GPU is not used",
            _CUDA_BUILD,
        )
        return
    seen = f"torch is built for CUDA {build}, the driver goes up to {driver or 'unknown'}"
    if driver is not None and int(build.split(".")[0]) > int(driver.split(".")[0]):
        yield Finding(
            "torch and gpu",
            "fatal",
            seen,
            "the driver is too old for this torch",
            f"update the driver, or {_CUDA_BUILD} (here at most {driver})",
        )
    elif not available:
        yield Finding(
            "torch and gpu",
            "fatal",
            f"{seen}; torch.cuda.is_available() is False",
            "torch cannot use the GPU",
            "python -c 'import torch; torch.zeros(1, device=\"cuda\")' says why",
        )
    else:
        yield Finding("torch and gpu", "ok", seen)


# -- calculations -------------------------------------------------------------------------------------------------


def calculations(device: str = "") -> Iterator[Finding]:
    """A product and an attention on every device a run could use, against results in double precision."""
    import torch

    devices = [device] if device else ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
    for each in devices:
        name = f"compute on {each}"
        try:
            yield judge_calculation(name, calculate(each))
        except Exception as error:  # drivers and kernels fail with anything
            yield Finding(
                name,
                "fatal",
                one_line(error),
                "torch cannot calculate there",
                "trainer.device=cpu, or mend the driver" if each != "cpu" else "install torch again",
            )


def calculate(device: str) -> dict[str, Any]:
    """Errors relative to the largest value of the exact result, and the speed of a float32 product."""
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    errors: dict[str, float] = {}
    kinds = [torch.float32, torch.bfloat16]
    left, right = torch.randn(128, 128), torch.randn(128, 128)
    query, key, value = (torch.randn(1, 4, 48, 32) for _ in range(3))
    hidden = torch.ones(48, 48, dtype=torch.bool).triu(1)
    scores = (query.double() @ key.double().transpose(-1, -2) / 32**0.5).masked_fill(hidden, float("-inf"))
    attended = scores.softmax(-1) @ value.double()
    for kind in kinds:
        word = str(kind).removeprefix("torch.")
        product = left.to(device, kind) @ right.to(device, kind)
        errors[f"{word} product"] = _error(product, left.double() @ right.double())
        q, k, v = (each.to(device, kind) for each in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        errors[f"{word} attention"] = _error(out, attended)
    return {
        "errors": errors,
        "gflops": {str(kind).removeprefix("torch."): _speed(device, kind) for kind in kinds},
    }


def _error(found: Any, exact: Any) -> float:
    return float((found.detach().cpu().double() - exact).abs().max() / exact.abs().max())


def _speed(device: str, kind: Any) -> float:
    """GFLOP/s: the best of the products that a fifth of a second has time for. On a CPU with one thread: several
    would wait for each other where other programs hold the cores, and the figure would tell of those."""
    import torch

    width = 256 if device == "cpu" else 4096
    matrix = torch.randn(width, width).to(device, kind)
    times: list[float] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        end = time.perf_counter() + 0.2
        while not times or (time.perf_counter() < end and len(times) < 100):
            began = time.perf_counter()
            result = matrix @ matrix
            if device != "cpu":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
            del result
    finally:
        torch.set_num_threads(threads)
    return 2 * width**3 / min(times) / 1e9


def judge_calculation(name: str, found: dict[str, Any]) -> Finding:
    allowed = {"float32": 1e-2, "bfloat16": 5e-2}  # float32 products may run as TF32
    for what, error in found["errors"].items():
        if not error <= allowed[what.split()[0]]:
            return Finding(
                name,
                "fatal",
                f"the {what} is off by {error:.2g} of its size",
                "results cannot be trusted: a broken build, or a broken device",
                "install torch again; for a GPU, look for errors in `dmesg` and `nvidia-smi -q`",
                data=found,
            )
    full, half = found["gflops"]["float32"], found["gflops"]["bfloat16"]
    each = " with one thread" if name.endswith("cpu") else ""
    seen = f"product and attention right; float32 {full:,.0f} GFLOP/s{each}, bf16 {half:,.1f}"
    if half < 0.5 * full and each == "":
        return Finding(
            name,
            "warning",
            seen,
            "this GPU has no hardware for bf16, the usual precision of runs",
            "actor_rollout_ref.model.dtype=float32",
            data=found,
        )
    if half < 0.5 * full:
        return Finding(name, "ok", f"{seen}: bf16 has no hardware here, float32 is used", data=found)
    return Finding(name, "ok", seen, data=found)


def triton(device: str = "") -> Iterator[Finding]:
    """One of our own kernels, compiled and run."""
    import torch

    if not device and not torch.cuda.is_available():
        yield Finding("triton", "note", "not tried without a GPU", together="not tried")
        return
    from verl.models.kernels import triton_fault

    problem = triton_fault(torch.device(device or "cuda"))
    if problem is None:
        yield Finding("triton", "ok", "a kernel was compiled and run")
        return
    compiler = "" if shutil.which("cc") or shutil.which("gcc") else " (there is no C compiler)"
    yield Finding(
        "triton",
        "warning",
        problem + compiler,
        "runs go on with plain torch, more slowly",
        "apt-get install gcc python3-dev" if compiler else "pip install --upgrade triton, as torch wants it",
    )
