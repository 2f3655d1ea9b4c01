"""Probes of Python, packages, GPUs, the host name and a Ray cluster; `verl --version`."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from verl import __version__
from verl.doctor.runner import Check, Status, one_line, size
from verl.requirements import PackageRequirement, install_command, installed_version

_MODULES = {
    "hydra-core": "hydra",
    "megatron-core": "megatron.core",
    "flash-attn-4": "flash_attn.cute",
    "nvidia-cudnn-frontend": "cudnn",
}
_CUDA_BUILD = "install the build of torch for your CUDA: see pytorch.org/get-started"


def python(version: Sequence[int] = sys.version_info[:3]) -> Iterator[Check]:
    seen = f"{'.'.join(map(str, version))} at {sys.executable}, {platform.system()} {platform.machine()}"
    if (3, 11) <= tuple(version[:2]) < (3, 14):
        yield Check("python", "ok", seen)
    else:
        yield Check("python", "fatal", f"{seen}: verl needs 3.11, 3.12 or 3.13", "python3.12 -m venv .venv")


def package(
    name: str, versions: str, extra: str = "", load: bool = True, options: str = ""
) -> Iterator[Check]:
    """Whether a package is installed, in the accepted range, and (with `load`) importable."""
    package = PackageRequirement(name, versions, extra, options)
    install = f"pip install '{package.requirement}'"
    version, module = installed_version(name), _MODULES.get(name, name.replace("-", "_"))
    if version is None and not _is_here(module):
        group = "missing extras" if extra else "missing packages"
        yield Check(name, "note" if extra else "fatal", "not installed", install, group)
        return
    serious: Status = "warning" if extra else "fatal"
    data = {"version": version, "accepted": versions}
    if version is not None and not package.accepts(version):
        yield Check(name, serious, f"{version} is installed; verl works with {versions}", install, data=data)
        return
    try:
        if load:
            importlib.import_module(module)
    except BaseException as error:  # packages end a program on import, too
        seen = f"{version} is installed but cannot be imported: {one_line(error)}"
        yield Check(name, serious, seen, f"pip install --force-reinstall '{package.requirement}'", data=data)
        return
    yield Check(name, "ok", version or "unknown version", group="extras" if extra else "packages", data=data)


def _is_here(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
        return spec is not None and spec.origin is not None  # a folder of that name is no package
    except (ImportError, ValueError):
        return False


def torch(versions: str) -> Iterator[Check]:
    found = list(package("torch", versions))
    if found[0].status == "ok":
        cuda = importlib.import_module("torch").version.cuda
        build = f"for CUDA {cuda}" if cuda else "for CPU"
        seen = f"{found[0].seen} ({build}), accepted: {versions}"
        found = [Check("torch", "ok", seen, data={**found[0].data, "cuda": cuda})]
    yield from found


# -- GPUs ---------------------------------------------------------------------------------------------------------


def gpus() -> Iterator[Check]:
    """What nvidia-smi reports, and whether torch can compute on it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        yield Check("gpu", "note", "none seen: runs compute on the CPU")
        return
    try:
        query = "--query-gpu=index,name,memory.total,memory.free"
        listed = _ask(command, query, "--format=csv,noheader,nounits")
        banner = _ask(command)
    except (OSError, subprocess.SubprocessError) as error:
        printed = f"{getattr(error, 'stdout', '') or ''}{getattr(error, 'stderr', '') or ''}".strip()
        seen = f"nvidia-smi fails: {one_line(printed or error)}; runs would compute on the CPU"
        fix = "reboot or reinstall the driver (in a container: docker run --gpus all)"
        yield Check("gpu", "warning", seen, fix)
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines()]
    yield from judge_gpus([row for row in rows if len(row) == 4], os.environ.get("CUDA_VISIBLE_DEVICES"))
    supported = re.search(r"CUDA (?:UMD )?Version:\s*([\d.]+)", banner)
    import torch

    driver = supported[1] if supported else None
    yield from judge_driver(len(rows), driver, torch.version.cuda, torch.cuda.is_available())
    for number in range(torch.cuda.device_count()):
        yield compute(f"cuda:{number}")
    generations = {torch.cuda.get_device_capability(each)[0] for each in range(torch.cuda.device_count())}
    yield from judge_attention(generations)


def judge_attention(generations: set[int]) -> Iterator[Check]:
    """Whether GPUs of these compute capabilities have the kernels of attention that are the fastest on them."""
    from verl.models.attention_backends import GAIN, gains, installed_backends

    if not any(gains(generation) for generation in generations):
        return
    if found := installed_backends():
        yield Check("attention", "ok", f"kernels of {', '.join(found)} are used where they are the fastest")
    else:
        yield Check("attention", "note", GAIN, install_command("attention"))


def _ask(command: str, *options: str) -> str:
    return subprocess.run(
        [command, *options], capture_output=True, text=True, timeout=20.0, check=True
    ).stdout


def judge_gpus(rows: list[list[str]], visible: str | None) -> Iterator[Check]:
    """Rows of (index, name, total MiB, free MiB) as nvidia-smi prints them."""
    for index, name, *memory in rows:
        total, free = (int(cell) * 2**20 if cell.isdigit() else 0 for cell in memory)
        seen = f"{name}, {size(free)} free of {size(total)}"
        if free < 0.8 * total:
            seen += ": in use; a run plans with 90 % of it"
            fix = "nvidia-smi shows the processes; or CUDA_VISIBLE_DEVICES=N"
            yield Check(f"gpu {index}", "warning", seen, fix)
        else:
            yield Check(f"gpu {index}", "ok", seen, data={"total": total, "free": free})
    if visible is not None:
        hidden = visible.strip() in ("", "-1")
        seen = f"is {visible!r}" + (": it hides every GPU" if hidden else ": runs see only these GPUs")
        fix = "unset CUDA_VISIBLE_DEVICES" if hidden else ""
        yield Check("CUDA_VISIBLE_DEVICES", "warning" if hidden else "note", seen, fix)


def judge_driver(count: int, driver: str | None, build: str | None, available: bool) -> Iterator[Check]:
    if not count:
        return
    if build is None:
        yield Check("torch and gpu", "warning", f"{count} GPU here, but torch is a CPU build", _CUDA_BUILD)
        return
    seen = f"torch is built for CUDA {build}, the driver supports up to {driver or 'unknown'}"
    if driver is not None and int(build.split(".")[0]) > int(driver.split(".")[0]):
        yield Check("torch and gpu", "fatal", seen, f"update the driver, or {_CUDA_BUILD}")
    elif not available:
        fix = "python -c 'import torch; torch.zeros(1, device=\"cuda\")' shows why"
        yield Check("torch and gpu", "fatal", f"{seen}; torch.cuda.is_available() is False", fix)
    else:
        yield Check("torch and gpu", "ok", seen)


def compute(device: str) -> Check:
    """A bf16 product whose result is known."""
    import torch

    try:
        ones = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
        wrong = None if bool(((ones @ ones) == 64).all()) else "a product of ones is wrong"
    except Exception as error:  # drivers and kernels fail with anything
        wrong = one_line(error)
    if wrong:
        fix = "look for errors in `dmesg` and `nvidia-smi -q`; trainer.device=cpu runs without it"
        return Check(f"compute on {device}", "fatal", wrong, fix)
    return Check(f"compute on {device}", "ok", "a bf16 product is right")


# -- several processes --------------------------------------------------------------------------------------------


def hostname(name: str | None = None) -> Iterator[Check]:
    """Gloo, NCCL and Ray look the machine's own name up."""
    name = name or socket.gethostname()
    try:
        seen = f"{name} is {socket.getaddrinfo(name, None)[0][4][0]}"
        yield Check("hostname", "ok", seen)
    except OSError as error:
        seen = f"{name!r} has no address, so processes cannot find each other: {error}"
        yield Check("hostname", "warning", seen, f"echo '127.0.1.1 {name}' >> /etc/hosts")


def ray_cluster(address: str | None = None) -> Iterator[Check]:
    """Whether the cluster of RAY_ADDRESS answers."""
    address = os.environ.get("RAY_ADDRESS", "") if address is None else address
    if not address or address == "local":
        yield Check("ray cluster", "note", "RAY_ADDRESS is not set: runs on several processes start one here")
        return
    fix = (
        "unset RAY_ADDRESS to start one here, `ray start --head` there, or give the cluster's token "
        "(RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...)"
    )
    try:
        host, _, port = address.rpartition("://")[2].rpartition(":")
        if host and port.isdigit():
            socket.create_connection((host, int(port)), timeout=10.0).close()
        import ray

        ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        resources = ray.cluster_resources()
    except ImportError as error:
        seen = f"RAY_ADDRESS={address}: {one_line(error)}"
        yield Check("ray cluster", "warning", seen, install_command("ray"))
    except Exception as error:  # sockets, version and token mismatches come as many classes
        seen = f"RAY_ADDRESS={address} does not answer: {one_line(error)}"
        yield Check("ray cluster", "warning", seen, fix)
    else:
        cpus, gpu_count = resources.get("CPU", 0), resources.get("GPU", 0)
        seen = f"{address}: {len(nodes)} nodes, {cpus:g} CPUs, {gpu_count:g} GPUs"
        yield Check("ray cluster", "ok", seen, data={"nodes": len(nodes), "gpus": gpu_count})


# -- `verl --version` ---------------------------------------------------------------------------------------------

_REPORTED = (
    "torch", "transformers", "triton", "ray", "vllm", "sglang", "megatron-core", "peft",
    "safetensors", "pyarrow", "numpy", "hydra-core", "omegaconf",
)  # fmt: skip


def version_report() -> str:
    """The versions a bug report needs, a line each. Nothing of what it names is imported, so it answers at once, also
    where a package is broken."""
    lines = [f"verl {__version__}{_checkout()}", f"python {platform.python_version()}"]
    lines.append(f"platform {platform.platform()}")
    for name in _REPORTED:
        version = installed_version(name)
        build = _torch_build() if name == "torch" and version else ""
        lines.append(f"{name} {version or 'not installed'}{build}")
    return "\n".join([*lines, *_gpu_lines()]) + "\n"


def _checkout() -> str:
    """The commit, where verl runs from a git checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file() or not (root / ".git").exists():
        return ""
    return f" (checkout, commit {_printed('git', '-C', str(root), 'describe', '--always', '--dirty') or 'unknown'})"


def _torch_build() -> str:
    """What torch was built for, from its version.py: importing torch takes seconds."""
    try:
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text("utf-8")
    except OSError:
        return ""
    for name, label in (("cuda", "CUDA"), ("hip", "ROCm")):
        if found := re.search(rf"^{name}\b.*=\s*'([^']+)'", text, flags=re.MULTILINE):
            return f" (built for {label} {found[1]})"
    return " (built for CPU)"


def _gpu_lines() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return ["gpu none (no nvidia-smi)"]
    listed = _printed("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    lines = []
    for line, count in Counter(listed.splitlines()).items():
        *about, driver = (cell.strip() for cell in line.split(","))
        lines.append(f"gpu {count} x {', '.join(about)}, driver {driver}")
    return lines or ["gpu unknown (nvidia-smi fails)"]


def _printed(*command: str) -> str:
    """What a program prints, or nothing where it fails."""
    try:
        return _ask(*command).strip()
    except (OSError, subprocess.SubprocessError):
        return ""
