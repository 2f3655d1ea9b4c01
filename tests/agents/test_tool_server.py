"""Clients of tool servers: which protocol answers, what a call gives, and what faults of the server cost."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.agents.stub_server import Answers, Drop, StubServer
from verl.agents import remote
from verl.agents.base import Observation, ToolCall, ToolFailed, ToolsLost
from verl.agents.mcp import MCPTools
from verl.agents.tool_server import ServerTools, TextServer, connect_tool_server
from verl.errors import ConfigError

LONG_S = 120.0
"""A time no test reaches unless something is broken."""
SCHEMA = {
    "type": "function",
    "function": {
        "name": "echo",
        "description": "Repeat.",
        "parameters": {"type": "object", "properties": {}},
    },
}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StubServer]]:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    started = []

    def start(answers: Answers, **options: Any) -> StubServer:
        started.append(StubServer(answers, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def tools_and(call: Callable[[Any], tuple[int, Any]]) -> Answers:
    """Our protocol, with `call` behind POST /call."""

    def answers(method: str, path: str, body: Any) -> tuple[int, Any]:
        if (method, path) == ("GET", "/tools"):
            return 200, {"tools": [SCHEMA]}
        return call(body) if (method, path) == ("POST", "/call") else (404, {})

    return answers


def echo(body: Any) -> tuple[int, Any]:
    return 200, {"result": body["arguments"]["text"]}


def text_server(observe: Callable[[Any], tuple[int, Any]]) -> Answers:
    """verl-tool's protocol: empty lists are refused, as its server does."""

    def answers(method: str, path: str, body: Any) -> tuple[int, Any]:
        if (method, path) == ("GET", "/health"):
            return 200, {"status": "healthy"}
        if (method, path) != ("POST", "/get_observation"):
            return 404, {"detail": "Not Found"}
        return observe(body) if body["trajectory_ids"] else (422, {"detail": "at least one"})

    return answers


async def tools_of(server: StubServer) -> ServerTools:
    tools = await connect_tool_server(server.address, LONG_S)
    assert isinstance(tools, ServerTools)
    return tools


async def texts_of(server: StubServer) -> TextServer:
    texts = await connect_tool_server(server.address, LONG_S)
    assert isinstance(texts, TextServer)
    return texts


def call_once(
    server: StubServer, timeout_s: float = LONG_S, name: str = "echo", arguments: dict[str, Any] | None = None
) -> str:
    async def run() -> str:
        tools = await tools_of(server)
        try:
            call = ToolCall(name, {"text": "hello"} if arguments is None else arguments)
            return await tools.call("uid#0", call, timeout_s)
        finally:
            await tools.close()

    return asyncio.run(run())


# ---- which protocol


@pytest.mark.parametrize(
    ("answers", "kind", "said"),
    [(tools_and(echo), ServerTools, "/tools"), (text_server(echo), TextServer, "/get_observation")],
)
def test_the_protocol_that_answers_is_used_and_logged(serve, caplog, answers, kind, said):
    server = serve(answers)
    caplog.set_level(logging.INFO)

    async def run() -> None:
        for address in (server.address, f"127.0.0.1:{server.server_port}", f"{server.address}{said}"):
            connected = await connect_tool_server(address, LONG_S)
            assert isinstance(connected, kind)
            await connected.close()

    asyncio.run(run())
    assert any(server.address in line and said in line for line in caplog.messages)


def test_a_server_that_speaks_nothing_known_is_refused_with_all_that_was_tried(serve):
    server = serve(lambda method, path, body: (404, b"page not found"))
    with pytest.raises(ConfigError) as error:
        asyncio.run(connect_tool_server(server.address, LONG_S))
    for part in ("rollout.multi_turn.tool_server", server.address, "GET /tools: HTTP 404: page not found"):
        assert part in str(error.value)
    assert "GET /health" in str(error.value) and "MCP" in str(error.value)


def test_a_website_at_the_address_is_no_tool_server(serve):
    server = serve(lambda method, path, body: (200 if method == "GET" else 405, b"<html>welcome</html>"))
    with pytest.raises(ConfigError, match="GET /tools: HTTP 200: <html>welcome"):
        asyncio.run(connect_tool_server(server.address, LONG_S))


@pytest.mark.parametrize("address", ["ftp://example.org", "http://", "http://[::1", "not an address"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match="no HTTP address"):
        asyncio.run(connect_tool_server(address, LONG_S))


@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        ([], "no tools"),
        ({"echo": SCHEMA}, "no list"),
        ([{"name": "echo"}], "lists {'name': 'echo'}"),
        ([SCHEMA, SCHEMA], "two tools called 'echo'"),
    ],
)
def test_a_list_of_tools_that_cannot_be_used_is_refused(serve, listed, problem):
    server = serve(lambda method, path, body: (200, {"tools": listed}))
    with pytest.raises(ConfigError, match=problem):
        asyncio.run(connect_tool_server(server.address, LONG_S))


def test_a_server_that_is_still_starting_is_waited_for(serve, monkeypatch):
    server = serve(tools_and(echo), listening=False)
    pause, refused = remote.Outage.pause, []

    async def listen_after_a_refusal(self: remote.Outage, at_least: float = 0.0) -> bool:
        if not refused:
            server.listen()
        refused.append(True)
        return await pause(self, at_least)

    monkeypatch.setattr(remote.Outage, "pause", listen_after_a_refusal)
    assert call_once(server) == "hello"
    assert refused


def test_no_server_at_the_start_is_an_error_with_address_and_reason(serve, monkeypatch):
    monkeypatch.setattr(remote, "LOST_AFTER_S", 0.05)
    server = serve(tools_and(echo), listening=False)
    with pytest.raises(ConfigError, match=rf"tool_server={server.address}.*ConnectError.*Start it first"):
        asyncio.run(connect_tool_server(server.address, LONG_S))
    server.listen()


# ---- a call


def test_a_call_sends_name_arguments_and_session(serve):
    server = serve(tools_and(echo))
    assert call_once(server) == "hello"
    sent = {"name": "echo", "arguments": {"text": "hello"}, "session": "uid#0"}
    assert server.requests[-1] == ("POST", "/call", sent)


@pytest.mark.parametrize(
    ("result", "text"), [({"a": [1, "é"]}, '{"a": [1, "é"]}'), (3, "3"), (None, "null"), ("\ud800!", "?!")]
)
def test_any_result_becomes_text_that_can_be_encoded(serve, result, text):
    assert call_once(serve(tools_and(lambda body: (200, {"result": result})))) == text


@pytest.mark.parametrize(
    ("status", "content", "text", "kind"),
    [
        (200, {"error": "no such page"}, "no such page", "failed"),
        (200, {"error": "too slow", "kind": "timeout"}, "too slow", "timeout"),
        (200, {"error": "odd", "kind": "other"}, "odd", "failed"),
        (500, b"Traceback", "HTTP 500", "failed"),
        (500, {"error": "broken inside"}, "broken inside", "failed"),
        (200, b"\xff\xfe not json", "not a JSON object", "failed"),
        (200, [1, 2], "not a JSON object", "failed"),
        (200, {"answer": 1}, "'result' or 'error'", "failed"),
        (200, b"[" * 100_000, "not a JSON object", "failed"),
    ],
)
def test_what_is_no_result_is_told_to_the_model(serve, status, content, text, kind):
    server = serve(tools_and(lambda body: (status, content)))
    with pytest.raises(ToolFailed, match=text) as error:
        call_once(server)
    assert error.value.kind == kind
    assert "Traceback" not in error.value.text


def test_an_endless_answer_is_cut_off(serve, monkeypatch):
    monkeypatch.setattr(remote, "MAX_ANSWER_BYTES", 1000)
    with pytest.raises(ToolFailed, match="larger than 1,000 bytes"):
        call_once(serve(tools_and(lambda body: (200, {"result": "x" * 2000}))))


def test_an_unknown_tool_is_not_sent(serve):
    server = serve(tools_and(echo))
    with pytest.raises(ToolFailed, match="no tool 'nothing'. Tools: echo") as error:
        call_once(server, name="nothing")
    assert error.value.kind == "unknown"
    assert [path for _, path, _ in server.requests] == ["/tools"]


@pytest.mark.parametrize("value", [float("nan"), {1, 2}])
def test_arguments_that_are_no_json_are_not_sent(serve, value):
    with pytest.raises(ToolFailed, match="cannot be written as JSON") as error:
        call_once(serve(tools_and(echo)), arguments={"text": value})
    assert error.value.kind == "malformed"


def test_half_a_surrogate_pair_reaches_the_server(serve):
    server = serve(tools_and(lambda body: (200, {"result": "seen"})))
    assert call_once(server, arguments={"text": "\ud800"}) == "seen"
    assert server.requests[-1][2]["arguments"] == {"text": "\ud800"}


# ---- faults


def test_a_call_that_hangs_ends_at_its_deadline_while_others_go_on(serve):
    release = threading.Event()

    def call(body: Any) -> tuple[int, Any]:
        if body["arguments"]["text"] == "slow":
            release.wait(LONG_S)
        return echo(body)

    server = serve(tools_and(call))

    async def run() -> None:
        tools = await tools_of(server)
        hung = asyncio.create_task(tools.call("a", ToolCall("echo", {"text": "slow"}), 0.3))
        assert await tools.call("b", ToolCall("echo", {"text": "quick"}), LONG_S) == "quick"
        with pytest.raises(ToolFailed, match="no answer within 0.3 s") as error:
            await hung
        assert error.value.kind == "timeout"
        release.set()  # the late answer goes nowhere
        assert await tools.call("a", ToolCall("echo", {"text": "next"}), LONG_S) == "next"
        await tools.close()

    try:
        asyncio.run(run())
    finally:
        release.set()


def test_a_broken_connection_is_tried_again(serve):
    def call(body: Any) -> tuple[int, Any]:
        if sum(path == "/call" for _, path, _ in server.requests) < 3:
            raise Drop
        return echo(body)

    server = serve(tools_and(call))
    assert call_once(server) == "hello"


def test_a_call_that_always_ends_its_server_is_given_up_but_not_the_run(serve):
    def call(body: Any) -> tuple[int, Any]:
        raise Drop

    server = serve(tools_and(call))
    with pytest.raises(ToolFailed, match="broke 3 times"):
        call_once(server)
    assert sum(path == "/call" for _, path, _ in server.requests) == 3


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_server_that_says_try_again_is_tried_again(serve, status):
    def call(body: Any) -> tuple[int, Any]:
        calls = sum(path == "/call" for _, path, _ in server.requests)
        return echo(body) if calls > 3 else (status, b"try again")

    server = serve(tools_and(call))
    assert call_once(server) == "hello"


def test_a_server_that_is_restarted_costs_nothing(serve, monkeypatch):
    first = serve(tools_and(echo))
    second = serve(
        tools_and(lambda body: (200, {"result": "from the second"})), port=first.server_port, listening=False
    )
    pause = remote.Outage.pause
    pauses: list[float] = []

    async def listen_after_three_refusals(self: remote.Outage, at_least: float = 0.0) -> bool:
        pauses.append(at_least)
        if len(pauses) == 3:
            second.listen()
        return await pause(self, at_least)

    async def run() -> str:
        tools = await tools_of(first)
        assert await tools.call("s", ToolCall("echo", {"text": "one"}), LONG_S) == "one"
        first.stop()
        monkeypatch.setattr(remote.Outage, "pause", listen_after_three_refusals)
        try:
            return await tools.call("s", ToolCall("echo", {"text": "two"}), LONG_S)
        finally:
            await tools.close()

    assert asyncio.run(run()) == "from the second"
    assert len(pauses) >= 3


def test_a_server_that_stays_away_stops_the_run_with_its_address(serve, monkeypatch):
    server = serve(tools_and(echo))

    async def run() -> None:
        tools = await tools_of(server)
        server.stop()
        monkeypatch.setattr(remote, "LOST_AFTER_S", 0.1)
        with pytest.raises(ToolsLost, match=rf"{server.address}.*ConnectError.*resumes"):
            await tools.call("s", ToolCall("echo", {}), LONG_S)
        await tools.close()
        await tools.close()

    asyncio.run(run())


@pytest.mark.parametrize("health", [True, False])
def test_a_server_that_answers_nothing_at_all_is_lost_and_one_with_slow_tools_is_not(
    serve, monkeypatch, health
):
    release = threading.Event()

    def answers(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/call" or (path == "/health" and not health):
            release.wait(LONG_S)
        return 200, {"tools": [SCHEMA]}

    server = serve(answers)
    monkeypatch.setattr(remote, "_HEALTH_S", LONG_S if health else 0.1)

    async def run() -> None:
        tools = await tools_of(server)
        monkeypatch.setattr(remote, "LOST_AFTER_S", 0.05)
        with pytest.raises(ToolFailed if health else ToolsLost):
            await tools.call("s", ToolCall("echo", {}), 0.3)
        await tools.close()

    try:
        asyncio.run(run())
    finally:
        release.set()


# ---- servers that read whole turns


def test_a_turn_is_sent_in_parallel_lists(serve):
    answer = {"observations": ["<result>4</result>"], "dones": [False], "valids": [1]}
    server = serve(text_server(lambda body: (200, answer)))

    async def run() -> Observation:
        texts = await texts_of(server)
        try:
            return await texts.observe("uid#0", "2 + 2 = <python>", {"level": 3}, True, LONG_S)
        finally:
            await texts.end("uid#0")
            await texts.close()

    assert asyncio.run(run()) == Observation("<result>4</result>", done=False, valid=True)
    (_, _, turn), (_, _, end) = server.requests[-2:]
    assert turn == {
        "trajectory_ids": ["uid#0"],
        "actions": ["2 + 2 = <python>"],
        "extra_fields": [{"level": 3}],
        "is_last_step": [True],
    }
    assert end["trajectory_ids"] == ["uid#0"] and end["finish"] == [True]


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"obs": "seen"}, "seen"),
        ({"obs": "", "invalid_reason": "no tool for it"}, "no tool for it"),
        ({"image": "data"}, '{"image": "data"}'),
    ],
)
def test_an_observation_may_be_an_object(serve, observation, text):
    answer = {"observations": [observation], "dones": [True], "valids": [False]}
    server = serve(text_server(lambda body: (200, answer)))

    async def run() -> Observation:
        texts = await texts_of(server)
        try:
            return await texts.observe("s", "x", {}, False, LONG_S)
        finally:
            await texts.close()

    assert asyncio.run(run()) == Observation(text, done=True, valid=False)


@pytest.mark.parametrize(
    "content",
    [
        {"observations": ["a", "b"], "dones": [False], "valids": [True]},
        {"observations": [], "dones": [], "valids": []},
        {"observations": ["a"]},
        {"observations": None, "dones": [False], "valids": [True]},
        b"garbage",
    ],
)
def test_an_answer_without_one_observation_is_a_failure_of_the_turn(serve, content):
    server = serve(text_server(lambda body: (200, content)))

    async def run() -> None:
        texts = await texts_of(server)
        with pytest.raises(ToolFailed):
            await texts.observe("s", "x", {}, False, LONG_S)
        await texts.close()

    asyncio.run(run())


@pytest.mark.parametrize("away", [False, True])
def test_a_conversation_that_cannot_be_ended_is_only_logged(serve, caplog, monkeypatch, away):
    def observe(body: Any) -> tuple[int, Any]:
        raise Drop

    server = serve(text_server(observe))

    async def run() -> None:
        texts = await texts_of(server)
        if away:
            server.stop()
            monkeypatch.setattr(remote, "LOST_AFTER_S", 0.05)
        await texts.end("uid#7")
        await texts.close()

    asyncio.run(run())
    assert any("uid#7" in line for line in caplog.messages)


# ---- MCP without a server; with real ones: tests/components/test_agents_servers.py


@pytest.mark.parametrize(
    ("target", "problem"),
    [("no-such-program --stdio", "no program 'no-such-program'"), ("server 'unclosed", "nor a command line")],
)
def test_an_mcp_command_that_cannot_be_started_is_refused(target, problem):
    pytest.importorskip("mcp")
    with pytest.raises(ConfigError, match=problem):
        asyncio.run(MCPTools(target).open())
