"""No control character of data, checkpoints, models or exceptions reaches the terminal, and no password of an address.

Every command replaces `sys.stdout` and `sys.stderr` at its start (`protect_terminal`); `SafeConsole` writes rich's own
control codes past them.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

from verl.config.keys import mask_text

# C0 and C1 controls but newline and tab, marks that turn the direction of writing around, and halves of surrogate
# pairs, which no terminal's encoding has.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_CURSOR_UP = re.compile("(\x1b\\[A)+")


def escape_control(text: str) -> str:
    """The same text with control characters written out, and without the passwords of addresses."""
    text = mask_text(text.replace("\r\n", "\n"))
    return _CONTROL.sub(
        lambda match: f"\\x{ord(match[0]):02x}" if ord(match[0]) < 256 else f"\\u{ord(match[0]):04x}", text
    )


class SafeStream:
    """A text stream that writes control characters out.

    Progress bars of libraries (tqdm) still work: a line that began with a carriage return may be written over by
    another, and nothing else can be."""

    def __init__(self, stream: Any) -> None:
        self.raw = stream
        self._rewritable = True

    def write(self, text: str) -> int:
        bar = self._rewritable and text.startswith("\r")
        shown = "" if _CURSOR_UP.fullmatch(text) else escape_control(text)
        if bar:
            shown = "\r" + escape_control(text[1:])
        if shown:
            self._rewritable = bar or shown.endswith("\n")
            self.raw.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw(stream: Any) -> Any:
    """The stream below, for a writer that puts its own control codes around text it has escaped."""
    while isinstance(stream, SafeStream):
        stream = stream.raw
    return stream


def protect_terminal() -> None:
    """Put a `SafeStream` around standard output and error, where there is none yet."""
    os.environ.setdefault("PYTHON_COLORS", "0")  # Python 3.13 colours tracebacks, which would be written out
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, SafeStream):
            setattr(sys, name, SafeStream(stream))


def while_read(command: Callable[[], int]) -> int:
    """The exit code of a command; 141, as after SIGPIPE, where the reader of its output left first (`| head`)."""
    try:
        try:
            return command()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        left = [descriptor for descriptor in (1, 2) if _reader_left(descriptor)]
        if not left:  # a pipe to some other process, whose end is an error
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in left:  # what is still buffered is written when Python ends
            os.dup2(nowhere, descriptor)
        return 128 + signal.SIGPIPE


def _reader_left(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
