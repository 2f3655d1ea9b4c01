"""The Dockerfiles: hadolint's rules, and what they say about verl agrees with the package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
CORE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
NAMES = [file.name for file in FILES]


def test_there_is_an_image_for_each_way_to_run() -> None:
    assert NAMES == [
        "cpu.Dockerfile",
        "cuda-sglang.Dockerfile",
        "cuda-vllm.Dockerfile",
        "megatron.Dockerfile",
    ]


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (extra `dev`, Linux)")
    done = subprocess.run(
        [hadolint, "--no-color", *map(str, FILES)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_pins_are_versions_that_the_package_accepts(file: Path) -> None:
    pins = re.findall(r"([\w-]+)(?:\[\w+\])?==([\w.]+)", file.read_text(encoding="utf-8"))
    accepted = [*map(Requirement, CORE), *(Requirement(line) for lines in EXTRAS.values() for line in lines)]
    assert pins
    for name, version in pins:
        ranges = [each.specifier for each in accepted if each.name == name]
        assert ranges and all(specifier.contains(version) for specifier in ranges), f"{name}=={version}"


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_extras_and_copied_files_exist_and_reach_the_builder(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    (extras,) = re.findall(r"pip install '\.\[([\w,]+)\]'", text)
    assert set(extras.split(",")) <= set(EXTRAS)
    copied = {
        path for line in re.findall(r"^COPY (.+)$", text, flags=re.MULTILINE) for path in line.split()[:-1]
    }
    sent = {
        line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")
    }
    assert copied == sent and all((ROOT / path).exists() for path in copied)


def test_the_page_builds_every_image_and_names_their_versions() -> None:
    page = (ROOT / "docs/containers.md").read_text(encoding="utf-8")
    for file in FILES:
        assert f"docker build --file docker/{file.name} " in page
        text = file.read_text(encoding="utf-8")
        (base,) = re.findall(r"^ARG BASE=(.+)$", text, flags=re.MULTILINE)
        assert f"`{base}`" in page
        for version in re.findall(r"==([\w.]+)", text):
            assert version in page, (file.name, version)
