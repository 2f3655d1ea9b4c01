"""A generation server as a child process, reached over HTTP from this machine only.

It ends with the engine that started it, also when this process is killed. When it dies, or makes no progress for
`trainer.watchdog_s`, the error holds the end of its log.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import time
from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from verl.errors import RESUME, EngineLost, RolloutError
from verl.processes import describe, group_members
from verl.rollout.base import FinishReason, Response
from verl.rollout.external_engine import ExternalRollout, Sample
from verl.rollout.weight_sync.server_watchdog import POLL_S, ServerWatchdog
from verl.rollout.weight_sync.stale_files import remove

START_TIMEOUT_S = 900.0
_HEALTH_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 256
_LOG_LINES = 20
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

Chunk = tuple[Sequence[int], Sequence[float], str | None]
"""New token ids, their log-probs, and the server's reason when the sample ended."""


class Client:
    """JSON over HTTP to `address`: the path of a unix socket, or host:port (with the server's key).

    Requests have no timeout: `watchdog` says when to wait no longer."""

    def __init__(self, address: str, name: str, key: str | None = None) -> None:
        self.address, self.name = address, name
        self.watchdog: ServerWatchdog | None = None
        uds = address if "/" in address else None
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=uds, limits=limits),
            base_url="http://localhost" if uds else f"http://{address}",
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=None,
        )

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer (text where it is not JSON); RolloutError for anything but success."""
        if self.watchdog is None:
            return self._call(method, path, body)
        try:
            return self.watchdog.call(path, self._call, method, path, body)
        except RolloutError as error:
            self.explain(error)
            raise

    def is_well(self) -> bool:
        try:
            self._call("GET", "/health", None, _HEALTH_TIMEOUT_S)
        except RolloutError:
            return False
        return True

    def explain(self, error: RolloutError) -> None:
        """EngineLost if the server has died or is dying, which explains every other error."""
        if self.watchdog is not None and not isinstance(error, EngineLost):
            self.watchdog.explain(error, self.is_well)

    def _call(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> Any:
        try:
            response = self._http.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise RolloutError(f"{self.name}'s server did not answer {path}: {error!r}") from error
        self._check_status(response, path)
        try:
            return response.json()
        except ValueError:
            return response.text

    def events(self, path: str, body: Any) -> Iterator[Any]:
        """The decoded server-sent events of a streaming answer; closing the iterator closes the connection."""
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.is_error:
                    response.read()
                self._check_status(response, path)
                for line in response.iter_lines():
                    if self.watchdog is not None:
                        self.watchdog.beat()
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        yield json.loads(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            raise RolloutError(f"{self.name}'s server broke off {path}: {error!r}") from error

    def _check_status(self, response: httpx.Response, path: str) -> None:
        if not response.is_success:
            raise RolloutError(
                f"{self.name}'s server answered {path} with {response.status_code}: {response.text[:2000]}"
            )

    def close(self) -> None:
        self._http.close()


class ServerProcess:
    """The child and its log file."""

    def __init__(self, command: Sequence[str], log_file: Path, engine: str, env: dict[str, str]) -> None:
        self.name, self.log_file = f"{engine}'s server", log_file
        with log_file.open("wb") as out:
            self._process = subprocess.Popen(
                list(command),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **env},
                start_new_session=True,
                preexec_fn=_terminate_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        if ended := self._ended():
            raise EngineLost(f"{ended}; {RESUME}.{self.log_tail()}")

    def _ended(self) -> str:
        code = self._process.poll()
        return "" if code is None else f"{self.name} ended with status {code}"

    def describe(self) -> str:
        return ", ".join(describe(process.pid) for process in group_members(self.pid)) or "no process is left"

    def log_tail(self) -> str:
        text = self.log_file.read_text(errors="replace") if self.log_file.exists() else ""
        return "\nEnd of its log:\n" + "\n".join(text.splitlines()[-_LOG_LINES:]) if text else ""

    def wait_until_ready(self, client: Client, timeout_s: float = START_TIMEOUT_S) -> None:
        """RolloutError if that does not happen: another start would fail too."""
        deadline = time.monotonic() + timeout_s
        while not client.is_well():
            if ended := self._ended():
                raise RolloutError(f"{ended} before it was ready.{self.log_tail()}")
            if time.monotonic() > deadline:
                raise RolloutError(f"{self.name} was not ready after {timeout_s:g} s.{self.log_tail()}")
            time.sleep(0.2)

    def stop(self, grace_s: float = 10.0) -> None:
        """Ask it to end, then kill whatever is left of its process group."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self.kill(grace_s)

    def kill(self, grace_s: float = 10.0) -> None:
        deadline = time.monotonic() + grace_s
        while self._signal(signal.SIGKILL) and time.monotonic() < deadline:
            self._process.poll()
            time.sleep(0.02)
        self._process.wait()

    def _signal(self, number: int) -> bool:
        """Whether any process of the group was left to receive it."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


def _terminate_with_parent() -> None:
    """The kernel sends SIGTERM to the child when the process that started it ends, however that happens."""
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerRollout(ExternalRollout):
    """An engine behind a server: one connection, in a thread, per running sample."""

    process: ServerProcess
    client: Client
    watchdog: ServerWatchdog

    def launch(
        self, command: Sequence[str], env: dict[str, str], client: Client, connections: int, watchdog_s: float
    ) -> None:
        """Start the server and wait until it is ready."""
        self.client = client
        self._threads = ThreadPoolExecutor(min(connections, _MAX_CONNECTIONS), "verl-sample")
        self._results: queue.SimpleQueue[tuple[Sample, FinishReason | Exception]] = queue.SimpleQueue()
        self.process = ServerProcess(command, self.folder / "server.txt", self.name, env)
        self.process.wait_until_ready(client)
        self.watchdog = client.watchdog = ServerWatchdog(self.process, watchdog_s)

    @abstractmethod
    def _stream(self, sample: Sample) -> Generator[Chunk, None, None]:
        """Ask the server for one sample and yield its tokens as they come."""

    def _start(self, samples: Sequence[Sample]) -> None:
        if len(self._outstanding) == len(samples):
            self.watchdog.beat()  # nothing was asked of the server before
        for sample in samples:
            self._threads.submit(self._run, sample)

    def _run(self, sample: Sample) -> None:
        try:
            self._results.put((sample, self._generate(sample)))
        except Exception as error:
            self._results.put((sample, error))

    def _generate(self, sample: Sample) -> FinishReason:
        if sample.aborted:
            return "abort"
        sample.started = True
        # Closing the connection is how the server learns that the rest is not wanted.
        with contextlib.closing(self._stream(sample)) as stream:
            for token_ids, log_probs, ended in stream:
                reason = sample.append(token_ids, log_probs, self.stopper)
                if reason is None and (ended is not None or sample.aborted):
                    reason = "length" if ended == "length" else "abort"
                if reason is not None:
                    return reason
        raise RolloutError(f"{self.name}'s server ended the answer to {sample.key} without a reason")

    def _advance(self, timeout_s: float | None) -> list[Response]:
        responses: list[Response] = []
        try:
            wait_s = POLL_S if timeout_s is None else min(POLL_S, timeout_s)
            results = [self._results.get(timeout=wait_s)]
            while not self._results.empty():
                results.append(self._results.get())
        except queue.Empty:
            self.watchdog.check(f"generate ({len(self._outstanding)} samples are not answered)")
            return []
        for sample, result in results:
            if self._outstanding.get(sample.key) is not sample:
                continue  # dropped after an error
            if isinstance(result, RolloutError):
                self.client.explain(result)
            if isinstance(result, Exception):
                raise result
            responses.append(self._finish(sample, result))
        return responses

    def close(self) -> None:
        if hasattr(self, "process"):
            self.process.stop()
            self._threads.shutdown(cancel_futures=True)
            self.client.close()
        if hasattr(self, "watchdog"):
            self.watchdog.close()
        remove(self.folder)
