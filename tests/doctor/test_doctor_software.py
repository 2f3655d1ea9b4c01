"""Packages that are missing, too old, damaged, or hang: real ones and fakes on the path."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

from verl.doctor import software
from verl.doctor.cli import machine_probes
from verl.doctor.runner import Check, run_groups
from verl.requirements import PackageRequirement, install_command, package_requirements

ROOT = Path(__file__).resolve().parents[2]


def only(findings: object) -> Check:
    (finding,) = list(findings)  # type: ignore[call-overload]
    return finding


def fake_package(folder: Path, name: str, version: str, code: str = "") -> Path:
    """A package as pip leaves it: a module and its metadata."""
    module = name.replace("-", "_")
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text(code)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


# -- ranges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "versions, accepted, refused",
    [
        (">=2.11", ["2.11", "2.11.0", "2.13.0+cpu", "3.0"], ["2.10.9", "2.9", "1"]),
        (">=0.24,<0.33", ["0.24.0", "0.32.5", "0.24.1.dev3"], ["0.33", "0.33.0", "0.23.9", "1.0"]),
        (">=2.3,<2.4", ["2.3.1"], ["2.4.0", "2.2"]),
        ("~=1.4.2", ["1.4.2", "1.4.9"], ["1.5.0", "1.4.1"]),
        ("==1.2", ["1.2.0"], ["1.2.1"]),
        ("", ["0.0.1"], []),
    ],
)
def test_versions_are_compared_as_numbers(versions: str, accepted: list[str], refused: list[str]) -> None:
    wanted = PackageRequirement("x", versions)
    assert [v for v in accepted if not wanted.accepts(v)] == []
    assert [v for v in refused if wanted.accepts(v)] == []


def test_what_is_wanted_is_what_the_project_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = package_requirements()
    core = [each.requirement for each in wanted if not each.extra]
    assert core == [line.replace(" ", "") for line in project["dependencies"]]
    assert {each.extra for each in wanted} - {""} == set(project["optional-dependencies"]) - {
        "dev",
        "docs",
        "all",
    }


@pytest.mark.parametrize(
    "extra",
    [
        "ray",
        "vllm",
        "sglang",
        "megatron",
        "peft",
        "wandb",
        "tensorboard",
        "mlflow",
        "trackio",
        "swanlab",
        "math",
        "datasets",
        "gym",
    ],
)
def test_an_extra_is_installed_by_the_names_of_its_packages(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = " ".join(f"'{line}'" for line in project["optional-dependencies"][extra])
    assert install_command(extra) == f"pip install {packages}"


def test_no_text_tells_to_install_this_project_from_a_registry() -> None:
    """A registry holds another project of this name; a page may say so."""
    pages = [
        ROOT / "README.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("verl/**/*.py"),
    ]
    told = re.compile(r"(?<!Not `)(?<!Not with `)pip install '?verl\b")
    found = [page for page in pages if told.search(page.read_text(encoding="utf-8"))]
    assert not found


def test_metadata_gives_the_same_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl import requirements as ranges

    lines = [
        "torch>=2.11",
        "vllm<0.33,>=0.24; extra == 'vllm'",
        "pytest>=8; extra == 'dev'",
        "verl[ray]; extra == 'all'",
    ]
    monkeypatch.setattr(ranges.Path, "is_file", lambda self: False)
    monkeypatch.setattr(ranges.metadata, "requires", lambda name: lines)
    found = package_requirements()
    assert [(each.name, each.extra) for each in found] == [("torch", ""), ("vllm", "vllm")]
    assert found[1].accepts("0.30") and not found[1].accepts("0.33")


# -- packages -----------------------------------------------------------------------------------------------------


def test_a_python_outside_the_range_of_the_project_is_fatal() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    accepted = PackageRequirement("python", project["requires-python"])
    seen = {f"3.{minor}.1": only(software.python((3, minor, 1))).status for minor in range(9, 18)}
    assert seen == {version: "ok" if accepted.accepts(version) else "fatal" for version in seen}
    assert only(software.python()).status == "ok"


def test_a_missing_extra_is_worth_knowing_and_a_missing_core_package_fatal() -> None:
    extra = only(software.package("verl-no-such-thing", ">=1", "peft", options="[all]"))
    assert extra.status == "note" and extra.fix == "pip install 'verl-no-such-thing[all]>=1'"
    core = only(software.package("verl-no-such-thing", ">=1", ""))
    assert core.status == "fatal" and "pip install 'verl-no-such-thing>=1'" in core.fix


def test_a_real_package_in_its_range_is_in_order() -> None:
    finding = only(software.package("numpy", ">=1.26", ""))
    assert finding.status == "ok" and re.match(r"\d", finding.seen)


@pytest.mark.parametrize("extra, status", [("", "fatal"), ("peft", "warning")])
def test_a_version_outside_the_range_is_named_with_the_range(extra: str, status: str) -> None:
    finding = only(software.package("numpy", ">=99.1", extra))
    assert finding.status == status and ">=99.1" in finding.seen and "numpy>=99.1" in finding.fix


@pytest.mark.parametrize(
    "code, told",
    [
        ("raise ImportError('libfoo.so.12: cannot open shared object file')", "libfoo.so.12"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("import os; os.abort()", "SIGABRT"),
        ("import threading; threading.Event().wait()", "no answer within"),
    ],
)
@pytest.mark.slow(seconds=3)
def test_a_damaged_package_costs_its_own_line_only(
    code: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raising, leaving, aborting, hanging: on the path of the command, as a broken installation is."""
    monkeypatch.syspath_prepend(str(fake_package(tmp_path, "wandb", "0.19.0", code)))
    wanted = ("wandb", "numpy")
    groups = [[probe for probe in group if probe.name in wanted] for group in machine_probes(str(tmp_path))]
    hanging = "wait" in code
    found = {
        answer.probe.name: answer.findings[0]
        for group in groups
        # A limit that only the hanging one is held to: numpy is given its own.
        for answer in run_groups([group], 3.0 if hanging and group and group[0].name == "wandb" else None)
    }
    assert found["wandb"].status == "warning" and told in found["wandb"].seen and found["wandb"].fix
    assert found["numpy"].status == "ok"


def test_a_damaged_torch_is_fatal_and_what_needs_it_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_package(
        tmp_path, "torch", "2.12.0", "raise OSError('libcudart.so.13: cannot open shared object file')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (group,) = [g for g in machine_probes(str(tmp_path)) if any(p.name == "torch" for p in g)]
    found = {answer.probe.name: answer for answer in run_groups([group])}
    assert found["torch"].fatal and "libcudart.so.13" in found["torch"].findings[0].seen
    for name in ("gpu", "transformers"):
        assert found[name].findings[0].seen == "not tried: torch does not work"


def test_torch_is_named_with_its_build() -> None:
    versions = {each.name: each.versions for each in package_requirements()}
    finding = only(software.torch(versions["torch"]))
    assert finding.status == "ok" and "for C" in finding.seen
    assert only(software.torch(">=99")).status == "fatal"


# -- GPUs and processes -------------------------------------------------------------------------------------------


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi first on the path."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\n"
        f"[ -e {tmp_path}/broken ] && {{ echo 'could not communicate with the NVIDIA driver'; exit 9; }}\n"
        'case "$1" in --query-gpu*) echo "0, NVIDIA H200, 143771, 143000"; echo "1, NVIDIA H200, 143771, 20000";;\n'
        "*) echo '| Driver Version: 570.86.15    CUDA Version: 12.8 |';; esac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_gpus_and_their_memory_are_listed(smi: Path) -> None:
    found = {finding.subject: finding for finding in software.gpus()}
    assert found["gpu 0"].status == "ok" and "NVIDIA H200, 140 GiB free of 140 GiB" in found["gpu 0"].seen
    assert found["gpu 1"].status == "warning" and "in use" in found["gpu 1"].seen


def test_a_gpu_that_would_gain_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.models import attention_backends

    installed: list[str] = []
    monkeypatch.setattr(attention_backends, "installed_backends", lambda: tuple(installed))
    assert list(software.judge_attention({8})) == []
    (note,) = software.judge_attention({9})
    assert note.status == "note" and "up to twice" in note.seen and "flash-attn-4" in note.fix
    installed.append("fa4")
    (found,) = software.judge_attention({9})
    assert found.status == "ok" and "fa4" in found.seen


def test_hidden_gpus_are_warned_of() -> None:
    assert [finding.status for finding in software.judge_gpus([], "")] == ["warning"]
    assert [finding.status for finding in software.judge_gpus([], "1")] == ["note"]


def test_a_driver_that_does_not_answer_is_warned_of(smi: Path) -> None:
    (smi / "broken").touch()
    finding = only(software.gpus())
    assert finding.status == "warning" and "could not communicate with the NVIDIA driver" in finding.seen


@pytest.mark.parametrize(
    "driver, build, available, status, told",
    [
        ("12.8", None, False, "warning", "CPU build"),
        ("12.2", "13.0", False, "fatal", "up to 12.2"),
        ("13.0", "12.8", False, "fatal", "is_available() is False"),
        ("12.2", "12.8", True, "ok", "CUDA 12.8"),
        (None, "12.8", True, "ok", "unknown"),
    ],
)
def test_torch_and_driver_must_match(
    driver: str | None, build: str | None, available: bool, status: str, told: str
) -> None:
    finding = only(software.judge_driver(1, driver, build, available))
    assert finding.status == status and told in finding.seen


def test_a_device_that_does_not_compute_is_fatal() -> None:
    assert software.compute("cpu").status == "ok"
    assert software.compute("cuda:99").status == "fatal"


def test_a_name_without_an_address_is_warned_of() -> None:
    finding = only(software.hostname("no-such-host.invalid"))
    assert finding.status == "warning" and "/etc/hosts" in finding.fix


def test_a_cluster_that_does_not_answer_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as held:  # bound and not listening: nobody else can answer there
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        finding = only(software.ray_cluster(address))
    assert finding.status == "warning" and address in finding.seen and "RAY_ADDRESS" in finding.fix
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert only(software.ray_cluster()).status == "note"
