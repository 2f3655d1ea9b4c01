"""Engines in other processes that hang or die: noticed by their silence, not by how long they take; nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from verl import processes
from verl import watchdog as process_watchdog
from verl.config.schema import RolloutConfig
from verl.errors import EngineLost, RolloutError
from verl.rollout import build_rollout, register_rollout, stale_files
from verl.rollout.base import Request, SamplingParams
from verl.rollout.weight_sync.broadcast import ReceivedWeights
from verl.watchdog import EngineWatchdog

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc")

FAKE = Path(__file__).parent / "fake_sglang"
HERE = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
"""The environment of a process that finds this very package."""
LONG = SamplingParams(max_tokens=100_000, ignore_eos=True)


class Child:
    """A process as an engine would start it."""

    name = "the engine"

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100_000)"])
        self.killed = False
        self.checks = 0

    def check(self) -> None:
        self.checks += 1
        if self.process.poll() is not None:
            raise EngineLost(f"it ended with {self.process.returncode}")

    def describe(self) -> str:
        return "it sleeps"

    def log_tail(self) -> str:
        return "\nlast line"

    def kill(self) -> None:
        self.killed = True
        self.process.kill()
        self.process.wait()


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child()
    yield made
    made.kill()


def looked_at(child: Child) -> None:
    """Until the watchdog has looked from now on, and is done with it."""
    seen = child.checks
    while child.checks < seen + 2:
        time.sleep(0.01)


def test_silence_ends_the_wait_and_the_engine_and_every_later_wait(child: Child) -> None:
    watchdog = EngineWatchdog(child, 0.5)
    with pytest.raises(
        EngineLost, match=r"(?s)0.5 s \(trainer.watchdog_s\).*waited for it in the weight sync.*last line"
    ):
        watchdog.call("the weight sync", threading.Event().wait)
    assert child.killed and watchdog.lost
    with pytest.raises(EngineLost, match="the weight sync"):
        watchdog.call("anything else", threading.Event().wait)


def test_an_engine_that_dies_releases_whoever_waits(child: Child) -> None:
    watchdog = EngineWatchdog(child, 1000)
    threading.Thread(target=child.process.kill).start()
    with pytest.raises(EngineLost, match="ended with -9"):
        watchdog.call("generate", threading.Event().wait)


@pytest.mark.slow(seconds=3)
def test_a_slow_engine_that_gives_signs_is_waited_for(child: Child) -> None:
    """Four times the limit, with a sign in every part of it and a look between them."""
    now = 0.0
    watchdog, beats = EngineWatchdog(child, 600, lambda: now), process_watchdog.beats

    def slowly() -> str:
        nonlocal now
        for _ in range(4):
            now += 590
            looked_at(child)
            watchdog.beat()
        return "done"

    assert watchdog.call("generate", slowly) == "done"
    assert not child.killed and process_watchdog.beats >= beats + 4, (
        "whoever watches this process sees it move"
    )


def test_time_spent_on_this_side_is_not_the_engines_silence(child: Child) -> None:
    now, made = 0.0, threading.Event()
    taken: list[int] = []
    watchdog = EngineWatchdog(child, 600, lambda: now)

    def make() -> Iterator[int]:
        nonlocal now
        now += 10_000
        looked_at(child)
        yield 1
        made.set()

    def trainer() -> None:
        taken.extend(watchdog.while_taken(make()))

    thread = threading.Thread(target=trainer)
    thread.start()
    assert watchdog.call("the weight sync", made.wait)
    thread.join()
    assert taken == [1] and not child.killed


def test_an_answer_that_is_an_error_is_given_on(child: Child) -> None:
    def fail() -> None:
        raise ValueError("the reason")

    watchdog = EngineWatchdog(child, 100)
    with pytest.raises(ValueError, match="the reason"):
        watchdog.call("generate", fail)
    assert watchdog.call("generate", lambda: 5) == 5
    watchdog.close()


def test_factories_are_given_what_they_have_an_argument_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import verl.rollout as room

    monkeypatch.setattr(room, "_registry", dict(room._registry))
    register_rollout("three")(lambda source, tokenizer, config: (source, tokenizer, config))  # type: ignore[arg-type,return-value]
    register_rollout("four")(lambda source, tokenizer, config, watchdog_s: watchdog_s)
    register_rollout("five")(lambda source, tokenizer, config, run_folder: run_folder)
    source = ReceivedWeights.__new__(ReceivedWeights)
    assert build_rollout("three", source, 2, 3, watchdog_s=7) == (source, 2, 3)
    assert build_rollout("four", source, 2, 3, watchdog_s=7) == 7
    assert build_rollout("five", source, 2, 3, run_folder=Path("run")) == Path("run")


# -- a server ---------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.setenv("PYTHONPATH", f"{FAKE}:{Path(__file__).parents[2]}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    section = RolloutConfig(name="sglang", mode="server", max_model_len=100_100, max_num_seqs=8)
    engine = build_rollout("sglang", tiny("llama_tied", max_position_embeddings=100_200), None, section)
    yield engine
    engine.close()


def stop_when(engine: Any, reached: Callable[[], bool]) -> threading.Thread:
    """Stops the server's processes at that moment, and from then on little patience is had with it."""

    def watch() -> None:
        while not reached():
            time.sleep(0.01)
        os.killpg(engine.process.pid, signal.SIGSTOP)
        engine.watchdog.watchdog_s = 1.0

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize("phase", ["generate", "the weight sync", "leaving"])
@pytest.mark.slow(seconds=3)
def test_a_stopped_server_is_noticed_killed_and_said(phase: str, server: Any) -> None:
    requests = [Request(f"r{i}", [5, 9], LONG) for i in range(2)]
    group, folder = server.process.pid, server.folder
    if phase == "generate":
        tokens = process_watchdog.beats + 5
        stopper = stop_when(server, lambda: process_watchdog.beats > tokens)
        with pytest.raises(EngineLost) as caught:
            list(server.generate(requests))
        assert "2 samples are not answered" in str(caught.value)
    elif phase == "the weight sync":
        stopper = stop_when(server, lambda: True)
        stopper.join()
        with pytest.raises(EngineLost) as caught:
            server.update_weights(server.source, 1)
        assert "waited for it in /update_weights_from_disk" in str(caught.value)
    else:
        # Whoever loses interest does not wait for a server that does not notice it either.
        short = Request("short", [5], SamplingParams(max_tokens=1, ignore_eos=True))
        answers = server.generate([short, *requests])
        next(answers)
        stopper = stop_when(server, lambda: True)
        stopper.join()
        with pytest.raises(EngineLost) as caught:
            answers.close()
    stopper.join()
    assert "sglang's server made no progress for 1 s (trainer.watchdog_s)" in str(caught.value)
    assert f"process {group} (sglang.launch_server) stopped" in str(caught.value)
    assert "trainer.resume_mode=auto" in str(caught.value)
    assert not processes.group_members(group)
    server.close()
    assert not folder.exists()


def test_a_refusal_is_no_loss_and_a_kill_is_one_in_every_call(server: Any) -> None:
    with pytest.raises(RolloutError, match="404") as caught:
        server.client.call("POST", "/no_such_thing", {})
    assert not isinstance(caught.value, EngineLost)
    (response,) = server.generate([Request("a", [5], SamplingParams(max_tokens=2, ignore_eos=True))])
    assert len(response.token_ids) == 2
    os.kill(server.process.pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match="ended with status -9"):
        server.update_weights(server.source, 1)
    with pytest.raises(EngineLost, match="ended with status -9"):
        list(server.generate([Request("a", [5], LONG)]))


# -- stale_files --------------------------------------------------------------------------------------------------

OWNER = """
import sys, time
from pathlib import Path
from verl.rollout import stale_files
for kind in ("rollout", "weights", "rollout"):
    folder = stale_files.new_path(kind, Path(sys.argv[1]))
    folder.mkdir(mode=0o700)
    (folder / "file").write_text("a")
print("made", flush=True)
time.sleep(100_000)
"""


@pytest.mark.slow(seconds=3)
def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    from multiprocessing import shared_memory

    segment = shared_memory.SharedMemory(create=True, size=4096)
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=HERE)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "made\n"
        made = sorted(tmp_path.iterdir())
        store, other = tmp_path.parent / "vllm_dist_0a", tmp_path.parent / "precious"
        store.touch()
        other.touch()
        stale_files.remember_files(made[1], [os.getpid()], [str(store), str(other), ""])
        mine = stale_files.new_path("rollout", tmp_path)
        elsewhere = mine.with_name(f"verl-rollout-0123abcd-{owner.pid:x}-1-00000000")
        unknown = tmp_path / "verl-rollout-of-somebody"
        number_again = mine.with_name(mine.name.replace(f"-{os.getpid():x}-", "-1-"))
        for folder in (mine, elsewhere, unknown, number_again):
            folder.mkdir()
        assert len(made) == 3 and stale_files.sweep([tmp_path]) == [number_again], (
            "all others are in use, or unknown"
        )
        owner.kill()
        owner.wait()
        assert sorted(stale_files.sweep([tmp_path])) == made
        assert sorted(tmp_path.iterdir()) == sorted([mine, elsewhere, unknown])
        assert not (stale_files.MEMORY / segment.name.lstrip("/")).exists(), "with the shared memory it lists"
        assert not store.exists() and other.exists()
    finally:
        owner.kill()
        owner.wait()
        segment.close()
        (stale_files.MEMORY / segment.name.lstrip("/")).unlink(missing_ok=True)


def test_a_process_that_took_the_number_of_a_dead_one_is_not_its_owner() -> None:
    started = processes.start_time(os.getpid())
    assert processes.is_alive(os.getpid(), started) and not processes.is_alive(os.getpid(), started - 1)


def test_where_temporary_files_have_a_long_way_a_socket_still_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket
    import tempfile

    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = stale_files.new_path("rollout")
    folder.mkdir()
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / ("s" * 36)))
    finally:
        stale_files.remove(folder)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert stale_files.new_path("rollout").parent == Path("/tmp")


LINE = """
import subprocess, sys
from verl.processes import ancestors_up_to
host, generation = int(sys.argv[1]), int(sys.argv[2])
if generation:
    command = [sys.executable, sys.argv[0], str(host), str(generation - 1)]
    raise SystemExit(subprocess.run(command).returncode)
print(*(process.pid for process in ancestors_up_to(host)), flush=True)
"""


def test_who_stands_between_a_worker_and_its_host(tmp_path: Path) -> None:
    script = tmp_path / "line.py"
    script.write_text(LINE)
    environment = {**os.environ, "PYTHONPATH": str(Path(processes.__file__).parents[1])}

    def line(host: int) -> tuple[int, list[int]]:
        command = [sys.executable, str(script), str(host), "2"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as first:
            return first.pid, [int(pid) for pid in first.communicate()[0].split()]

    first, found = line(os.getpid())
    assert len(found) == 2 and found[1] == first, "from the parent up to whoever the host started"
    _, found = line(2**22 + 1)
    assert len(found) == 1, "a host that is gone: the parent alone"
