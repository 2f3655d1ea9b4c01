"""What all HTTP servers share: who may ask, and that clients can neither block nor exhaust them."""

from __future__ import annotations

import contextlib
import errno
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from email.message import Message
from types import SimpleNamespace

import pytest

from verl import http_server
from verl.http_server import Handler, Server, is_from_elsewhere

LONG_S = 120.0


def headers(**values: str | list[str]) -> Message:
    message = Message()
    for name, given in values.items():
        for value in [given] if isinstance(given, str) else given:
            message[name] = value
    return message


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:8265", "[::1]:1", "LOCALHOST:1", "127.0.0.2:5000", "[::1]"]
)
def test_names_of_this_machine_may_ask(host: str) -> None:
    assert not is_from_elsewhere(headers(Host=host), loopback=True)
    assert not is_from_elsewhere(headers(Host=host, Origin=f"http://{host}"), loopback=True)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8265",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1:8265@evil.example",
        "127.0.0.1:8265, evil.example",
        "127.0.0.1:",
        "127.0.0.1:８265",
        "127.0.0.1:8265\n",
        "",
        ["localhost", "localhost"],
        [],
    ],
)
def test_other_names_are_refused_where_only_this_machine_is_served(host: str | list[str]) -> None:
    assert is_from_elsewhere(headers(Host=host), loopback=True)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://node7:5000", "http://node7:5001"])
def test_a_foreign_origin_is_refused_everywhere(origin: str) -> None:
    assert is_from_elsewhere(headers(Host="node7:5000", Origin=origin), loopback=False)
    assert not is_from_elsewhere(headers(Host="node7:5000", Origin="http://node7:5000"), loopback=False)
    assert not is_from_elsewhere(headers(Host="node7:5000"), loopback=False)


class Small(Server):
    max_connections = 4

    def __init__(self, handler: type[Handler]) -> None:
        self.answering, self.go_on = threading.Semaphore(0), threading.Event()
        super().__init__("127.0.0.1", 0, handler)


class Answers(Handler):
    timeout = idle_s = 600.0  # place is made, nobody is too slow
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/long":
            self.server.answering.release()
            assert self.server.go_on.wait(LONG_S)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")


@contextlib.contextmanager
def serving(server: Small) -> Iterator[Small]:
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.go_on.set()
            server.shutdown()
            server.close_connections()
            thread.join()


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=LONG_S)


def get(server: Server, path: str = "/") -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=LONG_S)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().read()


def test_half_requests_make_place_for_whole_ones() -> None:
    with serving(Small(Answers)) as server, contextlib.ExitStack() as stack:
        for _ in range(5 * server.max_connections):
            half = stack.enter_context(connect(server))
            half.sendall(b"GET / HTTP/1.1\r\nX: ")
            assert len(server.connections) <= server.max_connections
        assert get(server) == b"ok"


@pytest.mark.parametrize("keep", [True, False])
def test_an_answer_in_progress_is_only_cut_off_where_answers_are_quick(keep: bool) -> None:
    server = Small(Answers)
    server.keep_answering = keep
    with serving(server), contextlib.ExitStack() as stack:
        working = [stack.enter_context(connect(server)) for _ in range(server.max_connections - keep)]
        for each in working:
            each.sendall(b"GET /long HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert server.answering.acquire(timeout=LONG_S)
        if keep:
            assert [get(server) for _ in range(3)] == [b"ok"] * 3
        else:
            assert stack.enter_context(connect(server)).fileno() >= 0
            assert working[0].recv(1) == b"", "the oldest makes place"
        server.go_on.set()
        assert working[-1].recv(15) == b"HTTP/1.1 200 OK"


def test_a_request_has_a_deadline_although_bytes_keep_coming() -> None:
    class Hasty(Answers):
        timeout = 0.2

    with serving(Small(Hasty)) as server, connect(server) as dripping:
        dripping.sendall(b"GET / HTTP/1.1\r\nX: ")
        dripping.settimeout(0.01)
        closed = False
        for _ in range(1000):
            try:
                dripping.sendall(b"x")
                closed = dripping.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                closed = True
            break
        assert closed


def test_bytes_that_have_arrived_do_not_extend_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"GET")
        request = http_server._Input(theirs)
        with pytest.raises(TimeoutError):
            request.readinto(bytearray(10))


def test_without_descriptors_one_that_waits_is_closed_and_accepting_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    pauses: list[float] = []
    # Not the module's own sleep: threads of other tests may call that.
    monkeypatch.setattr(
        "verl.http_server.time", SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append)
    )
    with Small(Answers) as server, connect(server) as idle:
        accepted, address = server.get_request()
        server.process_request(accepted, address)
        listening, server.socket = server.socket, Full()  # type: ignore[assignment]
        try:
            with pytest.raises(OSError, match="Too many"):
                server.get_request()
        finally:
            server.socket = listening
        assert len(pauses) == 1
        assert idle.recv(1) == b""


def test_a_part_of_the_descriptors_is_left_for_the_rest_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("verl.http_server.resource.getrlimit", lambda which: (6, 6))
    with Small(Answers) as server:
        assert server.max_connections == 3


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("a" * 70, 0), ("no..name", 0)])
def test_where_nobody_can_listen_the_error_is_an_oserror(host: str, port: int) -> None:
    with pytest.raises(OSError):
        Server(host, port, Answers)
