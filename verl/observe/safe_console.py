"""The rich console of every command: styles and live displays are ours, text from elsewhere has no say in either."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment

from verl.observe.terminal import SafeStream, harmless, protect_terminal, raw


class SafeConsole(Console):
    """Reads no markup in text and writes control characters in it out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else harmless(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)

    @property
    def file(self) -> IO[str]:
        """Where rich writes, its control codes included: past the stream that would write them out."""
        return raw(Console.file.fget(self))  # type: ignore[attr-defined]

    @file.setter
    def file(self, stream: IO[str]) -> None:
        self._file = stream


def start_live(display: Live) -> None:
    """Start a live display. It puts streams of its own in place of ours, which take escape sequences for styles."""
    protected = isinstance(sys.stdout, SafeStream)
    display.start()
    if protected:
        protect_terminal()
