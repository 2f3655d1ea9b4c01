"""Judges a run after each step by the table of diagnoses.

A diagnosis reports at most once in `QUIET_STEPS` steps, also across a resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl.errors import CheckpointError
from verl.observe.diagnoses import Diagnosis, Finding, History
from verl.observe.diagnoses.steps import NEVER_INFINITE, SKIPPED, START_RULES, STEP_RULES

if TYPE_CHECKING:
    from verl.data.proto import DataProto

QUIET_STEPS = 20
REMEMBERED_STEPS = 500
# The metrics rules read; the others are not remembered.
WATCHED = {
    *NEVER_INFINITE, *SKIPPED, "reward/mean", "reward/min", "reward/max", "reward/calls", "reward/failed", "actor/kl",
    "actor/kl_loss", "actor/ppo_kl", "actor/entropy", "val/loss", "response_length/clip_ratio", "response_length/mean",
    "training/rollout_probs_diff_mean", "training/age/max", "training/age/mean", "timing_s/data", "timing_s/gen",
    "timing_s/step", "tools/calls/all", "tools/failed/all", "tools/timeout/all",
}  # fmt: skip


class HealthMonitor:
    """Applies the rules after each step. `config` is that of the run: reinforcement learning or given answers."""

    def __init__(self, config: Any) -> None:
        self.history = History(config)
        self._last_reported: dict[str, int] = {}

    def at_start(self, step: int = 0) -> list[Finding]:
        """What the config alone shows; `step` is that of the checkpoint, if the run resumed."""
        return self._judge(START_RULES, step)

    def check(self, step: int, metrics: Mapping[str, float], batch: DataProto | None = None) -> list[Finding]:
        """What to report after this step."""
        watched = {n: v for n, v in metrics.items() if n in WATCHED or n.startswith("val-core/")}
        self.history.steps.append((step, watched))
        del self.history.steps[:-REMEMBERED_STEPS]
        self.history.batch = None
        if batch is not None:
            from verl.observe.batch_metrics import batch_facts  # needs torch, which `verl view` does not load

            self.history.batch = batch_facts(batch)
        return self._judge(STEP_RULES, step)

    def _judge(self, rules: tuple[Diagnosis, ...], step: int) -> list[Finding]:
        found = []
        for rule in rules:
            quiet = step - self._last_reported.get(rule.name, -QUIET_STEPS) < QUIET_STEPS
            if not quiet and (finding := rule.judge(self.history)) is not None:
                self._last_reported[rule.name] = step
                found.append(finding)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Plain data with which a resumed run judges as if never interrupted."""
        steps = [[step, {name: float(value) for name, value in m.items()}] for step, m in self.history.steps]
        return {"steps": steps, "last_spoke": dict(self._last_reported)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Where `state` cannot be used, nothing changes."""
        try:
            steps: list[tuple[int, Mapping[str, float]]] = [
                (int(step), {str(name): float(value) for name, value in metrics.items()})
                for step, metrics in state["steps"]
            ]
            reported = {str(name): int(step) for name, step in state["last_spoke"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"its record of findings is damaged: {str(state)[:200]}") from error
        self.history.steps, self._last_reported = steps, reported
