"""How far a long job is: a bar where someone is watching, a line now and then where output is piped."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from verl.observe.logs import shared_console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

logger = logging.getLogger(__name__)

LINE_S = 30.0
"""Between two lines of piped output."""


class Counter:
    """Counts up to `total`; the number shown beside it is whatever the job says of itself."""

    def __init__(self, title: str, total: int, done: int, bar: Progress | None) -> None:
        self.title, self.total, self.done = title, total, done
        self._bar = bar
        self._task: TaskID | None = None
        self._said = time.monotonic()
        if bar is not None:
            self._task = bar.add_task(title, total=total, completed=done, about="")

    def advance(self, count: int = 1, about: str = "") -> None:
        self.done += count
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done, about=about)
        elif time.monotonic() - self._said > LINE_S:
            self._said = time.monotonic()
            logger.info("%s %d/%d%s", self.title, self.done, self.total, f"  {about}" if about else "")


@contextmanager
def counting(title: str, total: int, done: int = 0) -> Iterator[Counter]:
    """A counter that is on display while the block lasts."""
    console = shared_console()
    if not console.is_terminal:
        yield Counter(title, total, done, None)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from verl.observe.safe_console import start_live

    title_column, about_column = (
        TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[about]}")
    )
    columns = (title_column, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), about_column)
    bar = Progress(*columns, console=console, transient=True)
    start_live(bar.live)
    try:
        yield Counter(title, total, done, bar)
    finally:
        bar.stop()
