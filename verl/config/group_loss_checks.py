"""What losses that compare the responses to one prompt, and a reference that follows the policy, need of a config."""

from __future__ import annotations

from verl.config import known
from verl.config.keys import get
from verl.config.parallelism import ROLLOUT, layout_of, needs_reference, world_size
from verl.config.schema import PPOConfig

_LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"


def group_loss_errors(config: PPOConfig) -> list[str]:
    """Of online_dpo, spin and sppo."""
    loss, rollout = config.actor_rollout_ref.actor.policy_loss.loss_mode, config.actor_rollout_ref.rollout
    if loss not in known.GROUP_LOSSES:
        return []
    lines = []
    if rollout.n < 2 and loss != "spin":
        lines.append(
            f"'{ROLLOUT}.n' is {rollout.n}, but {_LOSS}={loss} compares the responses to one prompt; set it to 2 or "
            "more"
        )
    if config.algorithm.use_pf_ppo:
        lines.append(
            f"'algorithm.use_pf_ppo' is True, but {_LOSS}={loss} compares whole groups of responses; set it to False"
        )
    if config.algorithm.rollout_correction.rollout_is:
        lines.append(
            f"'algorithm.rollout_correction.rollout_is' is {config.algorithm.rollout_correction.rollout_is}, but "
            f"{_LOSS}={loss} has no token losses to weigh; leave it out"
        )
    split = rollout.multi_turn.enable and rollout.multi_turn.history == "split"
    if loss == "sppo" and split:
        lines.append(
            f"'{ROLLOUT}.multi_turn.history' is split, but {_LOSS}=sppo needs a response in one row; set it to append"
        )
    return lines + (_spin_errors(config) if loss == "spin" else [])


def _spin_errors(config: PPOConfig) -> list[str]:
    """What is defined for sampled responses only."""
    actor, rollout, algorithm = (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
        config.algorithm,
    )
    correction = algorithm.rollout_correction
    unfit = {
        f"{ROLLOUT}.multi_turn.enable": rollout.multi_turn.enable,
        "actor_rollout_ref.actor.use_kl_loss": actor.use_kl_loss,
        "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "algorithm.filter_groups.enable": algorithm.filter_groups.enable,
        "algorithm.rollout_correction.bypass_mode": correction.bypass_mode,
        "algorithm.rollout_correction.rollout_rs": correction.rollout_rs,
    }
    return [
        f"'{name}' is {value}, but {_LOSS}=spin also trains on the data's answers, which were not sampled; leave it out"
        for name, value in unfit.items()
        if value
    ]


def reference_errors(config: PPOConfig) -> list[str]:
    """Of trainer.ref_update_freq."""
    every, policy = config.trainer.ref_update_freq, config.actor_rollout_ref
    if every < 1:
        return []
    key = "trainer.ref_update_freq"
    if not needs_reference(config):
        return [
            f"'{key}' is {every}, but the run has no reference policy; set it to -1, or use one: {_LOSS}=online_dpo or "
            "spin, actor_rollout_ref.actor.use_kl_loss=True, algorithm.use_kl_in_reward=True"
        ]
    actor, ref, world = policy.actor, policy.ref, world_size(config)
    megatron = actor.strategy == "megatron"
    names = [
        "strategy",
        *(["megatron"] if megatron else ["fsdp_config.fsdp_size", "fsdp_config.offload_policy"]),
    ]
    alike = actor.strategy == ref.strategy and (
        layout_of(actor, world) == layout_of(ref, world)
        if megatron
        else all(get(actor, name) == get(ref, name) for name in names)
    )
    if alike or policy.model.lora_rank:  # adapters are copied within one engine
        return []
    wanted = ", ".join(f"actor_rollout_ref.ref.{name}" for name in names)
    return [
        f"'{key}' is {every}: the reference takes over the policy's shards, so both must be split alike; set {wanted} "
        "to what actor_rollout_ref.actor has"
    ]


def group_loss_advice(config: PPOConfig) -> list[str]:
    """Settings that work but cost more than they give."""
    loss, estimator = config.actor_rollout_ref.actor.policy_loss.loss_mode, config.algorithm.adv_estimator
    if loss not in known.ONLINE_PAIR_LOSSES or estimator not in known.CRITIC_ESTIMATORS:
        return []
    return [
        f"'algorithm.adv_estimator'={estimator} trains a critic, but {_LOSS}={loss} reads no advantages; set it to grpo"
    ]
