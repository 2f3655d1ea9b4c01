"""The rules that judge a config at the start and a run after each step."""

from __future__ import annotations

import itertools
import math

from verl.config.capabilities import engine_spec
from verl.observe.diagnoses import ACTOR, ROLLOUT, Diagnosis, History, Seen, diagnosis

KL_OF_UPDATE_BOUND = 0.1
STILL_STEPS = 10
NEVER_INFINITE = (
    "actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "implicit_reward/loss",
    "implicit_reward/grad_norm", "train/loss", "train/grad_norm",
)  # fmt: skip
SKIPPED = tuple(f"{role}/skipped_updates" for role in ("actor", "critic", "implicit_reward", "train"))
SLOW_GENERATION_S = 30.0
"""Generation that takes less of a step is not reported, whatever its share."""


# -- rewards and validation scores ------------------------------------------------------------------------------------


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
    if low is None or low != high or h.taught or (h.batch is not None and h.batch.sequences < 2):
        return None
    if low >= max(h.series("reward/max")) and low > min(h.series("reward/min")):
        return None  # it learned to get the best reward it knows
    seen = f"all rewards of this batch are {low:g}"
    other = "harder prompts" if low > 0 else "`verl sft` first, or easier prompts"
    fix = "`verl reward test`, which shows what the reward function returns; if it is right, "
    return seen, f"{fix}{other} (data.train_files)"


@diagnosis("step", "they add nothing to the update")
def groups_without_signal(h: History) -> Seen | None:
    if h.batch is None or h.batch.groups < 4 or h.batch.constant_groups == h.batch.groups:
        return None  # all of them constant: `rewards_all_equal`, or nothing a group estimator can use
    share = h.batch.constant_groups / h.batch.groups
    if share < 0.9 or h.solved or h.taught:
        return None
    n = h.rollout.n
    seen = f"{share:.0%} of the prompts got equal rewards for all responses"
    return seen, h.choices("algorithm.filter_groups.enable=True", f"{ROLLOUT}.n={max(2 * n, 8)} (now {n})")


@diagnosis("step", "the scores of this step come from elsewhere")
def reward_never_called(h: History) -> Seen | None:
    if h.latest("reward/calls") != 0 or h.rollout.multi_turn.environment or h.rollout.runs_agents:
        return None  # environments and agent loops score their rows themselves
    seen = "the reward function was not called in this step"
    fix = "other values of reward.reward_manager.name, reward.custom_reward_function.path, or data_source in the data"
    return seen, fix


@diagnosis("step", "what scores them failed or timed out; they are left out of the loss")
def rewards_failed(h: History) -> Seen | None:
    failed = h.latest("reward/failed")
    if not failed:
        return None
    timeout = h.config.reward.timeout_s
    faulty = "the reward function" + ", environment, agent loop or simulated user" * h.rollout.converses
    seen = f"{failed:g} responses got no score"
    fix = f"to fix {faulty} (rollouts/ has the errors), or reward.timeout_s={2 * timeout:g} (now {timeout:g})"
    return seen, fix


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
    seen = f"validation was 0 in all of {len(scores)} validations, {others}"
    fit = "data.val_files with the columns of data.train_files, a reward function for its data_source"
    now = h.rollout.val_kwargs.temperature
    return seen, h.choices(fit, f"{ROLLOUT}.val_kwargs.temperature=0 (now {now:g})")


# -- losses, gradients, KL and entropy --------------------------------------------------------------------------------


@diagnosis("step", "the update was skipped and its batch saved to `bad_batches/`")
def not_finite(h: History) -> Seen | None:
    for name in NEVER_INFINITE:
        value = h.latest(name)
        if value is not None and not math.isfinite(value):
            fix = f"{h.lower_lr} if it happens again, and look for extreme values in the data"
            return f"{name} is {value}", fix
    for name in SKIPPED:
        if h.latest(name):
            seen = f"{name} is {h.latest(name):g}, as a gradient was not finite"
            return seen, f"{h.lower_lr} if it happens again"
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
    fewer = f" or fewer {ACTOR}.ppo_epochs" * (h.actor.ppo_epochs > 1)
    more = " or a smaller trainer.async_training.staleness" if age else ""
    seen = f"actor/ppo_kl is {update:.3g} {steps}, beyond {KL_OF_UPDATE_BOUND:g}"
    return seen, h.lower_lr + fewer + more


@diagnosis("step", "this biases the gradient")
def rollout_probs_differ(h: History) -> Seen | None:
    value = h.latest("training/rollout_probs_diff_mean")
    if value is None or h.latest("training/age/max"):
        return None  # older weights drew some of the tokens: they are not the same policy
    bound = h.config.trainer.health.probs_diff_bound
    if value <= bound:
        return None
    seen = f"training/rollout_probs_diff_mean is {value:.4f}, above {bound:g} (normal below 0.005)"
    engine = h.rollout.name
    own = "".join(f" or +{ROLLOUT}.engine_kwargs.{engine}.{way}" for way in engine_spec(engine).closer)
    ways = ("algorithm.rollout_correction.rollout_is=token", f"{ROLLOUT}.name=native")
    return seen, h.choices(*ways, "the same dtype on both sides") + own


@diagnosis("step", "often rollout and trainer disagree")
def gradient_norm_growing(h: History) -> Seen | None:
    norms = [v for v in h.series("actor/grad_norm") if math.isfinite(v)]
    if len(norms) < 20:
        return None
    thirds = [sum(part) / len(part) for part in (norms[-20:-14], norms[-14:-7], norms[-7:])]
    if not (thirds[2] > 3 * thirds[0] > 0 and thirds[0] < thirds[1] < thirds[2]):
        return None
    seen = f"actor/grad_norm grew from {thirds[0]:.2g} to {thirds[2]:.2g} in 20 steps"
    look = "a look at training/rollout_probs_diff_mean"
    return seen, h.choices(f"{ROLLOUT}.calculate_log_probs=True", look, h.lower_lr)


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
    seen = f"{name} goes up and down, by {early:.2g} a step 20 steps ago and by {late:.2g} now"
    return seen, h.choices(h.lower_lr, more)


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
    if len(entropy) < 5 or not rewards or not entropy[-1] < min(0.02, 0.05 * entropy[0]) or h.solved:
        return None  # of a solved task it is certain because it is right
    return (
        f"actor/entropy fell from {entropy[0]:.3g} to {entropy[-1]:.3g} while the reward is {rewards[-1]:.3g}",
        h.choices(f"{ACTOR}.clip_ratio_high=0.28", h.more_entropy),
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
        h.choices("trainer.early_stop_patience=2", "fewer trainer.total_epochs", h.lower_lr),
    )


# -- responses, and what produces them: loader, engine, tools, age of the weights -------------------------------------


@diagnosis("start", "responses to a prompt are all equal at 0, and tend to be noise above 1.5")
def temperature_extreme(h: History) -> Seen | None:
    if h.offline or 0 < h.rollout.temperature <= 1.5:
        return None
    return f"temperature is {h.rollout.temperature:g} in training", f"{ROLLOUT}.temperature=1.0"


@diagnosis("step", "the chat template may not fit the model, or empty answers are rewarded")
def responses_empty(h: History) -> Seen | None:
    if h.batch is None or h.batch.empty_share <= 0.1:
        return None
    seen = f"{h.batch.empty_share:.0%} of the responses are empty"
    return seen, "data.apply_chat_template_kwargs, or a reward of 0 for empty answers; rollouts/ has them"


@diagnosis("step", "the policy is degenerating")
def responses_repetitive(h: History) -> Seen | None:
    if h.batch is None or h.batch.repetitive_share <= 0.2:
        return None
    seen = f"{h.batch.repetitive_share:.0%} of the responses repeat the same few tokens"
    return seen, f"an earlier checkpoint with {h.lower_lr} and {ROLLOUT}.temperature between 0.7 and 1.2"


@diagnosis("step", "their answers are missing, so their rewards mislead")
def responses_cut(h: History) -> Seen | None:
    ratio = h.latest("response_length/clip_ratio")
    if ratio is None or ratio <= 0.5:
        return None
    limit = h.config.data.max_response_length
    seen = f"{ratio:.0%} of the responses were cut at data.max_response_length={limit}"
    return seen, f"data.max_response_length={2 * limit}"


@diagnosis("step", "duplicates add nothing to an update")
def responses_duplicate(h: History) -> Seen | None:
    if h.batch is None or h.batch.groups < 4 or h.solved:
        return None
    share = h.batch.identical_groups / h.batch.groups
    if share <= 0.5:
        return None
    now = h.rollout.temperature
    more = f"{ROLLOUT}.temperature=1.0 (now {now:g})" if now < 1 else h.more_entropy
    seen = f"{share:.0%} of the prompts got the same response every time"
    return seen, f"{more} or fewer {ROLLOUT}.n (now {h.rollout.n})"


@diagnosis(
    "step", "the policy changes what is not rewarded, often by a bias of the loss or the reward for length"
)
def length_drift(h: History) -> Seen | None:
    lengths, rewards = h.ends("response_length/mean"), h.ends("reward/mean")
    if lengths is None or rewards is None or min(lengths) <= 0 or rewards[1] > rewards[0] + 0.02:
        return None
    if max(lengths) < 3 * min(lengths) or max(lengths) < 16:
        return None
    verb = "grew" if lengths[1] > lengths[0] else "shrank"
    return (
        f"response_length/mean {verb} from {lengths[0]:.0f} to {lengths[1]:.0f} tokens while the reward went from "
        f"{rewards[0]:.3g} to {rewards[1]:.3g}",
        h.choices(f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "a reward that depends on the length"),
    )


@diagnosis("step", "the trainer waits less than it could, but learns from a policy of several updates ago")
def samples_stale(h: History) -> Seen | None:
    oldest, mean = h.latest("training/age/max"), h.latest("training/age/mean")
    if oldest is None or mean is None or not oldest:
        return None
    bound = h.config.trainer.async_training.staleness or 0
    younger = f"trainer.async_training.staleness={max(bound // 2, 1)} (now {bound})"
    if oldest <= bound and not (bound >= 2 and mean >= 0.8 * bound):
        return None
    return (
        f"tokens are {mean:.1f} updates old on average and {oldest:g} at most (staleness {bound})",
        h.choices(younger, "more devices for generating", "algorithm.rollout_correction.rollout_is=token"),
    )


@diagnosis("step", "rows are read or tokenised too slowly")
def loader_starving(h: History) -> Seen | None:
    newest = [metrics for _, metrics in h.steps[-3:] if metrics.get("timing_s/data") is not None]
    data = sum(float(metrics["timing_s/data"]) for metrics in newest)
    step = sum(float(metrics.get("timing_s/step") or 0.0) for metrics in newest)
    whole = step + data if h.offline else step  # an offline step begins when it has its batch
    if len(newest) < 3 or data < 0.3 or data < 0.2 * whole:
        return None
    workers = h.config.data.dataloader_num_workers
    seen = f"{data / whole:.0%} of the last 3 steps was waiting for data"
    return seen, f"data.dataloader_num_workers={max(2 * workers, 4)} (now {workers})"


@diagnosis("step", "generating takes nearly all of a step")
def rollout_slow(h: History) -> Seen | None:
    newest = [m for _, m in h.steps[-3:] if m.get("timing_s/gen") is not None and m.get("timing_s/step")]
    if len(newest) < 3 or h.config.trainer.async_training.mode not in ("off", "carry_over"):
        return None
    gen = sum(float(m["timing_s/gen"]) for m in newest) / 3
    share = gen / (sum(float(m["timing_s/step"]) for m in newest) / 3)
    if share < 0.85 or gen < SLOW_GENERATION_S:
        return None
    now = h.rollout.gpu_memory_utilization
    more = f"{ROLLOUT}.gpu_memory_utilization={min(0.9, now + 0.2):g} (now {now:g}), " if now < 0.7 else ""
    return (
        f"generating takes {share:.0%} of a step ({gen:.0f} s)",
        f"{more}trainer.async_training.mode=one_step_off, or data.max_response_length="
        f"{max(1, h.config.data.max_response_length // 2)}",
    )


@diagnosis("step", "the model learns from errors of the tool, not of its own")
def tools_failing(h: History) -> Seen | None:
    calls = h.latest("tools/calls/all")
    failed, late = h.latest("tools/failed/all") or 0.0, h.latest("tools/timeout/all") or 0.0
    if not calls or calls < 4 or failed + late <= 0.3 * calls:
        return None
    timeout = h.rollout.multi_turn.tool_timeout_s
    return (
        f"of {calls:g} tool calls {failed:g} failed and {late:g} timed out",
        f"to fix the tool (rollouts/ has the errors), or {ROLLOUT}.multi_turn.tool_timeout_s={2 * timeout:g} "
        f"(now {timeout:g})",
    )


RULES = tuple(rule for rule in list(globals().values()) if isinstance(rule, Diagnosis))
START_RULES = tuple(rule for rule in RULES if rule.when == "start")
STEP_RULES = tuple(rule for rule in RULES if rule.when == "step")
