"""Tools that hang, raise, fork, flood, die or answer late: real processes, real kills, and every other call goes on."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from verl import processes
from verl.agents import tool_processes
from verl.agents.base import ToolCall, ToolFailed, ToolsLost
from verl.agents.tool_processes import MAX_RESULT, Instance, Target, ToolProcesses
from verl.errors import ConfigError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills and adoption are tested on Linux")

LONG = 240.0
"""Seconds for a call that answers, on any machine."""
SHORT = 0.25
"""For one that never does."""

TOOLS = '''
import asyncio, ctypes, os, random, signal, socket, sys, threading, time

calls = 0

def note(path, *numbers):
    with open(path, "a") as file:
        file.write("".join(f"{number}\\n" for number in numbers))

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.005)

def spawn(path, *, detach=False, bare=False):
    # Comes back when the sleeper has written down who it is.
    here, there = os.pipe()
    if os.fork() == 0:
        if detach:
            os.setsid()
            if os.fork():
                os.read(here, 1)
                os._exit(0)
            ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # and does not want to die with its parent
        note(path, os.getpid())
        os.write(there, b"..")
        if bare:  # nothing in it tells where it comes from
            os.execve("/bin/sleep", ["sleep", "600"], {})
        time.sleep(600)
        os._exit(0)
    os.read(here, 1)

def hop(path):
    # A process that forks its successor and ends, for ever.
    if os.fork():
        return
    note(path, os.getpid())
    while True:
        if os.fork():
            os._exit(0)

class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")

async def exit_in_a_task():
    sys.exit(5)

def act(what, path):
    global calls
    calls += 1
    if what == "pid":
        return str(os.getpid())
    if what == "calls":
        return str(calls)
    if what == "asyncio.run":
        return str(asyncio.run(asyncio.sleep(0.001, 1)))
    if what == "note and hang":
        note(path, os.getpid())
        time.sleep(600)
    if what == "hang":
        time.sleep(600)
    if what == "hang in C":
        ctypes.CDLL(None).sleep(600)
    if what == "ignore signals":
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True:
            time.sleep(1)
    if what == "segfault":
        ctypes.string_at(0)
    if what == "abort":
        os.abort()
    if what == "os._exit":
        os._exit(3)
    if what == "sys.exit":
        sys.exit(4)
    if what == "kill self":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "kill group":
        os.killpg(0, signal.SIGKILL)
    if what == "raise":
        raise ValueError("boom")
    if what == "raise long":
        raise ValueError("x" * 100_000)
    if what == "raise unprintable":
        raise Unprintable()
    if what == "raise cancelled":
        raise asyncio.CancelledError()
    if what == "close everything":
        os.closerange(3, 256)
        return "closed"
    if what == "write everywhere":
        for number in range(3, 64):
            try:
                os.write(number, b"not json\\n")
            except OSError:
                pass
        time.sleep(600)
    if what == "endless line":
        for number in range(3, 64):
            try:
                with socket.socket(fileno=os.dup(number)) as end:
                    peer = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                    while int.from_bytes(peer[:4], sys.byteorder) != os.getpid():  # not that of the event loop
                        end.setblocking(True)
                        end.sendall(b"x" * 65536)
            except OSError:
                pass
        time.sleep(600)
    if what == "die after the call":
        threading.Thread(target=lambda: (wait_for(path), os._exit(6))).start()
        return str(os.getpid())
    if what == "fork":
        spawn(path)
    if what == "double fork":
        spawn(path, detach=True)
    if what == "daemon":
        spawn(path, detach=True, bare=True)
    if what == "hop":
        note(path, os.getpgrp())
        hop(path)
    if what == "stop the supervisor":  # so that it cannot kill this process
        os.kill(os.getppid(), signal.SIGSTOP)
        note(path, os.getpid(), os.getppid())
    if what in ("fork", "double fork", "daemon", "hop", "stop the supervisor"):
        return what
    if what == "a forked child returns":
        child = os.fork()
        if child == 0:
            return "child"
        os.waitpid(child, 0)
        return "parent"
    if what == "print":
        for _ in range(2000):
            print("x" * 1000)
        return "printed"
    if what == "print for ever":
        def flood():
            while True:
                print("y" * 100, flush=True)
        threading.Thread(target=flood, daemon=True).start()
        return str(os.getpid())
    if what == "long":
        return "begin" + "\\u20ac" * 3_000_000 + "end"
    if what == "half a pair":
        return "a\\ud800b"
    if what == "alarm":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 500)
        return str(os.getpid())
    if what == "until the alarm":
        return str(signal.getitimer(signal.ITIMER_REAL)[0])
    if what == "torch":
        return str("torch" in sys.modules)
    if what == "random":
        return str(random.random())
    wait_for(path)
    return what

def do(what: str, path: str = "") -> str:
    """Do it."""
    return act(what, path)

def value() -> dict:
    """A value that is no text."""
    return {"a": [1, 2.5, None]}

background = None

async def do_async(what: str, path: str = "") -> str:
    """Do it in the event loop."""
    global background
    if what == "hang":
        await asyncio.sleep(600)
    if what == "background":
        async def work():
            await asyncio.sleep(0)
            note(path, "worked")
        background = asyncio.create_task(work())
        return "started"
    if what == "exit in a task":
        await asyncio.create_task(exit_in_a_task())
    await asyncio.sleep(0)
    return act(what, path)

class Counter:
    """One counter per conversation."""

    def __init__(self):
        self.count = 0
        self.path = ""

    def reset(self, start, path=""):
        self.count, self.path = start, path
        return f"starts at {start}"

    def add(self, number: int) -> int:
        """Add to it."""
        self.count += number
        return self.count

    def do(self, what: str, path: str = "") -> str:
        """Do it."""
        return act(what, path)

    def user(self, reply):
        return None if reply == "bye" else f"you said {reply}"

    def turn_reward(self):
        return 0.5

    def reward(self):
        return self.count

    def close(self):
        if self.path == "hang":
            time.sleep(600)
        if self.path:
            note(self.path, "closed")

class Broken:
    """Cannot be created."""

    def __init__(self):
        raise RuntimeError("no database")

    def user(self, reply):
        return "x"
'''

T = TypeVar("T")


class Tools:
    """Tools in an event loop that runs while a test waits for something."""

    def __init__(self, targets: list[Target]) -> None:
        self.runner = asyncio.Runner()
        self.processes = ToolProcesses(targets)
        self.infos = self.run(self.processes.open())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    async def act(
        self, what: str, path: Path | str = "", *, tool: str = "do", timeout_s: float = LONG
    ) -> str:
        return await self.processes.call(0, ToolCall(tool, {"what": what, "path": str(path)}), timeout_s)

    def do(self, what: str, path: Path | str = "", **options: Any) -> str:
        return self.run(self.act(what, path, **options))

    def fails(self, what: str, path: Path | str = "", **options: Any) -> ToolFailed:
        with pytest.raises(ToolFailed) as caught:
            self.do(what, path, **options)
        return caught.value

    def end_workers(self) -> None:
        for process in tuple(self.processes._workers):
            process.end("for a test")

    def counter(self, session: str = "") -> Instance:
        return self.processes.instance(1, session)

    def close(self) -> None:
        self.run(self.processes.close())
        self.runner.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "faults.py"
    path.write_text(TOOLS)
    return path


def targets(source: Path) -> list[Target]:
    functions = source.with_name("functions.py")
    functions.write_text("from faults import do, do_async, value\n__all__ = ['do', 'do_async', 'value']\n"
                         "from verl.agents import tool\nfor function in (do, do_async, value):\n"
                         "    tool(function)\ndel function\n")  # fmt: skip
    return [
        Target("tools", str(functions)),
        Target("environment", f"{source}:Counter"),
        Target("environment", f"{source}:Broken"),
        Target("user", f"{source}:Counter"),
    ]


@pytest.fixture(scope="module")
def shared(source) -> Iterator[Tools]:
    tools = Tools(targets(source))
    yield tools
    tools.close()


@pytest.fixture
def tools(shared, caplog) -> Tools:
    """Shared, because a fault of one test must not reach the next."""
    shared.processes._shown = 0
    return shared


@pytest.fixture
def own(source, monkeypatch) -> Iterator[Tools]:
    """For tests of limits and ends."""
    started = Tools(targets(source))
    yield started
    started.close()


def pids(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()]


async def exists(path: Path) -> None:
    while not path.exists():
        await asyncio.sleep(0.005)


async def failure(coroutine: Coroutine[Any, Any, object]) -> ToolFailed:
    with pytest.raises(ToolFailed) as caught:
        await coroutine
    return caught.value


# ---- what works


def test_the_trainer_learns_what_there_is(tools):
    kinds = [
        (target.kind, info.name) for target, info in zip(tools.processes.targets, tools.infos, strict=True)
    ]
    assert [kind for kind, _ in kinds] == ["tools", "environment", "environment", "user"]
    assert [name for _, name in kinds[1:]] == ["Counter", "Broken", "Counter"]
    functions, counter = tools.infos[:2]
    assert {schema["function"]["name"] for schema in functions.schemas} == {"do", "do_async", "value"}
    assert not functions.stateful and counter.stateful
    assert counter.hooks == ("reset", "user", "turn_reward", "reward") and "start" in counter.columns


def test_functions_are_called_and_their_process_is_used_again(tools):
    assert tools.do("pid") == tools.do("pid", tool="do_async") == tools.do("pid")
    assert int(tools.do("calls")) + 1 == int(tools.do("calls"))  # what a module holds stays
    assert tools.run(tools.processes.call(0, ToolCall("value", {}), LONG)) == '{"a": [1, 2.5, null]}'
    assert tools.do("torch") == "False"


def test_calls_run_at_the_same_time(tools, tmp_path):
    async def together() -> list[str]:
        calls = [asyncio.create_task(tools.act(f"call {number}", tmp_path / "go")) for number in range(5)]
        await tools.act("pid")  # a sixth process
        (tmp_path / "go").touch()
        return await asyncio.gather(*calls)

    assert tools.run(together()) == [f"call {number}" for number in range(5)]


def test_the_event_loop_of_a_process_runs_between_its_calls(tools, tmp_path):
    assert tools.do("background", tmp_path / "done", tool="do_async") == "started"
    tools.run(exists(tmp_path / "done"))


def test_a_plain_function_may_run_an_event_loop(tools):
    assert tools.do("asyncio.run") == "1"
    assert tools.do("calls", tool="do_async")  # that of the process goes on


def test_an_environment_keeps_its_state_and_hooks_are_called(tools, tmp_path):
    async def talk() -> None:
        one, two = tools.counter(), tools.counter()
        row = {"start": 5, "path": str(tmp_path / "closed"), "other": object}
        assert await one.reset(row, LONG) == "starts at 5"
        assert await two.reset({"start": 0}, LONG) == "starts at 0"
        assert await one.call(ToolCall("add", {"number": 2}), LONG) == ("7", None)
        assert await two.call(ToolCall("add", {"number": 2}), LONG) == ("2", None)
        assert (
            await one.user("hello", [], LONG) == "you said hello" and await one.user("bye", [], LONG) is None
        )
        assert (await one.turn_reward(LONG), await one.reward(LONG), await two.reward(LONG)) == (
            0.5,
            7.0,
            2.0,
        )
        process = one._process
        assert process is not None
        await one.close()
        await one.close()
        await two.close()
        assert process.ended == "ended its process with exit code 0"
        assert "it was closed" in (await failure(one.reward(LONG))).text

    tools.run(talk())
    assert (tmp_path / "closed").read_text() == "closed\n"


def test_random_draws_of_an_environment_depend_on_its_session_only(tools):
    async def draw(session: str) -> str:
        counter = tools.counter(session)
        drawn, _ = await counter.call(ToolCall("do", {"what": "random"}), LONG)
        await counter.close()
        return drawn

    assert tools.run(draw("a#0")) == tools.run(draw("a#0")) != tools.run(draw("a#1"))


# ---- faults


@pytest.mark.parametrize(
    ("tool", "fault"), [("do", "hang"), ("do", "hang in C"), ("do", "ignore signals"), ("do_async", "hang")]
)
def test_a_call_that_hangs_is_answered_at_its_deadline_and_its_process_is_killed(tools, gone, fault, tool):
    pid = int(tools.do("pid"))
    failed = tools.fails(fault, tool=tool, timeout_s=SHORT)
    assert failed.kind == "timeout" and failed.text == f"{tool} did not answer within 0.25 s and was stopped."
    assert gone(pid)
    assert tools.do("pid") != str(pid)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("segfault", "do was ended by SIGSEGV"),
        ("abort", "do was ended by SIGABRT"),
        ("os._exit", "do ended its process with exit code 3"),
        ("sys.exit", "do ended its process with exit code 4"),
        ("kill self", "do was ended by SIGKILL"),
        ("kill group", "do was ended by SIGKILL"),
        ("raise", "do failed: ValueError: boom"),
        ("raise unprintable", "do failed: Unprintable"),
        ("raise cancelled", "do failed: CancelledError"),
        ("close everything", "do ended its process with exit code 1"),
        ("write everywhere", "do broke the connection to the trainer"),
        ("endless line", "do sent too long an answer"),
    ],
)
def test_a_call_that_fails_gives_a_short_text_and_the_next_one_works(tools, fault, words):
    failed = tools.fails(fault)
    assert failed.kind == "failed" and failed.text.startswith(words) and "\n" not in failed.text
    assert tools.do("pid")


@pytest.mark.parametrize(("how", "code"), [("sys.exit", 4), ("exit in a task", 5)])
def test_an_async_function_that_exits_ends_its_process(tools, how, code):
    assert tools.fails(how, tool="do_async").text == f"do_async ended its process with exit code {code}."


def test_the_log_says_where_a_tool_raised_and_stops_after_some_failures(tools, caplog):
    for _ in range(25):
        assert len(tools.fails("raise long").text) < 2000
    shown = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(shown) == 21 and "(faults.py, line" in shown[0]


def test_an_unknown_tool_and_wrong_arguments_are_said_to_the_model(tools):
    async def call(name: str, arguments: dict[str, Any]) -> ToolFailed:
        return await failure(tools.processes.call(0, ToolCall(name, arguments), LONG))

    unknown = tools.run(call("nothing", {}))
    assert unknown.kind == "unknown" and "do_async" in unknown.text
    assert "what" in tools.run(call("do", {})).text


def test_a_row_that_cannot_be_sent_fails_alone(tools):
    counter = tools.counter()
    failed = tools.run(failure(counter.reset({"start": lambda: 0}, LONG)))
    assert failed.text.startswith("reset failed: its arguments cannot be sent")
    assert tools.run(counter.reset({"start": 1}, LONG)) == "starts at 1"
    tools.run(counter.close())


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("fork", "hang"),
        ("fork", "os._exit"),
        ("fork", "close"),
        ("double fork", "hang"),
        ("double fork", "os._exit"),
        ("daemon", "os._exit"),
        ("daemon", "close"),
        ("hop", "hang"),
        ("hop", "os._exit"),
    ],
)
def test_what_a_tool_started_dies_with_it(tools, tmp_path, gone, start, end):
    async def talk() -> None:
        counter = tools.counter()
        await counter.call(ToolCall("do", {"what": start, "path": str(tmp_path / "pids")}), LONG)
        if end != "close":
            await failure(counter.call(ToolCall("do", {"what": end}), SHORT if end == "hang" else LONG))
        await counter.close()

    tools.run(talk())
    group, *_ = found = pids(tmp_path / "pids")
    assert all(gone(pid) for pid in found)
    while start == "hop" and processes.group_members(group):  # until the time limit of the test
        time.sleep(0.01)


def test_only_the_parent_answers_when_a_tool_forked(tools):
    assert (
        tools.do("a forked child returns") == tools.do("a forked child returns", tool="do_async") == "parent"
    )
    assert tools.do("calls")


def test_what_a_tool_prints_is_logged_in_part_and_cannot_block_it(tools, caplog, monkeypatch):
    monkeypatch.setattr(tools.processes._server, "_shown", 0)

    async def flood() -> None:
        counter, other = tools.counter(), tools.counter()
        for what in ("print", "print for ever", "calls"):
            assert await counter.call(ToolCall("do", {"what": what}), LONG)
        assert await other.reset({"start": 1}, LONG) == "starts at 1"
        await counter.close()
        await other.close()

    with caplog.at_level("INFO", logger="verl.agents.output"):
        tools.run(flood())
    assert 0 < len([record for record in caplog.records if record.name == "verl.agents.output"]) <= 51


def test_a_long_result_is_cut_in_the_middle(tools):
    result = tools.do("long")
    assert MAX_RESULT < len(result) < MAX_RESULT + 100
    assert (
        result.startswith("begin\u20ac") and result.endswith("\u20acend") and "characters left out]" in result
    )


def test_a_result_can_always_be_encoded(tools):
    assert tools.do("half a pair") == "a?b"


def test_an_alarm_a_call_left_does_not_hit_the_next_one(tools):
    assert tools.do("alarm") == tools.do("pid")
    assert tools.do("until the alarm") == "0.0"


def test_a_process_that_ends_between_calls_costs_no_call(tools, tmp_path, gone):
    pid = tools.do("die after the call", tmp_path / "go")
    (tmp_path / "go").touch()
    assert gone(int(pid))

    async def seen() -> None:
        while not all(process.ended for process in tools.processes._workers if str(process.pid) == pid):
            await asyncio.sleep(0.005)

    tools.run(seen())
    assert tools.do("pid") != pid


# ---- answers and deadlines


def test_an_answer_after_the_deadline_is_not_taken_for_another_call(tools, tmp_path, gone):
    tools.do("stop the supervisor", tmp_path / "pids")
    pid, supervisor = pids(tmp_path / "pids")
    failed = tools.fails(
        "late", tmp_path / "go", timeout_s=SHORT
    )  # sent to the same process, the only idle one
    assert failed.kind == "timeout"
    assert processes.is_alive(pid)
    (tmp_path / "go").touch()  # now it answers
    assert gone(pid)
    assert tools.do("until the alarm") == "0.0"
    os.kill(supervisor, signal.SIGCONT)
    assert gone(supervisor)


def test_an_answer_in_time_counts_though_the_event_loop_was_busy(tools, tmp_path):
    async def busy() -> str:
        await tools.act("pid")
        (process,) = [process for process in tools.processes._workers if not process.ended]
        call = asyncio.create_task(tools.act("in time", tmp_path / "go", timeout_s=SHORT))
        await asyncio.sleep(0)  # it is sent
        (tmp_path / "go").touch()
        assert select.select([process._socket], [], [], LONG)[0]  # its answer is there
        time.sleep(SHORT)
        return await call

    tools.end_workers()
    assert tools.run(busy()) == "in time"


def test_a_cancelled_call_ends_its_process(tools, tmp_path, gone):
    async def cancel() -> None:
        call = asyncio.create_task(tools.act("note and hang", tmp_path / "pid"))
        await exists(tmp_path / "pid")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await tools.act("calls")

    tools.run(cancel())
    assert all(gone(pid) for pid in pids(tmp_path / "pid"))


def test_a_process_is_killed_although_another_one_holds_its_socket(tools, tmp_path, gone):
    """As with worker processes of a data loader that were forked meanwhile."""
    here, there = os.pipe()

    async def hold() -> int:
        counter = tools.counter()
        pid = int((await counter.call(ToolCall("do", {"what": "pid"}), LONG))[0])
        holder = os.fork()
        if holder == 0:
            os.read(here, 1)
            os._exit(0)
        try:
            assert (await failure(counter.call(ToolCall("do", {"what": "hang"}), SHORT))).kind == "timeout"
            assert gone(pid)
        finally:
            os.write(there, b".")
            os.waitpid(holder, 0)
        await counter.close()
        return pid

    assert tools.run(hold())
    os.close(here)
    os.close(there)


# ---- environments that end


@pytest.mark.parametrize(
    ("fault", "timeout_s", "kind", "how"),
    [
        ("hang", SHORT, "timeout", "it did not answer within 0.25 s and was stopped."),
        ("os._exit", LONG, "failed", "it ended its process with exit code 3."),
    ],
)
def test_an_environment_that_ended_says_so_and_others_go_on(tools, fault, timeout_s, kind, how):
    async def talk() -> None:
        lost, other = tools.counter(), tools.counter()
        await lost.reset({"start": 1}, LONG)
        await other.reset({"start": 1}, LONG)
        assert (await failure(lost.call(ToolCall("do", {"what": fault}), timeout_s))).kind == kind
        for request in (
            lost.call(ToolCall("add", {"number": 1}), LONG),
            lost.reward(LONG),
            lost.user("x", [], LONG),
        ):
            assert (await failure(request)).text == f"The environment has ended: {how}"
        assert await other.call(ToolCall("add", {"number": 1}), LONG) == ("2", None)
        await lost.close()
        await other.close()

    tools.run(talk())


def test_an_environment_that_raises_goes_on(tools):
    async def talk() -> None:
        counter = tools.counter()
        assert "start" in (await failure(counter.reset({}, LONG))).text
        assert (
            await failure(counter.call(ToolCall("do", {"what": "raise"}), LONG))
        ).text == "do failed: ValueError: boom"
        await counter.reset({"start": 1}, LONG)
        assert await counter.call(ToolCall("add", {"number": 1}), LONG) == ("2", None)
        await counter.close()

    tools.run(talk())


def test_an_environment_that_cannot_be_created_says_why(tools):
    broken = tools.processes.instance(2)
    assert tools.run(failure(broken.user("x", [], LONG))).text == "user failed: RuntimeError: no database"
    tools.run(broken.close())


def test_an_environment_that_hangs_when_closed_is_killed(tools, monkeypatch, gone):
    monkeypatch.setattr(tool_processes, "_CLOSE_S", SHORT)

    async def talk() -> int:
        counter = tools.counter()
        await counter.reset({"start": 1, "path": "hang"}, LONG)
        pid, _ = await counter.call(ToolCall("do", {"what": "pid"}), LONG)
        await counter.close()
        return int(pid)

    assert gone(tools.run(talk()))


# ---- limits


def test_calls_wait_for_a_process_at_the_limit(tools, tmp_path, monkeypatch):
    monkeypatch.setattr(tool_processes, "MAX_WORKERS", 2)
    tools.end_workers()
    tools.processes._workers.clear()

    async def wait() -> None:
        running = [asyncio.create_task(tools.act(str(number), tmp_path / str(number))) for number in range(4)]
        while len(tools.processes._workers) < 2 or tools.processes._waiting > 2:
            await asyncio.sleep(0.005)
        counter = tools.counter()
        await counter.reset({"start": 1}, LONG)  # its process would be forked after a third one
        await counter.close()
        assert tools.processes._waiting == len(tools.processes._workers) == 2
        for number in (1, 3, 0, 2):
            (tmp_path / str(number)).touch()
        assert await asyncio.gather(*running) == ["0", "1", "2", "3"]
        assert len(tools.processes._workers) == 2

    tools.run(wait())


@pytest.mark.slow(seconds=6)
def test_waiting_for_a_process_is_not_time_of_the_call(own, tmp_path, monkeypatch):
    monkeypatch.setattr(tool_processes, "MAX_WORKERS", 1)

    async def wait() -> None:
        first = asyncio.create_task(own.act("first", tmp_path / "go"))
        await asyncio.sleep(0)
        second = asyncio.create_task(own.act("pid", timeout_s=4.0))
        await asyncio.sleep(5.0)
        (tmp_path / "go").touch()
        assert await first == "first" and await second

    own.run(wait())


def test_conversations_wait_for_a_place_but_not_for_themselves(tools, monkeypatch):
    monkeypatch.setattr(tools.processes, "_free", asyncio.Semaphore(1))

    async def wait() -> None:
        environment, user = tools.counter("a#0"), tools.processes.instance(3, "a#0")
        await environment.reset({"start": 1}, LONG)
        next_one = tools.counter("a#1")
        waiting = asyncio.create_task(next_one.reset({"start": 2}, LONG))
        await user.reset({"start": 1}, LONG)
        await environment.close()
        assert await user.user("x", [], LONG) == "you said x" and not waiting.done()
        await user.close()
        assert await waiting == "starts at 2"
        await next_one.close()

    tools.run(wait())


# ---- the fork server


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os\nprint('the last words')\nos._exit(5)\n", "exit code 5; last output: the last words"),
        ("x = 1\n", "has no public function"),
    ],
)
def test_a_file_that_cannot_be_imported_is_said_at_start(tmp_path, text, words, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        Tools([Target("tools", str(path))])


def test_threads_that_an_import_started_are_named(tmp_path, caplog):
    path = tmp_path / "threads.py"
    path.write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, name='pump', daemon=True).start()\n"
        "def f() -> int:\n    'One.'\n    return 1\n"
    )
    with caplog.at_level("INFO", logger="verl.agents.output"):
        own = Tools([Target("tools", str(path))])
        assert own.run(own.processes.call(0, ToolCall("f", {}), LONG)) == "1"
        own.close()
    assert "Importing the tools started threads (pump)" in caplog.text


def test_a_process_that_cannot_be_forked_says_so_and_the_next_one_can(tmp_path):
    path = tmp_path / "refused.py"
    path.write_text(
        "import os\n_fork = os.fork\ndef _refuse():\n    os.fork = _fork\n    raise OSError('no process left')\n"
        "os.fork = _refuse\ndef f() -> int:\n    'One.'\n    return 1\n"
    )
    own = Tools([Target("tools", str(path))])
    call = ToolCall("f", {})
    failed = own.run(failure(own.processes.call(0, call, LONG)))
    assert failed.text.startswith("f could not be started (") and "no process left" in failed.text
    assert own.run(own.processes.call(0, call, LONG)) == "1"
    own.close()


def test_a_fork_server_that_dies_is_started_again_and_at_last_given_up(own, monkeypatch):
    async def kill() -> None:
        server = own.processes._server
        assert server is not None
        below = processes.descendants(server.process.pid)
        (child,) = [process for process in below if process.ppid() == server.process.pid]
        child.kill()
        while not server.ended:
            await asyncio.sleep(0.005)

    async def lose() -> None:
        counter = own.counter()
        await counter.reset({"start": 1}, LONG)
        await kill()
        while not (counter._process and counter._process.ended):
            await asyncio.sleep(0.005)
        assert "has ended" in (await failure(counter.reward(LONG))).text
        await counter.close()
        assert await own.counter().reset({"start": 2}, LONG) == "starts at 2"
        assert own.processes.restarts == 1
        monkeypatch.setattr(tool_processes, "_MAX_RESTARTS", 1)
        await kill()
        with pytest.raises(ToolsLost, match="was ended by SIGKILL.*for the 2"):
            await own.counter().reset({"start": 3}, LONG)
        with pytest.raises(ToolsLost):
            await own.act("pid")

    own.run(lose())


def test_closing_ends_every_process_and_every_call(own, tmp_path, monkeypatch, gone):
    monkeypatch.setattr(tool_processes, "MAX_WORKERS", 1)

    async def end() -> None:
        calls = [asyncio.create_task(failure(own.act("note and hang", tmp_path / "pids"))) for _ in range(3)]
        counter = own.counter()
        call = ToolCall("do", {"what": "note and hang", "path": str(tmp_path / "more")})
        calls.append(asyncio.create_task(failure(counter.call(call, LONG))))
        await exists(tmp_path / "pids")
        await exists(tmp_path / "more")
        await own.processes.close()
        assert {(await call).text for call in calls} == {"do was closed.", "The tools are closed."}
        await counter.close()

    own.run(end())
    assert all(gone(pid) for name in ("pids", "more") for pid in pids(tmp_path / name))


def test_when_the_trainer_is_killed_nothing_stays(source, tmp_path, gone):
    script = f"""
import asyncio
from verl.agents.base import ToolCall
from verl.agents.tool_processes import Target, ToolProcesses
async def main():
    tools = ToolProcesses([Target("environment", {f"{source}:Counter"!r})])
    await tools.open()
    instance = tools.instance(0)
    await instance.call(ToolCall("do", {{"what": "daemon", "path": {str(tmp_path / "pids")!r}}}), 600)
    await instance.call(ToolCall("do", {{"what": "note and hang", "path": {str(tmp_path / "hangs")!r}}}), 600)
asyncio.run(main())
"""
    trainer = subprocess.Popen([sys.executable, "-c", script])
    asyncio.run(exists(tmp_path / "hangs"))
    trainer.kill()
    trainer.wait()
    assert all(gone(pid) for name in ("pids", "hangs") for pid in pids(tmp_path / name))
