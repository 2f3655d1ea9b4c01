"""`verl view --follow`: a run as it goes on, until it ends or the watcher has seen enough.

What always holds: it only reads; Ctrl-C ends it with everything on the terminal as it was; a run that ends, or
ended before, ends it too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl.observe.console import step_line
from verl.observe.view_files import Run, health_rows
from verl.observe.view_state import State, state_of, total_steps
from verl.observe.view_text import styled, write

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

EVERY_S = 1.0
SETTLE_LOOKS = 5
"""A run that restarts itself lets go of its folder for a moment: so many looks without a process are its end."""


def follow(
    run: Run,
    console: Console,
    draw: Callable[[Run], RenderableType],
    *,
    pause: Callable[[float], None] = time.sleep,
) -> State:
    """Show the run until it ends; its state then. On a terminal the whole view is drawn anew, elsewhere a line is
    written for each step."""
    try:
        if console.is_terminal:
            return _live(run, console, draw, pause)
        return _lines(run, console, pause)
    except KeyboardInterrupt:
        return state_of(run)


def _live(
    run: Run, console: Console, draw: Callable[[Run], RenderableType], pause: Callable[[float], None]
) -> State:
    from rich.live import Live

    from verl.observe.safe_console import start_live

    live = Live(draw(run), console=console, auto_refresh=False, screen=True, vertical_overflow="crop")
    try:
        start_live(live)  # not as a context: an interrupt while it starts must find the way out, too
        state = _until_over(run, lambda new: live.update(draw(run), refresh=True), pause)
    finally:
        live.stop()
    write(console, draw(run))
    return state


def _lines(run: Run, console: Console, pause: Callable[[float], None]) -> State:
    def show(new: list[dict[str, Any]]) -> None:
        said = list(health_rows(run)) if new else []
        for row in new:
            metrics = {name: value for name, value in row.items() if name != "step"}
            write(console, styled(step_line(row["step"], metrics, total_steps(run))))
            for line in (line for step, _, line in said if step == row["step"]):
                write(console, styled(line))

    show(run.log.rows[-5:])
    state = _until_over(run, show, pause)
    write(console, styled(state.text))
    return state


def _until_over(
    run: Run, show: Callable[[list[dict[str, Any]]], None], pause: Callable[[float], None]
) -> State:
    looks = 0
    while True:
        # The state first: what a run wrote before it let go of its folder is then read below.
        state = state_of(run)
        show(run.log.poll())
        looks = looks + 1 if state.over else 0
        if looks >= (1 if state.word == "finished" else SETTLE_LOOKS):
            return state_of(run)
        pause(EVERY_S)
