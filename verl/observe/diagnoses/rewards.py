"""Rewards and validation scores."""

from __future__ import annotations

import math

from verl.observe.diagnoses.base import ROLLOUT, History, Seen, diagnosis


@diagnosis("step", "no advantage can be computed from them")
def reward_not_finite(h: History) -> Seen | None:
    fix = "a reward function that returns finite numbers (reward.custom_reward_function.path)"
    if h.batch is not None and h.batch.scores_not_finite:
        return f"{h.batch.scores_not_finite} of {h.batch.sequences} rewards are NaN or infinite", fix
    mean = h.latest("reward/mean")
    return (f"the mean reward is {mean}", fix) if mean is not None and not math.isfinite(mean) else None


@diagnosis("step", "a few samples decide the update")
def reward_outliers(h: History) -> Seen | None:
    if h.batch is None or not h.batch.outliers:
        return None
    return (
        f"{h.batch.outliers} of {h.batch.sequences} rewards are outliers (largest {h.batch.largest_outlier:g}, "
        f"typical {h.batch.typical_score:g})",
        "to clip the value in the reward function, for example max(-1.0, min(1.0, reward))",
    )


@diagnosis("step", "there is nothing to learn from")
def rewards_all_equal(h: History) -> Seen | None:
    low, high = h.latest("reward/min"), h.latest("reward/max")
    if low is None or high is None or low != high or (h.batch is not None and h.batch.sequences < 2):
        return None
    return (
        f"all rewards of this batch are {low:g}",
        "if it lasts, `verl reward test`, other prompts (data.train_files), or `verl sft` first",
    )


@diagnosis("step", "they add nothing to the update")
def groups_without_signal(h: History) -> Seen | None:
    if h.batch is None or h.batch.groups < 4 or h.batch.constant_groups == h.batch.groups:
        return None  # all of them constant: `rewards_all_equal`, or nothing a group estimator can use
    share = h.batch.constant_groups / h.batch.groups
    if share < 0.9 or h.solved:
        return None
    n = h.rollout.n
    return (
        f"{share:.0%} of the prompts got equal rewards for all responses",
        f"algorithm.filter_groups.enable=True, or {ROLLOUT}.n={max(2 * n, 8)} (now {n})",
    )


@diagnosis("step", "the scores of this step come from elsewhere")
def reward_never_called(h: History) -> Seen | None:
    if h.latest("reward/calls") != 0:
        return None
    return (
        "the reward function was not called in this step",
        "other values of reward.reward_manager.name, reward.custom_reward_function.path, or data_source in the data",
    )


@diagnosis("step", "the reward function failed or timed out; they are left out of the loss")
def rewards_failed(h: History) -> Seen | None:
    failed = h.latest("reward/failed")
    if not failed:
        return None
    timeout = h.config.reward.timeout_s
    return (
        f"{failed:g} responses got no score",
        f"to fix the function (rollouts/ has the errors), or reward.timeout_s={2 * timeout:g} (now {timeout:g})",
    )


@diagnosis("step", "the policy exploits the reward")
def reward_up_validation_down(h: History) -> Seen | None:
    scores = h.validations()
    if len(scores) < 3 or scores[-1][0] != h.steps[-1][0]:
        return None
    best_step, best = max(scores, key=lambda item: item[1])
    margin = max(0.02, 0.1 * abs(best))
    recent = [value for step, value in scores[-2:] if step > best_step]
    if len(recent) < 2 or any(value > best - margin for value in recent):
        return None
    at_best, now = h.mean_around("reward/mean", best_step), h.mean_around("reward/mean", scores[-1][0])
    if at_best is None or now is None or now <= at_best + max(0.02, 0.05 * abs(at_best)):
        return None
    return (
        f"reward rose from {at_best:.3g} to {now:.3g} since step {best_step} while validation fell from {best:.3g} to "
        f"{scores[-1][1]:.3g}",
        f"{h.more_kl}, or a reward that is harder to exploit; the checkpoint nearest step {best_step} is "
        "the better one",
    )


@diagnosis("step", "validation data and reward function may not fit each other")
def validation_always_zero(h: History) -> Seen | None:
    scores = h.validations()
    if not scores or scores[-1][0] != h.steps[-1][0] or any(value != 0 for _, value in scores):
        return None
    learned = any(v > 0 for v in h.series("reward/mean"))
    if len(scores) < (2 if learned else 3):
        return None
    others = "though training rewards are not" if learned else "and so are the training rewards"
    return (
        f"validation was 0 in all of {len(scores)} validations, {others}",
        "data.val_files with the columns of data.train_files, a reward function that handles its data_source, and "
        f"{ROLLOUT}.val_kwargs.temperature=0 (now {h.rollout.val_kwargs.temperature:g})",
    )
