"""Cores, memory, disks, limits, the sandbox and the hub: as they are here, and each thing that can be wrong."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from verl.doctor import machine
from verl.doctor.runner import Check

GIB = 2**30


def only(findings: object) -> Check:
    (finding,) = list(findings)  # type: ignore[call-overload]
    return finding


@pytest.mark.parametrize("probe", [machine.cores, machine.memory, machine.limits, machine.shared_memory])
def test_this_machine_is_read(probe) -> None:
    assert any(letter.isdigit() for letter in only(probe()).seen)


@pytest.mark.parametrize(
    "affinity, quota, threads, load, told",
    [
        (8, None, "16", 0.0, "16 threads"),
        (64, 4.0, "", 0.0, "64 threads"),
        (8, None, "", 20.0, "other programs"),
    ],
)
def test_threads_beyond_the_cores_are_warned_of(affinity, quota, threads, load, told) -> None:
    finding = machine.judge_cores(affinity, quota, threads, load)
    assert finding.status == "warning" and told in finding.seen
    assert finding.fix in ("top", f"export OMP_NUM_THREADS={int(quota or affinity)}")


@pytest.mark.parametrize("quota, threads", [(None, ""), (None, "4"), (4.0, "4"), (16.0, ""), (None, "2,1")])
def test_threads_that_fit_are_in_order(quota, threads) -> None:
    assert machine.judge_cores(8, quota, threads, 1.0).status == "ok"


def test_the_cpu_limit_of_a_container_is_read(tmp_path: Path) -> None:
    assert machine.cpu_quota(str(tmp_path)) is None
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert machine.cpu_quota(str(tmp_path)) == 2.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.cpu_quota(str(tmp_path)) is None


def test_little_memory_is_warned_of() -> None:
    assert machine.judge_memory(64 * GIB, GIB).status == "warning"
    assert machine.judge_memory(64 * GIB, 32 * GIB).status == "ok"


@pytest.mark.parametrize(
    "total, free, writable, told",
    [
        (GIB // 16, GIB // 16, True, "--shm-size"),
        (8 * GIB, GIB // 4, True, "ls -lt"),
        (8 * GIB, 8 * GIB, False, "chmod"),
    ],
)
def test_shared_memory_that_is_small_full_or_closed_is_warned_of(total, free, writable, told) -> None:
    finding = machine.judge_shared_memory("/dev/shm", total, free, writable)
    assert finding.status == "warning" and told in finding.fix


def test_shared_memory_that_is_missing_is_warned_of(tmp_path: Path) -> None:
    assert only(machine.shared_memory(str(tmp_path / "nowhere"))).status == "warning"


def test_the_disk_is_tried_where_run_folders_would_go_and_left_clean(tmp_path: Path) -> None:
    finding = only(machine.disk(str(tmp_path / "checkpoints" / "verl")))
    assert str(tmp_path) in finding.seen and list(tmp_path.iterdir()) == []
    assert only(machine.disk("/proc/nowhere")).status == "fatal"


@pytest.mark.parametrize("free, status", [(GIB // 2, "fatal"), (5 * GIB, "warning"), (50 * GIB, "ok")])
def test_free_space_is_judged(free: int, status: str) -> None:
    assert machine.judge_disk("/runs", free, 100 * GIB).status == status


@pytest.mark.parametrize("files, fix", [(1024, "ulimit -n 65536"), (resource.RLIM_INFINITY, "")])
def test_few_open_files_are_warned_of(files: int, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda number: (files, files))
    assert only(machine.limits()).fix == fix


def test_a_machine_without_bubblewrap_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.reward.sandbox import local

    monkeypatch.setenv("PATH", "/nowhere")
    local.why_unavailable.cache_clear()
    try:
        finding = only(machine.sandbox())
    finally:
        local.why_unavailable.cache_clear()
    assert finding.status == "warning" and "bwrap" in finding.seen and "bubblewrap" in finding.fix


def test_bubblewrap_that_may_not_make_namespaces_is_not_to_be_installed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from verl.reward.sandbox import local

    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    local.why_unavailable.cache_clear()
    try:
        finding = only(machine.sandbox())
        refusal = local.refusal("no namespaces")
    finally:
        local.why_unavailable.cache_clear()
    assert "bubblewrap does not work on this machine" in finding.seen
    for told in (finding.fix, refusal):
        assert "permit user namespaces" in told and "install" not in told


@pytest.mark.parametrize(
    "variables, problem, status, told",
    [
        ({}, None, "ok", "https://huggingface.co answers"),
        ({}, "refused", "warning", "refused"),
        ({}, "", "note", "SOCKS"),
        ({"HF_HUB_OFFLINE": "1"}, None, "note", "HF_HUB_OFFLINE=1"),
        ({"HF_ENDPOINT": "https://me:secret@mirror"}, None, "ok", "https://mirror answers"),
    ],
)
def test_whether_the_hub_answers(variables, problem, status, told) -> None:
    finding = machine.judge_hub(variables, lambda address: problem)
    assert finding.status == status and told in finding.seen and "secret" not in finding.seen
