"""An HTTP server of the standard library whose answers a test writes; it can be away and come back on its port."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answers = Callable[[str, str, Any], tuple[int, Any]]
"""(method, path, body) -> status and content: bytes as they are, anything else as JSON."""


class Drop(Exception):
    """Raised by the test's function: the connection is closed without an answer."""


class StubServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_port = True  # a successor may take the port before this one listens no more
    request_queue_size = 256

    def __init__(self, answers: Answers, port: int = 0, *, listening: bool = True) -> None:
        super().__init__(("127.0.0.1", port), _Handler, bind_and_activate=False)
        self.answers = answers
        self.requests: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._open: set[socket.socket] = set()
        self._serving = False
        self.server_bind()  # without listening: connections are refused, and nobody else gets the port
        if listening:
            self.listen()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def listen(self) -> None:
        self._serving = True
        self.server_activate()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def stop(self) -> None:
        """As if the process had been killed."""
        if self._serving:  # or it would wait for a loop that never ran
            self.shutdown()
        self.server_close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: StubServer
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def handle_any(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else None
        self.server.requests.append((self.command, self.path, body))
        self.server.headers.append(dict(self.headers))
        try:
            status, content = self.server.answers(self.command, self.path, body)
        except Drop:
            self.close_connection = True
            return
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = handle_any

    def log_message(self, format: str, *args: Any) -> None:
        pass
