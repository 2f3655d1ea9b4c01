"""What an engine takes from the config sections."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from verl.config.capabilities import strategy_spec
from verl.engines import budget
from verl.engines.budget import MicroBatchSize
from verl.engines.microbatch_runner import RunnerOptions
from verl.engines.offload import ActivationOffload
from verl.engines.optim import Schedule
from verl.errors import ModelError
from verl.models.attention import Backend
from verl.models.loading import parameter_dtype

Kind = Literal["actor", "ref", "critic", "reward"]


@dataclass
class EngineSettings:
    kind: Kind
    model: Any
    """The model section."""
    role: Any
    """The actor, ref or critic section."""
    dtype: torch.dtype
    train_size: MicroBatchSize
    forward_size: MicroBatchSize
    device: torch.device
    schedule: Schedule | None
    """Of the learning rate; None for a frozen model."""
    max_skipped_steps: int = 3
    bad_batch_dir: Path | None = None
    seed: int = 0
    exact: bool = False
    """Forward passes have the bits of those that generate (`verl.models.exact`)."""
    rollout_memory: float = 0.0
    """The share of the device that an engine may fill while it generates on it."""

    @property
    def trained(self) -> bool:
        return self.kind != "ref"

    @property
    def scalar(self) -> bool:
        """Whether the model gives one number per token instead of log-probs."""
        return self.kind in ("critic", "reward")

    @property
    def lora(self) -> bool:
        return self.trained and self.model.lora_rank > 0

    def attention_backend(self, config: Any) -> Backend:
        """`model.attention_backend`, which must be able to compute the attention of a model with this config."""
        backend: Backend = self.model.attention_backend
        if backend != "auto" or self.device.type == "cuda":
            from verl.models.attention_backends import check_backend

            check_backend(backend, config.get_text_config(), self.device, self.dtype)
        return backend

    def load_options(self) -> dict[str, Any]:
        """How `model.path` is opened; an error without one."""
        if not self.model.path:
            raise ModelError("no model: set actor_rollout_ref.model.path to a Hugging Face folder or name")
        options = {
            "dtype": self.dtype,
            "trust_remote_code": bool(self.model.trust_remote_code),
            "override_config": dict(self.model.override_config),
        }
        return {**options, "reward": self.kind == "reward"} if self.scalar else options

    def optimizer_options(self) -> dict[str, Any]:
        """Of `MasterAdamW`, besides its parameters."""
        optim = self.role.optim
        return {
            "schedule": self.schedule,
            "weight_decay": float(optim.weight_decay),
            "betas": (float(optim.betas[0]), float(optim.betas[1])),
            "eps": float(optim.eps),
            "momentum": float(optim.momentum),
            "grad_clip": float(self.role.grad_clip),
            "moments": optim.moments,
            "stochastic_rounding": bool(optim.stochastic_rounding),
            "seed": self.seed,
            "scale_loss": self.dtype == torch.float16,
        }

    def runner_options(self, layer_weights: float, **more: Any) -> RunnerOptions:
        """For a model with so many weights in each decoder layer; `more`: further fields."""
        on_gpu = self.device.type == "cuda"
        offloads = on_gpu and self.trained and self.model.enable_activation_offload
        section = getattr(self.role, strategy_spec(self.role.strategy).section)
        return RunnerOptions(
            self.train_size,
            self.forward_size,
            label=self.kind,
            max_tokens=budget.best_tokens(layer_weights) if on_gpu else budget.CAP_CPU,
            activation_offload=ActivationOffload(self.device) if offloads else None,
            share_prefixes=bool(self.model.share_prefixes),
            moments_on_host=bool(section.optimizer_offload),
            **more,
        )


def _size(sequences: int | None, dynamic: bool, tokens: int | None) -> MicroBatchSize:
    return MicroBatchSize(max_tokens=tokens) if dynamic else MicroBatchSize(max_sequences=sequences)


def _micro_batch_sizes(kind: Kind, role: Any, log_prob: Any) -> tuple[MicroBatchSize, MicroBatchSize]:
    """For training and for passes without gradient. `log_prob` is the section whose keys are for log-probs (rollout
    or ref); without one they are split as in training."""
    forward = None
    if log_prob is not None:
        forward = _size(
            log_prob.log_prob_micro_batch_size_per_gpu,
            log_prob.log_prob_use_dynamic_bsz,
            log_prob.log_prob_max_token_len_per_gpu,
        )
        if kind == "ref":
            return forward, forward
    tokens = role.ppo_max_token_len_per_gpu
    train = _size(role.ppo_micro_batch_size_per_gpu, role.use_dynamic_bsz, tokens)
    if kind in ("critic", "reward"):
        forward = _size(role.forward_micro_batch_size_per_gpu, role.use_dynamic_bsz, tokens)
    return train, forward or train


def read_settings(
    kind: Kind,
    model: Any,
    role: Any,
    *,
    device: str | torch.device,
    log_prob_cfg: Any = None,
    total_steps: int | None = None,
    **options: Any,
) -> EngineSettings:
    """From the arguments of `verl.engines.build_engine`; `options` are further fields of `EngineSettings`."""
    device = torch.device(device)
    train, forward = _micro_batch_sizes(kind, role, role if kind == "ref" else log_prob_cfg)
    schedule = None if kind == "ref" else Schedule.from_config(role.optim, total_steps)
    dtype = parameter_dtype(model.dtype, device)
    options.setdefault("rollout_memory", float(getattr(log_prob_cfg, "gpu_memory_utilization", 0.0)))
    return EngineSettings(kind, model, role, dtype, train, forward, device, schedule, **options)
