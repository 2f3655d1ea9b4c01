"""Functions that hang, crash, fork, eat memory or exit: real processes, real kills, and the rest gets its
scores."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl import memory, processes
from verl.config.schema import RewardConfig
from verl.errors import RewardError
from verl.reward.functions import FunctionSpec
from verl.reward.pool import WorkerPool
from verl.user_process import HEADER

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills and limits are tested on Linux")

FAULTS = """
import asyncio, ctypes, os, signal, subprocess, sys, threading, time

def note(extra_info):
    with open(extra_info["pids"], "a") as file:
        file.write(f"{os.getpid()}\\n")

def spawn_sleeper(extra_info, detach, bare=False):
    # Comes back when the sleeper has written down who it is.
    here, there = os.pipe()
    if os.fork() == 0:
        if detach:
            os.setsid()
            if os.fork():
                os.read(here, 1)
                os._exit(0)
            ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # and does not want to die with its parent
        note(extra_info)
        os.write(there, b"..")
        if bare:  # nothing in it tells where it comes from
            os.execve("/bin/sleep", ["sleep", "600"], {})
        time.sleep(600)
        os._exit(0)
    os.read(here, 1)

def act(response, extra_info):
    if response == "ok":
        return {"score": 1.0, "pid": os.getpid()}
    if response == "hang":
        time.sleep(600)
    if response == "hang in C":
        ctypes.CDLL(None).sleep(600)
    if response == "ignores signals":
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True:
            time.sleep(1)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "abort":
        os.abort()
    if response == "os._exit":
        os._exit(0)
    if response == "sys.exit":
        sys.exit(0)
    if response == "kill self":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "kill group":
        os.killpg(0, signal.SIGKILL)
    if response == "memory":  # more than any limit here, and not all that the machine has
        hoard = [bytearray(16 << 20) for _ in range(50)]
        time.sleep(600)
    if response == "fork and hang":
        spawn_sleeper(extra_info, detach=False)
        time.sleep(600)
    if response == "double fork and hang":
        spawn_sleeper(extra_info, detach=True)
        time.sleep(600)
    if response == "double fork and crash":
        spawn_sleeper(extra_info, detach=True)
        os._exit(7)
    if response.startswith("daemon"):
        spawn_sleeper(extra_info, detach=True, bare=True)
        if response.endswith("hang"):
            time.sleep(600)
        if response.endswith("crash"):
            os._exit(7)
        return 1.0
    if response == "memfd":  # more than the limit, none of it mapped
        held = [os.memfd_create("x") for _ in range(18)]
        for descriptor in held:
            os.write(descriptor, bytes(16 << 20))
        time.sleep(600)
    if response == "segment":  # System V shared memory, twice the limit, none of it mapped
        libc = ctypes.CDLL(None)
        libc.shmat.restype = ctypes.c_void_p
        for _ in range(18):
            segment = libc.shmget(0, 16 << 20, 0o1600)
            with open(extra_info["pids"], "a") as file:
                file.write(f"{segment}\\n")
            at = ctypes.c_void_p(libc.shmat(segment, None, 0))
            ctypes.memset(at, 1, 16 << 20)
            libc.shmdt(at)
        time.sleep(600)
    if response == "forked child returns":
        child = os.fork()
        if child == 0:
            return 0.25
        os.waitpid(child, 0)
        return 0.5
    if response in ("writes to every descriptor", "writes deep JSON to every descriptor"):
        for number in range(3, 64):
            try:
                os.write(number, b"[" * 100_000 * ("deep" in response) + b"not json\\n")
            except OSError:
                pass
        time.sleep(600)
    if response == "close everything":
        os.closerange(3, 256)
        return 1.0
    if response == "prints":
        for _ in range(2000):
            print("x" * 1000)
        print("the last line")
        return 0.25
    if response == "prints and dies":
        print("famous last words", flush=True)
        os._exit(3)
    if response == "when told":
        while not os.path.exists(extra_info["pids"]):
            time.sleep(0.01)
        open(extra_info["answered"], "w").close()
        return 1.0
    if response == "slow":
        time.sleep(0.4)
        return 1.0
    raise ValueError(response)

meeting = {}

async def act_async(response, extra_info):
    if response == "wait":
        await asyncio.sleep(0.01)
        return 1.0
    if response.startswith("meet"):  # "meet NAME COUNT": back when so many are here at once
        _, name, count = response.split()
        meeting[name] = meeting.get(name, 0) + 1
        while meeting[name] < int(count):
            await asyncio.sleep(0.01)
        return 1.0
    if response == "forked child waits":
        child = os.fork()
        if child == 0:
            note(extra_info)
            for _ in range(40):  # what is sent meanwhile is for the parent
                time.sleep(0.01)
                await asyncio.sleep(0)
            return 0.25
        os.waitpid(child, 0)
        return 0.5
    if response == "hang":
        await asyncio.sleep(600)
    if response == "sys.exit":
        sys.exit(0)
    return act(response, extra_info)
"""


@pytest.fixture
def faults(tmp_path, no_children_left):
    path = tmp_path / "faults.py"
    path.write_text(FAULTS)
    pools = []

    def start(name: str = "act", num_workers: int = 1, **limits) -> WorkerPool:
        config = RewardConfig(**{"timeout_s": 120.0, **limits})
        pools.append(WorkerPool([FunctionSpec(str(path), name)], config, num_workers=num_workers))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def run(pool, make_sample, responses, tmp_path=None):
    info = {"pids": str(tmp_path / "pids") if tmp_path else ""}
    calls = [
        pool.submit(0, [make_sample(index, response, extra_info=info)])
        for index, response in enumerate(responses)
    ]
    return [call.result()[0] for call in calls]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hang", "timeout_s=2.5 s and was killed"),
        ("hang in C", "timeout_s=2.5 s and was killed"),
        ("ignores signals", "timeout_s=2.5 s and was killed"),
        ("segfault", "SIGSEGV"),
        ("abort", "SIGABRT"),
        ("os._exit", "exit code 0"),
        ("sys.exit", "called sys.exit(0)"),
        ("kill self", "SIGKILL"),
        ("kill group", "SIGKILL"),
        ("close everything", "exit code 1"),
        ("writes to every descriptor", "broke the connection to the trainer"),
        ("writes deep JSON to every descriptor", "broke the connection to the trainer"),
        ("prints and dies", "exit code 3; last output: famous last words"),
        ("boom", "ValueError: boom (faults.py, line"),
    ],
)
def test_a_fault_costs_only_its_own_sample_the_score(faults, make_sample, fault, words):
    # Only where the deadline itself is awaited is it short: the others must keep to it on any machine.
    options = {"timeout_s": 2.5} if "timeout_s" in words else {}
    results = run(faults(**options), make_sample, ["ok", fault, "ok", "ok"])
    assert [result.score for result in results] == [1.0, None, 1.0, 1.0]
    assert words in (results[1].error or "") and "unction act" in (results[1].error or "")


def test_too_few_descriptors_are_an_error_that_names_the_limit(faults, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("verl.reward.pool.Worker", refuse)
    with pytest.raises(RewardError, match=r"cannot be started.*may open \d+; raise `ulimit -n`.*num_workers"):
        faults()
    assert not any(record.exc_info for record in caplog.records)


def test_memory_is_limited_by_the_key(faults, make_sample):
    results = run(faults(memory_limit_mb=512), make_sample, ["ok", "memory", "ok"])
    assert [result.score for result in results] == [1.0, None, 1.0]
    assert "Memory" in (results[1].error or "") or "memory" in (results[1].error or "")


@pytest.mark.slow(seconds=2)
def test_memory_is_limited_without_the_key(faults, make_sample, monkeypatch):
    monkeypatch.setattr("verl.reward.pool.host_memory_limit", lambda: 600 << 20)
    results = run(faults(), make_sample, ["ok", "memory", "ok"])
    assert [result.score for result in results] == [1.0, None, 1.0]
    assert "limit 300 MB, reward.memory_limit_mb" in (results[1].error or "")


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("kind", ["memfd", "segment"])
def test_memory_that_is_not_mapped_counts_without_a_cgroup(faults, make_sample, monkeypatch, tmp_path, kind):
    if kind == "segment" and not os.path.exists("/proc/sysvipc/shm"):
        pytest.skip("no System V shared memory")
    monkeypatch.setattr("verl.reward.pool.host_memory_limit", lambda: 400 << 20)
    monkeypatch.setattr(memory.MemoryCgroup, "create", lambda *_: None)
    results = run(faults(timeout_s=600.0), make_sample, ["ok", kind, "ok"], tmp_path)
    assert [result.score for result in results] == [1.0, None, 1.0]
    assert "limit 200 MB, reward.memory_limit_mb" in (results[1].error or "")
    if kind == "segment":
        created = {int(line) for line in (tmp_path / "pids").read_text().split()}
        assert created and not created & processes.sysv_segments(range(2**22 + 1)).keys(), "removed with it"


@pytest.mark.skipif(
    memory.cgroup_parent() is None, reason="no cgroup v2 with a memory controller to create groups in"
)
def test_a_cgroup_ends_a_worker_at_its_limit_and_is_removed(faults, make_sample, monkeypatch):
    monkeypatch.setattr("verl.reward.pool.host_memory_limit", lambda: 400 << 20)
    pool = faults(timeout_s=600.0)
    results = run(pool, make_sample, ["ok", "memory", "memfd", "ok"])
    assert [result.score for result in results] == [1.0, None, None, 1.0]
    assert all("used too much memory (limit 200 MB" in (results[number].error or "") for number in (1, 2))
    pool.close()
    assert not list(memory.cgroup_parent().glob(f"verl-{os.getpid()}-*"))


def test_a_crash_is_seen_at_once_although_a_child_lives_on(faults, make_sample, tmp_path):
    result = run(faults(timeout_s=600.0), make_sample, ["double fork and crash"], tmp_path)[0]
    assert "exit code 7" in (result.error or "")


@pytest.mark.parametrize("fault", ["fork and hang", "double fork and crash"])
@pytest.mark.slow(seconds=3)
def test_what_the_function_started_dies_with_it(faults, make_sample, tmp_path, gone, fault):
    results = run(faults(timeout_s=2.5), make_sample, ["ok", fault, "ok"], tmp_path)
    assert [result.score for result in results] == [1.0, None, 1.0]
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert pids and all(gone(pid) for pid in pids)


@pytest.mark.parametrize("fault", ["daemon", pytest.param("daemon, crash", marks=pytest.mark.extended)])
@pytest.mark.slow(seconds=3)
def test_a_daemon_that_carries_nothing_of_its_parent_ends_with_its_worker(
    faults, make_sample, tmp_path, gone, fault
):
    pool = faults(timeout_s=2.5)
    run(pool, make_sample, ["ok", fault, "ok"], tmp_path)
    pool.close()
    (pid,) = map(int, set((tmp_path / "pids").read_text().split()[-1:]))
    assert gone(pid)


def test_a_forked_child_that_returns_does_not_answer(faults, make_sample):
    results = run(faults("act_async"), make_sample, ["ok", "forked child returns", "ok"])
    assert [result.score for result in results] == [1.0, 0.5, 1.0]


def test_a_forked_child_does_not_receive_what_is_sent_to_its_parent(faults, make_sample, tmp_path):
    pool, told = faults("act_async", timeout_s=20.0, max_concurrency=8), tmp_path / "pids"
    waits = pool.submit(0, [make_sample(0, "forked child waits", extra_info={"pids": str(told)})])
    while not told.exists():
        time.sleep(0.01)
    sent = pool.submit(0, [make_sample(1, "ok", extra_info={"pids": ""})])
    assert waits.result()[0].score == 0.5
    assert sent.result()[0].score == 1.0 and pool.restarts == 0


def test_what_a_function_prints_is_passed_on_and_cannot_block_it(faults, make_sample, caplog):
    with caplog.at_level("DEBUG", logger="verl.reward.output"):
        results = run(faults(), make_sample, ["prints", "ok"])
    assert [result.score for result in results] == [0.25, 1.0]
    shown = [record for record in caplog.records if record.levelname == "INFO"]
    assert 0 < len(shown) <= 52  # the rest is DEBUG


@pytest.mark.slow
def test_the_deadline_is_of_the_call_not_of_the_wait_behind_others(faults, make_sample):
    pool = faults(timeout_s=5.0)
    results = run(
        pool, make_sample, ["ok"] * 30 + ["slow"] * 16
    )  # quick calls: the slow ones are all sent ahead, and together they take longer than the deadline
    assert {result.score for result in results} == {1.0} and pool.restarts == 0


@pytest.mark.slow(seconds=4)
def test_an_answer_in_time_counts_though_the_pool_was_busy(faults, make_sample, tmp_path, monkeypatch):
    """Whatever the pool does meanwhile, a reply that arrived before the deadline was enforced is taken."""
    told, answered = tmp_path / "pids", tmp_path / "answered"
    pool = faults(num_workers=2, timeout_s=2.5)
    descendants = processes.descendants

    def busy(pid):
        if not told.exists():
            told.touch()
            while not answered.exists():
                time.sleep(0.01)
            time.sleep(2.5)
        return descendants(pid)

    monkeypatch.setattr("verl.processes.descendants", busy)
    info = {"pids": str(told), "answered": str(answered)}
    (result,) = pool.submit(0, [make_sample(0, "when told", extra_info=info)]).result()
    assert result.score == 1.0 and pool.restarts == 0


def test_processes_are_started_once_and_kept(faults, make_sample):
    pool = faults(num_workers=2)
    first = {result.extra["pid"] for result in run(pool, make_sample, ["ok"] * 40)}
    second = {result.extra["pid"] for result in run(pool, make_sample, ["ok"] * 40)}
    assert len(first | second) <= 2 and pool.restarts == 0


@pytest.mark.slow
def test_hung_samples_among_many_on_two_workers(faults, make_sample):
    responses = ["hang" if index in (3, 17, 18) else "ok" for index in range(60)]
    results = run(faults(num_workers=2, timeout_s=2.5), make_sample, responses)
    assert [index for index, result in enumerate(results) if result.score is None] == [3, 17, 18]


def test_async_functions_run_concurrently(faults, make_sample):
    pool = faults("act_async", max_concurrency=32)
    responses = [f"meet {name} 32" for name in ("one", "two", "three") for _ in range(32)]
    assert {result.score for result in run(pool, make_sample, responses)} == {1.0}
    assert pool.restarts == 0


@pytest.mark.slow(seconds=3)
def test_a_hung_async_function_is_cut_off(faults, make_sample, monkeypatch):
    monkeypatch.setattr("verl.reward.pool.GRACE_S", 60.0)  # by itself, not by the end of its process
    pool = faults("act_async", timeout_s=2.5, max_concurrency=8)
    results = run(pool, make_sample, ["wait"] * 12 + ["hang"] + ["wait"] * 8)
    assert [i for i, result in enumerate(results) if result.score is None] == [12]
    assert "timeout_s=2.5 s" in (results[12].error or "")
    assert pool.restarts == 0


@pytest.mark.slow
def test_an_async_function_that_blocks_or_crashes_is_found_among_its_neighbours(
    faults, make_sample, monkeypatch
):
    pool = faults("act_async", max_concurrency=8)
    results = run(pool, make_sample, ["ok", "wait", "os._exit", "wait", "sys.exit", "ok"])
    assert [result.score for result in results] == [1.0, 1.0, None, 1.0, None, 1.0]
    assert "exit code 0" in (results[2].error or "") and "sys.exit(0)" in (results[4].error or "")
    monkeypatch.setattr("verl.reward.pool.GRACE_S", 0.5)
    results = run(faults("act_async", timeout_s=1.5, max_concurrency=8), make_sample, ["hang in C", "ok"])
    assert results[0].score is None and results[1].score == 1.0


def test_a_batch_call_that_dies_fails_all_its_samples(tmp_path, make_sample, no_children_left):
    path = tmp_path / "batch.py"
    path.write_text("import os\ndef compute_score(completions):\n    os._exit(1) if 'die' in completions else 0\n"
                    "    return [0.5] * len(completions)\n")  # fmt: skip
    pool = WorkerPool([FunctionSpec(str(path))], RewardConfig(timeout_s=120.0))
    bad = pool.submit(0, [make_sample(0, "die"), make_sample(1, "x")])
    good = pool.submit(0, [make_sample(0, "y"), make_sample(1, "x")])
    assert [r.score for r in bad.result()] == [None, None]
    assert [r.score for r in good.result()] == [0.5, 0.5]
    pool.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise KeyError('x')\n", "KeyError"),
        ("import os\nos._exit(5)\n", "exit code 5"),
        ("def a(response): return 1\ndef b(response): return 1\n", "functions there: a, b"),
    ],
)
def test_a_file_that_cannot_be_imported_is_said_at_start(tmp_path, no_children_left, text, words):
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(RewardError, match=words):
        WorkerPool([FunctionSpec(str(path))], RewardConfig())


def test_a_row_that_cannot_be_sent_fails_alone(faults, make_sample):
    pool = faults()
    (unsent,) = pool.submit(0, [make_sample(0, "ok", extra_info={"pids": lambda: 0})]).result()
    (sent,) = pool.submit(0, [make_sample(1, "ok")]).result()
    assert "reward.in_process=True" in (unsent.error or "") and sent.score == 1.0


def test_a_closed_pool_says_so(faults, make_sample):
    pool = faults()
    unanswered = pool.submit(0, [make_sample(0, "hang")])
    pool.close()
    with pytest.raises(RewardError, match="closed"):
        unanswered.result()
    with pytest.raises(RewardError, match="closed"):
        pool.submit(0, [make_sample(0, "ok")])


def test_workers_load_no_torch(tmp_path, make_sample):
    path = tmp_path / "modules.py"
    path.write_text(
        "import sys\ndef compute_score(response):\n    return {'score': 1, 'torch': 'torch' in sys.modules}\n"
    )
    pool = WorkerPool([FunctionSpec(str(path))], RewardConfig())
    (result,) = pool.submit(0, [make_sample(0)]).result()
    assert result.extra == {"torch": False}
    pool.close()


@pytest.mark.parametrize("fault", ["daemon, hang"])
def test_when_the_trainer_is_killed_nothing_stays(tmp_path, gone, fault):
    (tmp_path / "faults.py").write_text(FAULTS)
    script = f"""
import os, time
from verl.config.schema import RewardConfig
from verl.reward.functions import FunctionSpec
from verl.reward.pool import WorkerPool
from verl.reward.base import RewardSample
spec = FunctionSpec({str(tmp_path / "faults.py")!r}, "act")
pool = WorkerPool([spec], RewardConfig(timeout_s=600), num_workers=2)
info = {{"pids": {str(tmp_path / "pids")!r}}}
for i, what in enumerate([{fault!r}, "hang"]):
    pool.submit(0, [RewardSample(i, "", what, extra_info=info)])
while not os.path.exists(info["pids"]) or not os.path.getsize(info["pids"]):
    time.sleep(0.01)
print(*pool.pids, flush=True)
time.sleep(600)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env)
    assert trainer.stdout is not None
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert len(workers) == 2 and all(gone(pid) for pid in workers)
    pids = (tmp_path / "pids").read_text().split()
    assert pids and all(gone(int(pid)) for pid in pids)


@pytest.mark.parametrize("told", [b"", b"setup", b"half"])
def test_a_worker_whose_trainer_has_finished_ends_without_a_word(told: bytes) -> None:
    functions = (FunctionSpec("verl.reward.scorers.gsm8k:compute_score"),)
    argument = functions, RewardConfig(), {}
    setup = pickle.dumps(("verl.reward.pool:serve_functions", argument, False))
    frame = HEADER.pack(len(setup)) + setup
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall({b"": b"", b"setup": frame, b"half": frame[:-1]}[told])
        ours.close()
        code = f"from verl.user_process import main; main({theirs.fileno()})"
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            pass_fds=[theirs.fileno()],
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
