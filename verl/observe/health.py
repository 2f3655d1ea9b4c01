"""What the troubleshooting pages tell a user to notice, noticed by the program.

What always holds: rules read and never change anything; the same rule speaks at most once in `quiet_steps` steps;
what was remembered survives a resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl.observe.health_rules import START_RULES, STEP_RULES, WATCHED
from verl.observe.health_state import HealthSettings, History

if TYPE_CHECKING:
    from verl.data.proto import DataProto

__all__ = ["QUIET_STEPS", "STEP_RULES", "HealthMonitor", "HealthSettings", "History"]

QUIET_STEPS = 20
"""A rule that spoke is quiet for so many steps."""


class HealthMonitor:
    """Applies the rules after each step and remembers when each last spoke."""

    def __init__(
        self, settings: HealthSettings, *, quiet_steps: int = QUIET_STEPS, memory: int = 500
    ) -> None:
        self.history = History(settings)
        self._quiet_steps = quiet_steps
        self._memory = memory
        self._last_spoke: dict[str, int] = {}

    def at_start(self) -> list[str]:
        """What can be told from the settings alone."""
        return [line for rule in START_RULES if (line := rule(self.history)) is not None]

    def check(
        self, step: int, metrics: Mapping[str, float], batch: DataProto | None = None
    ) -> dict[str, str]:
        """The lines to show after this step, by the names of their rules."""
        watched = {n: v for n, v in metrics.items() if n in WATCHED or n.startswith("val-core/")}
        self.history.steps.append((step, watched))
        del self.history.steps[: -self._memory]
        self.history.batch = None
        if batch is not None:
            from verl.observe.batch_health import batch_facts

            self.history.batch = batch_facts(batch)
        lines: dict[str, str] = {}
        for rule in STEP_RULES:
            name = rule.__name__
            if step - self._last_spoke.get(name, -self._quiet_steps) < self._quiet_steps:
                continue
            line = rule(self.history)
            if line is not None:
                self._last_spoke[name] = step
                lines[name] = line
        return lines

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to judge as if never interrupted; plain data."""
        steps = [[step, {name: float(value) for name, value in m.items()}] for step, m in self.history.steps]
        return {"steps": steps, "last_spoke": dict(self._last_spoke)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history.steps = [
            (int(step), {str(name): float(value) for name, value in metrics.items()})
            for step, metrics in state["steps"]
        ]
        self._last_spoke = {str(name): int(step) for name, step in state["last_spoke"].items()}
