"""Responses, and the parts of a step that produce them: loader, engine, tools, age of the weights."""

from __future__ import annotations

from verl.observe.diagnoses.base import ROLLOUT, History, Seen, diagnosis

SLOW_GENERATION_S = 30.0
"""Generation that takes less of a step is not reported, whatever its share."""


@diagnosis("start", "responses to a prompt are all equal at 0, and tend to be noise above 1.5")
def temperature_extreme(h: History) -> Seen | None:
    if h.offline or 0 < h.rollout.temperature <= 1.5:
        return None
    return f"temperature is {h.rollout.temperature:g} in training", f"{ROLLOUT}.temperature=1.0"


@diagnosis("step", "the chat template may not fit the model, or empty answers are rewarded")
def responses_empty(h: History) -> Seen | None:
    if h.batch is None or h.batch.empty_share <= 0.1:
        return None
    return (
        f"{h.batch.empty_share:.0%} of the responses are empty",
        "data.apply_chat_template_kwargs, or a reward of 0 for empty answers; rollouts/ has them",
    )


@diagnosis("step", "the policy is degenerating")
def responses_repetitive(h: History) -> Seen | None:
    if h.batch is None or h.batch.repetitive_share <= 0.2:
        return None
    return (
        f"{h.batch.repetitive_share:.0%} of the responses repeat the same few tokens",
        f"an earlier checkpoint with {h.lower_lr} and {ROLLOUT}.temperature between 0.7 and 1.2",
    )


@diagnosis("step", "their answers are missing, so their rewards mislead")
def responses_cut(h: History) -> Seen | None:
    ratio = h.latest("response_length/clip_ratio")
    if ratio is None or ratio <= 0.5:
        return None
    limit = h.config.data.max_response_length
    return (
        f"{ratio:.0%} of the responses were cut at data.max_response_length={limit}",
        f"data.max_response_length={2 * limit}",
    )


@diagnosis("step", "duplicates add nothing to an update")
def responses_duplicate(h: History) -> Seen | None:
    if h.batch is None or h.batch.groups < 4 or h.solved:
        return None
    share = h.batch.identical_groups / h.batch.groups
    if share <= 0.5:
        return None
    now = h.rollout.temperature
    more = (
        f"{ROLLOUT}.temperature=1.0 (now {now:g})"
        if now < 1
        else "actor_rollout_ref.actor.entropy_coeff=0.001"
    )
    return (
        f"{share:.0%} of the prompts got the same response every time",
        f"{more} or fewer {ROLLOUT}.n (now {h.rollout.n})",
    )


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
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm, or a reward that takes length into account",
    )


@diagnosis("step", "the trainer waits less than it could, but learns from a policy of several updates ago")
def samples_stale(h: History) -> Seen | None:
    oldest, mean = h.latest("training/age/max"), h.latest("training/age/mean")
    if oldest is None or mean is None or not oldest:
        return None
    bound = h.config.trainer.async_training.staleness or 0
    if oldest <= bound and not (bound >= 2 and mean >= 0.8 * bound):
        return None
    return (
        f"tokens are {mean:.1f} updates old on average and {oldest:g} at most (staleness {bound})",
        f"trainer.async_training.staleness={max(bound // 2, 1)} (now {bound}), more devices for generating, or "
        "algorithm.rollout_correction.rollout_is=token",
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
    return (
        f"{data / whole:.0%} of the last 3 steps was waiting for data",
        f"data.dataloader_num_workers={max(2 * workers, 4)} (now {workers})",
    )


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
