"""`verl tool-server`: its calculator, search and Python, functions of a file, and the HTTP protocol."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import math
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.agents.base import ToolCall, ToolFailed
from verl.agents.builtin_tools import (
    BuiltinTools,
    Passages,
    calculator,
    python_within,
    search_in,
    split_passages,
)
from verl.agents.serve import Tools, ToolServer, run, served_tools
from verl.agents.tool_server import ServerTools, connect_tool_server
from verl.config.sections.reward import SandboxConfig
from verl.errors import ConfigError

LONG_S = 120.0

# ---- calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 12", "84"),
        ("2 ** 100", str(2**100)),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2 % 5", str(-7 // 2 % 5)),
        ("sqrt(2)", "1.41421356237"),
        ("max(1, gcd(12, 18), round(2.5))", "6"),
        ("round(2.345, 2) + round(123, -1)", "122.35"),
        ("round(10 ** 1000, -900) - 10 ** 1000", "0"),
        (" 2*pi ", "6.28318530718"),
        ("1e400", "inf"),
    ],
)
def test_expressions_have_their_values(expression, value):
    assert calculator(expression) == value


@given(
    st.recursive(
        st.integers(0, 999).map(str),
        lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(
            lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
        ),
        max_leaves=8,
    )
)
def test_integers_are_exact(expression):
    try:
        expected = str(eval(expression))
    except ZeroDivisionError:
        with pytest.raises(ToolFailed, match="ZeroDivisionError"):
            calculator(expression)
    else:
        assert calculator(expression) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2 +",
        "9 ** 9 ** 9",
        "2 ** -(10 ** 9)",
        "(2 ** 2000) * (2 ** 2000) * (2 ** 2000)",
        "10 ** 5000.0",
        "(-8) ** 0.5",
        "1 / 0",
        "True + 1",
        "'a' * 10 ** 9",
        "[1] * 3",
        "__import__('os').getpid()",
        "(1).real",
        "abs",
        "x + 1",
        "round(1, ndigits=2)",
        "1" * 2000,
        "(" * 400 + "1" + ")" * 400,
        "-" * 900 + "1",
        "1 if 1 else 2",
        "sqrt('4')",
        "1 << 100000000",
        "round(1, -5000)",
        "round(1, -30000000)",
        "round(1.5, 10 ** 9)",
    ],
)
def test_what_is_no_small_arithmetic_is_refused(expression):
    try:
        result = calculator(expression)
    except ToolFailed as error:
        assert len(error.text) < 2500
    else:  # deep nesting of plain signs and brackets may be evaluated; nothing else here
        assert set(expression) <= set("-()1") and result in ("1", "-1")


@pytest.mark.slow(seconds=3)
@given(st.text(max_size=60))
def test_no_text_makes_the_calculator_crash(text):
    with contextlib.suppress(ToolFailed):
        assert isinstance(calculator(text), str)


# ---- search


def test_ranking_is_that_of_bm25():
    texts = ["green tree in the park by the river", "red apple tree", "red red wine", "stone"]
    passages = [(f"{number}.txt", text) for number, text in enumerate(texts)]
    words = [[f"{number}", "txt", *text.split()] for number, text in enumerate(texts)]
    mean = sum(map(len, words)) / len(words)

    def score(query: list[str], document: list[str]) -> float:
        total = 0.0
        for word in query:
            found = sum(word in other for other in words)
            count = Counter(document)[word]
            rarity = math.log(1 + (len(words) - found + 0.5) / (found + 0.5))
            total += rarity * count * 2.5 / (count + 1.5 * (0.25 + 0.75 * len(document) / mean))
        return total

    for query in (["red"], ["tree"], ["red", "tree"], ["the", "park", "apple"]):
        scores = [score(query, document) for document in words]
        order = sorted((n for n in range(len(texts)) if scores[n] > 0), key=lambda n: -scores[n])
        assert Passages(passages).best(" ".join(query), 4) == [passages[n] for n in order]


@given(st.lists(st.lists(st.text("abc", min_size=1, max_size=3), max_size=200), max_size=6))
def test_passages_hold_every_word_in_order(paragraphs):
    text = "\n\n".join(" ".join(words) for words in paragraphs)
    passages = split_passages(text)
    assert " ".join(passages).split() == text.split()
    assert all(0 < len(passage.split()) <= 120 for passage in passages)


def test_search_names_the_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "fox.md").write_text("The quick brown fox.")
    (tmp_path / "dog.txt").write_bytes(b"The lazy dog \xff barks.")
    (tmp_path / "data.bin").write_text("fox fox fox")
    search = search_in(tmp_path)
    assert search("FOX?") == "[1] sub/fox.md\nThe quick brown fox."
    assert search("the", top_k=0).count("[") == 1
    assert search("the", top_k=99).count("[") == 2
    assert search("zebra") == "nothing found"


@pytest.mark.parametrize("content", [None, {}, {"empty.txt": " \n"}, {"a.bin": "x"}])
def test_a_folder_without_texts_is_refused(tmp_path, content):
    folder = tmp_path / "documents"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    with pytest.raises(ConfigError, match="--documents"):
        search_in(folder)


# ---- the server


FUNCTIONS = '''
import os
import time

def shout(text: str, times: int = 1) -> str:
    """Say it loudly.

    Args:
        text: What to say
        times: How often
    """
    return text.upper() * times

def die() -> str:
    """End the process."""
    os._exit(3)

def hang() -> str:
    """Never return."""
    time.sleep(3600)

def count() -> dict:
    """A result that is no text."""
    return {"n": 1}
'''


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tools") / "functions.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture(scope="module")
def server(functions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolServer]:
    documents = tmp_path_factory.mktemp("documents")
    (documents / "fox.txt").write_text("The quick brown fox.")
    python = SandboxConfig(timeout_s=2.0, allow_unisolated=True)
    with (
        served_tools(BuiltinTools(python, documents), [str(functions)], 2.0) as tools,
        serving(tools) as server,
    ):
        yield server


@contextlib.contextmanager
def serving(tools: Tools) -> Iterator[ToolServer]:
    with ToolServer("127.0.0.1", 0, tools) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def call(server: ToolServer, name: str, arguments: Any) -> str:
    async def run() -> str:
        tools = await connect_tool_server(server.url, LONG_S)
        assert isinstance(tools, ServerTools)
        try:
            return await tools.call("s", ToolCall(name, arguments), LONG_S)
        finally:
            await tools.close()

    return asyncio.run(run())


def ask(server: ToolServer, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=LONG_S)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_tools_of_both_kinds_are_listed_with_their_schemas(server):
    status, content = ask(server, "GET", "/tools")
    listed = {schema["function"]["name"]: schema["function"] for schema in content["tools"]}
    assert status == 200 and set(listed) == {
        "calculator",
        "python",
        "search",
        "shout",
        "die",
        "hang",
        "count",
    }
    assert listed["shout"]["parameters"]["properties"]["text"]["type"] == "string"
    assert listed["calculator"]["parameters"]["required"] == ["expression"]
    assert ask(server, "GET", "/health") == (200, {"status": "ok"})


@pytest.mark.slow(seconds=3)
def test_calls_give_results(server):
    assert call(server, "calculator", {"expression": "6*7"}) == "42"
    assert call(server, "search", {"query": "fox"}) == "[1] fox.txt\nThe quick brown fox."
    assert call(server, "python", {"code": "print(6 * 7)"}) == "42"
    endless = "print('begun', flush=True)\nwhile True: pass"
    assert call(server, "python", {"code": endless}) == "begun\n\n[stopped after 2 s]"
    assert call(server, "shout", {"text": "hé", "times": 2}) == "HÉHÉ"
    assert call(server, "count", {}) == '{"n": 1}'


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize(
    ("name", "arguments", "text", "kind"),
    [
        ("calculator", {"expression": "1/0"}, "ZeroDivisionError", "failed"),
        ("calculator", {}, "expression", "malformed"),
        ("calculator", {"expression": "1", "digits": 3}, "digits", "malformed"),
        ("shout", {"text": 5, "times": "many"}, "do not fit", "malformed"),
        ("hang", {}, "2 s", "timeout"),
        ("die", {}, "die", "failed"),
    ],
)
def test_failures_are_told_with_their_kind(server, name, arguments, text, kind):
    with pytest.raises(ToolFailed, match=text) as error:
        call(server, name, arguments)
    assert error.value.kind == kind
    assert call(server, "shout", {"text": "still here"}) == "STILL HERE"


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "text"),
    [
        ("GET", "/other", b"", {}, 404, "GET /tools"),
        ("POST", "/other", b"{}", {}, 404, "POST /call"),
        ("POST", "/call", b"{}", {"Content-Type": "text/plain"}, 400, "application/json"),
        ("POST", "/call", b"not json", {}, 400, "Expecting value"),
        ("POST", "/call", b"[]", {}, 400, "JSON object"),
        ("POST", "/call", b"[" * 200 + b"]" * 200, {}, 400, "nested deeper than 100"),
        ("POST", "/call", b"", {"Content-Length": "-5"}, 400, "Content-Length"),
        ("POST", "/call", b"", {"Content-Length": "99999999999"}, 400, "Content-Length"),
        ("POST", "/call", b'{"name": ["x"]}', {}, 200, "no tool"),
        ("POST", "/call", b'{"name": "calculator", "arguments": [1]}', {}, 200, "must be an object"),
        ("POST", "/call", b'{"name": "calculator"}', {}, 200, "expression"),
    ],
)
def test_bad_requests_are_answered_with_what_is_wrong(server, method, path, body, headers, status, text):
    got, content = ask(server, method, path, body, **headers)
    assert got == status and text in content["error"]
    assert ask(server, "GET", "/health") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example"}, {"Host": "127.0.0.1:1@evil"}, {"Origin": "http://evil.example"}]
)
def test_pages_of_other_sites_may_not_call(server, headers):
    body = json.dumps({"name": "calculator", "arguments": {"expression": "2+3"}}).encode()
    status, content = ask(server, "POST", "/call", body, **headers)
    assert status == 403 and "Host must name 127.0.0.1 or localhost" in content["error"]
    assert ask(server, "GET", "/tools", **headers)[0] == 403
    here = f"http://127.0.0.1:{server.server_port}"
    assert ask(server, "POST", "/call", body, Origin=here) == (200, {"result": "5"})


def test_every_call_has_the_time_limit_of_a_tool_process_and_the_server_answers_meanwhile(
    server, monkeypatch
):
    started, go_on, asked = threading.Event(), threading.Event(), []

    async def wait(processes, target, call, timeout_s):
        asked.append((target, call.name, timeout_s))
        started.set()
        await asyncio.to_thread(go_on.wait, LONG_S)
        return "done"

    monkeypatch.setattr("verl.agents.tool_processes.ToolProcesses.call", wait)
    results: list[Any] = []
    body = json.dumps({"name": "calculator", "arguments": {"expression": "2+3"}}).encode()
    caller = threading.Thread(target=lambda: results.append(ask(server, "POST", "/call", body)))
    caller.start()
    try:
        assert started.wait(LONG_S)
        assert ask(server, "GET", "/health") == (200, {"status": "ok"})
        assert asked == [(0, "calculator", 2.0)] and not results
    finally:
        go_on.set()
        caller.join()
    assert results == [(200, {"result": "done"})]


def test_half_requests_do_not_stop_the_calls(server, monkeypatch):
    monkeypatch.setattr(ToolServer, "max_connections", 8)
    with serving(dict(server.tools)) as small, contextlib.ExitStack() as stack:
        for _ in range(40):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", small.server_port), LONG_S))
            half.sendall(
                b"POST /call HTTP/1.1\r\nContent-Length: 9\r\nContent-Type: application/json\r\n\r\n{"
            )
            assert len(small.connections) <= 8
        assert call(small, "calculator", {"expression": "6*7"}) == "42"


def test_many_calls_at_once(server):
    async def run() -> list[str]:
        tools = await connect_tool_server(server.url, LONG_S)
        assert isinstance(tools, ServerTools)
        calls = [ToolCall("calculator", {"expression": f"{n} + 1"}) for n in range(64)]
        try:
            return await asyncio.gather(*(tools.call(str(n), c, LONG_S) for n, c in enumerate(calls)))
        finally:
            await tools.close()

    assert asyncio.run(run()) == [str(n + 1) for n in range(64)]


# ---- the command


def options(**changes: Any) -> argparse.Namespace:
    given = {"host": "127.0.0.1", "port": 0, "tools": [], "documents": None, "timeout": 10.0}
    return argparse.Namespace(**{**given, "allow_unisolated": True, **changes})


def test_a_port_that_is_taken_is_an_error(server):
    with pytest.raises(ConfigError, match="choose another --port"):
        run(options(port=server.server_port))


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"port": 70_000}, "--port 70000"),
        ({"timeout": 0.0}, "--timeout"),
        ({"documents": Path("/no/such/folder")}, "--documents"),
        ({"tools": ["no_such_file.py"]}, "no_such_file.py"),
    ],
)
def test_options_that_cannot_work_are_errors(changes, problem):
    with pytest.raises(ConfigError, match=problem):
        run(options(**changes))


def test_two_files_with_the_same_tool_are_an_error(functions, tmp_path):
    copy = tmp_path / "again.py"
    copy.write_text(FUNCTIONS)
    with pytest.raises(ConfigError, match="'shout' is there already"):
        run(options(tools=[str(functions), str(copy)]))


def test_a_program_prints_its_result_or_its_error():
    python = python_within(SandboxConfig(allow_unisolated=True))
    assert python("print(sum(range(10)))") == "45"
    assert "NameError" in python("print(x)")
    assert "print" in python("x = 1")


def test_a_program_that_does_not_end_is_stopped():
    python = python_within(SandboxConfig(timeout_s=0.5, allow_unisolated=True))
    assert "stopped after 0.5 s" in python("while True: pass")
