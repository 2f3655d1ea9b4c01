"""`verl view RUN --serve`: the viewer's page and its data over HTTP, for this machine only.

It reads and never writes, binds to the loopback address, answers GET alone and only paths of the runs it was given.
A page of another site cannot read it: names other than those of the loopback address are refused, and no header allows
other origins.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from verl.errors import ConfigError
from verl.observe.web_data import WebData
from verl.observe.web_page import page

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
PORT = 8265
MAX_CONNECTIONS = 32
TIMEOUT_S = 30.0
MAX_QUERY = 1000
_NAMES = {"127.0.0.1", "localhost", "[::1]"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class WebServer(ThreadingHTTPServer):
    """Serves until `shutdown`. Without a port: `PORT`, or any other where that is taken."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, data: WebData, port: int | None = None) -> None:
        self.data = data
        self.document = "".join(page(data.runs[0].run.name, served=True)).encode()
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        try:
            super().__init__((HOST, PORT if port is None else port), _Handler)
        except OSError as error:
            if port is not None:
                raise ConfigError(
                    f"cannot serve at {HOST}:{port}: {error.strerror or error}. Give another --port, for example "
                    f"--port {_free_port()}"
                ) from None
            super().__init__((HOST, 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(timeout=TIMEOUT_S):
            super().process_request(request, client_address)
        else:
            super().shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request from %s ended early", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: WebServer
    timeout = TIMEOUT_S
    server_version, sys_version = "verl", ""

    def do_GET(self) -> None:
        if not _is_loopback(self.headers.get_all("Host", [])):
            self._send(403, b"open this page by http://127.0.0.1 or http://localhost\n", "text/plain")
            return
        target = urlsplit(self.path)
        path = unquote(target.path).lstrip("/")
        if path == "":
            self._send(200, self.server.document, "text/html; charset=utf-8")
            return
        query = {name: values[0] for name, values in parse_qs(target.query[: 3 * MAX_QUERY]).items()}
        if len(query.get("q", "")) > MAX_QUERY:
            self._send(400, f"a search has at most {MAX_QUERY} characters\n".encode(), "text/plain")
            return
        try:
            body = self.server.data.get(path, query)
        except (KeyError, ValueError):
            self._send(404, b"there is nothing here\n", "text/plain")
        except Exception as error:
            logger.warning("%s could not be answered: %s: %s", path, type(error).__name__, error)
            self._send(500, f"{type(error).__name__}: {error}\n".encode(), "text/plain; charset=utf-8")
        else:
            self._send(200, body, "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        if status == 200 and self.headers.get("If-None-Match") == tag:
            status, body = 304, b""
        packed = len(body) > 1000 and "gzip" in self.headers.get("Accept-Encoding", "")
        content = gzip.compress(body, compresslevel=1) if packed else body
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "ETag": tag}.items():
            self.send_header(name, value)
        if packed:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        return None


def _is_loopback(hosts: list[str]) -> bool:
    """Whether the one Host header names this machine: a name that another site resolves to it is refused."""
    if len(hosts) != 1:
        return False
    name, _, port = hosts[0].rpartition(":") if not hosts[0].endswith("]") else (hosts[0], "", "")
    return (name or port).lower() in _NAMES


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
