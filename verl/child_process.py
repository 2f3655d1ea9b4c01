"""A Python process under a supervisor: its parent talks to it over a socket and logs what it prints."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence

from verl import processes

HEADER = struct.Struct(">I")
"""The length of a message to the process, before the message."""
_OUTPUT_TAIL = 2000
_SHOWN_LINES = 50
_MAIN = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from {module} import main; main(*map(int, sys.argv[1].split()))"
)


class PythonChild:
    """Calls `main` of a module with the numbers of its socket and of the `inherited` descriptors.

    The kernel ends it with the thread that created it; `end` before that, in an event loop. The socket is separate from
    stdout, so that what it prints is never taken for a message."""

    def __init__(self, module: str, log: logging.Logger, inherited: Sequence[int] = ()) -> None:
        self._log = log
        self._tail = self._partial = b""
        self._shown = 0
        self.socket, theirs = socket.socketpair()
        with theirs:
            descriptors = [theirs.fileno(), *inherited]
            numbers = " ".join(map(str, descriptors))
            # -u: what it printed is known even if it ends at once.
            command = [sys.executable, "-u", "-c", _MAIN.format(module=module), numbers, json.dumps(sys.path)]
            self.process = subprocess.Popen(
                processes.supervised_command(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=descriptors,
            )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)

    async def wait(self, timeout_s: float) -> None:
        """Until the process has ended, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.002)

    async def end(self) -> None:
        """Kill it with everything it started. Safe to call again after it was cancelled."""
        self.process.terminate()
        await self.wait(5.0)
        if (
            self.process.returncode is None
        ):  # the supervisor was stopped, or something below it hangs in the kernel
            processes.kill_tree(self.process.pid)
            self.process.wait()
        if self.output.closed:
            return
        while self.read_output():
            pass
        asyncio.get_running_loop().remove_reader(self.output)
        self.output.close()
        self.socket.close()

    def read_output(self) -> bool:
        """Log what was printed; whether there was anything."""
        data = self.output.read(1 << 16)
        if data is None:
            return False
        self._tail = (self._tail + data)[-_OUTPUT_TAIL:]
        if not data:
            asyncio.get_running_loop().remove_reader(self.output)
        if self._shown > _SHOWN_LINES and not self._log.isEnabledFor(logging.DEBUG):
            return bool(data)  # an endless flood should cost little
        *lines, self._partial = (self._partial + data).split(b"\n")
        if not data or len(self._partial) > _OUTPUT_TAIL:
            lines, self._partial = [*lines, self._partial], b""
        for line in filter(None, lines):
            self._shown += 1
            level = logging.INFO if self._shown <= _SHOWN_LINES else logging.DEBUG
            self._log.log(level, "%s", line[:500].decode(errors="replace"))
            if self._shown == _SHOWN_LINES:
                self._log.info("(further output of this process is logged at level DEBUG)")
        return bool(data)

    def last_output(self) -> str:
        lines = [line for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        return f"; last output: {lines[-1].strip()[:200]}" if lines else ""
