"""`verl plan`: which sharding, engine and budgets fit a model on N GPUs, and what a step would be made of.

Memory is what `--check` estimates (`phases`); the plan tries settings from the fastest to the thriftiest and takes
the first whose every phase fits. Times come from speeds measured on one GPU where they are given, and otherwise from
the GPU's peaks and shares of them that are assumed: the text says which. Pure arithmetic, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from verl.config.available import unavailable
from verl.config.device import Device
from verl.config.finalize import finalize
from verl.config.keys import put
from verl.config.model_shape import ModelShape
from verl.config.phases import Estimate, estimate
from verl.config.schema import PPOConfig
from verl.config.step_time import Speeds, StepPart, step_parts
from verl.errors import ConfigError

SAFE = 0.9
"""Share of a GPU that is planned with."""
_BUDGETS = (65536, 49152, 32768, 24576, 16384, 12288, 8192, 6144, 4096)
_ACTOR, _CRITIC, _MODEL = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Wish:
    """What is to be run, and on what."""

    gpus: int
    gpu_memory: int
    gpus_per_node: int = 8
    prompts: int = 256
    n: int = 8
    prompt_length: int = 1024
    response_length: int = 2048
    critic: bool = False
    reference: bool = False

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)


@dataclass
class Proposal:
    """Keys to set, and what they lead to."""

    keys: dict[str, object]
    config: PPOConfig
    memory: Estimate
    parts: list[StepPart]
    fits: bool
    tensor_parallel: int
    """GPUs that must share one copy of the model to generate; 1: each has room for its own."""
    notes: list[str] = field(default_factory=list)


def propose(wish: Wish, shape: ModelShape, speeds: Speeds) -> Proposal:
    """The first of the candidates whose phases all fit; the thriftiest one, and what is missing, if none does."""
    if wish.gpus > wish.gpus_per_node and wish.gpus % wish.gpus_per_node:
        raise ConfigError(
            f"--gpus {wish.gpus} is more than one node of {wish.gpus_per_node}, but not a whole number of nodes; give "
            "a multiple, or --gpus-per-node"
        )
    device = Device("cuda", "GPU", wish.gpu_memory, min(wish.gpus, wish.gpus_per_node))
    best: Proposal | None = None
    for saving in _savings():
        candidate = _with_budgets(wish, shape, speeds, device, saving)
        if best is None or not best.fits:
            best = candidate
        if candidate.fits:
            break
    assert best is not None
    best.notes += _notes(wish, shape, best)
    return best


def _savings() -> Iterator[dict[str, object]]:
    """Settings that save memory, each costing more time than the one before."""
    actor, critic = f"{_ACTOR}.fsdp_config", f"{_CRITIC}.fsdp_config"
    base: dict[str, object] = {f"{_MODEL}.enable_gradient_checkpointing": False}
    yield base
    yield (base := {**base, f"{_MODEL}.enable_gradient_checkpointing": True})
    yield (base := {**base, "actor_rollout_ref.ref.fsdp_config.param_offload": True})
    yield (base := {**base, f"{actor}.optimizer_offload": True, f"{critic}.optimizer_offload": True})
    yield (base := {**base, f"{critic}.param_offload": True})
    yield (base := {**base, f"{_MODEL}.enable_activation_offload": True})
    # From here on the optimiser itself is made smaller, or all but adapters are frozen.
    yield (
        small := {
            **base,
            f"{_ACTOR}.optim.moments": "int8",
            f"{_ACTOR}.optim.stochastic_rounding": True,
        }
    )
    yield {**small, f"{_MODEL}.lora_rank": 32}


def _config(wish: Wish, keys: dict[str, object]) -> PPOConfig:
    config = PPOConfig()
    for name, value in keys.items():
        put(config, name, value)
    config.user_set = frozenset(keys)
    finalize(config)
    return config


def _keys(wish: Wish, saving: dict[str, object]) -> dict[str, object]:
    sharded: dict[str, object] = {
        "trainer.nnodes": wish.nodes,
        "trainer.n_gpus_per_node": min(wish.gpus, wish.gpus_per_node),
        "data.train_batch_size": wish.prompts,
        "data.max_prompt_length": wish.prompt_length,
        "data.max_response_length": wish.response_length,
        "algorithm.adv_estimator": "gae" if wish.critic else "grpo",
        f"{_ROLLOUT}.n": wish.n,
        f"{_ROLLOUT}.name": "native",
        f"{_ACTOR}.use_dynamic_bsz": True,
        f"{_ACTOR}.use_kl_loss": wish.reference,
    }
    wanted = {
        name: value
        for name, value in saving.items()
        if (wish.critic or not name.startswith(_CRITIC)) and (wish.reference or ".ref." not in name)
    }
    return {**sharded, **wanted}


def _with_budgets(
    wish: Wish, shape: ModelShape, speeds: Speeds, device: Device, saving: dict[str, object]
) -> Proposal:
    """The largest token budget and share for generating that fit with these settings."""
    keys = _keys(wish, saving)
    limit = int(wish.gpu_memory * SAFE)
    longest = wish.prompt_length + wish.response_length
    for shards in _shard_sizes(wish):
        keys[f"{_ACTOR}.fsdp_config.fsdp_size"] = shards
        budgets = [size for size in _BUDGETS if size >= longest] or [longest]
        for budget in budgets:
            keys[f"{_ACTOR}.ppo_max_token_len_per_gpu"] = budget
            share = _share(wish, shape, device, keys, limit)
            keys[f"{_ROLLOUT}.gpu_memory_utilization"] = share or 0.9
            config = _config(wish, keys)
            memory = estimate(config, shape, shape if wish.critic else None, device)
            training = [phase.total for phase in memory.phases if phase.name != "generate"]
            if share is not None and max(training) <= limit:
                parts = step_parts(config, shape, memory, speeds, wish.gpu_memory)
                return Proposal(dict(keys), config, memory, parts, True, 1)
    config = _config(wish, keys)
    memory = estimate(config, shape, shape if wish.critic else None, device)
    parts = step_parts(config, shape, memory, speeds, wish.gpu_memory)
    return Proposal(dict(keys), config, memory, parts, False, _tensor_parallel(wish, memory, limit))


def _shard_sizes(wish: Wish) -> list[int]:
    """Within a node and replicated across nodes first: less crosses the slower network. -1: over all."""
    return [wish.gpus_per_node, -1] if wish.nodes > 1 else [-1]


def _share(
    wish: Wish, shape: ModelShape, device: Device, keys: dict[str, object], limit: int
) -> float | None:
    """`gpu_memory_utilization`: what the trainer leaves, in steps of 0.05; None where a sequence finds no room."""
    memory = estimate(_config(wish, keys), shape, shape if wish.critic else None, device)
    (generate,) = [phase for phase in memory.phases if phase.name == "generate"]
    actor = memory.roles[0]
    resting = generate.total - generate.parts["KV cache"] - actor.whole_weights
    share = int((limit - resting) / wish.gpu_memory * 20) / 20
    one_sequence = (
        memory.cache_bytes // max(memory.cache_tokens, 1) * (wish.prompt_length + wish.response_length)
    )
    if share * wish.gpu_memory < actor.whole_weights + one_sequence:
        return None
    return min(share, 0.9)


def _tensor_parallel(wish: Wish, memory: Estimate, limit: int) -> int:
    """The fewest GPUs over which a copy of the weights leaves half of each for the cache."""
    whole = memory.roles[0].whole_weights
    size = 1
    while whole / size > limit / 2 and size < wish.gpus_per_node:
        size *= 2
    return size


def _notes(wish: Wish, shape: ModelShape, proposal: Proposal) -> list[str]:
    lines = []
    if not shape.exact:
        lines.append(
            f"'{shape.model_type}' is not a family whose sizes are known exactly; it was counted as if built like Llama"
        )
    if proposal.fits:
        lines += unavailable(proposal.config)
        return lines
    peak = max(proposal.memory.phases, key=lambda phase: phase.total)
    lines.append(
        f"nothing tried fits: with the thriftiest settings '{peak.name}' still needs {peak.total / 2**30:.1f} GiB of "
        f"{wish.gpu_memory / 2**30:.0f}. More GPUs shard further (--gpus), or shorten --response-length"
    )
    if proposal.tensor_parallel > 1:
        lines.append(
            f"one copy of the weights is {proposal.memory.roles[0].whole_weights / 2**30:.1f} GiB: generating needs it "
            f"spread over {proposal.tensor_parallel} GPUs, which in this version only a server on GPUs of its own does "
            f"({_ROLLOUT}.name=vllm {_ROLLOUT}.mode=server, one trainer process)"
        )
    return lines
