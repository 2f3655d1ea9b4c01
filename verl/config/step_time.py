"""What a training step is made of, in seconds: an estimate from measured speeds, or from a GPU's peaks.

Counted at their longest: every prompt and response. Not counted: gathering sharded weights, rewards, and the tail of
a batch in which only the longest responses still run.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.memory import bytes_per_element
from verl.config.model_shape import ModelShape
from verl.config.phases import Estimate
from verl.config.ranks import world_size
from verl.config.schema import PPOConfig

PEAKS = (
    (24, 165.0, 1.0),
    (48, 362.0, 0.86),
    (40, 312.0, 1.6),
    (80, 990.0, 3.35),
    (141, 990.0, 4.8),
    (192, 2250.0, 8.0),
)
"""GiB, dense bf16 TFLOP/s and TB/s as makers state them (RTX 4090, L40S, A100-40, H100, H200, B200)."""
TRAIN_SHARE = 0.35
PREFILL_SHARE = 0.4
BANDWIDTH_SHARE = 0.6
"""Shares of the peaks that a run is assumed to reach where nothing was measured."""


@dataclass(frozen=True)
class Speeds:
    """Of one GPU: peaks, and where given what was measured with this model (tokens per second)."""

    tflops: float
    bandwidth: float
    train: float | None = None
    generate: float | None = None

    @staticmethod
    def of(memory: int, train: float | None = None, generate: float | None = None) -> Speeds:
        size = memory / 2**30
        _, tflops, bandwidth = min(PEAKS, key=lambda row: abs(row[0] - size))
        return Speeds(tflops, bandwidth, train, generate)


@dataclass(frozen=True)
class StepPart:
    """One part of a step on every GPU at once."""

    name: str
    seconds: float
    source: str


def active_parameters(shape: ModelShape) -> int:
    """That a token is multiplied with: no lookups, and of experts only those it visits."""
    matrices = sum(linear.parameters for linear in shape.linears)
    if shape.experts:
        matrices += shape.layers * 3 * shape.hidden * shape.intermediate
    return matrices + shape.embedding  # the output matrix, tied or not


def step_parts(
    config: PPOConfig, shape: ModelShape, memory: Estimate, speeds: Speeds, gpu_memory: int
) -> list[StepPart]:
    """Generation, the passes without gradient and the updates."""
    active, gpus = active_parameters(shape), world_size(config)
    data, policy = config.data, config.actor_rollout_ref
    sequences = data.train_batch_size * policy.rollout.n / gpus
    tokens = sequences * (data.max_prompt_length + data.max_response_length)
    passes = 8 if policy.model.enable_gradient_checkpointing else 6
    compute = speeds.tflops * 1e12 * TRAIN_SHARE
    train = speeds.train or compute / (passes * active)
    source = "measured" if speeds.train else f"assumed: {TRAIN_SHARE:.0%} of {speeds.tflops:g} TFLOP/s"
    forward = train * passes / 2
    parts = [_generation(config, shape, memory, speeds, sequences, gpu_memory)]
    # With one optimiser step per batch the update's own forward pass gives the old log-probs.
    if (
        config.actor_rollout_ref.actor.ppo_mini_batch_size < data.train_batch_size
        or policy.actor.ppo_epochs > 1
    ):
        parts.append(StepPart("log-probs", tokens / forward, source))
    if policy.actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        parts.append(StepPart("reference log-probs", tokens / forward, source))
    if config.critic.enable:
        parts.append(StepPart("values", tokens / forward, source))
        parts.append(StepPart("update critic", tokens * config.critic.ppo_epochs / train, source))
    parts.append(StepPart("update actor", tokens * policy.actor.ppo_epochs / train, source))
    return parts


def _generation(
    config: PPOConfig, shape: ModelShape, memory: Estimate, speeds: Speeds, sequences: float, gpu_memory: int
) -> StepPart:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    produced = sequences * data.max_response_length
    if speeds.generate:
        return StepPart("generate", produced / speeds.generate, "measured")
    element = bytes_per_element(config.actor_rollout_ref.model.dtype, "cuda")
    per_token = shape.cache_elements * element
    longest = data.max_prompt_length + data.max_response_length
    room = max(
        gpu_memory * rollout.gpu_memory_utilization - memory.roles[0].whole_weights, per_token * longest
    )
    running = max(min(sequences, rollout.max_num_seqs, room // (per_token * longest)), 1)
    active = active_parameters(shape)
    # One token for each running sequence: every weight is read once, and the cache at half its final length.
    read = memory.roles[0].whole_weights + running * per_token * (
        data.max_prompt_length + data.max_response_length / 2
    )
    token_s = max(
        read / (speeds.bandwidth * 1e12 * BANDWIDTH_SHARE),
        2 * active * running / (speeds.tflops * 1e12 * PREFILL_SHARE),
    )
    prefill = data.train_batch_size / world_size(config) * data.max_prompt_length * 2 * active
    seconds = sequences / running * data.max_response_length * token_s
    seconds += prefill / (speeds.tflops * 1e12 * PREFILL_SHARE)
    return StepPart(
        "generate",
        seconds,
        f"assumed: {BANDWIDTH_SHARE:.0%} of {speeds.bandwidth:g} TB/s, {running:.0f} sequences at a time",
    )
