"""A generation server of our own starting: a child process, spoken to over HTTP, gone when we are.

What always holds: the server is reachable from this machine only; it ends with the engine that started it, also
when this process is killed; when it dies the error holds the end of its log.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from verl.errors import RolloutError
from verl.rollout.base import Response
from verl.rollout.handover.copy_engine import CopyRollout, Sample

START_TIMEOUT_S = 900.0
CALL_TIMEOUT_S = 600.0
_MOST_CONNECTIONS = 256
_LOG_LINES = 20
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG

Chunk = tuple[Sequence[int], Sequence[float], str | None]
"""New token ids, their log-probs, and the server's reason when the sample ended."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """JSON over HTTP to `address`: a path of a socket file, or host:port (with the server's key)."""

    def __init__(self, address: str, name: str, key: str | None = None) -> None:
        self.address, self.name = address, name
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if "/" in self.address:
            return _UnixConnection(self.address, timeout)
        return http.client.HTTPConnection(self.address, timeout=timeout)

    def call(self, method: str, path: str, body: Any = None, timeout: float = CALL_TIMEOUT_S) -> Any:
        """The decoded answer (text where it is not JSON); RolloutError for anything but success."""
        connection = self._connect(timeout)
        try:
            response = self._send(connection, method, path, body)
            text = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise RolloutError(f"{self.name}'s server did not answer {path}: {error!r}") from error
        finally:
            connection.close()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def events(self, path: str, body: Any, timeout: float = CALL_TIMEOUT_S) -> Iterator[Any]:
        """The decoded server-sent events of a streaming answer; closing the iterator closes the connection."""
        connection = self._connect(timeout)
        try:
            for line in self._send(connection, "POST", path, body):
                text = line.decode().strip()
                if text == "data: [DONE]":
                    return
                if text.startswith("data: "):
                    yield json.loads(text.removeprefix("data: "))
        except (OSError, http.client.HTTPException) as error:
            raise RolloutError(f"{self.name}'s server broke off {path}: {error!r}") from error
        finally:
            connection.close()

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, self._headers)
        response = connection.getresponse()
        if response.status >= 300:
            text = response.read().decode(errors="replace")[:2000]
            raise RolloutError(f"{self.name}'s server answered {path} with {response.status}: {text}")
        return response


class ServerProcess:
    """The child and its log file."""

    def __init__(self, command: Sequence[str], log_file: Path, name: str, env: dict[str, str]) -> None:
        self.name, self.log_file = name, log_file
        with log_file.open("wb") as out:
            self._process = subprocess.Popen(
                list(command),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **env},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """RolloutError with the end of the log when the server is no longer there."""
        code = self._process.poll()
        if code is not None:
            raise RolloutError(
                f"{self.name}'s server ended with status {code}; its last lines:\n{self.tail()}"
            )

    def tail(self) -> str:
        text = self.log_file.read_text(errors="replace") if self.log_file.exists() else ""
        return "\n".join(text.splitlines()[-_LOG_LINES:])

    def wait_until_ready(self, client: Client, path: str, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            self.check()
            try:
                client.call("GET", path, timeout=5)
                return
            except RolloutError as error:
                if time.monotonic() > deadline:
                    self.stop()
                    raise RolloutError(
                        f"{self.name}'s server was not ready after {timeout_s:g} s; its last lines:\n{self.tail()}"
                    ) from error
                time.sleep(0.2)

    def stop(self, grace_s: float = 10.0) -> None:
        """Ask it to end, then end whatever is left of it and its own children."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        deadline = time.monotonic() + grace_s
        while self._signal(signal.SIGKILL) and time.monotonic() < deadline:
            self._process.poll()
            time.sleep(0.02)
        self._process.wait()

    def _signal(self, kind: int) -> bool:
        """Whether any process of the group was there to hear it."""
        try:
            os.killpg(self._process.pid, kind)
        except ProcessLookupError:
            return False
        return True


_LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """Linux ends the child when the process that started it ends, however that happens."""
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_DEATH_SIGNAL, signal.SIGTERM)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerRollout(CopyRollout):
    """An engine behind a server: one connection per running sample."""

    process: ServerProcess
    client: Client
    connections: int = _MOST_CONNECTIONS

    def _stream(self, sample: Sample) -> Iterator[Chunk]:
        """Ask the server for one sample and give its tokens as they come."""
        raise NotImplementedError

    def _run(self, samples: list[Sample]) -> Iterator[Response]:
        if len({sample.key for sample in samples}) != len(samples):
            raise RolloutError("two samples share an id; request ids of one call must differ")
        left, version = threading.Event(), self.version
        with ThreadPoolExecutor(max(1, min(len(samples), self.connections, _MOST_CONNECTIONS))) as pool:
            futures = [pool.submit(self._one, sample, version, left) for sample in samples]
            try:
                for future in as_completed(futures):
                    yield future.result()
            except RolloutError as error:
                self.process.check()
                raise error
            finally:
                left.set()

    def _one(self, sample: Sample, version: int, left: threading.Event) -> Response:
        if left.is_set() or self.aborted(sample):
            return sample.response("abort", version)
        stream = self._stream(sample)
        try:
            for token_ids, log_probs, ended in stream:
                reason = self.accept(sample, token_ids, log_probs)
                if reason is None and (ended is not None or left.is_set() or self.aborted(sample)):
                    reason = "length" if ended == "length" else "abort"
                if reason is not None:
                    return sample.response(reason, version)
        finally:
            # Closing the connection is how the server learns that nobody wants the rest.
            stream.close()  # type: ignore[attr-defined]
        raise RolloutError(f"{self.name}'s server ended the answer to {sample.key} without a reason")

    def close(self) -> None:
        self.process.stop()
