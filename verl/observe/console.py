"""One readable line per step; a live display where someone is watching.

What always holds: the same numbers appear in both modes; text that is piped carries no control codes and one
line per step; messages written through the shared console while the display is up do not tear it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl.observe.logs import shared_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

# What a line shows, in order: metric name (first that is present), label, format.
_COLUMNS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("reward/mean",), "reward", "{:.3f}"),
    (("train/loss",), "loss", "{:.4f}"),
    (("val/loss",), "val loss", "{:.4f}"),
    (("response_length/mean",), "length", "{:.0f}"),
    (("actor/pg_loss",), "loss", "{:+.4f}"),
    (("actor/kl_loss", "actor/kl"), "kl", "{:.4f}"),
    (("actor/entropy",), "entropy", "{:.3f}"),
    (("actor/pg_clipfrac",), "clip", "{:.3f}"),
    (("critic/vf_loss",), "value loss", "{:.3f}"),
    (("actor/grad_norm", "train/grad_norm"), "grad", "{:.2f}"),
    (("perf/throughput",), "tok/s", "{:,.0f}"),
    (("timing_s/step", "perf/time_per_step"), "time", "{:.1f}s"),
)
_SPARKS = "▁▂▃▄▅▆▇█"


def step_line(step: int, metrics: Mapping[str, Any], total_steps: int | None = None) -> str:
    """`step 12/200  reward 0.431  length 85 ...`: the few numbers that tell whether a run is well."""
    head = f"step {step:>{len(str(total_steps))}}/{total_steps}" if total_steps else f"step {step}"
    parts = [head]
    for names, label, form in _COLUMNS:
        value = next((metrics[name] for name in names if metrics.get(name) is not None), None)
        if value is not None:
            parts.append(f"{label} {_format(form, float(value))}")
    validation = validation_summary(metrics)
    if validation is not None:
        parts.append(f"validation {validation:.3f}")
    return "  ".join(parts)


def validation_summary(metrics: Mapping[str, Any]) -> float | None:
    """One number for the validation of a step: the mean over its core metrics, or None without validation."""
    values = [float(v) for name, v in metrics.items() if name.startswith("val-core/") and v is not None]
    return sum(values) / len(values) if values else None


def sparkline(values: list[float], width: int = 40) -> str:
    """The course of a metric in one line of text; the newest `width` values, scaled to their own range."""
    shown = [v for v in values if math.isfinite(v)][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((v - low) * scale)] for v in shown)


class StepConsole:
    """Shows steps as they finish. `live=True` asks for the live display, which needs a terminal."""

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        live: bool = False,
        title: str = "training",
        console: Console | None = None,
    ) -> None:
        self.console = console or shared_console()
        self.total_steps = total_steps
        self.title = title
        self._rewards: list[float] = []
        self._last = ""
        self._step = 0
        self._live: Live | None = None
        if live and self.console.is_terminal:
            from rich.live import Live

            from verl.observe.safe_console import start_live

            self._live = Live(get_renderable=self._panel, console=self.console, refresh_per_second=8)
            start_live(self._live)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._step = step
        line = step_line(step, metrics, self.total_steps)
        curve = metrics.get("reward/mean", metrics.get("train/loss"))
        if curve is not None:
            self._rewards.append(float(curve))
        if self._live is None:
            from rich.text import Text

            self.console.print(Text(line))
        else:
            self._last = line
            self._live.refresh()

    def note(self, text: str) -> None:
        """A message between steps, above the live display if there is one."""
        from rich.text import Text

        self.console.print(Text(text))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _panel(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        rows: list[Any] = [Text(self._last or "starting ...", overflow="fold")]
        if len(self._rewards) > 1:
            rows.append(Text(sparkline(self._rewards, 60), style="cyan"))
        if self.total_steps:
            rows.append(ProgressBar(total=self.total_steps, completed=self._step))
        return Panel(Group(*rows), title=Text(self.title), title_align="left")


def _format(form: str, value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    small = form.endswith(("f}",)) and value != 0 and abs(value) < 0.5 * 10 ** -_decimals(form)
    return f"{value:.1e}" if small else form.format(value)


def _decimals(form: str) -> int:
    digits = form.split(".")[-1].rstrip("f}s")
    return int(digits) if digits.isdigit() else 0
