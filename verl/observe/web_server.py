"""`verl view RUN --serve`: the viewer's page and its data over HTTP, for this machine only.

It reads and never writes, binds to the loopback address, answers GET alone and only paths of the runs it was given.
A page of another site cannot read it: names other than those of the loopback address are refused, and no header allows
other origins.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
from urllib.parse import parse_qs, unquote, urlsplit

from verl import http_server
from verl.errors import ConfigError
from verl.observe.report import page
from verl.observe.web_data import WebData

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
PORT = 8265
MAX_QUERY = 1000
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class WebServer(http_server.Server):
    """Serves until `shutdown`. Without a port: `PORT`, or any other where that is taken."""

    def __init__(self, data: WebData, port: int | None = None) -> None:
        self.data = data
        self.document = "".join(page(data.runs[0].run.name, served=True)).encode()
        try:
            super().__init__(HOST, PORT if port is None else port, _Handler)
        except OSError as error:
            if port is not None:
                raise ConfigError(
                    f"cannot serve at {HOST}:{port}: {error.strerror or error}. Give another --port, for example "
                    f"--port {http_server.free_port()}"
                ) from None
            super().__init__(HOST, 0, _Handler)


class _Handler(http_server.Handler):
    server: WebServer

    def do_GET(self) -> None:
        if http_server.is_from_elsewhere(self.headers, loopback=True):
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
