"""The way to the hub is tried, not read off variables: real servers on this machine, and ports where none is."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from verl.config.model_path import hub_error
from verl.doctor.machine import judge_hub
from verl.doctor.runner import Check


class Hub(BaseHTTPRequestHandler):
    code = 200
    asked: list[str] = []

    def do_HEAD(self) -> None:
        type(self).asked.append(f"{self.command} {self.path}")
        self.send_response(self.code)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[type[Hub], str]]:
    handler = type("OneHub", (Hub,), {"asked": []})
    found = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


def finding(variables: dict[str, str]) -> Check:
    return judge_hub(variables, hub_error)


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("code", [200, 401, 404, 405])
def test_a_hub_that_answers_is_in_order(code: int, server: tuple[type[Hub], str], tmp_path: Path) -> None:
    handler, address = server
    handler.code = code
    seen = finding({"HF_ENDPOINT": address + "/", "HF_HOME": str(tmp_path / "new")})
    assert seen.status == "ok" and f"{address} answers" in seen.seen
    assert handler.asked == ["HEAD /api/models?limit=1"]


def test_a_hub_in_trouble_is_no_hub(server: tuple[type[Hub], str]) -> None:
    handler, address = server
    handler.code = 503
    seen = finding({"HF_ENDPOINT": address})
    assert seen.status == "warning" and "it answers 503" in seen.seen


def test_a_closed_port_is_not_reachable_whatever_the_variables_say() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can answer there
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        seen = finding({"HF_ENDPOINT": address})
    assert seen.status == "warning" and "cannot be reached" in seen.seen and "refused" in seen.seen
    assert "folders" in seen.fix and "https_proxy" in seen.fix


def test_a_server_that_says_nothing_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "timed out" in str(hub_error(address, request_s=0.2))
        assert hub_error(address, request_s=60.0, all_s=0.2) == "no answer within 0 s"


def test_the_proxy_is_the_way_that_is_tried(
    server: tuple[type[Hub], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, address = server
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("all_proxy", address)
    assert hub_error("http://hub.invalid") is None
    assert handler.asked == ["HEAD http://hub.invalid/api/models?limit=1"]


def test_a_proxy_we_cannot_speak_to_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:1")
    assert hub_error("http://hub.invalid") == ""
    assert finding({"HF_ENDPOINT": "http://hub.invalid", "HF_HOME": str(tmp_path)}).status == "note"
