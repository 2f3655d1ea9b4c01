"""The machine's probes: right on this machine, and each of them in a case where it must complain."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from verl.doctor import machine, storage
from verl.doctor.finding import Finding

GIB, MIB = 2**30, 2**20


def only(findings: object) -> Finding:
    (finding,) = list(findings)  # type: ignore[call-overload]
    return finding


# -- cores --------------------------------------------------------------------------------------------------------


def test_the_cores_of_this_machine_are_counted() -> None:
    assert only(machine.cores()).data["usable"] >= 1


@pytest.mark.parametrize(
    "quota, variables, load, told, do",
    [
        (None, {"OMP_NUM_THREADS": "64"}, 0.0, "more threads than cores", "OMP_NUM_THREADS=8"),
        (None, {"OMP_NUM_THREADS": "many"}, 0.0, "not a number", "OMP_NUM_THREADS=8"),
        (None, {"OMP_NUM_THREADS": "0"}, 0.0, "not a number", "OMP_NUM_THREADS=8"),
        (2.0, {}, 0.0, "would start 8 threads for 2 cores", "OMP_NUM_THREADS=2"),
        (None, {}, 30.0, "other programs use this machine", "top"),
    ],
)
def test_threads_beyond_the_cores_are_warned_of(
    quota: float | None, variables: dict[str, str], load: float, told: str, do: str
) -> None:
    finding = machine.judge_cores(8, quota, variables, load)
    assert finding.status == "warning" and told in finding.means and do in finding.do


@pytest.mark.parametrize(
    "quota, variables", [(None, {}), (None, {"OMP_NUM_THREADS": "8"}), (2.0, {"OMP_NUM_THREADS": "2"})]
)
def test_threads_that_fit_are_in_order(quota: float | None, variables: dict[str, str]) -> None:
    assert machine.judge_cores(8, quota, variables, 1.0).status == "ok"


def test_a_containers_share_of_the_cores_is_read(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert machine.cpu_quota(str(tmp_path)) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.cpu_quota(str(tmp_path)) is None
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("400000")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000")
    assert machine.cpu_quota(str(tmp_path)) == 4.0
    assert machine.cpu_quota(str(tmp_path / "nowhere")) is None


# -- memory -------------------------------------------------------------------------------------------------------


def test_the_memory_of_this_machine_is_read() -> None:
    data = only(machine.memory()).data
    assert 0 < data["available"] <= data["total"]


def test_little_memory_is_warned_of() -> None:
    assert machine.judge_memory(64 * GIB, 1 * GIB).status == "warning"
    assert machine.judge_memory(64 * GIB, 32 * GIB).status == "ok"


def test_a_containers_memory_is_read(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB}\n")
    assert machine.cgroup_memory(str(tmp_path)) == (8 * GIB, 3 * GIB)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.cgroup_memory(str(tmp_path)) == (None, 0)


# -- shared memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "total, free, writable, told",
    [
        (64 * MIB, 60 * MIB, True, "bus error"),
        (16 * GIB, 100 * MIB, True, "hand-over of weights"),
        (16 * GIB, 16 * GIB, False, "through the disk"),
    ],
)
def test_shared_memory_that_is_small_full_or_closed_is_warned_of(
    total: int, free: int, writable: bool, told: str
) -> None:
    finding = storage.judge_shared_memory("/dev/shm", total, free, writable)
    assert finding.status == "warning" and told in finding.means and finding.do


def test_shared_memory_that_is_missing_is_warned_of(tmp_path: Path) -> None:
    assert only(storage.shared_memory(str(tmp_path / "none"))).status == "warning"
    assert only(storage.shared_memory(str(tmp_path))).data["total"] > 0
    assert storage.judge_shared_memory("/dev/shm", 16 * GIB, 8 * GIB).status == "ok"


# -- disk ---------------------------------------------------------------------------------------------------------


def test_the_disk_is_written_to_where_run_folders_would_go_and_left_clean(tmp_path: Path) -> None:
    finding = only(storage.disk(str(tmp_path / "not" / "there" / "yet")))
    assert str(tmp_path) in finding.seen and finding.data["bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_fatal() -> None:
    finding = only(storage.disk("/proc/verl"))  # not even root writes there
    assert finding.status == "fatal" and "trainer.default_local_dir" in finding.do


@pytest.mark.parametrize(
    "free, speed, status, told",
    [
        (100 * MIB, None, "fatal", "no room"),
        (5 * GIB, 1e9, "warning", "16 bytes per parameter"),
        (500 * GIB, 5e6, "warning", "hold training up"),
        (500 * GIB, 2e8, "ok", ""),
    ],
)
def test_room_and_speed_are_judged(free: int, speed: float | None, status: str, told: str) -> None:
    finding = storage.judge_disk("/data", free, 1000 * GIB, speed)
    assert finding.status == status and told in finding.means


# -- limits, name, clock ------------------------------------------------------------------------------------------


def test_the_limits_of_this_process_are_read() -> None:
    assert set(only(machine.limits()).data) >= {"NOFILE"}


@pytest.mark.parametrize(
    "found, infiniband, do",
    [
        ({"NOFILE": 1024}, False, "ulimit -n"),
        ({"NOFILE": None, "NPROC": 256}, False, "ulimit -u"),
        ({"NOFILE": None, "MEMLOCK": 65536}, True, "ulimit -l"),
    ],
)
def test_low_limits_are_warned_of(found: dict[str, int | None], infiniband: bool, do: str) -> None:
    finding = machine.judge_limits(found, infiniband)
    assert finding.status == "warning" and do in finding.do


def test_locked_memory_matters_only_where_there_is_infiniband() -> None:
    assert machine.judge_limits({"NOFILE": 65536, "MEMLOCK": 65536}).status == "ok"


def test_a_name_without_an_address_is_warned_of() -> None:
    finding = only(machine.hostname("no-such-host.invalid"))
    assert finding.status == "warning" and "/etc/hosts" in finding.do
    assert only(machine.hostname("localhost")).status == "ok"


def test_a_wrong_clock_is_warned_of(tmp_path: Path) -> None:
    built = 1.75e9
    assert machine.judge_clock(0.0, None, built).status == "warning"
    assert machine.judge_clock(5e9, None, built).status == "warning"
    assert "apart" in machine.judge_clock(1.8e9, 1.8e9 - 3600, built).seen
    assert machine.judge_clock(1.8e9, 1.8e9 + 1, built).status == "ok"
    assert only(machine.clock(str(tmp_path))).subject == "clock" and not list(tmp_path.iterdir())


# -- sandbox, leftovers -------------------------------------------------------------------------------------------


def test_a_machine_without_bubblewrap_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.reward.sandbox import local

    monkeypatch.setenv("PATH", "/nowhere")
    local.why_unavailable.cache_clear()
    try:
        finding = only(machine.sandbox())
    finally:
        local.why_unavailable.cache_clear()
    assert finding.status == "warning" and "bwrap" in finding.seen and "bubblewrap" in finding.do


def test_leftovers_are_counted_and_only_reported(tmp_path: Path) -> None:
    for number in range(3):
        folder = tmp_path / f"verl-weights-{number}"
        folder.mkdir()
        (folder / "bucket").write_bytes(bytes(1000))
    os.utime(tmp_path / "verl-weights-0", (time.time() - 7200,) * 2)
    finding = only(storage.leftovers([f"{tmp_path}/verl-*"]))
    assert finding.status == "note" and finding.data["bytes"] == 3000 and len(finding.data["paths"]) == 3
    assert f"rm -r {tmp_path}/verl-weights*" in finding.do
    assert len(list(tmp_path.iterdir())) == 3
    assert only(storage.leftovers([f"{tmp_path}/none-*"])).status == "ok"


def test_what_a_living_process_owns_is_no_leftover(tmp_path: Path) -> None:
    """By the names runs give."""
    from verl.rollout.weight_sync.stale_files import new_path

    mine = new_path("weights", tmp_path)
    mine.mkdir()
    gone = tmp_path / mine.name.replace(f"-{os.getpid():x}-", "-ffffffff-")
    gone.mkdir()
    assert only(storage.leftovers([f"{tmp_path}/verl-*"])).data["paths"] == [str(gone)]


def test_large_leftovers_are_warned_of() -> None:
    assert storage.judge_leftovers(["/dev/shm/verl-weights-a"], 3 * GIB, 60.0).status == "warning"
