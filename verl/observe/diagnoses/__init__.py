"""What a diagnosis is, what its rule may read, and the findings that console, `verl view`, report and `metrics.jsonl`
show.

A rule is a pure function of the config and what has been measured. It returns what was seen and what to try, or None,
and is silent where its metric is absent: one list of rules serves reinforcement learning and training on given answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from verl.config.keys import get
from verl.config.methods import needed_columns

if TYPE_CHECKING:
    from verl.observe.batch_metrics import BatchFacts

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

Seen = tuple[str, str]
"""What was seen, and what to try: keys with values."""


@dataclass(frozen=True)
class Finding:
    """What a diagnosis saw in a run, what that means and which keys to change."""

    rule: str
    """The name of the diagnosis, e.g. entropy_collapsed."""
    seen: str
    meaning: str = ""
    try_: str = ""
    """Keys with values."""

    @property
    def line(self) -> str:
        """One line of text."""
        meaning = f": {self.meaning}" if self.meaning else ""
        return f"{self.seen}{meaning}" + (f". Try {self.try_}" if self.try_ else "")

    def to_row(self) -> dict[str, str]:
        """As `metrics.jsonl` holds it."""
        return {"rule": self.rule, "seen": self.seen, "meaning": self.meaning, "try": self.try_}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Finding:
        """Missing fields are empty."""
        return cls(*(str(row.get(name) or "") for name in ("rule", "seen", "meaning", "try")))


def read_findings(rows: Any) -> list[Finding]:
    """Those of the value of a "findings" field, whatever another program wrote there."""
    known = [row for row in (rows if isinstance(rows, list) else ()) if isinstance(row, Mapping)]
    return [Finding.from_row(row) for row in known if row.get("seen")]


@dataclass(frozen=True)
class Diagnosis:
    """A rule with its name and what it means when it applies; `docs/troubleshooting.md` has an entry for each."""

    name: str
    when: Literal["start", "step", "crash"]
    """What its rule judges: the config, a step, an exception."""
    meaning: str
    """Follows a colon in a line of text."""
    rule: Callable[..., Seen | None]

    def judge(self, *facts: Any) -> Finding | None:
        seen = self.rule(*facts)
        return None if seen is None else Finding(self.name, seen[0], self.meaning, seen[1])


def diagnosis(
    when: Literal["start", "step", "crash"], meaning: str
) -> Callable[[Callable[..., Seen | None]], Diagnosis]:
    """Make a `Diagnosis` of the decorated rule, under the function's name."""
    return lambda rule: Diagnosis(rule.__name__, when, meaning, rule)


@dataclass
class History:
    """What a rule may read: the config, metrics by step, oldest first, and facts of the newest batch."""

    config: Any
    steps: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    batch: BatchFacts | None = None

    @property
    def offline(self) -> bool:
        """Whether it trains on given answers (fine-tuning, preferences, a reward model)."""
        return not hasattr(self.config, "actor_rollout_ref")

    @property
    def actor(self) -> Any:
        return self.config.actor_rollout_ref.actor

    @property
    def rollout(self) -> Any:
        return self.config.actor_rollout_ref.rollout

    def new_lr(self, factor: float) -> str:
        """A learning rate `factor` times as large, as a key to set."""
        key, section = ("optim", self.config) if self.offline else (f"{ACTOR}.optim", self.actor)
        return f"{key}.lr={section.optim.lr * factor:g} (now {section.optim.lr:g})"

    @property
    def lower_lr(self) -> str:
        return self.new_lr(0.5)

    @property
    def more_kl(self) -> str:
        """Ten times the weight of the KL to the reference, as keys to set."""
        if self.actor.use_kl_loss:
            now = self.actor.kl_loss_coef
            return f"{ACTOR}.kl_loss_coef={max(10 * now, 0.01):g} (now {now:g})"
        if self.config.algorithm.use_kl_in_reward:
            now = self.config.algorithm.kl_ctrl.kl_coef
            return f"algorithm.kl_ctrl.kl_coef={max(10 * now, 0.01):g} (now {now:g})"
        return f"{ACTOR}.use_kl_loss=True with {ACTOR}.kl_loss_coef=0.01"

    @property
    def more_entropy(self) -> str:
        return f"{ACTOR}.entropy_coeff={max(2 * self.actor.entropy_coeff, 0.001):g}"

    def choices(self, *texts: str) -> str:
        """Those that change something, joined by "or": no key=value that the config has already."""
        return " or ".join(text for text in texts if not self._has(*text.partition(" ")[0].split("=")))

    def _has(self, key: str, value: str = "") -> bool:
        return value != "" and str(get(self.config, key)) in (value, f"{value}.0")

    def latest(self, name: str) -> float | None:
        value = self.steps[-1][1].get(name) if self.steps else None
        return None if value is None else float(value)

    def series(self, name: str) -> list[float]:
        return [float(m[name]) for _, m in self.steps if m.get(name) is not None]

    def ends(self, name: str, width: int = 5, least: int = 20) -> tuple[float, float] | None:
        """The means of the first and of the last `width` values; None with fewer than `least`."""
        values = self.series(name)
        if len(values) < least:
            return None
        return sum(values[:width]) / width, sum(values[-width:]) / width

    @property
    def solved(self) -> bool:
        """Whether rewards are near the best there is: equal or short responses are right then."""
        mean, best = self.latest("reward/mean"), self.latest("reward/max")
        return mean is not None and best is not None and best > 0 and mean >= 0.8 * best

    @property
    def taught(self) -> bool:
        """Whether a teacher's distribution is learned, which no reward decides."""
        return "teacher_log_probs" in needed_columns(self.config)

    def validations(self) -> list[tuple[int, float]]:
        """(step, validation score) of every validation so far; the mean over the core metrics."""
        return [(step, value) for step, m in self.steps if (value := validation_summary(m)) is not None]

    def mean_around(self, name: str, step: int, width: int = 3) -> float | None:
        near = [m for s, m in self.steps if abs(s - step) <= width]
        values = [float(m[name]) for m in near if m.get(name) is not None]
        return sum(values) / len(values) if values else None


def validation_summary(metrics: Mapping[str, Any]) -> float | None:
    """One number for the validation of a step: the mean over its core metrics, or None without validation."""
    values = [float(v) for name, v in metrics.items() if name.startswith("val-core/") and v is not None]
    return sum(values) / len(values) if values else None
