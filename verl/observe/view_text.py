"""Text from models and files on a terminal, where it must not take control of it, and paper to write on.

What always holds: no control character of a sample reaches the terminal, and text is not read as markup.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from verl.observe.terminal import harmless

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

PIPE_WIDTH = 100


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters: the beginning, and the end, where answers stand."""
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail]} […{len(text) - limit} characters…] {text[len(text) - tail :]}"


def paper(width: int | None = None) -> Console:
    """Where the view is written: as wide as the terminal; plain text and a fixed width where output is piped."""
    from verl.observe.safe_console import SafeConsole

    class Paper(SafeConsole):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # whoever asked for the view decides what that means

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    console = Paper(width=width)
    if console.is_terminal:
        return console
    return Paper(width=width or PIPE_WIDTH, color_system=None)


def write(console: Console, what: RenderableType) -> None:
    """On a terminal text is wrapped to its width; in a pipe a line stays a line."""
    console.print(what, soft_wrap=not console.is_terminal)


def draws_dots(console: Console) -> bool:
    """Whether braille and blocks can be shown."""
    return "utf" in (console.encoding or "").lower()


def styled(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(harmless(text), style=style)
