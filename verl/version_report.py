"""`verl --version`: the versions a bug report needs. Nothing of what it names is imported, so it answers at once and
also where a package is broken."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from verl import __version__
from verl.requirements import installed_version

_PACKAGES = (
    "torch", "transformers", "triton", "ray", "vllm", "sglang", "megatron-core", "peft",
    "safetensors", "pyarrow", "numpy", "hydra-core", "omegaconf",
)  # fmt: skip


def version_report() -> str:
    """One line per component: name, version."""
    lines = [f"verl {__version__}{_checkout()}", f"python {platform.python_version()}"]
    lines.append(f"platform {platform.platform()}")
    for name in _PACKAGES:
        version = installed_version(name)
        build = _torch_build() if name == "torch" and version else ""
        lines.append(f"{name} {version or 'not installed'}{build}")
    return "\n".join([*lines, *_gpus()]) + "\n"


def _checkout() -> str:
    """The commit, where verl runs from a git checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "pyproject.toml").is_file() or not (root / ".git").exists():
        return ""
    return f" (checkout, commit {_output('git', '-C', str(root), 'describe', '--always', '--dirty') or 'unknown'})"


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


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return ["gpu none (no nvidia-smi)"]
    listed = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    if not listed:
        return ["gpu unknown (nvidia-smi fails)"]
    counted: dict[str, int] = {}
    for line in listed.splitlines():
        counted[line] = counted.get(line, 0) + 1
    found = []
    for line, count in counted.items():
        *about, driver = (cell.strip() for cell in line.split(","))
        found.append(f"gpu {count} x {', '.join(about)}, driver {driver}")
    return found


def _output(*command: str) -> str:
    """What a program prints, or nothing where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
