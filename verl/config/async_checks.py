"""What generating ahead of training (`trainer.async_training`) needs of the rest of a config, and its lines in the
plan."""

from __future__ import annotations

import math

from verl.config.batch_math import BatchPlan
from verl.config.capabilities import engine_spec
from verl.config.known import POOL_ASYNC_MODES
from verl.config.methods import methods_of
from verl.config.parallelism import ROLLOUT, engine_size, rollout_pool
from verl.config.schema import PPOConfig

SECTION = "trainer.async_training"
CORRECTION = "algorithm.rollout_correction"
POOL = f"{ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=1"


def async_errors(config: PPOConfig) -> list[str]:
    """Why a run that trains cannot generate ahead as configured."""
    if config.trainer.async_training.mode == "off":
        return []
    return [
        *_staleness_errors(config),
        *_placement_errors(config),
        *_correction_errors(config),
        *_group_errors(config),
    ]


def _staleness_errors(config: PPOConfig) -> list[str]:
    own = config.trainer.async_training
    mode, staleness, name = own.mode, own.staleness or 0, f"{SECTION}.staleness"
    if mode == "one_step_off" and staleness > 1:
        return [
            f"'{name}' is {staleness}, but {SECTION}.mode=one_step_off is never more than one step behind; set "
            f"{name}=1 (or 0: no overlap), or {SECTION}.mode=fully_async"
        ]
    if mode == "carry_over" and staleness < 1:
        return [
            f"'{name}' is {staleness}, but with {SECTION}.mode=carry_over unfinished responses continue in the next "
            f"step; set {name}=1 or more, or {SECTION}.mode=off"
        ]
    if mode == "fully_async" and staleness < own.sync_every - 1:
        return [
            f"'{SECTION}.sync_every' is {own.sync_every}: the weights that generate are up to {own.sync_every - 1} "
            f"steps old before they are replaced, but {name}={staleness}; set {name}={own.sync_every - 1} or more, or "
            f"{SECTION}.sync_every={staleness + 1}"
        ]
    if mode == "carry_over" and own.over_sampling > staleness:
        return [
            f"'{SECTION}.over_sampling' is {own.over_sampling:g} with {name}={staleness}: the prompts beyond a batch "
            f"would be more than {_steps(staleness)} can train, so some would become too old; set "
            f"{SECTION}.over_sampling={staleness} or less, or {name}={math.ceil(own.over_sampling)}"
        ]
    return []


def _placement_errors(config: PPOConfig) -> list[str]:
    mode, rollout = config.trainer.async_training.mode, config.actor_rollout_ref.rollout
    if mode in POOL_ASYNC_MODES and not rollout_pool(config):
        return [
            f"'{SECTION}.mode' is {mode}, but {ROLLOUT}.n_gpus_per_node={rollout.n_gpus_per_node} and "
            f"{ROLLOUT}.nnodes={rollout.nnodes}: generating and training share one set of weights here, so they cannot "
            f"overlap. Give generation its own GPUs (with trainer.device=cpu: its own processes), e.g. {POOL}, or stay "
            f"on these with {SECTION}.mode=carry_over"
        ]
    if mode == "carry_over" and rollout.n_gpus_per_node:
        return [
            f"'{SECTION}.mode' is carry_over, but {ROLLOUT}.n_gpus_per_node={rollout.n_gpus_per_node}: the GPUs of "
            f"generation would idle while the trainer trains. Set {SECTION}.mode=one_step_off or "
            f"{SECTION}.mode=fully_async, or share the trainer's GPUs: {ROLLOUT}.nnodes=0 {ROLLOUT}.n_gpus_per_node=0"
        ]
    if mode in ("carry_over", "fully_async") and not engine_spec(rollout.name).streams:
        return [
            f"'{ROLLOUT}.name' is {rollout.name}, which generates one batch of requests to its end; {SECTION}.mode="
            f"{mode} adds requests and weights meanwhile. Set {ROLLOUT}.name=native, or {SECTION}.mode=off"
        ]
    return []


def _correction_errors(config: PPOConfig) -> list[str]:
    staleness, chosen = config.trainer.async_training.staleness or 0, config.algorithm.rollout_correction
    if not staleness or chosen.bypass_mode or chosen.rollout_is or chosen.rollout_rs:
        return []
    return [
        f"'{SECTION}.staleness' is {staleness}: responses are drawn by weights up to {_steps(staleness)} older than "
        "those trained, which needs a correction. Choose one: "
        f"{CORRECTION}.bypass_mode=True (the clipped ratio of the loss is taken to the weights that drew each token; "
        "saves a pass); "
        f"{CORRECTION}.rollout_is=token (the ratio to the weights before the update, and a truncated importance "
        "weight for the rest); "
        f"{CORRECTION}.rollout_rs=seq_mean_k1 {CORRECTION}.rollout_rs_threshold=0.5_2.0 (leaves out responses that the "
        f"weights before the update would hardly give); or {SECTION}.mode=off"
    ]


def _group_errors(config: PPOConfig) -> list[str]:
    mode, lines = config.trainer.async_training.mode, []
    for method in methods_of(config):
        if "reward_baselines" in method.needs:
            lines.append(
                f"'{method.key}' is {method.name}, which needs a greedy response by the weights that drew the samples; "
                f"{SECTION}.mode={mode} does not keep them; set "
                f"algorithm.adv_estimator=rloo (with {ROLLOUT}.n=2 or more), or {SECTION}.mode=off"
            )
    if config.algorithm.filter_groups.enable:
        lines.append(
            f"'algorithm.filter_groups.enable' is True, which draws more prompts in the middle of a step, but "
            f"{SECTION}.mode={mode} starts them before the step; set algorithm.filter_groups.enable=False, or "
            f"{SECTION}.mode=off"
        )
    return lines


def async_advice(config: PPOConfig) -> list[str]:
    """What is allowed and easily misunderstood."""
    own, warmup = config.trainer.async_training, config.trainer.critic_warmup
    if own.mode == "off" or config.trainer.val_only or not own.staleness or not warmup:
        return []
    return [
        f"'trainer.critic_warmup'={warmup}: the policy does not change in the first {_steps(warmup)}; responses are "
        f"generated ahead all the same, and their age counts in steps ({SECTION}.staleness={own.staleness})"
    ]


def async_rows(config: PPOConfig, batches: BatchPlan) -> list[tuple[str, str, str]]:
    """The lines of the plan; empty for synchronous training."""
    own, rollout = config.trainer.async_training, config.actor_rollout_ref.rollout
    if own.mode == "off" or config.trainer.val_only:
        return []
    staleness = own.staleness or 0
    where = "the trainer's processes, before each update"
    if own.mode in POOL_ASYNC_MODES:
        engines = rollout.nnodes * rollout.n_gpus_per_node // engine_size(config)
        where = f"{engines} separate {'process' if engines == 1 else 'processes'}, during updates"
    most = (staleness + 1) * batches.prompts
    how = f"at most, those in training included: {batches.prompts:,} x {staleness + 1}"
    if own.mode == "carry_over":
        most = math.ceil(batches.prompts * (1 + own.over_sampling))
        how = f"at most: {batches.prompts:,} x {1 + own.over_sampling:g}"
    lines = [
        ("mode", own.mode, f"generated by {where}"),
        ("prompts in progress", f"{most:,}", how),
        ("oldest weights", f"{staleness:,}", "steps behind those trained, when a response starts"),
    ]
    if batches.optimiser_steps > 1:
        remark = "per step: the ratio in the loss also covers these updates, besides the age"
        lines.append(("optimiser steps", f"{batches.optimiser_steps:,}", remark))
    return lines


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"
