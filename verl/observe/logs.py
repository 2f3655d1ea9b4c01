"""Log lines on the terminal, through the console of the live display so that they do not break it."""

from __future__ import annotations

import logging

# Talkative at INFO, and nothing a user of ours can act on.
_QUIET = ("httpx", "urllib3", "transformers", "torch", "absl", "filelock", "fsspec", "asyncio")


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

        from verl.observe.console import log_console

        try:
            prefix, style = self._STYLES.get(min(record.levelno, logging.ERROR), ("", ""))
            log_console().print(Text(prefix + self.format(record), style=style))
        except Exception:
            self.handleError(record)
