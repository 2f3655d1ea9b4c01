"""Log lines on the terminal, sharing one rich console with the progress display so that they do not tear it."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Talkative at INFO, and nothing a user of ours can act on.
_QUIET = ("httpx", "urllib3", "transformers", "torch", "absl", "filelock", "fsspec", "asyncio")


@cache
def shared_console() -> Console:
    """The console every part of the program writes to. Piped output is not wrapped and carries no colour codes."""
    from verl.observe.safe_console import SafeConsole

    console = SafeConsole()
    return console if console.is_terminal else SafeConsole(width=100_000, soft_wrap=True)


def log_console() -> Console:
    """Where log lines go: between the lines of the display on a terminal, to stderr where output is piped, so that
    what a command prints (a config, a plan, a table) can be used as it is."""
    console = shared_console()
    if console.is_terminal:
        return console
    from verl.observe.safe_console import SafeConsole

    return SafeConsole(stderr=True, width=100_000, soft_wrap=True)


def setup_logging(level: int | str = logging.INFO) -> None:
    """Send log records to the shared console: warnings marked, information bare. Called once by each command."""
    handler = _ConsoleHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _ConsoleHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


class _ConsoleHandler(logging.Handler):
    _STYLES = {logging.WARNING: ("warning: ", "yellow"), logging.ERROR: ("error: ", "red")}

    def emit(self, record: logging.LogRecord) -> None:
        from rich.text import Text

        try:
            prefix, style = self._STYLES.get(min(record.levelno, logging.ERROR), ("", ""))
            log_console().print(Text(prefix + self.format(record), style=style))
        except Exception:
            self.handleError(record)
