"""A generation server as a child process, reached over HTTP from this machine only.

It ends with the engine that started it, also when this process is killed. When it dies, or makes no progress for
`trainer.watchdog_s`, the error holds the errors of its log and its end, and the run folder a copy of all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import re
import resource
import signal
import subprocess
import threading
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch

from verl.config.keys import mask_text
from verl.errors import RESUME, ConfigError, EngineLost, RolloutError
from verl.processes import describe, die_with_parent, group_members
from verl.rollout.base import FinishReason, Response
from verl.rollout.external_engine import ExternalRollout, Sample
from verl.rollout.source import ModelInfo
from verl.watchdog import POLL_S, EngineWatchdog

if TYPE_CHECKING:
    from verl.config.schema import RolloutConfig

START_TIMEOUT_S = 900.0
_HEALTH_TIMEOUT_S = 5.0
_INTERRUPT_S = 0.05
_OTHER_FILES = 1024
TOKENS_PER_EVENT = 32
"""How many tokens of a sample a server sends at once, after its first."""
_LOG_LINES = 20
_LOG_ERRORS = 8
_LOG_PREFIX = re.compile(r"(\([^()]*pid=\d+\) )?([A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] )?")
"""Before a line of vLLM: its process, the level, the time and the line of code."""
_LOG_ERROR = re.compile(
    r"[\w.]*(Error|Exception)\b.*|.*(Fatal Python error|out of memory|terminate called).*"
)
LOGS = "engine_logs"
"""Folder of a run with the logs of servers that failed."""

Chunk = tuple[Sequence[int], Sequence[float], str | None]
"""New token ids, their log-probs, and the server's reason when the sample ended."""


def server_devices(config: RolloutConfig, info: ModelInfo) -> dict[str, str]:
    """The environment of a server with its own GPUs (`rollout.n_gpus_per_node`): those after the trainer's."""
    count = config.n_gpus_per_node
    if info.device != "cuda" or count == 0:
        return {}
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    visible = named or [str(number) for number in range(torch.cuda.device_count())]
    if len(visible) < count + 1:
        raise ConfigError(
            f"actor_rollout_ref.rollout.n_gpus_per_node is {count}, in addition to the trainer's one; torch sees "
            f"{len(visible)} GPUs. Lower it together with actor_rollout_ref.rollout.tensor_model_parallel_size"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[1 : count + 1])}


class Client:
    """JSON over HTTP to `address`: the path of a unix socket, or host:port (with the server's key).

    Requests have no timeout: `watchdog` says when to wait no longer."""

    def __init__(self, address: str, name: str, watchdog: EngineWatchdog, key: str | None = None) -> None:
        self.address, self.name, self.watchdog = address, name, watchdog
        uds = address if "/" in address else None
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        url = "http://localhost" if uds else f"http://{address}"
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        transport = httpx.HTTPTransport(uds=uds, limits=limits)
        self._http = httpx.Client(transport=transport, base_url=url, headers=headers, timeout=None)
        streams = httpx.AsyncHTTPTransport(uds=uds, limits=limits)
        self._streams = httpx.AsyncClient(transport=streams, base_url=url, headers=headers, timeout=None)
        """For the methods that are coroutines, which belong to one event loop."""

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer (text where it is not JSON); RolloutError for anything but success."""
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
        if not isinstance(error, EngineLost):
            self.watchdog.explain(error, self.is_well)

    def _call(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> Any:
        try:
            response = self._http.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise self._silent(path, error) from error
        self._check_status(response, path)
        try:
            return response.json()
        except ValueError:
            return response.text

    async def post(self, path: str, body: Any = None) -> None:
        """A request beside streaming answers, whose answer does not matter."""
        try:
            response = await self._streams.post(path, json=body)
        except httpx.HTTPError as error:
            raise self._silent(path, error) from error
        self._check_status(response, path)

    async def events(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """The decoded server-sent events of a streaming answer; closing the iterator closes the connection."""
        try:
            async with self._streams.stream("POST", path, json=body) as response:
                if response.is_error:
                    await response.aread()
                self._check_status(response, path)
                async for line in response.aiter_lines():
                    self.watchdog.beat()
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        yield json.loads(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            raise RolloutError(f"{self.name}'s server broke off {path}: {error!r}") from error

    def _silent(self, path: str, error: httpx.HTTPError) -> RolloutError:
        return RolloutError(f"{self.name}'s server did not answer {path}: {error!r}")

    def _check_status(self, response: httpx.Response, path: str) -> None:
        if not response.is_success:
            raise RolloutError(
                f"{self.name}'s server answered {path} with {response.status_code}: {response.text[:2000]}"
            )

    async def close_streams(self) -> None:
        await self._streams.aclose()

    def close(self) -> None:
        self._http.close()


def log_errors(text: str) -> list[str]:
    """The last lines of tracebacks and other errors in a log, each once. The first is the cause more often than the
    last, which may only say that another process failed; what is logged as a warning did no harm."""
    found: dict[str, None] = {}
    for line in text.splitlines():
        prefix = _LOG_PREFIX.match(line)
        assert prefix is not None
        message = line[prefix.end() :]
        if _LOG_ERROR.fullmatch(message) and not (prefix[2] or "").startswith("WARNING"):
            found[message[:500]] = None
    errors = list(found)
    return errors if len(errors) <= _LOG_ERRORS else [*errors[: _LOG_ERRORS - 1], errors[-1]]


class ServerProcess:
    """The child and its log file, which is copied to `kept_log` when the server fails."""

    def __init__(
        self,
        command: Sequence[str],
        log_file: Path,
        engine: str,
        env: dict[str, str],
        kept_log: Path | None = None,
    ) -> None:
        self.name, self.log_file, self.kept_log = f"{engine}'s server", log_file, kept_log
        with log_file.open("wb") as out:
            self._process = subprocess.Popen(
                list(command),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **env},
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
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
        text = mask_text(self.log_file.read_text(errors="replace")) if self.log_file.exists() else ""
        if not text:
            return ""
        parts = {"Errors in its log": log_errors(text), "End of its log": text.splitlines()[-_LOG_LINES:]}
        shown = "".join(f"\n{title}:\n" + "\n".join(lines) for title, lines in parts.items() if lines)
        return shown + self._keep_log(text)

    def _keep_log(self, text: str) -> str:
        if self.kept_log is None:
            return ""
        try:
            self.kept_log.parent.mkdir(parents=True, exist_ok=True)
            self.kept_log.write_text(text)
        except OSError as error:
            return f"\nIts log could not be kept in {self.kept_log}: {error}"
        return f"\nThe whole log: {self.kept_log}"

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


def allow_connections(count: int) -> None:
    """Raise this process's limit of open files, which the server inherits, where `count` samples need more."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    if limit != resource.RLIM_INFINITY and limit < needed:
        needed = needed if most == resource.RLIM_INFINITY else min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


class ServerRollout(ExternalRollout):
    """An engine behind a server: one connection per running sample, all of them in the event loop of one thread."""

    process: ServerProcess
    client: Client
    watchdog: EngineWatchdog

    def start_server(
        self, command: Sequence[str], env: dict[str, str], address: str, key: str | None = None
    ) -> None:
        """Start the server and wait until it is ready."""
        allow_connections(self.config.most_sequences)
        env = {**env, **server_devices(self.config, self.info)}
        # Scratch folders end with a random name, so that servers that failed one after another are told apart.
        name = f"{self.name}_server_{self.folder.name.rpartition('-')[2]}.txt"
        kept_log = self.run_folder / LOGS / name if self.run_folder is not None else None
        self.process = ServerProcess(command, self.folder / "server.txt", self.name, env, kept_log)
        self.watchdog = EngineWatchdog(self.process, self.watchdog_s)
        self.client = Client(address, self.name, self.watchdog, key)
        self._results: queue.SimpleQueue[tuple[Sample, FinishReason | BaseException]] = queue.SimpleQueue()
        self._running: dict[Sample, asyncio.Task[FinishReason | None]] = {}
        self._places = asyncio.Semaphore(self.config.most_sequences)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="verl-samples", daemon=True)
        self._thread.start()
        self.process.wait_until_ready(self.client)

    @abstractmethod
    def stream(self, sample: Sample) -> AsyncGenerator[Chunk, None]:
        """Ask the server for one sample and yield its tokens in pieces, as they come."""

    @abstractmethod
    async def end_all(self) -> None:
        """Let the server end all samples it has now; their answers then come with the rest of their tokens."""

    async def end(self, sample: Sample) -> None:
        """The same with one, where the server can; otherwise it ends with the next piece of its answer."""

    def _start(self, samples: Sequence[Sample]) -> None:
        if len(self._outstanding) == len(samples):
            self.watchdog.beat()  # nothing was asked of the server before
        self._loop.call_soon_threadsafe(self._begin, list(samples))

    def _begin(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            task = self._running[sample] = self._loop.create_task(self._generate(sample))
            task.add_done_callback(partial(self._ended, sample))

    async def _generate(self, sample: Sample) -> FinishReason | None:
        """Why it ended; None: it was interrupted."""
        async with self._places:
            if sample.aborted:
                return "abort"
            sample.started = True
            # Closing the connection is how the server learns that the rest is not wanted.
            async with contextlib.aclosing(self.stream(sample)) as stream:
                async for token_ids, log_probs, ended in stream:
                    reason = sample.append(token_ids, log_probs, self.stopper)
                    if reason is not None or ended == "length":
                        return reason or "length"
                    if sample.aborted or (ended is not None and not self._updating):
                        return "abort"
                    if ended is not None:
                        return None
        raise RolloutError(f"{self.name}'s server ended the answer to {sample.name} without a reason")

    def _ended(self, sample: Sample, task: asyncio.Task[FinishReason | None]) -> None:
        del self._running[sample]
        result: FinishReason | BaseException | None
        if task.cancelled():
            result = "abort" if sample.aborted else None
        elif (result := task.exception()) is None:
            result = task.result()
        elif self._updating:
            result = None  # any error but that of being interrupted comes again
        if result is not None:
            sample.ended = True
            self._results.put((sample, result))

    def _interrupt(self) -> None:
        ended = asyncio.run_coroutine_threadsafe(self._end_running(), self._loop)
        try:
            while not wait([ended], POLL_S).done:
                self.watchdog.check("interrupting samples for new weights")
            ended.result()
        except RolloutError as error:
            self.client.explain(error)
            raise
        finally:
            ended.cancel()

    async def _end_running(self) -> None:
        self._stop([sample for sample in self._running if not sample.started])
        while running := list(self._running.values()):
            await self.end_all()  # again for those that were just connecting
            await asyncio.wait(running, timeout=_INTERRUPT_S)

    def _stop(self, samples: Sequence[Sample]) -> None:
        """In the loop: end them here, with the tokens that have come."""
        for sample in samples:
            if sample in self._running:
                self._running[sample].cancel()

    def _cancel(self, samples: Sequence[Sample]) -> None:
        self._loop.call_soon_threadsafe(self._stop, samples)

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        super().abort(request_ids)
        if self._outstanding:
            asyncio.run_coroutine_threadsafe(self._end_aborted(), self._loop)

    async def _end_aborted(self) -> None:
        aborted = [sample for sample in self._running if sample.aborted]
        self._stop([sample for sample in aborted if not sample.started])
        await asyncio.gather(*(self._end_one(sample) for sample in aborted if sample.started))

    async def _end_one(self, sample: Sample) -> None:
        try:
            await self.end(sample)
        except RolloutError as error:
            self._results.put((sample, error))

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
            if self._outstanding.get(sample.name) is not sample:
                continue  # dropped after an error
            if isinstance(result, RolloutError):
                self.client.explain(result)
            if isinstance(result, BaseException):
                raise result
            responses.append(self._finish(sample, result))
        return responses

    async def _close_streams(self) -> None:
        self._stop(list(self._running))
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
            await asyncio.sleep(0)  # what they leave is closed by tasks of its own
        await self.client.close_streams()

    def close(self) -> None:
        if hasattr(self, "_thread") and not self._loop.is_closed():
            self.process.stop()
            asyncio.run_coroutine_threadsafe(self._close_streams(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self.client.close()
            self.watchdog.close()
        super().close()
