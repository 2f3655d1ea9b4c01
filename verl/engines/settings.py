"""Engine settings, read once from the config sections."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from verl.engines.microbatches import MicroBatchSize
from verl.errors import ConfigError
from verl.models.dtypes import parameter_dtype

Kind = Literal["actor", "ref", "critic"]


@dataclass(frozen=True)
class Lora:
    rank: int
    alpha: int
    target_modules: tuple[str, ...]


@dataclass(frozen=True)
class Sharding:
    param_offload: bool = False
    optimizer_offload: bool = False
    offload_policy: bool = False
    fsdp_size: int = -1
    reshard_after_forward: bool = True


@dataclass
class EngineSettings:
    kind: Kind
    dtype: torch.dtype
    train_size: MicroBatchSize
    forward_size: MicroBatchSize
    packed: bool = True
    gradient_checkpointing: bool = False
    activation_offload: bool = False
    torch_compile: bool = False
    freeze_embeddings: bool = False
    lora: Lora | None = None
    sharding: Sharding = field(default_factory=Sharding)
    grad_clip: float = 0.0
    max_skipped_steps: int = 3
    bad_batch_dir: Path | None = None
    seed: int = 0


def _size(sequences: int | None, dynamic: bool, tokens: int | None) -> MicroBatchSize:
    return MicroBatchSize(max_tokens=tokens) if dynamic else MicroBatchSize(max_sequences=sequences)


def _micro_batch_sizes(kind: Kind, role: Any, log_prob: Any) -> tuple[MicroBatchSize, MicroBatchSize]:
    """For training and for passes without gradient. `log_prob` is the section whose keys are for the actor's
    log-probs (rollout); without one they are split as in training."""
    if kind == "ref":
        forward = _size(
            role.log_prob_micro_batch_size_per_gpu,
            role.log_prob_use_dynamic_bsz,
            role.log_prob_max_token_len_per_gpu,
        )
        return forward, forward
    train = _size(role.ppo_micro_batch_size_per_gpu, role.use_dynamic_bsz, role.ppo_max_token_len_per_gpu)
    if kind == "critic":
        return train, _size(
            role.forward_micro_batch_size_per_gpu,
            role.use_dynamic_bsz,
            role.ppo_max_token_len_per_gpu,
        )
    if log_prob is None:
        return train, train
    return train, _size(
        log_prob.log_prob_micro_batch_size_per_gpu,
        log_prob.log_prob_use_dynamic_bsz,
        log_prob.log_prob_max_token_len_per_gpu,
    )


def read_settings(
    kind: Kind,
    model: Any,
    role: Any,
    *,
    device: torch.device,
    log_prob: Any = None,
    max_skipped_steps: int = 3,
    bad_batch_dir: Path | None = None,
    seed: int = 0,
) -> EngineSettings:
    """From the model section and the role's section (actor, ref or critic)."""
    train, forward = _micro_batch_sizes(kind, role, log_prob)
    trained = kind != "ref"
    lora = None
    if model.lora_rank > 0 and trained:
        if model.peft_type != "lora":
            raise ConfigError(f"model.peft_type={model.peft_type!r} is unknown; allowed: lora")
        lora = Lora(int(model.lora_rank), int(model.lora_alpha), tuple(model.target_modules))
    fsdp = role.fsdp_config
    return EngineSettings(
        kind=kind,
        dtype=parameter_dtype(model.dtype, device),
        train_size=train,
        forward_size=forward,
        packed=bool(model.use_remove_padding),
        gradient_checkpointing=trained and bool(model.enable_gradient_checkpointing),
        activation_offload=trained and bool(model.enable_activation_offload),
        torch_compile=bool(getattr(role, "use_torch_compile", False)),
        freeze_embeddings=trained and bool(model.freeze_embeddings),
        lora=lora,
        sharding=Sharding(
            bool(fsdp.param_offload),
            bool(fsdp.optimizer_offload),
            bool(fsdp.offload_policy),
            int(fsdp.fsdp_size),
            bool(fsdp.reshard_after_forward),
        ),
        grad_clip=float(role.grad_clip) if trained else 0.0,
        max_skipped_steps=max_skipped_steps,
        bad_batch_dir=bad_batch_dir,
        seed=seed,
    )
