"""Probes that misbehave, as packages and drivers do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

from verl.doctor.runner import Check
from verl.errors import ConfigError


def fine(word: str = "fine") -> Iterator[Check]:
    yield Check(word, "ok", f"{word} in process {os.getpid()}", data={"pid": os.getpid()})


def raises() -> Iterator[Check]:
    yield Check("before", "ok", "said before the error")
    raise RuntimeError("the library is of another version\nwith many more lines")


def refuses() -> Iterator[Check]:
    raise ConfigError("trainer.nnodes is 0; it must be at least 1")


def leaves() -> Iterator[Check]:
    sys.exit("this package prints help and leaves")


def hangs() -> Iterator[Check]:
    threading.Event().wait()
    yield Check("hangs", "ok", "unreachable")


def hangs_with_a_child(file: str) -> Iterator[Check]:
    child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    with open(file, "w") as target:
        target.write(str(child.pid))
    threading.Event().wait()
    yield Check("hangs", "ok", "unreachable")


def crashes() -> Iterator[Check]:
    print("last words")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGSEGV)
    yield Check("crashes", "ok", "unreachable")


def fatal() -> Iterator[Check]:
    yield Check("fatal", "fatal", "does not work")


def talks() -> Iterator[Check]:
    for _ in range(10_000):
        print("a progress bar, again and again")
    yield Check("talks", "ok", "and then an answer")


def keeps_a_thread() -> Iterator[Check]:
    threading.Thread(target=threading.Event().wait).start()
    yield Check("keeps a thread", "ok", "answered")
