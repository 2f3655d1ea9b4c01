"""Compares a few log-probs of the engine with the trainer's: this shows whether the weights that arrived are in use.

In float32 both sides agree to a few thousandths, and more ends the run. In narrower types no bound tells right from
wrong: the rounding of every layer moves log-probs of right weights by 0.1 and more. There the gap is compared with what
the run itself shows: the rounding noise of the trainer's log-probs of the same rows (against float32 arithmetic with
the same weights), and the gaps of this run so far. A gap that is a clear multiple of both is a warning; it ends the run
when it persists for several versions, or when the log-probs of the two sides are unrelated.

Two computations of the trainer in its own precision would not show the noise: the kernels for packed sequences compute
a row bit for bit equal whatever else is in the pack.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

import torch

from verl.errors import TrainingHalted
from verl.models.weight_source import SourceLogProbs
from verl.rollout.base import Request, SamplingParams

log = logging.getLogger(__name__)

PROMPT_TOKENS = 16
RESPONSE_TOKENS = 8
SAMPLES = 4
PROBE_ID = "verl-probe"
_STRIDE = 7919

FLOAT32_GAP = 2e-3
"""Largest mean difference of a log-prob that arithmetic in float32 explains."""
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "fp8": 2.0**-6}
"""Relative error of one rounding; of the sums that eight-bit products are, not of one product."""
ROUNDINGS = 4
"""Roundings of a log-prob that need no explanation, whatever was measured; dozens lie between two of them."""
CLEAR = 4
"""A gap this many times what is explained is an outlier."""
IN_A_ROW = 3
"""This many outliers in a row are no accident."""
BASELINE = 8
"""Versions at the beginning of a run from which its usual gap is taken."""
UNRELATED = 0.75
"""Part of the difference between log-probs of different tokens from which on the two sides have nothing in common..."""
UNRELATED_GAP = 0.5
"""...unless that is less than this: log-probs of an untrained model are all similar."""

Rows = Sequence[Sequence[float]]
Verdict = Literal["explained", "outlier", "wrong"]


@dataclass(frozen=True)
class Probe:
    """Mean differences of log-probs after one update of the weights."""

    gap: float
    """Between engine and trainer."""
    noise: float | None
    """Between the trainer and float32 arithmetic with its weights; None where that is not possible."""
    spread: float
    """Between the engine's log-prob of one token and the trainer's of another."""
    outlier: bool = False


def probe_request(vocab_size: int, max_length: int | None) -> Request:
    """A fixed prompt with ids from all over the vocabulary, and how many tokens to draw after it."""
    tokens = min(RESPONSE_TOKENS, (max_length or RESPONSE_TOKENS + 1) - 1)
    prompt = [(_STRIDE * (position + 1)) % vocab_size for position in range(PROMPT_TOKENS)]
    prompt = prompt[: max_length - tokens] if max_length else prompt
    return Request(PROBE_ID, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), n=SAMPLES)


def _flat(rows: Rows) -> torch.Tensor:
    return torch.tensor([list(row) for row in rows], dtype=torch.float64).flatten()


def measure(engine: Rows, trainer: SourceLogProbs) -> Probe:
    """Compare the log-probs of both sides, row by row."""
    ours, theirs = _flat(engine), _flat(trainer.log_probs)
    others = ~torch.eye(len(ours), dtype=torch.bool)
    return Probe(
        gap=float((ours - theirs).abs().mean()),
        noise=None if trainer.exact is None else float((theirs - _flat(trainer.exact)).abs().mean()),
        spread=float((ours[:, None] - theirs)[others].abs().mean()),
    )


def usual_gap(history: Sequence[Probe], new: Probe) -> float:
    """The gap between right weights that this run's own figures let expect: the larger of earlier gaps and noise."""
    usual = [probe for probe in history if not probe.outlier][:BASELINE]
    expected = median(probe.gap for probe in usual) if usual else 0.0
    recent = [*history[1 - BASELINE :], new]
    if usual and median(probe.spread for probe in usual) > 0:
        # A policy that has become surer since the beginning has larger logits, and larger roundings of them.
        grown = median(probe.spread for probe in recent) / median(probe.spread for probe in usual)
        expected *= max(1.0, grown)
    return max(expected, new.noise or 0.0)


def judge(history: Sequence[Probe], new: Probe, precision: str) -> Verdict:
    """Verdict on the newest probe of a run, given those before it."""
    if not new.gap < float("inf"):
        return "wrong"
    if precision not in ROUNDING:
        return "explained" if new.gap <= FLOAT32_GAP else "wrong"
    usual = usual_gap(history, new)
    if new.gap > max(CLEAR * usual, UNRELATED * new.spread, UNRELATED_GAP):
        return "wrong"
    # The first gap is what later ones are compared with.
    if not history or new.gap <= CLEAR * max(usual, ROUNDINGS * ROUNDING[precision] * new.spread):
        return "explained"
    before = history[-(IN_A_ROW - 1) :]
    persists = len(before) == IN_A_ROW - 1 and all(probe.outlier for probe in before)
    return "wrong" if persists else "outlier"


@dataclass
class ProbeCheck:
    """The probes of one engine in this run."""

    name: str
    precision: str
    advice: str = "use actor_rollout_ref.rollout.name=native if it happens again"
    history: list[Probe] = field(default_factory=list)

    def add(self, version: int, engine: Rows, trainer: SourceLogProbs) -> Probe:
        """The newest probe; TrainingHalted, with both sides, when the weights in use are not the trainer's."""
        new = measure(engine, trainer)
        verdict = judge(self.history, new, self.precision)
        if verdict == "wrong":
            raise TrainingHalted(self._wrong(version, new, engine, trainer))
        if verdict == "outlier":
            if not any(probe.outlier for probe in self.history):
                log.warning("%s", self._outlier_warning(version, new))
            new = replace(new, outlier=True)
        self.history.append(new)
        return new

    def metrics(self) -> dict[str, float]:
        if not self.history:
            return {}
        last = self.history[-1]
        noise = {} if last.noise is None else {"rollout/probe_noise": last.noise}
        return {"rollout/probe_gap": last.gap, **noise}

    def _context(self, new: Probe) -> str:
        if self.precision not in ROUNDING:
            return f"{FLOAT32_GAP:g} is what {self.precision} explains"
        earlier = ", ".join(f"{probe.gap:.3g}" for probe in self.history[-BASELINE:]) or "none"
        noise = "unknown" if new.noise is None else f"{new.noise:.2g}"
        return f"rounding noise {noise}, between different tokens {new.spread:.2g}, earlier gaps {earlier}"

    def _outlier_warning(self, version: int, new: Probe) -> str:
        return (
            f"{self.name}: log-probs of a fixed prompt under policy version {version} differ from the trainer's by "
            f"{new.gap:.3g} on average ({self._context(new)}). {IN_A_ROW} versions like this in a row end the run. "
            "Watch training/rollout_probs_diff_mean"
        )

    def _wrong(self, version: int, new: Probe, engine: Rows, trainer: SourceLogProbs) -> str:
        shown = "  ".join(f"{a:.4f}/{b:.4f}" for a, b in zip(engine[0], trainer.log_probs[0], strict=True))
        return (
            f"{self.name} does not compute with the trainer's weights of policy version {version}: log-probs of a "
            f"fixed prompt differ by {new.gap:.4g} on average, {self._context(new)} ({self.name}/trainer: {shown}). "
            f"Restart from the last checkpoint, and {self.advice}"
        )


def worst(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest of each figure."""
    names = {name for found in metrics for name in found}
    return {name: max(found[name] for found in metrics if name in found) for name in sorted(names)}
