"""The sdist and the wheel, and what runs from the wheel without the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import verl

ROOT = Path(__file__).resolve().parents[2]
NO_CODE = {"verl/observe/web/app.js", "verl/recipes/gspo/recipe.yaml", "verl/recipes/gspo/README.md"}


def run(command: Sequence[str | Path], cwd: Path, timeout: float = 280) -> str:
    # Without PYTHONPATH: the checkout must not be importable.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools writes beside what it builds."""
    folder = tmp_path_factory.mktemp("sdist")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a git checkout: the files of the sdist cannot be listed")
    copy = folder / "copy"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    run([sys.executable, "-c", _HOOK.format(hook="build_sdist", folder=str(folder))], cwd=copy)
    return folder / f"verl-{verl.__version__}.tar.gz"


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as `python -m build` does."""
    folder = tmp_path_factory.mktemp("wheel")
    run(["tar", "-xzf", sdist], cwd=folder)
    source = folder / f"verl-{verl.__version__}"
    run([sys.executable, "-c", _HOOK.format(hook="build_wheel", folder=str(folder))], cwd=source)
    return folder / f"verl-{verl.__version__}-py3-none-any.whl"


_SHORT_DEMO = """
import sys, verl.demo.cli as demo
from verl.cli import main
demo.SFT_STEPS, demo.RL_STEPS = 2, 1
arguments = demo.rl_arguments
small = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=2"]
demo.rl_arguments = lambda *given: arguments(*given) + small
sys.exit(main(["demo", "--out", "here"]))
"""
_HOOK = "import setuptools.build_meta as backend; backend.{hook}({folder!r})"


@pytest.mark.slow(seconds=10)
def test_the_sdist_has_tests_and_pages(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        "LICENSE",
        "CHANGELOG.md",
        "Makefile",
        "constraints.txt",
        "docs/architecture.md",
        "tests/conftest.py",
        "benchmarks/README.md",
        "docker/cpu.Dockerfile",
        "mkdocs.yml",
        ".github/CODEOWNERS",
    }
    assert (expected | NO_CODE) - names == set()
    assert not [name for name in names if name.endswith(".pyc") or name.startswith(".venv")]


@pytest.mark.slow(seconds=10)
def test_the_wheel_has_the_whole_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        described = archive.read(f"verl-{verl.__version__}.dist-info/METADATA").decode()
    tracked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "verl").rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    assert {name for name in names if not name.startswith("verl-")} == tracked
    assert (
        f"\nVersion: {verl.__version__}\n" in described and "\nRequires-Python: <3.14,>=3.11\n" in described
    )


@pytest.mark.slow(seconds=25)
@pytest.mark.timeout(600)
def test_the_wheel_runs_the_demo_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """The demo with few steps, from an empty folder. torch and the rest come from this environment; verl must not."""
    environment, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    run([sys.executable, "-m", "venv", "--without-pip", environment], cwd=tmp_path)
    python = environment / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    run([sys.executable, "-m", "pip", "--python", python, *install], cwd=tmp_path)
    # .pth files of a folder that is added this way are not read, an editable installation of verl among them.
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    (site / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run([python, "-c", "import verl; print(verl.__file__)"], cwd=empty)
    assert Path(where.strip()).is_relative_to(environment)

    reported = run([environment / "bin" / "verl", "--version"], cwd=empty)
    assert reported.startswith(f"verl {verl.__version__}\npython 3.")
    assert re.search(r"^torch 2\.", reported, flags=re.MULTILINE)

    printed = run([python, "-c", _SHORT_DEMO], cwd=empty, timeout=560)
    assert re.fullmatch(r"demo: held-out accuracy \d\.\d\d -> \d\.\d\d", printed.splitlines()[-1])
    assert list(empty.rglob("report.html"))
