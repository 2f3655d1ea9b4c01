"""Finding, watching and killing processes, on real ones."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory

import pytest

from verl import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

FORK = "import os, time; os.fork(); os.write(1, f'{os.getpid()}\\n'.encode()); time.sleep(600)"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def run(code: str, **options) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def pids_of(process: subprocess.Popen[str], count: int) -> set[int]:
    assert process.stdout is not None
    return {int(process.stdout.readline()) for _ in range(count)}


def test_a_tree_is_found_and_killed(start, gone):
    process = start(FORK, start_new_session=True)
    pids = pids_of(process, 2)
    assert {found.pid for found in processes.descendants(process.pid)} == pids - {process.pid}
    assert {found.pid for found in processes.group_members(process.pid)} == pids
    processes.kill_tree(process.pid)
    process.wait()
    assert all(gone(pid) for pid in pids)
    assert processes.descendants(process.pid) == processes.group_members(process.pid) == []


def test_a_group_is_killed_as_one_although_its_first_process_has_ended(start, gone):
    process = start("import os; os.fork() and os._exit(0)\n" + FORK, start_new_session=True)
    pids = pids_of(process, 2)
    process.wait()
    processes._kill_with_group(min(pids))
    assert all(gone(pid) for pid in pids)


def test_a_process_is_known_by_pid_and_start(start):
    process = start("import time; print(1, flush=True); time.sleep(600)")
    assert process.stdout.readline()  # before it has executed Python, it has no command line
    started = processes.start_time(process.pid)
    assert started > 0 and processes.is_alive(process.pid, started) and processes.is_alive(process.pid)
    assert not processes.is_alive(process.pid, started + 1)
    assert f"process {process.pid} ({sys.executable})" in processes.describe(process.pid)
    assert not processes.wait_gone(process.pid, started, timeout_s=0.0)
    process.kill()
    assert processes.wait_gone(process.pid, started)
    assert not processes.is_alive(process.pid, started)  # a zombie is not alive
    process.wait()
    assert processes.wait_gone(process.pid, started) and processes.start_time(process.pid) == 0
    assert "has ended" in processes.describe(process.pid)


def test_ancestors_between_a_process_and_the_one_that_started_it(start):
    code = (
        "import os, subprocess, sys\n"
        "code = 'from verl import processes; import sys; '"
        "       'print(*[p.pid for p in processes.ancestors_up_to(int(sys.argv[1]))])'\n"
        f"subprocess.run([sys.executable, '-c', code, '{os.getpid()}'])\n"
    )
    process = start(code)
    assert pids_of(process, 1) == {process.pid}


def test_shared_memory_of_processes_is_named():
    memory = shared_memory.SharedMemory(create=True, size=4096)
    try:
        found = processes.mapped_shared_memory([os.getpid()], re.compile(r"psm_[0-9a-f]+"))
        assert memory.name.lstrip("/") in found
        assert processes.mapped_shared_memory([os.getpid()], re.compile("nothing")) == []
    finally:
        memory.close()
        memory.unlink()


def test_a_supervised_command_ends_with_its_status_and_what_it_started(gone):
    command = processes.supervised_command([sys.executable, "-c", FORK])
    supervisor = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert supervisor.stdout is not None
    pids = [int(supervisor.stdout.readline()) for _ in range(2)]
    supervisor.send_signal(signal.SIGSTOP)  # a supervisor that does not react is killed with its tree
    processes.kill_supervised(supervisor, timeout_s=0.2)
    assert all(gone(pid) for pid in pids) and supervisor.returncode == -signal.SIGKILL
    supervisor.stdout.close()
    failing = processes.supervised_command([sys.executable, "-c", "import sys; sys.exit(7)"])
    assert subprocess.run(failing).returncode == 7
    assert processes.describe_exit(7).endswith("exit code 7")
    assert "SIGSEGV" in processes.describe_exit(-signal.SIGSEGV)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_without_a_mapping_is_found_by_its_descriptors_and_counts_once(tmp_path):
    before = processes.open_memory_bytes([os.getpid()])
    held = [os.memfd_create("held"), os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR), os.dup(0)]
    held.append(os.dup(held[0]))
    on_disk = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    try:
        for descriptor in (*held[:2], on_disk):
            os.pwrite(descriptor, bytes(1 << 20), 0)
            os.ftruncate(descriptor, 1 << 30)  # not memory before it is written
        assert processes.open_memory_bytes([os.getpid(), os.getpid()]) - before == 2 << 20
    finally:
        for descriptor in (*held, on_disk):
            os.close(descriptor)
    assert processes.open_memory_bytes([os.getpid(), 2**22 + 1]) == before


@pytest.mark.skipif(not os.path.exists("/proc/sysvipc/shm"), reason="no System V shared memory")
def test_system_v_segments_are_those_of_their_creators_and_are_removed():
    create = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.shmat.restype = ctypes.c_void_p\n"
        "segment = libc.shmget(0, 1 << 20, 0o1600)\n"
        "ctypes.memset(ctypes.c_void_p(libc.shmat(segment, None, 0)), 1, 1 << 20)\n"
        "print(segment)"
    )
    process = subprocess.Popen([sys.executable, "-c", create], stdout=subprocess.PIPE, text=True)
    segment = int(process.communicate()[0])
    assert segment not in processes.sysv_segments([os.getpid()])
    assert processes.sysv_segments([process.pid]) == {segment: 1 << 20}
    processes.remove_sysv_segments([process.pid])
    assert not processes.sysv_segments([process.pid])


def test_resident_memory_counts_files_in_memory_once():
    used = processes.resident_bytes([os.getpid()])
    assert used > 1 << 20
    assert processes.resident_bytes([os.getpid()], tmpfs_bytes=1 << 40) > 1 << 40
    assert processes.resident_bytes([]) == 0
