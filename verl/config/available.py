"""Keys that are known but whose feature this version does not have: refused before a run, never ignored."""

from __future__ import annotations

from verl.config.schema import AnyConfig, PPOConfig, SFTConfig


def unavailable(cfg: AnyConfig) -> list[str]:
    """One line for each such setting: what it is, and what to set instead."""
    if not isinstance(cfg, (PPOConfig, SFTConfig)):
        return []
    found = _shared(cfg) + (_ppo(cfg) if isinstance(cfg, PPOConfig) else [])
    return [
        f"{what} is not available in this version; set {instead}" for asked, what, instead in found if asked
    ]


def _shared(cfg: PPOConfig | SFTConfig) -> list[tuple[bool, str, str]]:
    role = cfg.actor_rollout_ref.actor if isinstance(cfg, PPOConfig) else cfg.model
    prefix = "actor_rollout_ref.actor" if isinstance(cfg, PPOConfig) else "model"
    return [
        (role.strategy == "megatron", f"{prefix}.strategy=megatron", f"{prefix}.strategy=fsdp"),
        (
            role.ulysses_sequence_parallel_size > 1,
            f"{prefix}.ulysses_sequence_parallel_size={role.ulysses_sequence_parallel_size}",
            f"{prefix}.ulysses_sequence_parallel_size=1",
        ),
    ]


def _ppo(cfg: PPOConfig) -> list[tuple[bool, str, str]]:
    rollout = cfg.actor_rollout_ref.rollout
    key = "actor_rollout_ref.rollout"
    return [
        (
            rollout.name == "sglang" and rollout.mode != "server",
            f"{key}.name=sglang in the trainer's process ({key}.mode={rollout.mode})",
            f"{key}.mode=server",
        ),
        (rollout.multi_turn.enable, f"{key}.multi_turn.enable=True", f"{key}.multi_turn.enable=False"),
        (
            cfg.actor_rollout_ref.actor.strategy != "megatron"  # which the others follow
            and "megatron" in (cfg.critic.strategy, cfg.actor_rollout_ref.ref.strategy),
            "strategy=megatron for critic or ref",
            "critic.strategy=fsdp actor_rollout_ref.ref.strategy=fsdp",
        ),
    ]
