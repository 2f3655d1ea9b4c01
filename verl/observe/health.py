"""Health rules: what to watch for in a run, and one line on how to fix it.

Each rule is a pure function of the config and what has been measured, and returns a line (what was seen, what it
means, which key to change) or None; it is silent where its metric is absent. A rule reports at most once in
`QUIET_STEPS` steps, also across a resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.data.proto import DataProto
    from verl.observe.batch_metrics import BatchFacts

QUIET_STEPS = 20
KL_OF_UPDATE_BOUND = 0.1
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# The metrics rules read; the others are not remembered.
WATCHED = {
    "reward/mean", "reward/min", "reward/max", "reward/calls", "reward/failed", "actor/pg_loss", "actor/grad_norm",
    "actor/skipped_updates", "actor/kl", "actor/kl_loss", "actor/ppo_kl", "actor/entropy", "critic/vf_loss",
    "critic/grad_norm", "critic/skipped_updates", "implicit_reward/loss", "implicit_reward/grad_norm",
    "implicit_reward/skipped_updates", "train/loss", "response_length/clip_ratio",
    "training/rollout_probs_diff_mean",
    "training/age/max",
}  # fmt: skip

NEVER_INFINITE = (
    "actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "implicit_reward/loss",
    "implicit_reward/grad_norm", "train/loss",
)  # fmt: skip


@dataclass
class History:
    """What a rule may read: the config, metrics by step, oldest first, and facts of the newest batch."""

    config: Any
    steps: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    batch: BatchFacts | None = None

    @property
    def actor(self) -> Any:
        return self.config.actor_rollout_ref.actor

    @property
    def rollout(self) -> Any:
        return self.config.actor_rollout_ref.rollout

    @property
    def lower_lr(self) -> str:
        """Half the learning rate, as a key to set."""
        lr = self.actor.optim.lr
        return f"{ACTOR}.optim.lr={lr / 2:g} (now {lr:g})"

    def latest(self, name: str) -> float | None:
        value = self.steps[-1][1].get(name) if self.steps else None
        return None if value is None else float(value)

    def series(self, name: str) -> list[float]:
        return [float(m[name]) for _, m in self.steps if m.get(name) is not None]

    def validations(self) -> list[tuple[int, float]]:
        """(step, validation score) of every validation so far; the mean over the core metrics."""
        found = [(step, validation_summary(metrics)) for step, metrics in self.steps]
        return [(step, value) for step, value in found if value is not None]

    def reward_around(self, step: int, width: int = 3) -> float | None:
        near = [m for s, m in self.steps if abs(s - step) <= width]
        values = [float(m["reward/mean"]) for m in near if m.get("reward/mean") is not None]
        return sum(values) / len(values) if values else None


Rule = Callable[[History], str | None]


def validation_summary(metrics: Mapping[str, Any]) -> float | None:
    """One number for the validation of a step: the mean over its core metrics, or None without validation."""
    values = [float(v) for name, v in metrics.items() if name.startswith("val-core/") and v is not None]
    return sum(values) / len(values) if values else None


# -- the rules ----------------------------------------------------------------------------------------------------


def temperature_extreme(h: History) -> str | None:
    value = h.rollout.temperature
    if value == 0:
        return f"temperature is 0 in training: all responses to a prompt are equal. Set {ROLLOUT}.temperature=1.0"
    if value > 1.5:
        return (
            f"temperature is {value:g}: above 1.5 responses tend to be noise. Set {ROLLOUT}.temperature=1.0"
        )
    return None


def reward_not_finite(h: History) -> str | None:
    fix = "Return finite numbers from the reward function (reward.custom_reward_function.path)"
    if h.batch is not None and h.batch.scores_not_finite:
        return f"{h.batch.scores_not_finite} of {h.batch.sequences} rewards are NaN or infinite. {fix}"
    mean = h.latest("reward/mean")
    return f"the mean reward is {mean}. {fix}" if mean is not None and not math.isfinite(mean) else None


def reward_outliers(h: History) -> str | None:
    if h.batch is None or not h.batch.outliers:
        return None
    return (
        f"{h.batch.outliers} of {h.batch.sequences} rewards are outliers (largest {h.batch.largest_outlier:g}, "
        f"typical {h.batch.typical_score:g}): a few samples decide the update. Clip the value in the reward "
        "function, for example max(-1.0, min(1.0, reward))"
    )


def rewards_all_equal(h: History) -> str | None:
    low, high = h.latest("reward/min"), h.latest("reward/max")
    if low is None or high is None or low != high or (h.batch is not None and h.batch.sequences < 2):
        return None
    return (
        f"all rewards of this batch are {low:g}: there is nothing to learn from. If it lasts, try `verl reward test`, "
        "other prompts (data.train_files), or `verl sft` first"
    )


def groups_without_signal(h: History) -> str | None:
    if h.batch is None or h.batch.groups < 4 or h.batch.constant_groups == h.batch.groups:
        return None  # all of them constant: `rewards_all_equal`, or nothing a group estimator can use
    share = h.batch.constant_groups / h.batch.groups
    mean, best = h.latest("reward/mean"), h.latest("reward/max")
    solved = mean is not None and best is not None and best > 0 and mean >= 0.9 * best
    if share < 0.9 or solved:
        return None
    n = h.rollout.n
    return (
        f"{share:.0%} of the prompts got equal rewards for all responses and add nothing to the update. Set "
        f"algorithm.filter_groups.enable=True, or {ROLLOUT}.n={max(2 * n, 8)} (now {n})"
    )


def reward_never_called(h: History) -> str | None:
    if h.latest("reward/calls") != 0:
        return None
    return (
        "the reward function was not called in this step. Check reward.reward_manager.name, "
        "reward.custom_reward_function.path and data_source in the data"
    )


def rewards_failed(h: History) -> str | None:
    failed = h.latest("reward/failed")
    if not failed:
        return None
    return (
        f"{failed:g} responses got no score (the reward function failed or timed out) and are left out of the loss. "
        "See rollouts/, fix the function, or raise reward.timeout_s"
    )


def not_finite(h: History) -> str | None:
    for name in NEVER_INFINITE:
        value = h.latest(name)
        if value is not None and not math.isfinite(value):
            return (
                f"{name} is {value}: the update was skipped and its batch saved. If it happens again, set {h.lower_lr} "
                "and look for extreme rewards"
            )
    for name in (f"{role}/skipped_updates" for role in ("actor", "critic", "implicit_reward")):
        if h.latest(name):
            return f"{name} is {h.latest(name):g}: a gradient was not finite. If it happens again, set {h.lower_lr}"
    return None


def kl_too_large(h: History) -> str | None:
    bound, control = h.config.trainer.health.kl_bound, h.config.algorithm.kl_ctrl
    for name in ("actor/kl", "actor/kl_loss"):
        value = h.latest(name)
        if value is not None and value > bound:
            if h.actor.use_kl_loss:
                fix = f"{ACTOR}.kl_loss_coef={h.actor.kl_loss_coef * 10:g} (now {h.actor.kl_loss_coef:g})"
            elif h.config.algorithm.use_kl_in_reward:
                fix = f"algorithm.kl_ctrl.kl_coef={control.kl_coef * 10:g} (now {control.kl_coef:g})"
            else:
                fix = f"{ACTOR}.use_kl_loss=True with {ACTOR}.kl_loss_coef=0.01"
            return f"{name} is {value:.3g}, above {bound:g}: the policy is far from the reference. Set {fix}"
    update = h.latest("actor/ppo_kl")
    if update is not None and abs(update) > KL_OF_UPDATE_BOUND:
        age = h.latest("training/age/max") or 0
        steps, more = "one step", ""
        if age:
            steps = f"the {age + 1:g} steps since the oldest tokens were drawn"
            more = " or a smaller trainer.async_training.staleness"
        return (
            f"actor/ppo_kl is {update:.3g}, beyond {KL_OF_UPDATE_BOUND:g}: the policy moves too far in {steps}. "
            f"Set {h.lower_lr} or fewer ppo_epochs{more}"
        )
    return None


def rollout_probs_differ(h: History) -> str | None:
    value, bound = h.latest("training/rollout_probs_diff_mean"), h.config.trainer.health.probs_diff_bound
    if value is None or value <= bound or h.latest("training/age/max"):
        return None  # older weights drew some of the tokens: they are not the same policy
    return (
        f"training/rollout_probs_diff_mean is {value:.4f}, above {bound:g} (normal below 0.005): rollout and trainer "
        "disagree about the same tokens, which biases the gradient. Set "
        f"algorithm.rollout_correction.rollout_is=token, {ROLLOUT}.name=native, or the same dtype on both sides"
    )


def gradient_norm_growing(h: History) -> str | None:
    norms = [v for v in h.series("actor/grad_norm") if math.isfinite(v)]
    if len(norms) < 20:
        return None
    thirds = [sum(part) / len(part) for part in (norms[-20:-14], norms[-14:-7], norms[-7:])]
    if not (thirds[2] > 3 * thirds[0] > 0 and thirds[0] < thirds[1] < thirds[2]):
        return None
    return (
        f"actor/grad_norm grew from {thirds[0]:.2g} to {thirds[2]:.2g} in 20 steps: often rollout and trainer "
        f"disagree. Set {ROLLOUT}.calculate_log_probs=True and watch training/rollout_probs_diff_mean, "
        f"or set {h.lower_lr}"
    )


def responses_empty(h: History) -> str | None:
    if h.batch is None or h.batch.empty_share <= 0.1:
        return None
    return (
        f"{h.batch.empty_share:.0%} of the responses are empty: the chat template may not fit the model, or empty "
        "answers are rewarded. See rollouts/, data.apply_chat_template_kwargs and the reward function"
    )


def responses_repetitive(h: History) -> str | None:
    if h.batch is None or h.batch.repetitive_share <= 0.2:
        return None
    return (
        f"{h.batch.repetitive_share:.0%} of the responses repeat the same few tokens: the policy is degenerating. "
        f"Resume from an earlier checkpoint with {h.lower_lr} and {ROLLOUT}.temperature between 0.7 and 1.2"
    )


def responses_cut(h: History) -> str | None:
    ratio, limit = h.latest("response_length/clip_ratio"), h.config.data.max_response_length
    if ratio is None or ratio <= 0.5:
        return None
    return (
        f"{ratio:.0%} of the responses were cut at data.max_response_length={limit}: their answers are missing, so "
        f"their rewards mislead. Set data.max_response_length={2 * limit}"
    )


def entropy_collapsed(h: History) -> str | None:
    entropy, rewards = h.series("actor/entropy"), h.series("reward/mean")
    if len(entropy) < 5 or not rewards or not (entropy[-1] < 0.02 and entropy[-1] < 0.05 * entropy[0]):
        return None
    top = h.latest("reward/max")
    if top is not None and rewards[-1] >= 0.8 * top:
        return None  # certain because it is right
    return (
        f"actor/entropy fell from {entropy[0]:.3g} to {entropy[-1]:.3g} while the reward is {rewards[-1]:.3g}: the "
        f"policy stopped exploring. Set {ACTOR}.clip_ratio_high=0.28 or "
        f"{ACTOR}.entropy_coeff={max(2 * h.actor.entropy_coeff, 0.001):g}"
    )


def reward_up_validation_down(h: History) -> str | None:
    scores = h.validations()
    if len(scores) < 3 or scores[-1][0] != h.steps[-1][0]:
        return None
    best_step, best = max(scores, key=lambda item: item[1])
    margin = max(0.02, 0.1 * abs(best))
    recent = [value for step, value in scores[-2:] if step > best_step]
    if len(recent) < 2 or any(value > best - margin for value in recent):
        return None
    at_best, now = h.reward_around(best_step), h.reward_around(scores[-1][0])
    if at_best is None or now is None or now <= at_best + max(0.02, 0.05 * abs(at_best)):
        return None
    if h.actor.use_kl_loss:
        fix = f"{ACTOR}.kl_loss_coef={10 * h.actor.kl_loss_coef:g} (now {h.actor.kl_loss_coef:g})"
    else:
        coefficient = max(10 * h.config.algorithm.kl_ctrl.kl_coef, 0.01)
        fix = f"algorithm.use_kl_in_reward=True with algorithm.kl_ctrl.kl_coef={coefficient:g}"
    return (
        f"reward rose from {at_best:.3g} to {now:.3g} since step {best_step} while validation fell from {best:.3g} to "
        f"{scores[-1][1]:.3g}: the policy exploits the reward. Set {fix}, or make the reward harder to exploit; the "
        f"checkpoint nearest step {best_step} is the better one"
    )


def validation_always_zero(h: History) -> str | None:
    scores = h.validations()
    if not scores or scores[-1][0] != h.steps[-1][0] or any(value != 0 for _, value in scores):
        return None
    learned = any(v > 0 for v in h.series("reward/mean"))
    if len(scores) < (2 if learned else 3):
        return None
    seen = "though training rewards are not" if learned else "and so are the training rewards"
    return (
        f"validation was 0 in all of {len(scores)} validations, {seen}. Check that data.val_files has the columns of "
        "data.train_files, that the reward function handles its data_source, and "
        f"{ROLLOUT}.val_kwargs.temperature=0 (now {h.rollout.val_kwargs.temperature:g})"
    )


START_RULES: tuple[Rule, ...] = (temperature_extreme,)
STEP_RULES: tuple[Rule, ...] = (
    reward_not_finite, reward_outliers, rewards_all_equal, groups_without_signal, reward_never_called, rewards_failed,
    not_finite, kl_too_large, rollout_probs_differ, gradient_norm_growing, responses_empty, responses_repetitive,
    responses_cut, entropy_collapsed, reward_up_validation_down, validation_always_zero,
)  # fmt: skip


class HealthMonitor:
    """Applies the rules after each step. `config` is the PPOConfig, or anything with its attributes."""

    def __init__(self, config: Any, *, quiet_steps: int = QUIET_STEPS, memory: int = 500) -> None:
        self.history = History(config)
        self._quiet_steps = quiet_steps
        self._memory = memory
        self._last_reported: dict[str, int] = {}

    def at_start(self) -> list[str]:
        """What the config alone shows."""
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
            from verl.observe.batch_metrics import (
                batch_facts,  # imports torch, which `verl view` does not need
            )

            self.history.batch = batch_facts(batch)
        lines: dict[str, str] = {}
        for rule in STEP_RULES:
            name = rule.__name__
            if step - self._last_reported.get(name, -self._quiet_steps) < self._quiet_steps:
                continue
            line = rule(self.history)
            if line is not None:
                self._last_reported[name] = step
                lines[name] = line
        return lines

    def state_dict(self) -> dict[str, Any]:
        """Plain data with which a resumed run judges as if never interrupted."""
        steps = [[step, {name: float(value) for name, value in m.items()}] for step, m in self.history.steps]
        return {"steps": steps, "last_spoke": dict(self._last_reported)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history.steps = [
            (int(step), {str(name): float(value) for name, value in metrics.items()})
            for step, metrics in state["steps"]
        ]
        self._last_reported = {str(name): int(step) for name, step in state["last_spoke"].items()}
