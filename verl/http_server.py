"""HTTP servers that clients can neither block nor exhaust: the viewer, the metrics endpoint, `verl tool-server`.

A thread per connection and a limit on connections: for a new one beyond it, the connection that has waited longest for
a request is closed. A request has a deadline from its first byte on, also one that arrives byte by byte; so has sending
its answer.
"""

from __future__ import annotations

import contextlib
import errno
import io
import ipaddress
import logging
import re
import resource
import socket
import threading
import time
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.1
_LOCAL_HOST = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)

_log = logging.getLogger(__name__)


def is_from_elsewhere(headers: Message, loopback: bool) -> bool:
    """Whether a page of another site may be asking: its Origin is not the address that is asked or, where only this
    machine is served (`loopback`), that address is a name that does not stand for this machine."""
    hosts = headers.get_all("Host", [])
    if len(hosts) != 1 or (loopback and not _LOCAL_HOST.fullmatch(hosts[0])):
        return True
    return any(origin.lower() != f"http://{hosts[0]}".lower() for origin in headers.get_all("Origin", []))


def free_port() -> int:
    """A port of this machine that nobody listens on now, for messages."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server(ThreadingHTTPServer):
    """OSError where it cannot listen."""

    daemon_threads = True
    request_queue_size = 1024  # a client that finds the queue full is kept waiting for a second by the kernel
    max_connections = 32
    keep_answering = False
    """Whether a connection whose request is being answered is never closed for a new one; False: answers are quick, and
    the oldest connection is one whose client does not read."""

    def __init__(self, host: str, port: int, handler: type[Handler]) -> None:
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if descriptors != resource.RLIM_INFINITY:
            self.max_connections = max(1, min(self.max_connections, descriptors // 2))
        self.connections: dict[socket.socket, None] = {}
        """The oldest first."""
        self._waiting: dict[socket.socket, None] = {}
        """Those that wait for a request, or for the rest of one; the longest first."""
        self._lock = threading.Lock()
        self._places = threading.Semaphore(self.max_connections)
        self._handler = handler
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            super().__init__((host, port), handler)
        except (OverflowError, UnicodeError) as error:  # what Python refuses before the system can
            raise OSError(errno.EINVAL, str(error)) from error

    @property
    def url(self) -> str:
        host, port = str(self.server_address[0]), self.server_port
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def loopback(self) -> bool:
        """Whether it serves this machine only."""
        return ipaddress.ip_address(str(self.server_address[0])).is_loopback

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if (
                error.errno in _NO_DESCRIPTORS
            ):  # the connection stays in the queue: without a pause, a busy loop
                self.close_one()
                time.sleep(_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.close_one()
            if not self._places.acquire(timeout=self._handler.timeout):
                super().shutdown_request(request)
                return
        self.connections[request] = None
        self.waits(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.answers(request)
        super().shutdown_request(request)
        if request in self.connections:
            del self.connections[request]
            self._places.release()

    def waits(self, connection: socket.socket) -> None:
        with self._lock:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None

    def answers(self, connection: socket.socket) -> None:
        with self._lock:
            self._waiting.pop(connection, None)

    def close_one(self) -> None:
        """Make place for a new connection, where that is possible."""
        with self._lock:
            candidates = self._waiting or ({} if self.keep_answering else self.connections)
            for connection in list(candidates)[:1]:
                self._waiting.pop(connection, None)
                _cut_off(connection)

    def close_connections(self) -> None:
        for connection in list(self.connections):
            _cut_off(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a request from %s ended early", client_address, exc_info=True)


def _cut_off(connection: socket.socket) -> None:
    """Let the thread that reads from it see its end."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    server: Any  # a Server; subclasses say which
    timeout: ClassVar[float] = 30.0
    """Seconds for a request, and for sending its answer."""
    idle_s: ClassVar[float] = 30.0
    """Seconds until the first byte of a request."""
    server_version, sys_version = "verl", ""
    disable_nagle_algorithm = True  # headers and body are sent one after the other
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(explain)s\n"

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._input = _Input(self.connection)
        self.rfile = io.BufferedReader(self._input)

    def handle_one_request(self) -> None:
        self.server.waits(self.connection)
        self._input.deadline = time.monotonic() + self.idle_s
        first = b""
        with contextlib.suppress(OSError):
            first = self.rfile.peek(1)  # type: ignore[attr-defined]
        self._input.deadline = time.monotonic() + self.timeout
        if first:
            super().handle_one_request()
        else:
            self.close_connection = True

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        if parsed and self.command == "GET":
            self.request_complete()
        return parsed

    def request_complete(self) -> None:
        """Everything was read; what is done from here on is not cut off for a new connection."""
        self.server.answers(self.connection)
        self.connection.settimeout(self.timeout)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)


class _Input(io.RawIOBase):
    """What a client sends; TimeoutError at the deadline, however often something arrived before."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.deadline = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)
