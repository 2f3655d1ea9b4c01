"""Real servers of tools in their own processes, and what their faults cost: MCP over standard input and output and over
HTTP, and `verl tool-server`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from verl.agents import mcp, remote
from verl.agents.base import ToolCall, ToolFailed, ToolProvider, ToolsLost
from verl.agents.mcp import MCPTools
from verl.agents.tool_server import ServerTools, connect_tool_server
from verl.errors import ConfigError
from verl.processes import is_alive, start_time, wait_gone

pytest.importorskip("mcp")

LONG_S = 300.0
"""A time no test reaches unless something is broken."""
SHORT_S = 1.0
PROGRAM = Path(__file__).parents[1] / "agents" / "mcp_server.py"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LOST_AFTER_S", LONG_S)
    monkeypatch.setattr(mcp, "CHECK_S", SHORT_S)


def stdio(*options: object) -> str:
    return shlex.join([sys.executable, str(PROGRAM), *map(str, options)])


def stop(server: subprocess.Popen[bytes]) -> None:
    """Returns when all its threads stand still: until then one of them may still answer."""
    server.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(server.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


@contextlib.asynccontextmanager
async def opened(target: str) -> AsyncIterator[MCPTools]:
    tools = MCPTools(target)
    try:
        await tools.open()
        yield tools
    finally:
        await tools.close()


async def call(tools: ToolProvider, name: str, timeout_s: float = LONG_S, **arguments: Any) -> str:
    return await tools.call("uid#0", ToolCall(name, arguments), timeout_s)


async def works(tools: ToolProvider) -> None:
    assert await call(tools, "add", a=2, b=3) == "5"


async def fails(tools: ToolProvider, name: str, timeout_s: float = LONG_S, **arguments: Any) -> ToolFailed:
    with pytest.raises(ToolFailed) as error:
        await call(tools, name, timeout_s, **arguments)
    return error.value


async def check_results(tools: ToolProvider) -> None:
    """What every connection must do, whatever is below it."""
    schemas = {schema["function"]["name"]: schema["function"] for schema in tools.schemas}
    assert schemas["add"]["description"] == "Add two integers."
    assert schemas["add"]["parameters"]["required"] == ["a", "b"]
    await works(tools)
    assert "rows" in await call(tools, "table")
    failure = await fails(tools, "fail")
    assert "fail" in failure.text and "Traceback" not in failure.text and failure.kind == "failed"
    assert "integer" in (await fails(tools, "add", a="x", b=1)).text
    assert (await fails(tools, "add", a="\ud800", b=1)).kind == "malformed"
    assert (await fails(tools, "hang", SHORT_S)).kind == "timeout"
    with contextlib.suppress(ToolFailed):  # the package limits the length of an event
        assert len(await call(tools, "flood")) == 3_000_000
    results = await asyncio.gather(*(call(tools, "add", a=n, b=1) for n in range(100)))
    assert results == [str(n + 1) for n in range(100)]


# ---- MCP over standard input and output


def test_stdio_results_and_failures():
    async def body() -> None:
        async with opened(stdio()) as tools:
            await check_results(tools)

    run(body())


def test_stdio_server_has_our_environment_and_ends_with_the_connection(monkeypatch):
    monkeypatch.setenv("A_KEY_OF_THE_USER", "secret")

    async def body() -> None:
        async with opened(stdio()) as tools:
            assert await call(tools, "environment", variable="A_KEY_OF_THE_USER") == "secret"
            process = int(await call(tools, "pid"))
            began = start_time(process)
        await tools.close()
        assert wait_gone(process, began, LONG_S)

    run(body())


def test_stdio_server_that_dies_between_calls_is_started_again():
    async def body() -> None:
        async with opened(stdio()) as tools:
            first = int(await call(tools, "pid"))
            os.kill(first, signal.SIGKILL)
            assert int(await call(tools, "pid")) != first

    run(body())


def test_stdio_call_that_kills_its_server_is_told_to_the_model_and_the_others_go_on():
    async def body() -> None:
        async with opened(stdio()) as tools:
            assert "broke 3 times" in (await fails(tools, "die")).text
            await works(tools)

    run(body())


def test_stdio_server_that_is_blocked_is_replaced_and_the_calls_behind_are_sent_again():
    async def body() -> None:
        async with opened(stdio()) as tools:
            first = int(await call(tools, "pid"))
            blocked = asyncio.create_task(fails(tools, "block", SHORT_S))
            await asyncio.sleep(0)  # it is sent before the others
            others = [asyncio.create_task(call(tools, "add", a=n, b=0)) for n in range(5)]
            assert (await blocked).kind == "timeout"
            assert await asyncio.gather(*others) == [str(n) for n in range(5)]
            assert int(await call(tools, "pid")) != first

    run(body())


def test_stdio_garbage_on_the_standard_output_is_skipped():
    async def body() -> None:
        async with opened(stdio()) as tools:
            assert await call(tools, "garbage") == "after the garbage"
            await works(tools)

    run(body())


def test_stdio_slow_start_is_waited_for(tmp_path):
    gate = tmp_path / "gate"

    async def body() -> None:
        tools = MCPTools(stdio("--after", gate))
        opening = asyncio.create_task(tools.open())
        await asyncio.sleep(SHORT_S)
        assert not opening.done()
        gate.touch()
        await opening
        await works(tools)
        await tools.close()

    run(body())


@pytest.mark.parametrize(
    ("options", "problem"),
    [(("--fail", "the licence has expired"), "the licence has expired"), (("--empty",), "no tools")],
)
def test_stdio_server_that_cannot_be_used_is_refused_with_what_it_said(options, problem):
    async def body() -> None:
        with pytest.raises(ConfigError, match=f"rollout.multi_turn.mcp=(.|\n)*{problem}"):
            await MCPTools(stdio(*options)).open()

    run(body())


def test_stdio_program_that_speaks_no_mcp_is_refused(monkeypatch):
    monkeypatch.setattr(mcp, "HANDSHAKE_S", 2 * SHORT_S)

    async def body() -> None:
        for command in ("echo hello", "sleep 3600"):
            with pytest.raises(ConfigError, match=f"mcp={command}"):
                await MCPTools(command).open()

    run(body())


def test_stdio_server_that_cannot_be_started_again_stops_the_run(tmp_path, monkeypatch):
    program = tmp_path / "server"
    program.write_text(f"#!/bin/sh\nexec {stdio()}\n")
    program.chmod(0o700)

    async def body() -> None:
        async with opened(str(program)) as tools:
            process = int(await call(tools, "pid"))
            program.write_text("#!/bin/sh\necho the disk is gone >&2; exit 1\n")
            monkeypatch.setattr(remote, "LOST_AFTER_S", SHORT_S)
            os.kill(process, signal.SIGKILL)
            with pytest.raises(ToolsLost, match="the disk is gone(.|\n)*resumes"):
                await call(tools, "add", a=1, b=1)

    run(body())


def test_stdio_server_ends_with_a_trainer_that_is_killed():
    script = (
        "import asyncio, sys\n"
        "from verl.agents.base import ToolCall\n"
        "from verl.agents.mcp import MCPTools\n"
        "async def main():\n"
        "    tools = MCPTools(sys.argv[1])\n"
        "    await tools.open()\n"
        "    print(await tools.call('s', ToolCall('pid', {}), 300), flush=True)\n"
        "    await tools.call('s', ToolCall('block', {}), 3600)\n"  # it cannot see the end of its input
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, stdio()], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        process = int(trainer.stdout.readline())
        began = start_time(process)
        assert is_alive(process, began)
        trainer.kill()
    assert wait_gone(process, began, LONG_S)


# ---- MCP over HTTP


def test_http_results_failures_and_slow_start(start, port, tmp_path):
    start(PROGRAM, "--port", port, "--after", tmp_path / "gate")

    async def body() -> None:
        tools = MCPTools(f"http://127.0.0.1:{port}/mcp")
        opening = asyncio.create_task(tools.open())
        await asyncio.sleep(SHORT_S)
        assert not opening.done()
        (tmp_path / "gate").touch()
        await opening
        try:
            await check_results(tools)
        finally:
            await tools.close()

    run(body())


def test_http_server_is_found_behind_the_key_tool_server(start, port):
    start(PROGRAM, "--port", port)

    async def body() -> None:
        for address in (f"http://127.0.0.1:{port}", f"127.0.0.1:{port}/mcp"):
            tools = await connect_tool_server(address, LONG_S)
            assert isinstance(tools, MCPTools)
            await works(tools)
            await tools.close()

    run(body())


def test_http_server_that_is_killed_and_started_again_costs_nothing(start, port):
    server = start(PROGRAM, "--port", port)

    async def body() -> None:
        async with opened(f"http://127.0.0.1:{port}/mcp") as tools:
            await works(tools)
            server.kill()
            server.wait()
            during = [asyncio.create_task(call(tools, "add", a=n, b=0)) for n in range(5)]
            await asyncio.sleep(SHORT_S)
            assert not any(task.done() for task in during)
            start(PROGRAM, "--port", port)
            assert await asyncio.gather(*during) == [str(n) for n in range(5)]

    run(body())


def test_http_server_that_hangs_costs_the_calls_of_that_time(start, port):
    server = start(PROGRAM, "--port", port)

    async def body() -> None:
        async with opened(f"http://127.0.0.1:{port}/mcp") as tools:
            stop(server)
            assert (await fails(tools, "add", SHORT_S, a=1, b=1)).kind == "timeout"
            server.send_signal(signal.SIGCONT)
            await works(tools)

    run(body())


def test_http_server_that_stays_away_stops_the_run(start, port, monkeypatch):
    server = start(PROGRAM, "--port", port)

    async def body() -> None:
        async with opened(f"http://127.0.0.1:{port}/mcp") as tools:
            monkeypatch.setattr(remote, "LOST_AFTER_S", SHORT_S)
            server.kill()
            server.wait()
            with pytest.raises(ToolsLost, match=f"127.0.0.1:{port}/mcp.*resumes"):
                await call(tools, "add", a=1, b=1)

    run(body())


def test_http_no_server_is_an_error_with_the_address(port, monkeypatch):
    monkeypatch.setattr(remote, "LOST_AFTER_S", SHORT_S)

    async def body() -> None:
        with pytest.raises(
            ConfigError, match=f"mcp=http://127.0.0.1:{port}/mcp: no MCP server could be reached"
        ):
            await MCPTools(f"http://127.0.0.1:{port}/mcp").open()

    run(body())


# ---- verl tool-server


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "bears.txt").write_text("Polar bears live in the Arctic.")
    return folder


def test_tool_server_serves_python_arithmetic_and_search(start, port, documents):
    server = start(
        "-m", "verl", "tool-server", "--port", port, "--documents", documents, "--allow-unisolated"
    )

    async def body() -> None:
        tools = await connect_tool_server(f"http://127.0.0.1:{port}", LONG_S)
        assert isinstance(tools, ServerTools)
        assert await call(tools, "calculator", expression="12 * 12") == "144"
        assert await call(tools, "python", code="print(sum(range(10)))") == "45"
        assert "Arctic" in await call(tools, "search", query="polar bears")
        assert "stopped after 10 s" in await call(tools, "python", code="while True: pass")
        await tools.close()

    run(body())
    server.terminate()
    assert server.wait(LONG_S) == 128 + signal.SIGTERM


def test_tool_server_that_is_killed_and_started_again_costs_nothing(start, port):
    def serve() -> subprocess.Popen[bytes]:
        return start("-m", "verl", "tool-server", "--port", port, "--allow-unisolated")

    server = serve()

    async def body() -> None:
        tools = await connect_tool_server(f"http://127.0.0.1:{port}", LONG_S)
        assert await call(tools, "calculator", expression="1 + 1") == "2"  # type: ignore[arg-type]
        server.kill()
        server.wait()
        during = [asyncio.create_task(call(tools, "calculator", expression=f"{n} + 1")) for n in range(5)]  # type: ignore[arg-type]
        await asyncio.sleep(SHORT_S)
        assert not any(task.done() for task in during)
        serve()
        assert await asyncio.gather(*during) == [str(n + 1) for n in range(5)]
        await tools.close()

    run(body())


def test_tool_server_that_hangs_costs_the_calls_of_that_time(start, port):
    server = start("-m", "verl", "tool-server", "--port", port, "--allow-unisolated")

    async def body() -> None:
        tools = await connect_tool_server(f"http://127.0.0.1:{port}", LONG_S)
        assert isinstance(tools, ServerTools)
        stop(server)
        assert (await fails(tools, "calculator", SHORT_S, expression="1")).kind == "timeout"
        server.send_signal(signal.SIGCONT)
        assert await call(tools, "calculator", expression="1") == "1"
        await tools.close()

    run(body())
