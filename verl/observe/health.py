"""Health rules: what to watch for in a run, and one line on how to fix it.

Each rule is a pure function of what has been measured, and returns a line or None. A rule reports at most once in
`QUIET_STEPS` steps, also across a resume. A line has what was seen, what it means, and the key to change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from verl.observe.health_state import HealthSettings, History

if TYPE_CHECKING:
    from verl.data.proto import DataProto

QUIET_STEPS = 20
KL_OF_UPDATE_BOUND = 0.1

# The metrics rules look at; the others are not remembered.
WATCHED = frozenset(
    [
        "reward/mean",
        "reward/min",
        "reward/max",
        "reward/calls",
        "reward/failed",
        "actor/pg_loss",
        "actor/grad_norm",
        "actor/skipped_updates",
        "actor/kl",
        "actor/kl_loss",
        "actor/ppo_kl",
        "actor/entropy",
        "critic/vf_loss",
        "critic/grad_norm",
        "critic/skipped_updates",
        "train/loss",
        "response_length/clip_ratio",
        "training/rollout_probs_diff_mean",
    ]
)

Rule = Callable[[History], str | None]


def temperature_zero(h: History) -> str | None:
    s = h.settings
    if s.temperature == 0:
        return (
            "temperature is 0 in training: every response to a prompt is the same, so there is nothing to compare "
            "and nothing to explore. Set actor_rollout_ref.rollout.temperature=1.0"
        )
    if s.temperature > 1.5:
        return (
            f"temperature is {s.temperature:g} in training: above 1.5 responses tend to be noise. "
            "Set actor_rollout_ref.rollout.temperature=1.0"
        )
    return None


def reward_not_finite(h: History) -> str | None:
    if h.batch is not None and h.batch.scores_not_finite:
        return (
            f"{h.batch.scores_not_finite} of {h.batch.sequences} rewards are NaN or infinite: the reward function "
            "returned them. Make it return finite numbers (see reward.custom_reward_function.path)"
        )
    mean = h.latest("reward/mean")
    if mean is not None and not math.isfinite(mean):
        return (
            f"the mean reward is {mean}: the reward function returned NaN or infinity. "
            "Make it return finite numbers (see reward.custom_reward_function.path)"
        )
    return None


def reward_outliers(h: History) -> str | None:
    if h.batch is None or not h.batch.outliers:
        return None
    return (
        f"{h.batch.outliers} of {h.batch.sequences} rewards lie far outside the rest (largest "
        f"{h.batch.largest_outlier:g}, typical {h.batch.typical_score:g}): a few samples decide the update. "
        "Bound the value in the reward function, for example max(-1.0, min(1.0, reward))"
    )


def rewards_all_equal(h: History) -> str | None:
    low, high = h.latest("reward/min"), h.latest("reward/max")
    if low is None or high is None or low != high or (h.batch is not None and h.batch.sequences < 2):
        return None
    return (
        f"all rewards of this batch are {low:g}: there is no signal to learn from. If it lasts, the task is too hard "
        "or too easy, or the reward function cannot read the answers: try `verl reward test`, other prompts "
        "in data.train_files, or a warm start by `verl sft`"
    )


def groups_without_signal(h: History) -> str | None:
    if h.batch is None or h.batch.groups < 4 or h.batch.constant_groups == h.batch.groups:
        return None  # all of them constant: `rewards_all_equal`, or nothing a group estimator can use
    share = h.batch.constant_groups / h.batch.groups
    mean, best = h.latest("reward/mean"), h.latest("reward/max")
    solved = mean is not None and best is not None and best > 0 and mean >= 0.9 * best
    if share < 0.9 or solved:  # nearly everything right: there is little left to learn, and nothing wrong
        return None
    return (
        f"{share:.0%} of the prompts got the same reward for every response: they add nothing to the update. "
        f"Set algorithm.filter_groups.enable=True to replace them, or raise actor_rollout_ref.rollout.n from "
        f"{h.settings.n} to {max(2 * h.settings.n, 8)}"
    )


def reward_never_called(h: History) -> str | None:
    if h.latest("reward/calls") != 0:
        return None
    return (
        "the reward function was not called in this step: the reward manager took every score from elsewhere. "
        "Check reward.reward_manager.name, reward.custom_reward_function.path and .name, and data_source in the data"
    )


def rewards_failed(h: History) -> str | None:
    failed = h.latest("reward/failed")
    if not failed:
        return None
    return (
        f"{failed:g} responses got no score because the reward function failed or ran out of time; they are left "
        "out of the loss. Look at their text in rollouts/, mend the function, or raise reward.timeout_s"
    )


def not_finite(h: History) -> str | None:
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "train/loss"):
        value = h.latest(name)
        if value is not None and not math.isfinite(value):
            lr = h.settings.actor_lr
            return (
                f"{name} is {value}: that step was not applied and its batch was saved for inspection. "
                f"If it comes again, set actor_rollout_ref.actor.optim.lr={lr / 2:g} (now {lr:g}) "
                "and look for extreme rewards"
            )
    for name in ("actor/skipped_updates", "critic/skipped_updates"):
        if h.latest(name):
            return (
                f"{name} is {h.latest(name):g}: a gradient was not finite, so the update was not applied. If it comes "
                f"again, set actor_rollout_ref.actor.optim.lr={h.settings.actor_lr / 2:g} (now {h.settings.actor_lr:g})"
            )
    return None


def kl_too_large(h: History) -> str | None:
    s = h.settings
    for name in ("actor/kl", "actor/kl_loss"):
        value = h.latest(name)
        if value is not None and value > s.kl_bound:
            if s.use_kl_loss:
                fix = f"actor_rollout_ref.actor.kl_loss_coef={s.kl_loss_coef * 10:g} (now {s.kl_loss_coef:g})"
            elif s.use_kl_in_reward:
                fix = f"algorithm.kl_ctrl.kl_coef={s.kl_coef * 10:g} (now {s.kl_coef:g})"
            else:
                fix = (
                    "actor_rollout_ref.actor.use_kl_loss=True with actor_rollout_ref.actor.kl_loss_coef=0.01"
                )
            return (
                f"{name} is {value:.3g}, above {s.kl_bound:g}: the policy has left the reference far "
                f"behind. Set {fix}"
            )
    update = h.latest("actor/ppo_kl")
    if update is not None and abs(update) > KL_OF_UPDATE_BOUND:
        return (
            f"actor/ppo_kl is {update:.3g}, beyond {KL_OF_UPDATE_BOUND:g}: the policy moves too far within one step. "
            f"Set actor_rollout_ref.actor.optim.lr={s.actor_lr / 2:g} (now {s.actor_lr:g}) or fewer ppo_epochs"
        )
    return None


def probabilities_apart(h: History) -> str | None:
    value = h.latest("training/rollout_probs_diff_mean")
    if value is None or value <= h.settings.probs_diff_bound:
        return None
    return (
        f"training/rollout_probs_diff_mean is {value:.4f}, above {h.settings.probs_diff_bound:g} (normal below "
        "0.005): rollout and trainer disagree about the same tokens, which biases the gradient. Set "
        "algorithm.rollout_correction.rollout_is=token, or actor_rollout_ref.rollout.name=native, "
        "or the same dtype on both sides"
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
        "disagree. Set actor_rollout_ref.rollout.calculate_log_probs=True and watch "
        "training/rollout_probs_diff_mean; "
        f"or lower actor_rollout_ref.actor.optim.lr to {h.settings.actor_lr / 2:g}"
    )


def responses_empty(h: History) -> str | None:
    if h.batch is None or h.batch.empty_share <= 0.1:
        return None
    return (
        f"{h.batch.empty_share:.0%} of the responses are empty (the first token ends them): the chat template may not "
        "fit the model, or emptiness is rewarded. Look at rollouts/, check data.apply_chat_template_kwargs "
        "and what the reward function gives for an empty answer"
    )


def responses_repetitive(h: History) -> str | None:
    if h.batch is None or h.batch.repetitive_share <= 0.2:
        return None
    return (
        f"{h.batch.repetitive_share:.0%} of the responses repeat the same few tokens: the policy is degenerating. "
        f"Go back to an earlier checkpoint with actor_rollout_ref.actor.optim.lr={h.settings.actor_lr / 2:g}, and "
        "keep actor_rollout_ref.rollout.temperature between 0.7 and 1.2"
    )


def responses_cut(h: History) -> str | None:
    ratio = h.latest("response_length/clip_ratio")
    if ratio is None or ratio <= 0.5:
        return None
    longer = 2 * h.settings.max_response_length
    return (
        f"{ratio:.0%} of the responses were cut at data.max_response_length={h.settings.max_response_length}: their "
        f"answers are missing, so their rewards mislead. Set data.max_response_length={longer}"
    )


def entropy_collapsed(h: History) -> str | None:
    entropy, rewards = h.series("actor/entropy"), h.series("reward/mean")
    if len(entropy) < 5 or not rewards or not (entropy[-1] < 0.02 and entropy[-1] < 0.05 * entropy[0]):
        return None
    top = h.latest("reward/max")
    if top is not None and rewards[-1] >= 0.8 * top:
        return None  # certain because it is right
    coefficient = max(2 * h.settings.entropy_coeff, 0.001)
    return (
        f"actor/entropy fell from {entropy[0]:.3g} to {entropy[-1]:.3g} while the reward is {rewards[-1]:.3g}: the "
        "policy stopped exploring before it solved the task. Set actor_rollout_ref.actor.clip_ratio_high=0.28 or "
        f"actor_rollout_ref.actor.entropy_coeff={coefficient:g}"
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
    at_best = _mean_reward_around(h, best_step)
    now = _mean_reward_around(h, scores[-1][0])
    if at_best is None or now is None or now <= at_best + max(0.02, 0.05 * abs(at_best)):
        return None
    s = h.settings
    if s.use_kl_loss:
        fix = f"actor_rollout_ref.actor.kl_loss_coef={10 * s.kl_loss_coef:g} (now {s.kl_loss_coef:g})"
    else:
        fix = f"algorithm.use_kl_in_reward=True with algorithm.kl_ctrl.kl_coef={max(10 * s.kl_coef, 0.01):g}"
    return (
        f"reward rose from {at_best:.3g} to {now:.3g} since step {best_step} while validation fell from {best:.3g} to "
        f"{scores[-1][1]:.3g}: the policy exploits the reward rather than improving. Set {fix}, or make the reward "
        f"harder to game; the checkpoint nearest step {best_step} is the better one"
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
        f"validation was 0 in all of {len(scores)} validations, {seen}: the data may have another format. Check that "
        "data.val_files has the columns of data.train_files, that the reward function handles its data_source, and "
        f"actor_rollout_ref.rollout.val_kwargs.temperature=0 (now {h.settings.val_temperature:g})"
    )


def _mean_reward_around(h: History, step: int, width: int = 3) -> float | None:
    values = [
        float(m["reward/mean"])
        for s, m in h.steps
        if abs(s - step) <= width and m.get("reward/mean") is not None
    ]
    return sum(values) / len(values) if values else None


START_RULES: tuple[Rule, ...] = (temperature_zero,)
STEP_RULES: tuple[Rule, ...] = (
    reward_not_finite,
    reward_outliers,
    rewards_all_equal,
    groups_without_signal,
    reward_never_called,
    rewards_failed,
    not_finite,
    kl_too_large,
    probabilities_apart,
    gradient_norm_growing,
    responses_empty,
    responses_repetitive,
    responses_cut,
    entropy_collapsed,
    reward_up_validation_down,
    validation_always_zero,
)


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
            from verl.observe.batch_metrics import (
                batch_facts,  # imports torch, which `verl view` does not need
            )

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
