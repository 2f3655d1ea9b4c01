"""Probes that misbehave, as packages and drivers do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

from verl.doctor.finding import Finding
from verl.errors import ConfigError


def fine(word: str = "fine") -> Iterator[Finding]:
    yield Finding(word, "ok", f"{word} in process {os.getpid()}", data={"pid": os.getpid()})


def raises() -> Iterator[Finding]:
    yield Finding("before", "ok", "said before the error")
    raise RuntimeError("the library is of another version\nwith many more lines")


def refuses() -> Iterator[Finding]:
    raise ConfigError("trainer.nnodes is 0; it must be at least 1")


def leaves() -> Iterator[Finding]:
    sys.exit("this package prints help and leaves")


def hangs() -> Iterator[Finding]:
    threading.Event().wait()
    yield Finding("hangs", "ok", "unreachable")


def hangs_with_a_child(file: str) -> Iterator[Finding]:
    child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    with open(file, "w") as target:
        target.write(str(child.pid))
    threading.Event().wait()
    yield Finding("hangs", "ok", "unreachable")


def crashes() -> Iterator[Finding]:
    print("last words")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGSEGV)
    yield Finding("crashes", "ok", "unreachable")


def fatal() -> Iterator[Finding]:
    yield Finding("fatal", "fatal", "does not work")


def talks() -> Iterator[Finding]:
    for _ in range(10_000):
        print("a progress bar, again and again")
    yield Finding("talks", "ok", "and then an answer")


def keeps_a_thread() -> Iterator[Finding]:
    threading.Thread(target=threading.Event().wait).start()
    yield Finding("keeps a thread", "ok", "answered")
