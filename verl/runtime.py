"""Process set-up shared by every command: seeds, third-party logging, exit codes and signals."""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from verl.errors import CommandAnswered, VerlError

logger = logging.getLogger(__name__)

# Talkative at INFO, and nothing a user of ours can act on.
_QUIET = ("httpx", "urllib3", "transformers", "torch", "absl", "filelock", "fsspec", "asyncio")


def seed_everything(seed: int) -> None:
    """Every global generator, for whatever a model or a user's function draws from them."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def setup_logging(level: int | str = logging.INFO) -> None:
    """Send log records to the shared console: warnings marked, information bare. Called once by each command."""
    handler = _ConsoleHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _ConsoleHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    logging.getLogger("huggingface_hub").propagate = False  # it has its own handler
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


class _ConsoleHandler(logging.Handler):
    _STYLES = {logging.WARNING: ("warning: ", "yellow"), logging.ERROR: ("error: ", "red")}

    def emit(self, record: logging.LogRecord) -> None:
        from rich.text import Text

        from verl.observe.console import log_console

        try:
            prefix, style = self._STYLES.get(min(record.levelno, logging.ERROR), ("", ""))
            log_console().print(Text(prefix + self.format(record), style=style))
        except Exception:
            self.handleError(record)


class quiet_transformers:
    """No progress bars and load reports of transformers from this call on; as a context, until its end. What is wrong
    with a model folder is in our own errors."""

    def __init__(self) -> None:
        from transformers.utils import logging

        self._bars, self._level = logging.is_progress_bar_enabled(), logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity(max(self._level, logging.ERROR))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self._level)
        if self._bars:
            logging.enable_progress_bar()


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Environment variables while the context lasts; the old values are restored."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Let the thread that launches kernels have the interpreter's lock back within 0.5 ms, in place of Python's 5 ms,
    from threads that write samples or serve metrics: a decode step of a small model takes less than 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, 0.0005))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


STOPPED = 75
"""Exit code of a run that a signal ended before its last step, with a checkpoint: "temporary failure" in sysexits.h."""
SAME_REQUEST_S = 1.0
"""Signals that soon after another are the same request: `timeout` sends one to the command and one to its group."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP came: what is open is closed on the way out, as after Ctrl-C."""


@contextmanager
def _handled(
    numbers: Iterable[signal.Signals], handle: Callable[[int, Any], None]
) -> Iterator[dict[int, Any]]:
    """Signals call `handle` in the main thread, once for one request; yields the handlers before. Elsewhere nothing
    changes, nor for a SIGHUP that is ignored (`nohup`)."""
    before: dict[int, Any] = {}
    last = -math.inf

    def handle_request(number: int, frame: Any) -> None:
        nonlocal last
        if time.monotonic() - last >= SAME_REQUEST_S:
            last = time.monotonic()
            handle(number, frame)

    try:
        for number in numbers:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            try:
                before[number] = signal.signal(number, handle_request)
            except ValueError:  # only the main thread may set handlers
                break
        yield before
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def closed_on_signal() -> Iterator[list[int]]:
    """SIGTERM and SIGHUP raise `Terminated` in the main thread. Yields a list of those that came: Ray turns what is
    raised in its calls into a plain KeyboardInterrupt."""
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        raise Terminated

    with _handled((signal.SIGTERM, signal.SIGHUP), handle):
        yield received


class Stoppable(Protocol):
    """A loop that can end early."""

    def request_stop(self) -> None: ...


class StopRequest:
    """Whether a signal asked a run to stop. It outlives the run's loop: a restart builds another."""

    def __init__(self) -> None:
        self.asked = False
        self.loop: Stoppable | None = None

    @contextmanager
    def stops(self, loop: Stoppable) -> Iterator[None]:
        """A signal meanwhile ends `loop` after its step."""
        self.loop = loop
        try:
            yield
        finally:
            self.loop = None

    def take(self, number: int) -> bool:
        """Note a signal; False where the run is to end at once."""
        if self.asked or self.loop is None:
            return False
        self.asked = True
        logger.warning(
            "%s: stopping after this step, with a checkpoint; send it again to stop at once",
            signal.Signals(number).name,
        )
        self.loop.request_stop()
        return True


_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it for the command of `ray job submit` and of a RayJob, and for nothing else."""
_RAY_STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
_SHORT_STOP_S = 60


def _warn_of_short_stop() -> None:
    """In a Ray job that `ray job stop` would kill before most steps have ended. The command inherits the variable from
    the process that will kill it, where 3 is the default."""
    stated = os.environ.get(_RAY_STOP_WAIT, "3")
    if _RAY_JOB in os.environ and not (stated.isdecimal() and int(stated) >= _SHORT_STOP_S):
        logger.warning(
            "`ray job stop` kills this run %s s after it asks it to stop, without a checkpoint where a step and its "
            'checkpoint take longer: submit with --runtime-env-json \'{"env_vars": {"%s": "1800"}}\'',
            stated,
            _RAY_STOP_WAIT,
        )


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """The first SIGTERM, Ctrl-C or SIGHUP stops after the current step, with a checkpoint; the second at once, and so
    does the first where no loop runs."""
    _warn_of_short_stop()
    request = StopRequest()

    def handle(number: int, frame: Any) -> None:
        if request.take(number):
            return
        if callable(before.get(number)):
            before[number](number, frame)
        raise Terminated

    with _handled((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), handle) as before:
        yield request


def run_command(body: Callable[[], int | None], *, trains: bool = False) -> int:
    """Run a command's body and turn what it raises into one message and an exit code. `trains`: it writes a run folder,
    whose keys can be named.

    0: done; 2: something the user can correct (the message says how); 3: training stopped itself; 75: a signal ended
    the run after a checkpoint, the same command resumes; 129, 130, 143: SIGHUP, Ctrl-C or SIGTERM ended it at once;
    141: the reader of the output left. Anything else is a defect of ours and keeps its traceback."""
    from verl.observe.terminal import protect_terminal, while_read

    protect_terminal()
    code = while_read(lambda: _exit_code(body, trains))
    services = sys.modules.get("verl.observe.tracker_services")  # there where a run uses one
    if services is not None:
        services.leave_given_up(code)
    _ends_at_once(code)
    return code


def _ends_at_once(code: int) -> None:
    """Let Ctrl-C end a process whose command is done and which waits for threads and what is registered for its exit:
    with one line, and the command's code."""

    def end(number: int, frame: Any) -> None:
        if threading.main_thread().is_alive():
            signal.default_int_handler(number, frame)
        with suppress(OSError, ValueError):
            sys.stderr.write("interrupted at the end\n")
            sys.stderr.flush()
        os._exit(code)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(ValueError):  # only the main thread may set handlers
            signal.signal(signal.SIGINT, end)


def _exit_code(body: Callable[[], int | None], trains: bool) -> int:
    setup_logging()
    received: list[int] = []
    try:
        with closed_on_signal() as received, exits_as_errors():
            return body() or 0
    except VerlError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        advice = "the disk is full; free some space, or write to another disk"
        if trains:
            from verl.observe.diagnoses.crashes import likely_fix

            advice = likely_fix(error)
        sys.stderr.write(f"error: {error}. {advice}\n")
        return VerlError.exit_code
    except KeyboardInterrupt:
        with suppress(OSError):  # the terminal may be closed
            sys.stderr.write("terminated\n" if received else "interrupted\n")
        return 128 + (received[-1] if received else signal.SIGINT)


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """`sys.exit` in code that we call (a reward, a plug-in, a tracker, a model's own code) is an error: what was not
    finished must not end like what was."""
    try:
        yield
    except CommandAnswered:
        raise
    except SystemExit as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = f" in {trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno}" if trace else ""
        raise VerlError(
            f"sys.exit({error.code!r}) was called{where}, before the command was done. Code that is given to a run "
            "must return or raise an exception"
        ) from error
