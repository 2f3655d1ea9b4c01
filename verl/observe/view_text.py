"""Text from models and files on a terminal, where it must not take control of it, and paper to write on.

What always holds: no control character of a sample reaches the terminal, and text is not read as markup.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

PIPE_WIDTH = 100
# C0 and C1 controls but newline and tab, and the marks that turn the direction of writing around.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """The same text with control characters written out."""
    text = text.replace("\r\n", "\n")
    return _CONTROL.sub(
        lambda match: f"\\x{ord(match[0]):02x}" if ord(match[0]) < 256 else f"\\u{ord(match[0]):04x}", text
    )


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters: the beginning, and the end, where answers stand."""
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail]} […{len(text) - limit} characters…] {text[len(text) - tail :]}"


def paper(width: int | None = None) -> Console:
    """Where the view is written: as wide as the terminal; plain text and a fixed width where output is piped."""
    from rich.console import Console

    class Paper(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # whoever asked for the view decides what that means

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    console = Paper(highlight=False, markup=False, emoji=False, width=width)
    if console.is_terminal:
        return console
    return Paper(highlight=False, markup=False, emoji=False, width=width or PIPE_WIDTH, color_system=None)


def write(console: Console, what: RenderableType) -> None:
    """On a terminal text is wrapped to its width; in a pipe a line stays a line."""
    console.print(what, soft_wrap=not console.is_terminal)


def draws_dots(console: Console) -> bool:
    """Whether braille and blocks can be shown."""
    return "utf" in (console.encoding or "").lower()


def styled(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(harmless(text), style=style)
