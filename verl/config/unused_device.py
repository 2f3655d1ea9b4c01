"""Keys that have no effect, or a bad one, on the device a config computes on."""

from __future__ import annotations

from verl.config.device import cpu_has_bf16
from verl.config.keys import get, schema_keys
from verl.config.known import MODEL_DTYPES, ROLLOUT_DTYPES
from verl.config.machine import on_cpu
from verl.config.pools import EXTERNAL_ENGINES
from verl.config.schema import GenerationConfig, PPOConfig, SFTConfig
from verl.config.unused_rules import Rule

_POLICY = "actor_rollout_ref"
_OFFLOADS = ("param_offload", "optimizer_offload", "offload_policy")
_IN_HOST_MEMORY = "on a CPU everything is in host memory"


def _on_device(config: PPOConfig | SFTConfig | GenerationConfig) -> bool:
    return not on_cpu(config)


def _offload_rule(roles: tuple[str, ...], models: tuple[str, ...]) -> Rule:
    keys = [f"{role}.fsdp_config.{name}" for role in roles for name in _OFFLOADS]
    keys += [f"{model}.enable_activation_offload" for model in models]
    return Rule(tuple(keys), _on_device, _IN_HOST_MEMORY)


def _rollout_rules(rollout: str) -> tuple[Rule, ...]:
    return (
        Rule((f"{rollout}.enforce_eager",), _on_device, "there are no CUDA graphs on a CPU"),
        # The native engine bounds its KV cache on a CPU by this share of the free host memory.
        Rule(
            (f"{rollout}.gpu_memory_utilization",),
            lambda c: _on_device(c) or get(c, rollout).name not in EXTERNAL_ENGINES,
            "there is no GPU memory to share on a CPU",
        ),
    )


def _rounding_rule(optim: str, model: str) -> Rule:
    def has_16_bit_weights(config: PPOConfig | SFTConfig) -> bool:
        dtype = get(config, model).dtype
        return not on_cpu(config) if dtype == "auto" else dtype != "float32"

    return Rule((f"{optim}.stochastic_rounding",), has_16_bit_weights, "the weights are float32")


PPO_DEVICE_RULES: tuple[Rule, ...] = (
    _offload_rule((f"{_POLICY}.actor", f"{_POLICY}.ref", "critic"), (f"{_POLICY}.model", "critic.model")),
    *_rollout_rules(f"{_POLICY}.rollout"),
    Rule(
        (f"{_POLICY}.rollout.free_cache_engine",), _on_device, "there is no GPU memory to give back on a CPU"
    ),
    Rule(("reward.reward_model.param_offload",), _on_device, _IN_HOST_MEMORY),
    _rounding_rule(f"{_POLICY}.actor.optim", f"{_POLICY}.model"),
    _rounding_rule("critic.optim", "critic.model"),
)
SFT_DEVICE_RULES: tuple[Rule, ...] = (
    _offload_rule(("model",), ("model",)),
    _rounding_rule("optim", "model"),
)
GENERATION_DEVICE_RULES: tuple[Rule, ...] = _rollout_rules("rollout")


def slow_dtypes(config: PPOConfig | SFTConfig | GenerationConfig) -> list[str]:
    """A line for each key that asks a CPU without bf16 instructions for bf16."""
    keys = [
        key.name
        for key in schema_keys(type(config)).values()
        if key.metadata["known"] in (MODEL_DTYPES, ROLLOUT_DTYPES)
        and key.name in config.user_set
        and get(config, key.name) == "bfloat16"
    ]
    if not keys or cpu_has_bf16() or not on_cpu(config):
        return []
    return [
        f"'{key}'=bfloat16 is many times slower than float32 here: this CPU has no bf16 instructions. Leave it out, "
        f"or set {key}=float32"
        for key in keys
    ]
