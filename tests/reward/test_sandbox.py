"""Attacks on the sandbox, for real. Every test first makes sure that the attack would work without it, or
that the program got as far as to try."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from verl import memory, processes
from verl.config.sections.reward import RewardConfig, SandboxConfig, SandboxFusionConfig
from verl.errors import RewardError
from verl.reward import RewardSample, build_reward_manager, sandbox
from verl.reward.sandbox import Program, local, remote, seccomp
from verl.reward.scorers import code

LIMITS = SandboxConfig(timeout_s=120.0, memory_limit_mb=256, max_processes=24, max_file_mb=4)
UNAVAILABLE = local.why_unavailable()
isolated = pytest.mark.skipif(
    UNAVAILABLE is not None, reason=f"the local sandbox cannot work here: {UNAVAILABLE}"
)


def run(source: str, stdin: str = "", **limits):
    return local.run(Program(source, stdin), replace(LIMITS, **limits))


def tried(statement: str, **limits) -> str:
    """What became of one attempt: 'done' or the name of the exception."""
    body = f"try:\n    {statement}\n    print('done')\nexcept BaseException as e:\n    print(type(e).__name__, e)\n"
    outcome = run("import ctypes, os, socket, subprocess, sys\n" + body, **limits)
    assert outcome.end == "ok", outcome
    return outcome.stdout.strip()


@isolated
def test_a_program_reads_stdin_prints_and_ends():
    outcome = run("import sys\nprint(sys.stdin.read()[::-1])\nprint('oops', file=sys.stderr)\n", "abc")
    assert (outcome.end, outcome.stdout, outcome.stderr, outcome.exit_code) == ("ok", "cba\n", "oops\n", 0)
    assert run("raise SystemExit(3)").end == "error"
    failing = run("x = 1\n1/0\n")
    assert failing.end == "error" and 'File "solution.py", line 2' in failing.stderr
    assert run("import signal, os\nos.kill(os.getpid(), signal.SIGSEGV)").end == "error"


@isolated
def test_reading_a_file_outside(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    secret.chmod(0o644)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)  # so that only the sandbox stands between the program and the file
    assert "FileNotFoundError" in tried(f"open({str(secret)!r}).read()")
    for path in ("/etc/passwd", "/etc/shadow", "/root/.bashrc", str(Path(__file__))):
        assert tried(f"open({path!r}).read()").split()[0] in ("FileNotFoundError", "PermissionError"), path
    assert "FileNotFoundError" in tried(f"open('/proc/{os.getpid()}/environ').read()")
    assert run("import os\nprint(sorted(os.listdir('/')))").stdout.count("home") == 0


@isolated
def test_writing_outside_the_scratch_folder():
    for path in ("/usr/x", "/x", "/etc/x", "/dev/x", "/solution.py", "/bin/x"):
        assert tried(f"open({path!r}, 'w')").split()[0] in ("OSError", "PermissionError"), path
    assert tried("open('/scratch/x', 'w').write('ok')") == "done"
    assert tried("open('/tmp/x', 'w').write('ok')") == "done"
    # nothing stays for the next program
    assert "[]" in run("import os\nprint(os.listdir('/scratch'))").stdout


@isolated
def test_opening_a_socket():
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    socket.create_connection(("127.0.0.1", port)).close()  # outside, it works
    attempt = f"socket.create_connection(('127.0.0.1', {port}), timeout=5)"
    assert tried(attempt).split()[0] in ("ConnectionRefusedError", "OSError")
    assert tried("socket.create_connection(('1.1.1.1', 53), timeout=5)").startswith("OSError")
    assert "done" not in tried("socket.getaddrinfo('example.com', 80)")
    server.close()


@isolated
def test_a_unix_socket_of_the_host(tmp_path):
    path = str(tmp_path / "s")
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    assert "FileNotFoundError" in tried(f"socket.socket(socket.AF_UNIX).connect({path!r})")
    name = f"\\0verl-test-{os.getpid()}"
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(name.replace("\\0", "\0"))
    abstract.listen()
    assert "ConnectionRefusedError" in tried(f"socket.socket(socket.AF_UNIX).connect('{name}')")
    server.close()
    abstract.close()


@isolated
def test_a_fork_bomb(tmp_path):
    room = {"memory_limit_mb": 4096}  # so that it is the count that stops them
    outcome = run(
        """
import os, sys, time
count = 0
while count < 100000:
    try:
        if os.fork() == 0:
            time.sleep(600)
        count += 1
    except OSError:
        print("stopped after", count, flush=True)
        break
""",
        **room,
    )
    assert outcome.end == "ok"
    assert (
        outcome.stdout.startswith("stopped after") and int(outcome.stdout.split()[-1]) <= LIMITS.max_processes
    )
    bomb = "while True:\n    import os\n    os.fork()\n"
    assert run(bomb, timeout_s=1.0, **room).end in ("timeout", "error")
    assert run("print('alive')").stdout == "alive\n"


@isolated
def test_filling_memory():
    assert "MemoryError" in tried("bytearray(1 << 30)")
    hoard = "hoard = []\nwhile True:\n    hoard.append(bytearray(1 << 20))\n"
    assert run(hoard).end in ("error", "memory")
    forked = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        hoard = bytearray(os.urandom(1)) * (120 << 20)
        time.sleep(600)
time.sleep(600)
"""
    assert run(forked).end == "memory"  # no single process is over its limit, together they are


HOARD = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.mmap.restype = libc.shmat.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
SIZE, FAILED = 16 << 20, ctypes.c_void_p(-1).value

def shared_mapping(flags, descriptor):
    start = libc.mmap(None, SIZE, 3, flags, descriptor, 0)
    if start == FAILED:
        return False
    ctypes.memset(start, 1, SIZE)
    libc.munmap(start + 4096, SIZE - 4096)
    return True

def sysv():
    number = libc.shmget(0, SIZE, 0o1600)
    start = libc.shmat(number, None, 0) if number >= 0 else FAILED
    if start == FAILED:
        return False
    ctypes.memset(start, 1, SIZE)
    libc.shmdt(ctypes.c_void_p(start))
    return True

def memfd():
    try:
        descriptor = os.memfd_create("x")
    except OSError:
        return False
    return all(os.write(descriptor, bytes(1 << 20)) for _ in range(16))

def pipe():
    class Part(ctypes.Structure):
        _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    page = ctypes.create_string_buffer(4096)
    part = Part(ctypes.addressof(page), 4096)
    return libc.vmsplice(os.pipe()[1], ctypes.byref(part), ctypes.c_ulong(1), 0) > 0

def anonymous():
    return shared_mapping(0x21, -1)

def zero():
    return shared_mapping(0x01, os.open("/dev/zero", os.O_RDWR))

ways = [sysv, memfd, anonymous, zero, pipe]
print([way.__name__ for way in ways if way()])
"""


@isolated
@pytest.mark.skipif(seccomp.program() is None, reason=f"no filter for {platform.machine()}")
def test_memory_that_is_in_no_process_cannot_be_had():
    outside = subprocess.run([sys.executable, "-c", HOARD], capture_output=True, text=True, check=True).stdout
    assert outside == "['sysv', 'memfd', 'anonymous', 'zero', 'pipe']\n"  # elsewhere it can
    assert run(HOARD, memory_limit_mb=128).stdout == "[]\n"
    # what programs do use still works
    assert tried("import multiprocessing; multiprocessing.Array('i', 1000)[0] = 5") == "done"
    assert tried("open('/dev/zero', 'rb').read(8) == bytes(8) or sys.exit('not zero')") == "done"


@isolated
@pytest.mark.parametrize("folder", ["/scratch", "/dev/shm"])
def test_files_count_as_memory(folder):
    files = f"""
import time
for number in range(6):
    with open(f"{folder}/{{number}}", "wb") as file:
        file.write(bytes(16 << 20))
time.sleep(600)
"""
    assert run(files, memory_limit_mb=80, max_file_mb=32, timeout_s=250.0).end == "memory"
    names = f"import os\nfor number in range(10**7): os.mknod(f'{folder}/{{number}}')"
    assert run(names, memory_limit_mb=48, timeout_s=250.0).end == "memory"


@isolated
@pytest.mark.skipif(
    memory.cgroup_parent() is None, reason="no cgroup v2 with a memory controller to create groups in"
)
def test_with_a_cgroup_the_kernel_holds_the_limits(monkeypatch):
    monkeypatch.setattr(processes, "resident_bytes", lambda *_: pytest.fail("nothing is left to count"))
    assert "verl-" in run("print(open('/proc/1/cgroup').read(), open('/proc/self/cgroup').read())").stdout
    forked = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        hoard = bytearray(os.urandom(1)) * (120 << 20)
        time.sleep(600)
time.sleep(600)
"""
    assert run(forked, timeout_s=250.0).end == "memory"
    files = """
with open("/dev/shm/a", "wb") as file:
    for _ in range(120):
        file.write(bytes(1 << 20))
"""
    assert run(files, memory_limit_mb=80, max_file_mb=200, timeout_s=250.0).end == "memory"
    buffers = """
import socket
held = [socket.socketpair() for _ in range(120)]
for pair in held:
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        end.setblocking(False)
        try:
            while end.send(bytes(65536)): pass
        except BlockingIOError:
            pass
"""
    assert run(buffers, memory_limit_mb=48, timeout_s=250.0).end == "memory"
    assert not list(memory.cgroup_parent().glob(f"verl-{os.getpid()}-*"))


@isolated
def test_a_program_has_no_descriptor_but_the_standard_ones():
    listing = (
        "import os\nprint([n for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')])"
    )
    assert run(listing).stdout == "['0', '1', '2']\n"


@isolated
def test_bubblewrap_is_started_from_where_it_was_found(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        wrapper = Path(folder, "bwrap")
        wrapper.write_text(f'#!/bin/sh\necho "this one" >&2\nexec {local.find_bwrap()} "$@"\n')
        wrapper.chmod(0o755)
        monkeypatch.setenv("PATH", folder)
        assert run("print(1)").stderr == "this one\n"


@isolated
def test_filling_the_disk():
    assert "OSError" in tried("open('/scratch/big', 'wb').write(b'x' * (8 << 20))")  # one file
    many = """
written = 0
try:
    for number in range(1000):
        with open(f"/FOLDER/{number}", "wb") as file:
            written += file.write(b"x" * (1 << 20))
except OSError as error:
    print("stopped", written >> 20)
"""
    for folder in ("scratch", "dev/shm"):
        stopped = run(many.replace("FOLDER", folder)).stdout.split()
        assert stopped[0] == "stopped" and int(stopped[1]) <= 4 * LIMITS.max_file_mb


@isolated
def test_killing_the_parent_and_everybody_else():
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        run("import os, signal\nfor pid in (os.getppid(), -1):\n    os.kill(pid, signal.SIGKILL)\n")
        run(f"import os, signal\nos.kill({os.getpid()}, signal.SIGKILL)\n")
        assert "ProcessLookupError" in tried(f"os.kill({bystander.pid}, 9)")
        assert bystander.poll() is None
        assert run("print('alive')").stdout == "alive\n"
    finally:
        bystander.kill()
        bystander.wait()


@isolated
def test_reading_the_expected_outputs():
    hidden = "8675309-expected"
    spy = """
import glob, os, sys
seen = []
for root in ("/proc/self", "/proc/1", "/proc", "/scratch", "/tmp", "/dev/shm"):
    for folder, folders, files in os.walk(root):
        if folder.count("/") > 4:
            folders.clear()
        for name in files:
            if name in ("mem", "kmsg", "pagemap", "kcore", "kpagecount", "kpageflags", "kpagecgroup",
            "clear_refs"): continue
            try:
                file = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NONBLOCK)
                try:
                    seen.append(os.read(file, 1 << 16))
                finally:
                    os.close(file)
            except OSError:
                pass
seen += [repr(dict(os.environ)).encode(), repr(sys.argv).encode(), sys.stdin.read().encode()]
for number in range(3, 64):
    try:
        seen.append(os.read(number, 1 << 16))
    except OSError:
        pass
print(len(seen), b"8675309" in b"".join(seen))
"""
    outcome = run(spy, "the input", timeout_s=60.0)
    assert (
        outcome.end == "ok" and int(outcome.stdout.split()[0]) > 20 and outcome.stdout.split()[1] == "False"
    )
    sandbox.configure(RewardConfig(timeout_s=75.0, sandbox=LIMITS))
    cheat = f"```python\n{spy}\nprint(b'8675309' in b''.join(seen))\n```"
    assert code.compute_score(cheat, {"inputs": ["x"], "outputs": [hidden]})["score"] == 0.0


@isolated
def test_sleeping_for_ever_and_burning_time():
    assert run("import time\ntime.sleep(600)", timeout_s=0.5).end == "timeout"
    assert run("while True: pass", timeout_s=0.5).end == "timeout"
    assert run("import os, time\nos.close(1)\nos.close(2)\ntime.sleep(600)", timeout_s=0.5).end == "timeout"
    ignoring = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(1)"
    assert run(ignoring, timeout_s=0.5).end == "timeout"


@isolated
def test_the_clock_starts_with_the_program_not_with_its_sandbox():
    assert run("print(1)", timeout_s=0.001).end in ("ok", "timeout")  # never "the sandbox failed"


@isolated
def test_writing_gigabytes_to_stdout():
    for stream, end, timeout_s in (("stdout", "output", 60.0), ("stderr", "timeout", 2.0)):
        outcome = run(f"import sys\nwhile True: sys.{stream}.write('x' * 65536)\n", timeout_s=timeout_s)
        assert outcome.end == end
        assert len(outcome.stdout) <= local.OUTPUT_LIMIT and len(outcome.stderr) <= 65536


@isolated
def test_escaping_through_a_double_fork(tmp_path):
    marker = f"verl-escape-{os.getpid()}-{time.monotonic_ns()}"
    outcome = run(f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(0), os.close(1), os.close(2)
        sleeper = "import time; open('/scratch/away', 'w'); time.sleep(600)"
        os.execv(sys.executable, [sys.executable, "-c", sleeper, {marker!r}])
    os._exit(0)
while not os.path.exists("/scratch/away"):
    time.sleep(0.01)
print("left")
""")
    assert outcome.stdout == "left\n"

    def found() -> bool:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if marker.encode() in entry.read_bytes():
                    return True
            except OSError:
                continue
        return False

    for _ in range(4000):
        if not found():
            return
        time.sleep(0.05)
    raise AssertionError("a process outlived its sandbox")


@isolated
def test_becoming_somebody_else():
    assert "Error" in tried("os.setuid(0)")
    assert "CapEff:\t0000000000000000" in run("print(open('/proc/self/status').read())").stdout
    assert "NoNewPrivs:\t1" in run("print(open('/proc/self/status').read())").stdout
    assert run("import os\nprint(os.getuid())").stdout.strip() == "65534"
    raised = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))"
    assert "ValueError" in run(raised).stderr


@isolated
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be dropped")
def test_started_as_root_the_program_is_somebody_unprivileged_also_outside(tmp_path):
    source = "import time; time.sleep(600)"
    seen: list[str] = []
    over = threading.Event()
    number = f"{os.getpid()}00"  # among the program's limits, by which it is known from those of other tests

    def look() -> None:
        while not over.wait(0.01):
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    arguments = (entry / "cmdline").read_bytes()
                    if (
                        b'"/solution.py"' in arguments
                        and f'"NPROC": {number}'.encode() in arguments
                        and b"bwrap" not in (entry / "comm").read_bytes()
                    ):
                        status = (entry / "status").read_text()
                        seen.append(status.split("Uid:")[1].split()[0])
                        os.kill(int(entry.name), signal.SIGKILL)  # it was only there to be seen
                        return
                except (OSError, IndexError):
                    continue

    thread = threading.Thread(target=look)
    thread.start()
    run(source, timeout_s=120.0, max_processes=int(number))
    over.set()
    thread.join()
    assert seen and seen[0] != "0"


@isolated
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else for a test")
def test_it_works_for_an_ordinary_user_too():
    root = Path(__file__).parents[2]
    script = f"""
import os, sys
sys.path[:0] = {[str(root), *sys.path]!r}
from verl.config.sections.reward import SandboxConfig
from verl.reward.sandbox import Program, local
assert os.getuid() == 65533
limits = SandboxConfig(timeout_s=60.0, max_processes=8)
print(local.why_unavailable(), local.run(Program("print(open('/etc/passwd').read())"), limits).end)
"""
    python = local.find_python() or sys.executable
    try:
        done = subprocess.run(
            [python, "-c", script],
            user=65533,
            group=65533,
            extra_groups=[],
            capture_output=True,
            text=True,
            cwd="/",
        )
    except PermissionError:
        pytest.skip("another user may not run this Python")
    if "ModuleNotFoundError" in done.stderr or "PermissionError" in done.stderr:
        pytest.skip("another user may not read this folder")
    assert done.stdout.strip() == "None error", done


@isolated
@pytest.mark.skipif(seccomp.program() is None, reason=f"no filter for {platform.machine()}")
def test_the_system_call_filter():
    assert "Seccomp:\t2" in run("print(open('/proc/self/status').read())").stdout
    libc = "ctypes.CDLL(None, use_errno=True)"
    call = "r = {libc}.{what}; assert r != -1, os.strerror(ctypes.get_errno())"
    for what in ("ptrace(0, 0, 0, 0)", "unshare(0x10000000)", "mount(b'a', b'/scratch', b'tmpfs', 0, None)"):
        assert "Operation not permitted" in tried(call.format(libc=libc, what=what)), what
    numbers = seccomp.MACHINES[platform.machine()][1]
    for name in ("keyctl", "bpf", "io_uring_setup", "perf_event_open", "userfaultfd"):
        what = f"syscall({numbers[name]}, 0, 0, 0, 0)"
        assert "Operation not permitted" in tried(call.format(libc=libc, what=what)), name
    for family in ("AF_VSOCK", "AF_NETLINK", "AF_PACKET"):
        assert tried(f"socket.socket(socket.{family}, socket.SOCK_DGRAM)").startswith("PermissionError"), (
            family
        )
    assert tried("socket.socket(socket.AF_INET)") == "done"
    assert tried("import threading; t = threading.Thread(target=print); t.start(); t.join()").endswith("done")
    assert tried("subprocess.run(['/bin/true'], check=True)") == "done"


def answer(machine: str, number: int, *arguments: int, arch: int | None = None) -> str:
    """What the filter says to a system call, by running its program as the kernel does."""
    data = seccomp.program(machine)
    assert data is not None
    program = list(struct.iter_unpack("=HBBI", data))
    call = struct.pack("=iIQ6Q", number, arch or seccomp.MACHINES[machine][0], 0, *(*arguments, *[0] * 6)[:6])
    place, loaded = 0, 0
    while True:
        operation, if_true, if_false, value = program[place]
        place += 1
        if operation == 0x20:
            (loaded,) = struct.unpack_from("=I", call, value)
        elif operation == 0x06:
            return {0x7FFF0000: "allowed", 0x80000000: "killed"}.get(value) or os.strerror(value & 0xFFFF)
        else:
            met = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[operation]
            place += if_true if met else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_on_both_machines(machine):
    refused = "Operation not permitted"
    _, denied, (clone, clone3, socket_call, socketpair, mmap) = seccomp.MACHINES[machine]
    for name in ("shmget", "shmat", "shmctl", "semget", "msgget", "memfd_create", "memfd_secret", "vmsplice"):
        assert name in denied
    assert {answer(machine, number) for number in denied.values()} == {refused}
    shared, private, anonymous = 1, 2, 0x20
    assert answer(machine, mmap, 0, 0, 0, shared | anonymous) == refused
    assert answer(machine, mmap, 0, 0, 0, 3 | anonymous) == refused  # MAP_SHARED_VALIDATE
    assert answer(machine, mmap, 0, 0, 0, private | anonymous) == "allowed"
    assert answer(machine, mmap, 0, 0, 0, shared) == "allowed"  # of a file, which is counted
    assert answer(machine, clone, 0x10000000) == refused and answer(machine, clone, 17) == "allowed"
    assert answer(machine, clone3) == "Function not implemented"
    for call in (socket_call, socketpair):
        assert [answer(machine, call, family) for family in (1, 2, 10)] == ["allowed"] * 3
        assert [answer(machine, call, family) for family in (16, 17, 38, 40)] == [refused] * 4
    assert answer(machine, 63 if machine == "aarch64" else 0) == "allowed"  # read
    assert answer(machine, 3, arch=0x40000003) == "killed"  # i386: its calls have other numbers
    assert answer(machine, 3, arch=0x40000028) == "killed"  # 32-bit ARM
    if machine == "x86_64":
        assert answer(machine, 0x40000000 + 9) == "killed"  # x32


def test_no_filter_for_other_machines():
    assert seccomp.program("mips") is None


@isolated
def test_function_calls_are_made_inside_and_compared_outside():
    sandbox.configure(RewardConfig(sandbox=replace(LIMITS, timeout_s=250.0)))
    noisy = "def f(a, b=1):\n    print('noise')\n    return a / b\n"
    assert code.call_function(noisy, "f", [([4], {}), ([4, 2], {}), ([1, 0], {})], 250.0)[0] == {
        0: 4.0,
        1: 2.0,
    }
    method = "class Solution:\n    def f(self, x):\n        return {x, x + 1}\n"
    assert code.call_function(method, "f", [([1], {})], 250.0)[0] == {0: {"__set__": [1, 2]}}
    for source in ("import os\nos._exit(0)", "syntax error", "def g(): pass", "import sys\nsys.exit()"):
        assert code.call_function(source, "f", [([1], {})], 250.0)[0] == {}
    half = "def f(x):\n    while x: pass\n    return x\n"
    found, limit = {}, 2.0
    while not found and limit < 250:  # a slow machine gets to the first call with a longer limit
        found, _ = code.call_function(half, "f", [([0], {}), ([1], {})], limit)
        limit *= 2
    assert found == {0: 0}


def test_without_isolation_nothing_runs_unless_the_user_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(local, "why_unavailable", lambda: "bubblewrap (the program bwrap) is not installed")
    with pytest.raises(RewardError, match=r"bubblewrap.*sandbox_fusion.url.*allow_unisolated=True"):
        run("print(1)")
    cfg = RewardConfig(in_process=True)
    with pytest.raises(RewardError, match="allow_unisolated"):
        build_reward_manager(cfg, max_response_length=8).check(["code"], [])
    assert run("print(1)", allow_unisolated=True).stdout == "1\n"
    assert run("import time\ntime.sleep(600)", allow_unisolated=True, timeout_s=1.0).end == "timeout"
    assert run("bytearray(1 << 30)", allow_unisolated=True).end == "error"
    assert run("import os; os.kill(os.getpid(), 11)", allow_unisolated=True).exit_code == -11
    cfg.sandbox.allow_unisolated = True
    build_reward_manager(cfg, max_response_length=8).check(["code"], [])


def test_without_isolation_a_daemon_ends_with_its_program(monkeypatch, gone):
    monkeypatch.setattr(local, "why_unavailable", lambda: "bubblewrap (the program bwrap) is not installed")
    daemon = """
import ctypes, os
here, there = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
        os.write(there, str(os.getpid()).encode())
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 1), os.dup2(null, 2)
        os.execve("/bin/sleep", ["sleep", "600"], {})
    os._exit(0)
print(os.read(here, 16).decode())
"""
    outcome = run(daemon, allow_unisolated=True)
    assert outcome.end == "ok" and gone(int(outcome.stdout))


def test_threads_of_the_user_are_not_the_programs(monkeypatch):
    """The kernel counts all of a user's threads, this test's among them."""
    monkeypatch.setattr(local, "why_unavailable", lambda: "bubblewrap (the program bwrap) is not installed")
    before, over = local._own_tasks(), threading.Event()
    threads = [threading.Thread(target=over.wait) for _ in range(80)]
    for thread in threads:
        thread.start()
    try:
        assert local._own_tasks() > threading.active_count() >= 81 and before >= 1
        outcome = run("import os\nos.fork() and print('forked')", allow_unisolated=True, max_processes=64)
    finally:
        over.set()
    assert outcome.end == "ok" and outcome.stdout == "forked\n"


@isolated
def test_a_sandbox_that_does_not_start_is_not_the_models_fault(monkeypatch):
    monkeypatch.setattr(local, "host_mounts", lambda python: iter([["--ro-bind", "/nowhere", "/usr"]]))
    outcome = run("print(1)")
    assert outcome.end == "sandbox" and "bwrap" in outcome.stderr
    fake = run("import sys\nprint('bwrap: no', file=sys.stderr)\nsys.exit(1)")
    assert fake.end == "sandbox"  # still broken
    monkeypatch.undo()
    fake = run("import sys\nprint('bwrap: no', file=sys.stderr)\nsys.exit(1)")
    assert fake.end == "error"  # a program cannot pretend


@isolated
@pytest.mark.parametrize(
    ("timeout_s", "answers"),
    [
        pytest.param(
            60.0,
            {
                "print(int(input()) * 2)": (1.0, "ok"),
                "n = int(input())\nprint(n * 2 if n < 5 else 'no')": (2 / 3, None),
                "import os\nos.kill(os.getppid(), 9)": (0.0, None),
                "hoard = []\nwhile True: hoard.append(bytearray(1 << 24))": (0.0, None),
            },
            id="programs that end",
        ),
        pytest.param(
            1.0,
            {
                "while True: pass": (0.0, "timeout"),
                "import os\nwhile True: os.fork()": (0.0, None),
            },
            id="programs that do not end",
        ),
    ],
)
@pytest.mark.slow(seconds=4)
def test_the_code_scorer_through_worker_processes(no_children_left, timeout_s, answers):
    cfg = RewardConfig(num_workers=2, timeout_s=600.0)
    cfg.reward_manager.name = "prime"
    cfg.sandbox.timeout_s = timeout_s
    manager = build_reward_manager(cfg, max_response_length=8)
    manager.check(["code"], [])
    double = {"inputs": ["1\n", "2\n", "5\n"], "outputs": ["2", "4", "10"]}
    for index, text in enumerate(answers):
        manager.submit(
            RewardSample(index, "", f"Here:\n```python\n{text}\n```", ground_truth=double, data_source="code")
        )
    results = manager.collect()
    for index, (score, end) in enumerate(answers.values()):
        assert results[index].score == score
        assert end is None or results[index].extra["code_end"] == end
    manager.close()


class FusionHandler(BaseHTTPRequestHandler):
    """A stand-in for the remote service: runs the code in a plain process and speaks its JSON."""

    failures = 0
    requests: list[dict] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).requests.append(body)
        if type(self).failures > 0:
            type(self).failures -= 1
            self.send_error(503)
            return
        status, code_, out, err = "Finished", 0, "", ""
        if self.path != "/run_code":
            self.send_error(404)
            return
        try:
            done = subprocess.run(
                [sys.executable, "-c", body["code"]], input=body["stdin"], capture_output=True, text=True,
                timeout=body["run_timeout"],
            )  # fmt: skip
            out, err, code_ = done.stdout, done.stderr, done.returncode
        except subprocess.TimeoutExpired:
            status, code_ = "TimeLimitExceeded", None
        run_result = {
            "status": status,
            "return_code": code_,
            "stdout": out,
            "stderr": err,
            "execution_time": 0.1,
        }
        answer = {"status": "Success" if code_ == 0 else "Failed", "message": "", "run_result": run_result}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def fusion(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), FusionHandler)
    FusionHandler.failures, FusionHandler.requests = 0, []
    monkeypatch.setattr(remote, "BACKOFF_S", 0.01)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def use_service(url: str, **limits) -> None:
    sandbox.configure(
        RewardConfig(sandbox=SandboxConfig(**limits), sandbox_fusion=SandboxFusionConfig(url=url))
    )


def test_a_remote_service_runs_the_code(fusion):
    use_service(fusion, timeout_s=60.0, memory_limit_mb=128)
    good = "```python\nprint(int(input()) + 1)\n```"
    assert code.compute_score(good, {"inputs": ["1", "2"], "outputs": ["2", "3"]})["score"] == 1.0
    calls = {"entry_point": "f", "tests": [{"args": [2], "expected": 4}, {"args": [3], "expected": 0}]}
    assert code.compute_score("```python\ndef f(x): return x * 2\n```", calls)["score"] == 0.5
    sent = FusionHandler.requests[0]
    assert sent["language"] == "python" and sent["memory_limit_MB"] == 128 and sent["stdin"] in ("1", "2")
    assert not any("expected" in json.dumps(request) for request in FusionHandler.requests)


def test_a_remote_service_that_fails_is_retried_and_then_leaves_no_score(fusion):
    use_service(fusion)
    FusionHandler.failures = 2
    assert sandbox.run(Program("print(1)")).stdout == "1\n"
    FusionHandler.failures = 9
    outcome = sandbox.run(Program("print(1)"))
    assert outcome.end == "sandbox" and "503" in outcome.stderr and fusion in outcome.stderr
    use_service("http://127.0.0.1:1")
    assert sandbox.run(Program("x")).end == "sandbox"
    with pytest.raises(RewardError, match="sandbox_fusion.url"):
        code.compute_score("print(1)", {"inputs": [""], "outputs": ["1"]})


def test_a_remote_program_that_prints_without_end_has_failed(fusion, monkeypatch):
    monkeypatch.setattr("verl.reward.http.MAX_ANSWER_BYTES", 1 << 16)
    use_service(fusion)
    assert sandbox.run(Program("print('x' * 100_000)")).end == "output"
    assert len(FusionHandler.requests) == 1
    score = code.compute_score("```python\nprint('x' * 100_000)\n```", {"inputs": [""], "outputs": ["x"]})
    assert score["score"] == 0.0 and score["code_end"] == "output"


def test_a_remote_program_that_fails_after_the_right_output_has_failed(fusion):
    use_service(fusion)
    outcome = sandbox.run(Program("print(1); raise SystemExit(3)"))
    assert (outcome.end, outcome.stdout, outcome.exit_code) == ("error", "1\n", 3)


def test_remote_addresses():
    assert remote.address("http://h:1") == remote.address("http://h:1/") == "http://h:1/run_code"
    assert remote.address("http://h/faas/run_code") == "http://h/faas/run_code"


@pytest.fixture(autouse=True)
def default_settings():
    yield
    sandbox.configure(RewardConfig())
