"""Fine-tuning on the processes that `torchrun` started: rank 0 runs the loop and asks, the others answer.

What always holds: only rank 0 reads data, logs and writes the run folder; its own part of the work runs in a thread,
so that it always hears of a rank that failed or hangs, and of signals; the others end when it says so, or when it is
gone.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from verl.config.load import from_dict, to_dict
from verl.config.schema import SFTConfig
from verl.errors import ConfigError
from verl.workers.hang_report import RESUME, who_waits_for_whom
from verl.workers.local import choose_device
from verl.workers.outcome import Failure, Outcome, WorkersLost
from verl.workers.rank import RankSetup
from verl.workers.sft.channel import CONNECT_S, Channel, Freshness, Job, Signs, pause_s
from verl.workers.sft.group import SpreadSFT
from verl.workers.sft.rank import SFTRankWorker

if TYPE_CHECKING:
    from verl.workers.watchdog import Sign

logger = logging.getLogger(__name__)

OWN_THREAD = "verl-rank-0"
GRACE_S = 10.0
"""After a rank says that another is gone: how long to wait for the news of that other one."""
AFTERTHOUGHT_S = 1.0
"""After an exception: whether another rank's explains it."""
STALE_S = 10.0
"""A process whose signs stopped for so long does not answer at all."""
LOOK_S = 0.5
"""How often the others look whether rank 0 is there."""
LEAVE_S = 2.0
"""After rank 0 has ended, for the others to end by themselves."""
ORPHAN_S = 5.0
"""Told to end, or after an error, rank 0 is gone when it gives no sign for so long; it may still want to save."""
LOST_S = 300.0
"""Otherwise: signs come from beside the work, so whoever gives none for so long is gone."""
CLOSE_S = 10.0


class TorchrunWorker(SFTRankWorker):
    """A rank whose device and meeting point are the launcher's choice."""

    def __init__(self, job: Job, tokenizer: Any = None) -> None:
        super().__init__(job.rank, job.world_size)
        self._job = job
        self._own_tokenizer = tokenizer
        self._store = job.store

    def do_who(self, address: str = "", log: str = "") -> dict[str, Any]:
        return super().do_who(address or _address_towards(self._job.address), log)

    def do_start(self, config: dict[str, Any], training_steps: int, run_folder: str) -> None:
        cfg = from_dict(SFTConfig, config, checked=False)
        if cfg.trainer.device == "cuda":
            self._take_gpu()
        self.do_build(
            RankSetup(
                cfg=cfg,  # type: ignore[arg-type]
                tokenizer=self._own_tokenizer,
                training_steps=training_steps,
                run_folder=Path(run_folder),
                store=(self._job.address, self._job.port),
                one_host=self._job.one_host,
            )
        )

    def _take_gpu(self) -> None:
        """For this thread, which serves every later call as well."""
        if self._job.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"torchrun started {self._job.local_world_size} processes on this machine, which has "
                f"{torch.cuda.device_count()} GPUs; give it --nproc_per_node={torch.cuda.device_count()}, or set "
                "trainer.device=cpu"
            )
        torch.cuda.set_device(self._job.local_rank)

    def do_close(self) -> None:
        super().do_close()
        if dist.is_initialized():
            dist.destroy_process_group()


def torchrun_sft(
    cfg: SFTConfig, job: Job, tokenizer: Any, *, training_steps: int, run_folder: Path
) -> SpreadSFT:
    """On rank 0: let every rank join and load its part of the model."""
    calls = TorchrunCalls(job, TorchrunWorker(job, tokenizer), cfg.trainer.watchdog_s)
    calls.handshake()
    config = to_dict(cfg)
    config["trainer"]["device"] = choose_device(cfg.trainer.device).type
    calls.all("start", config, training_steps, str(run_folder.absolute()))
    return SpreadSFT(calls, lambda: calls.shutdown(CLOSE_S))


class TorchrunCalls:
    """Calls to all ranks, this process's own among them; errors as `RankCalls` raises them."""

    def __init__(self, job: Job, worker: TorchrunWorker, watchdog_s: float) -> None:
        self.job, self.watchdog_s = job, watchdog_s
        self.names = [f"rank {rank}" for rank in range(job.world_size)]
        self.broken = False
        self._worker = worker
        self._channel = Channel(job)
        self._signs = Signs(job, worker)
        self._fresh = Freshness()
        self._tasks: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=OWN_THREAD, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return self.job.world_size

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            call, args = task
            self._done.put(self._worker.serve(call, *args))

    def handshake(self) -> None:
        """Learn who the ranks are, so that a later message can name them. Processes may take long to come up."""
        watchdog_s, self.watchdog_s = self.watchdog_s, max(self.watchdog_s, CONNECT_S)
        found = self.all("who")
        self.watchdog_s = watchdog_s
        for rank, who in enumerate(found):
            self.names[rank] = f"rank {rank} on {who['host']} (process {who['pid']})"

    # -- calls --------------------------------------------------------------------------------------------------

    def all(self, call: str, *args: Any) -> list[Any]:
        """The same call to every rank; their values by rank."""
        return self.each(call, [args] * len(self))

    def each(self, call: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One call to every rank, with arguments of its own."""
        try:
            self._channel.send(call, args)
            self._tasks.put((call, args[0]))
            return self._collect(call)
        except dist.DistError as error:
            self.broken = True
            raise WorkersLost(
                f"the store at {self.job.address}:{self.job.port} that the ranks meet at is gone, and torchrun with "
                f"it: {str(error).splitlines()[0][:200]}. {RESUME[0].upper()}{RESUME[1:]}."
            ) from error

    def _collect(self, call: str) -> list[Any]:
        values: dict[int, Any] = {}
        awaited = set(range(len(self)))
        asked = time.monotonic()
        while awaited:
            answers = self._answers(awaited, asked)
            for rank, outcome in answers.items():
                awaited.discard(rank)
                values[rank] = self._value(call, rank, outcome, awaited)
            if not answers and time.monotonic() - asked > self.watchdog_s / 2:
                self._look_for_signs(call, sorted(awaited), asked)
        return [values[rank] for rank in sorted(values)]

    def _answers(self, awaited: set[int], asked: float) -> dict[int, Outcome]:
        """What has come in; waits a moment where nothing has."""
        found: dict[int, Outcome] = {}
        for rank in awaited - {0}:
            outcome = self._channel.answer_of(rank)
            if outcome is not None:
                found[rank] = outcome
        pause = 0.0 if found else pause_s(time.monotonic() - asked)
        if 0 not in awaited:
            time.sleep(pause)
            return found
        with suppress(queue.Empty):
            found[0] = self._done.get(block=pause > 0, timeout=pause or None)
        return found

    def _value(self, call: str, rank: int, outcome: Outcome, awaited: set[int]) -> Any:
        # What rank 0 logged was said in this process when it was logged.
        for line in outcome.lines if rank > 0 else []:
            logging.getLogger(line.logger).log(line.level, "%s: %s", self.names[rank], line.text)
        if outcome.failure is not None:
            self._fail(rank, outcome.failure, awaited)
        return outcome.value

    # -- failing ------------------------------------------------------------------------------------------------

    def _fail(self, rank: int, failure: Failure, awaited: set[int]) -> NoReturn:
        """Hear what the others have to say for a moment, find the cause among it, raise it."""
        self.broken = True
        problems = {rank: failure}
        deadline = time.monotonic() + (GRACE_S if failure.caused_by_another else AFTERTHOUGHT_S)
        while awaited and time.monotonic() < deadline:
            for other, outcome in self._answers(awaited, deadline - GRACE_S).items():
                awaited.discard(other)
                if outcome.failure is not None:
                    problems[other] = outcome.failure
            if not all(problem.caused_by_another for problem in problems.values()):
                deadline = min(deadline, time.monotonic() + AFTERTHOUGHT_S)
        cause = min(problems, key=lambda r: (problems[r].caused_by_another, r))
        error = problems[cause].as_error()
        raise WorkersLost(str(error)) if problems[cause].caused_by_another else error

    def _look_for_signs(self, call: str, awaited: list[int], asked: float) -> None:
        """Raise when no awaited rank has moved for `watchdog_s`."""
        signs, quiet = self._all_signs()
        if min([quiet[rank] for rank in awaited] + [time.monotonic() - asked]) > self.watchdog_s:
            self.broken = True
            raise WorkersLost(who_waits_for_whom(call, self.watchdog_s, self.names, awaited, signs))

    def _all_signs(self) -> tuple[dict[int, Sign], dict[int, float]]:
        """Of the ranks that give any, and for each rank how long it has not moved."""
        own = self._worker.sign()
        signs, quiet = {0: own}, {0: own.still_s}
        for rank in range(1, len(self)):
            found = self._channel.sign_of(rank)
            age = self._fresh.age_s(rank, found[0] if found else 0)
            quiet[rank] = age + (found[1].still_s if found else 0.0)
            if found and age < STALE_S:
                signs[rank] = found[1]
        return signs, quiet

    # -- the end ------------------------------------------------------------------------------------------------

    def shutdown(self, seconds: float) -> None:
        """Let the ranks close what they opened, for as long as that may take; whatever they answer is unheard."""
        self._signs.stop()
        if self.broken:
            return
        with suppress(dist.DistError):
            self._channel.send("close", [()] * len(self))
            self._tasks.put(("close", ()))
            awaited, asked = set(range(len(self))), time.monotonic()
            while awaited and time.monotonic() - asked < seconds:
                awaited -= self._answers(awaited, asked).keys()
        self._tasks.put(None)
        self._thread.join(seconds)


def follow(job: Job) -> int:
    """The whole life of a rank above 0; its exit code."""
    worker, channel = TorchrunWorker(job), Channel(job)
    Signs(job, worker)
    alone = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Rank 0 got it too: it decides, after the step at hand and a checkpoint.
        signal.signal(number, lambda *_: alone.set())
    threading.Thread(target=_leave_with_rank_0, args=(job, alone), name="verl-leave", daemon=True).start()
    code = 0
    try:
        while (message := channel.next_call()) is not None:
            call, args = message
            outcome = worker.serve(call, *args)
            if outcome.failure:
                code = 1
                alone.set()
            channel.answer(outcome)
            if call == "close":
                break
    except dist.DistError:
        return 1  # the store is gone, and with it rank 0 or the launcher
    return code


def _leave_with_rank_0(job: Job, alone: threading.Event) -> None:
    """End this process, whatever it waits for, when rank 0 is through or gone. `alone`: there is reason to look."""
    channel, first = Channel(job), Freshness()
    while True:
        time.sleep(LOOK_S)
        try:
            if channel.ended():
                time.sleep(LEAVE_S)
                os._exit(1)
            sign = channel.sign_of(0)
        except dist.DistError:
            os._exit(1)
        age = first.age_s(0, sign[0] if sign else 0)
        if (alone.is_set() and age > ORPHAN_S) or (sign and age > LOST_S):
            os._exit(1)


def _address_towards(host: str) -> str:
    """This machine's address as the machine that all meet at sees it; loopback where that is this one alone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
