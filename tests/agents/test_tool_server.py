"""Clients of tool servers: which protocol answers, what a call gives, and what faults of the server cost."""

from __future__ import annotations

import asyncio
import gc
import gzip
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.agents.stub_server import Answers, Drop, StubServer
from verl.agents import remote
from verl.agents.base import Observation, ToolCall, ToolFailed, ToolsLost
from verl.agents.episode import Episode
from verl.agents.formats import get_format
from verl.agents.mcp import MCPTools
from verl.agents.tool_server import ServerTools, TextServer, connect_tool_server
from verl.agents.toolset import Agents
from verl.config.sections.rollout import MultiTurnConfig
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


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(remote.asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


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


@pytest.mark.parametrize(
    ("entry", "warned"),
    [({"type": "string", "enum": None}, False), ({"enum": 5}, True), ({"minimum": "1"}, True)],
)
def test_schemas_with_nulls_or_mistakes_end_no_run(serve, caplog, entry, warned):
    body = {"type": "object", "properties": {"text": entry}, "required": ["text"]}
    schema = {"type": "function", "function": {**SCHEMA["function"], "parameters": body}}  # type: ignore[dict-item]
    server = serve(
        lambda method, path, sent: (200, {"tools": [schema]} if method == "GET" else {"result": "found"})
    )
    agents = Agents(MultiTurnConfig(enable=True, tool_server=server.address), get_format("hermes"))
    try:
        session = Episode(agents, "s", {"prompt": "x"})
        text = '<tool_call>{"name": "echo", "arguments": {"text": "a"}}</tool_call>'
        (record,) = agents.wait_for(session.respond(text, [])).records
    finally:
        agents.close()
    assert (record.result, record.failure) == ("found", None)
    lines = [line for line in caplog.messages if "no valid JSON schema" in line]
    assert len(lines) == warned and all("'echo'" in line and server.address in line for line in lines)


def test_a_server_that_is_still_starting_is_waited_for(serve, monkeypatch):
    server = serve(tools_and(echo), listening=False)
    pause, refused = remote.Outage.pause, []

    async def listen_after_a_refusal(self: remote.Outage, *given: Any) -> None:
        if not refused:
            server.listen()
        refused.append(True)
        await pause(self, *given)

    monkeypatch.setattr(remote.Outage, "pause", listen_after_a_refusal)
    assert call_once(server) == "hello"
    assert refused


def test_no_server_at_the_start_is_an_error_with_address_and_reason(serve, monkeypatch):
    monkeypatch.setattr(remote, "LOST_AFTER_S", 0.05)
    server = serve(tools_and(echo), listening=False)
    with pytest.raises(ConfigError, match=rf"tool_server={server.address}.*ConnectError.*Start it first"):
        asyncio.run(connect_tool_server(server.address, LONG_S))


def test_a_server_that_is_away_is_named_while_it_is_waited_for(monkeypatch, caplog):
    clock = Clock(monkeypatch)
    contact = remote.Contact("The tool server", "http://127.0.0.1:1", "rollout.multi_turn.tool_server")
    told: list[float] = []

    async def run() -> None:
        outages = [remote.Outage(contact) for _ in range(8)]
        while True:
            for outage in outages:
                await outage.pause("ConnectError: refused")
            told.extend([clock.now - 1000.0] * (len(caplog.records) - len(told)))

    with pytest.raises(ToolsLost):
        asyncio.run(run())
    (line,) = caplog.messages
    assert told[0] < 10.0
    for part in (
        "http://127.0.0.1:1: ConnectError",
        "60 s",
        "Start it, or correct rollout.multi_turn.tool_server",
    ):
        assert part in line


@pytest.mark.usefixtures("heard_signals")
def test_an_interruption_while_a_server_is_waited_for_leaves_no_task(serve, monkeypatch, caplog):
    server = serve(tools_and(echo), listening=False)
    pause = remote.Outage.pause

    async def interrupted(self: remote.Outage, *given: Any) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        await pause(self, *given)

    monkeypatch.setattr(remote.Outage, "pause", interrupted)
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", LONG_S)
    with pytest.raises(KeyboardInterrupt):
        Agents(MultiTurnConfig(enable=True, tool_server=server.address), get_format("hermes"))
    gc.collect()
    assert not [
        text for text in caplog.messages if "destroyed" in text
    ]  # asyncio: "Task was destroyed but ..."


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


@pytest.mark.parametrize("encoding", ["gzip", "gzip, gzip", "br", "GZIP"])
def test_a_compressed_answer_is_not_read(encoding):
    """The bytes of a bomb are few; nothing is decompressed, so nothing can grow."""
    read: list[bytes] = []

    async def body() -> AsyncIterator[bytes]:
        read.append(gzip.compress(bytes(1 << 20)))
        yield read[-1]

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        return httpx.Response(200, headers={"Content-Encoding": encoding}, content=body())

    async def run() -> None:
        server = remote.RemoteServer("http://x", "The tool server", key="tool_server")
        await server.close()
        server._http = httpx.AsyncClient(
            base_url="http://x", headers=server._http.headers, transport=httpx.MockTransport(answer)
        )
        with pytest.raises(ToolFailed, match="compressed"):
            await server.request("GET", "/", timeout_s=LONG_S)
        await server.close()

    asyncio.run(run())
    assert read == []


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


def calls_of(server: StubServer) -> int:
    return sum(path == "/call" for _, path, _ in server.requests)


@pytest.mark.parametrize(("status", "times"), [(429, 4), (503, 4), (502, 2), (504, 2)])
def test_a_server_that_says_try_again_is_tried_again(serve, status, times):
    def call(body: Any) -> tuple[int, Any]:
        return echo(body) if calls_of(server) > times else (status, b"try again")

    server = serve(tools_and(call))
    assert call_once(server) == "hello"


@pytest.mark.parametrize("status", [502, 504])
@pytest.mark.parametrize("quiet_s", [0.0, LONG_S])
def test_a_call_that_alone_meets_the_limit_of_a_proxy_costs_itself(serve, monkeypatch, status, quiet_s):
    """However long the server was not asked for anything else."""
    server = serve(tools_and(lambda body: (status, b"Gateway Time-out")))
    monkeypatch.setattr(remote, "LOST_AFTER_S", LONG_S - quiet_s)
    with pytest.raises(ToolFailed, match=rf"sent \d times and met HTTP {status}"):
        call_once(server)
    assert calls_of(server) <= remote.MAX_SENDS


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_server_that_answers_no_call_is_lost(serve, monkeypatch, status):
    away = threading.Event()

    def answers(method: str, path: str, body: Any) -> tuple[int, Any]:
        return (status, b"try again") if away.is_set() else tools_and(echo)(method, path, body)

    server = serve(answers)

    async def run() -> None:
        tools = await tools_of(server)
        away.set()
        monkeypatch.setattr(remote, "LOST_AFTER_S", 0.1)
        key = "max_concurrent_requests" if status == 429 else "Start it again"
        with pytest.raises(ToolsLost, match=rf"HTTP {status}: try again. .*{key}.*resumes"):
            await tools.call("s", ToolCall("echo", {}), LONG_S)
        await tools.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("others", "error"), [(False, ToolsLost), (True, ToolFailed)], ids=["nobody is answered", "others are"]
)
def test_a_rate_limit_is_waited_for_as_long_as_others_are_answered(monkeypatch, others, error):
    clock = Clock(monkeypatch)
    contact = remote.Contact("The simulated user", "http://x", "user.base_url")
    contact.heard = clock.now

    async def run() -> None:
        outage = remote.Outage(contact)
        while True:
            await outage.pause("HTTP 429: slow down")
            contact.heard = clock.now if others else contact.heard

    with pytest.raises(error):
        asyncio.run(run())
    waited = clock.now - 1000.0
    assert waited == pytest.approx(remote.LOST_AFTER_S) if not others else waited > remote.BUSY_S


@pytest.mark.parametrize(("asked", "slept"), [("7", 7.0), ("1e9", remote.LOST_AFTER_S), ("soon", 0.2)])
def test_a_server_says_how_long_to_wait_within_a_bound(monkeypatch, asked, slept):
    clock = Clock(monkeypatch)
    answers = [
        httpx.Response(status, headers={"Retry-After": asked}, stream=httpx.ByteStream(b""))
        for status in (429, 200)
    ]

    async def run() -> None:
        server = remote.RemoteServer("http://x", "The tool server", key="tool_server")
        await server.close()
        server._http = httpx.AsyncClient(
            base_url="http://x", transport=httpx.MockTransport(lambda request: answers.pop(0))
        )
        await server.request("GET", "/", timeout_s=LONG_S)
        await server.close()

    asyncio.run(run())
    assert clock.slept == [slept]


def test_a_server_gets_as_many_requests_at_a_time_as_the_key_allows(serve):
    inside, most, lock = [0], [0], threading.Lock()

    def call(body: Any) -> tuple[int, Any]:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        with lock:
            inside[0] -= 1
        return echo(body)

    server = serve(tools_and(call))

    async def run() -> None:
        tools = await connect_tool_server(server.address, LONG_S, 2)
        assert isinstance(tools, ServerTools)
        await asyncio.gather(*(tools.call("s", ToolCall("echo", {"text": "x"}), LONG_S) for _ in range(8)))
        await tools.close()

    asyncio.run(run())
    assert most[0] <= 2


def test_a_server_that_is_restarted_costs_nothing(serve, monkeypatch):
    first = serve(tools_and(echo))
    second = serve(
        tools_and(lambda body: (200, {"result": "from the second"})), port=first.server_port, listening=False
    )
    pause = remote.Outage.pause
    pauses: list[str] = []

    async def listen_after_three_refusals(self: remote.Outage, *given: Any) -> None:
        pauses.append(given[0])
        if len(pauses) == 3:
            second.listen()
        await pause(self, *given)

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


def test_a_compressed_answer_of_an_mcp_server_is_not_read():
    pytest.importorskip("mcp")
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.read(1 << 16))
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip, gzip\r\n"
            b"Content-Length: 1000000\r\n\r\n"
        )
        await writer.drain()
        await reader.read()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        tools = MCPTools(f"http://127.0.0.1:{port}/mcp")
        with pytest.raises(ConfigError, match="its answer is compressed"):
            await tools.open()
        await tools.close()
        server.close()

    asyncio.run(run())
    assert any(b"accept-encoding: identity" in request.lower() for request in asked)
