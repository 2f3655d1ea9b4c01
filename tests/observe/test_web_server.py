"""The viewer's server answers this machine, and only what the page asks for."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.observe.run_folder import RunFolder
from verl.observe.web_data import WebData
from verl.observe.web_server import WebServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebServer]:
    with RunFolder(tmp_path / "project" / "run") as run:
        run.write_rollouts(1, [{"uid": "0-1", "prompt": "p", "response": "Straße <b>", "score": 1.0}])
    with WebServer(WebData([tmp_path / "project" / "run"], live=True), 0) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def ask(server: WebServer, path: str, host: str = "localhost", method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request(method, path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_a_name_that_is_not_loopback_is_refused(server: WebServer) -> None:
    for host in ("localhost", "127.0.0.1:8265", "[::1]:1", "LOCALHOST:1"):
        assert ask(server, "/runs.json", host)[0] == 200, host
    for host in (
        "evil.example",
        "evil.example:8265",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1:1@evil.example",
        "127.0.0.1:1, evil.example",
        "",
    ):
        assert ask(server, "/runs.json", host)[0] == 403, host


def test_a_page_of_another_site_is_refused(server: WebServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", "/runs.json", headers={"Origin": "http://evil.example"})
    assert connection.getresponse().status == 403


def test_only_get_of_known_paths_is_answered(server: WebServer) -> None:
    assert ask(server, "/runs.json", method="POST")[0] == 501
    for path in (
        "/../config.yaml",
        "/run/0/../../x",
        "/run/9/summary.json",
        "/run/0/group/rollouts/1/7.json",
        "/x",
    ):
        assert ask(server, path)[0] == 404, path


def test_a_group_and_a_search_are_those_of_the_file(server: WebServer) -> None:
    group = json.loads(ask(server, "/run/0/group/rollouts/1/0.json")[1])
    assert [row["response"] for row in group["rows"]] == ["Straße <b>"]
    assert json.loads(ask(server, "/run/0/search/rollouts?q=STRASSE")[1]) == {"matches": [0]}
    assert json.loads(ask(server, "/run/0/search/rollouts?q=none")[1]) == {"matches": []}
