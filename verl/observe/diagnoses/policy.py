"""Losses, gradients, KL and entropy."""

from __future__ import annotations

import itertools
import math

from verl.observe.diagnoses.base import ACTOR, ROLLOUT, History, Seen, diagnosis

KL_OF_UPDATE_BOUND = 0.1
STILL_STEPS = 10
NEVER_INFINITE = (
    "actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "implicit_reward/loss",
    "implicit_reward/grad_norm", "train/loss", "train/grad_norm",
)  # fmt: skip
SKIPPED = tuple(f"{role}/skipped_updates" for role in ("actor", "critic", "implicit_reward", "train"))


@diagnosis("step", "the update was skipped and its batch saved to `bad_batches/`")
def not_finite(h: History) -> Seen | None:
    for name in NEVER_INFINITE:
        value = h.latest(name)
        if value is not None and not math.isfinite(value):
            return (
                f"{name} is {value}",
                f"{h.lower_lr} if it happens again, and look for extreme values in the data",
            )
    for name in SKIPPED:
        if h.latest(name):
            return (
                f"{name} is {h.latest(name):g}, as a gradient was not finite",
                f"{h.lower_lr} if it happens again",
            )
    return None


@diagnosis("step", "the policy is far from the reference")
def kl_too_large(h: History) -> Seen | None:
    for name in ("actor/kl", "actor/kl_loss"):
        value = h.latest(name)
        if value is not None and value > h.config.trainer.health.kl_bound:
            return f"{name} is {value:.3g}, above {h.config.trainer.health.kl_bound:g}", h.more_kl
    return None


@diagnosis("step", "the responses no longer represent the policy they train")
def update_too_large(h: History) -> Seen | None:
    update = h.latest("actor/ppo_kl")
    if update is None or abs(update) <= KL_OF_UPDATE_BOUND:
        return None
    age = h.latest("training/age/max") or 0
    steps = f"in the {age + 1:g} steps since the oldest tokens were drawn" if age else "in one step"
    more = " or a smaller trainer.async_training.staleness" if age else ""
    return (
        f"actor/ppo_kl is {update:.3g} {steps}, beyond {KL_OF_UPDATE_BOUND:g}",
        f"{h.lower_lr} or fewer {ACTOR}.ppo_epochs{more}",
    )


@diagnosis("step", "this biases the gradient")
def rollout_probs_differ(h: History) -> Seen | None:
    value = h.latest("training/rollout_probs_diff_mean")
    if value is None or h.latest("training/age/max"):
        return None  # older weights drew some of the tokens: they are not the same policy
    bound = h.config.trainer.health.probs_diff_bound
    if value <= bound:
        return None
    vllm = (
        f", +{ROLLOUT}.engine_kwargs.vllm.disable_cascade_attn=True (long contexts)"
        if h.rollout.name == "vllm"
        else ""
    )
    return (
        f"training/rollout_probs_diff_mean is {value:.4f}, above {bound:g} (normal below 0.005)",
        f"algorithm.rollout_correction.rollout_is=token, {ROLLOUT}.name=native, the same dtype on both sides{vllm}",
    )


@diagnosis("step", "often rollout and trainer disagree")
def gradient_norm_growing(h: History) -> Seen | None:
    norms = [v for v in h.series("actor/grad_norm") if math.isfinite(v)]
    if len(norms) < 20:
        return None
    thirds = [sum(part) / len(part) for part in (norms[-20:-14], norms[-14:-7], norms[-7:])]
    if not (thirds[2] > 3 * thirds[0] > 0 and thirds[0] < thirds[1] < thirds[2]):
        return None
    return (
        f"actor/grad_norm grew from {thirds[0]:.2g} to {thirds[2]:.2g} in 20 steps",
        f"{ROLLOUT}.calculate_log_probs=True and watch training/rollout_probs_diff_mean, or {h.lower_lr}",
    )


@diagnosis("step", "updates overshoot")
def loss_oscillating(h: History) -> Seen | None:
    name = "train/loss" if h.offline else "actor/pg_loss"
    values = [v for v in h.series(name) if math.isfinite(v)][-20:]
    changes = [after - before for before, after in itertools.pairwise(values)]
    turns = sum(a * b < 0 for a, b in itertools.pairwise(changes))
    if len(values) < 20 or turns < 12:
        return None
    early, late = (sum(map(abs, part)) / len(part) for part in (changes[:9], changes[-9:]))
    rewards = h.ends("reward/mean")
    better = rewards is not None and rewards[1] > rewards[0] + 0.02
    if late < 3 * early or early == 0 or better:
        return None
    more = "a larger data.train_batch_size" if h.offline else f"{ACTOR}.clip_ratio=0.1"
    return (
        f"{name} goes up and down, by {early:.2g} a step 20 steps ago and by {late:.2g} now",
        f"{h.lower_lr} or {more}",
    )


@diagnosis("step", "learning rate too small, or the KL holds the policy at the reference")
def policy_not_moving(h: History) -> Seen | None:
    for name in ("actor/kl_loss", "actor/kl"):
        kl = h.series(name)
        rewards = h.ends("reward/mean", width=3, least=STILL_STEPS)
        if len(kl) < STILL_STEPS or rewards is None or max(map(abs, kl)) > 1e-6 or h.solved:
            continue
        return (
            f"{name} is still {kl[-1]:.1e} after {len(kl)} steps, and the reward {rewards[1]:.3g} (at first "
            f"{rewards[0]:.3g})",
            h.new_lr(10),
        )
    return None


@diagnosis("step", "the policy stopped exploring")
def entropy_collapsed(h: History) -> Seen | None:
    entropy, rewards = h.series("actor/entropy"), h.series("reward/mean")
    if len(entropy) < 5 or not rewards or not (entropy[-1] < 0.02 and entropy[-1] < 0.05 * entropy[0]):
        return None
    if h.solved:
        return None  # certain because it is right
    return (
        f"actor/entropy fell from {entropy[0]:.3g} to {entropy[-1]:.3g} while the reward is {rewards[-1]:.3g}",
        f"{ACTOR}.clip_ratio_high=0.28 or {ACTOR}.entropy_coeff={max(2 * h.actor.entropy_coeff, 0.001):g}",
    )


@diagnosis("step", "the model learns its training data by heart")
def overfitting(h: History) -> Seen | None:
    losses = [(step, float(m["val/loss"])) for step, m in h.steps if m.get("val/loss") is not None]
    if len(losses) < 3 or losses[-1][0] != h.steps[-1][0]:
        return None
    best_step, best = min(losses, key=lambda item: item[1])
    recent = [value for step, value in losses[-2:] if step > best_step]
    if len(recent) < 2 or any(value < best + max(0.02, 0.05 * abs(best)) for value in recent):
        return None
    at_best, now = h.mean_around("train/loss", best_step), h.mean_around("train/loss", losses[-1][0])
    if at_best is None or now is None or now >= at_best:
        return None
    return (
        f"val/loss rose from {best:.3g} (step {best_step}) to {losses[-1][1]:.3g} while train/loss fell from "
        f"{at_best:.3g} to {now:.3g}",
        f"trainer.early_stop_patience=2, fewer trainer.total_epochs, or {h.lower_lr}",
    )
