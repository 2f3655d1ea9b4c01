"""A generation server of our own starting: a child process, spoken to over HTTP, gone when we are.

What always holds: the server is reachable from this machine only; it ends with the engine that started it, also
when this process is killed; when it dies, or gives no sign of life for `trainer.watchdog_s`, the error says so and
holds the end of its log.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from verl.errors import RESUME, EngineLost, RolloutError
from verl.rollout import WATCHDOG_S
from verl.rollout.base import Response
from verl.rollout.external_engine import ExternalRollout, Sample
from verl.rollout.weight_sync import processes
from verl.rollout.weight_sync.server_watchdog import POLL_S, Guard

START_TIMEOUT_S = 900.0
HEALTH = "/health"
_HEALTH_TIMEOUT_S = 5.0
_MOST_CONNECTIONS = 256
_LOG_LINES = 20
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG

Chunk = tuple[Sequence[int], Sequence[float], str | None]
"""New token ids, their log-probs, and the server's reason when the sample ended."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """JSON over HTTP to `address`: a path of a socket file, or host:port (with the server's key).

    An answer may take as long as it takes: `guard` says when to wait no longer."""

    def __init__(self, address: str, name: str, key: str | None = None) -> None:
        self.address, self.name = address, name
        self.guard: Guard | None = None
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def _connect(self, timeout: float | None = None) -> http.client.HTTPConnection:
        if "/" in self.address:
            return _UnixConnection(self.address, timeout)
        return http.client.HTTPConnection(self.address, timeout=timeout)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer (text where it is not JSON); RolloutError for anything but success."""
        if self.guard is None:
            return self._call(method, path, body)
        try:
            return self.guard.ask(path, self._call, method, path, body)
        except RolloutError as error:
            self.explain(error)
            raise

    def is_well(self) -> bool:
        """Whether the server answers and has nothing to complain of."""
        try:
            self._call("GET", HEALTH, None, _HEALTH_TIMEOUT_S)
        except RolloutError:
            return False
        return True

    def explain(self, error: RolloutError) -> None:
        """EngineLost if the server is gone or dying, which explains every other error; else nothing."""
        if self.guard is not None and not isinstance(error, EngineLost):
            self.guard.explain(error, self.is_well)

    def _call(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> Any:
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

    def events(self, path: str, body: Any) -> Iterator[Any]:
        """The decoded server-sent events of a streaming answer, each a sign of life; closing the iterator closes the
        connection."""
        connection = self._connect()
        try:
            for line in self._send(connection, "POST", path, body):
                if self.guard is not None:
                    self.guard.sign()
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

    def __init__(self, command: Sequence[str], log_file: Path, engine: str, env: dict[str, str]) -> None:
        self.log_file = log_file
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
        self.name = f"{engine}'s server"

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """EngineLost with the end of the log when the server is no longer there."""
        ended = self._ended()
        if ended:
            raise EngineLost(f"{ended}; {RESUME}.{self.last_lines()}")

    def _ended(self) -> str:
        code = self._process.poll()
        return "" if code is None else f"{self.name} ended with status {code}"

    def describe(self) -> str:
        found = processes.members(self.pid)
        return ", ".join(process.describe() for process in found) or "no process of it is left"

    def last_lines(self) -> str:
        text = self.log_file.read_text(errors="replace") if self.log_file.exists() else ""
        return "\nIts last lines:\n" + "\n".join(text.splitlines()[-_LOG_LINES:]) if text else ""

    def wait_until_ready(self, client: Client, timeout_s: float = START_TIMEOUT_S) -> None:
        """RolloutError if that does not happen: the config has to be mended, another start would help nobody."""
        deadline = time.monotonic() + timeout_s
        while not client.is_well():
            ended = self._ended()
            if ended:
                raise RolloutError(f"{ended} before it was ready.{self.last_lines()}")
            if time.monotonic() > deadline:
                last = self.last_lines()
                self.kill()
                raise RolloutError(f"{self.name} was not ready after {timeout_s:g} s.{last}")
            time.sleep(0.2)

    def stop(self, grace_s: float = 10.0) -> None:
        """Ask it to end, then end whatever is left of it and its own children."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self.kill(grace_s)

    def kill(self, grace_s: float = 10.0) -> None:
        """End it and its own children at once, also those that are stopped."""
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


class ServerRollout(ExternalRollout):
    """An engine behind a server: one connection per running sample."""

    process: ServerProcess
    client: Client
    guard: Guard
    connections: int = _MOST_CONNECTIONS

    def open(self, watchdog_s: float = WATCHDOG_S) -> None:
        """Wait until the server is there; from then on nobody waits for it unguarded."""
        self.process.wait_until_ready(self.client)
        self.guard = self.client.guard = Guard(self.process, watchdog_s)

    @abstractmethod
    def _stream(self, sample: Sample) -> Iterator[Chunk]:
        """Ask the server for one sample and give its tokens as they come."""

    def _run(self, samples: list[Sample]) -> Iterator[Response]:
        if len({sample.key for sample in samples}) != len(samples):
            raise RolloutError("two samples share an id; request ids of one call must differ")
        left, version = threading.Event(), self.version
        finished: queue.SimpleQueue[Future[Response]] = queue.SimpleQueue()
        most = max(1, min(len(samples), self.connections, _MOST_CONNECTIONS))
        with ThreadPoolExecutor(most) as pool, self.guard.waiting():
            futures = [pool.submit(self._one, sample, version, left) for sample in samples]
            for future in futures:
                future.add_done_callback(finished.put)
            try:
                for answered in range(len(samples)):
                    what = f"generate ({len(samples) - answered} of {len(samples)} samples are not answered)"
                    yield self._next(finished, what).result()
            except RolloutError as error:
                self.client.explain(error)
                raise
            finally:
                left.set()
                while wait(futures, POLL_S).not_done:
                    self.guard.check("the end of its streams")

    def _next(self, finished: queue.SimpleQueue[Future[Response]], what: str) -> Future[Response]:
        while True:
            try:
                return finished.get(timeout=POLL_S)
            except queue.Empty:
                self.guard.check(what)

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
        if hasattr(self, "guard"):
            self.guard.close()
