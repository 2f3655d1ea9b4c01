"""Put an FSDP engine together from config sections: load or take the model, prepare it, make the optimiser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.engines.fsdp import FSDPEngine
from verl.engines.optim import MasterAdamW
from verl.engines.schedule import Schedule
from verl.engines.settings import EngineSettings, Kind, read_settings
from verl.errors import ModelError
from verl.models.loading import disable_dropout, load_causal_lm, load_value_model
from verl.models.value_model import ValueModel


def build_fsdp(
    kind: Kind,
    model_cfg: Any,
    role_cfg: Any,
    *,
    model: nn.Module | None,
    device: str | torch.device,
    total_steps: int | None,
    seed: int,
    log_prob_cfg: Any = None,
    max_skipped_steps: int = 3,
    bad_batch_dir: Path | None = None,
) -> FSDPEngine:
    """Strategies `fsdp` and `fsdp2`; arguments as in `verl.engines.build_engine`."""
    device = torch.device(device)
    settings = read_settings(
        kind,
        model_cfg,
        role_cfg,
        device=device,
        log_prob=log_prob_cfg,
        max_skipped_steps=max_skipped_steps,
        bad_batch_dir=bad_batch_dir,
        seed=seed,
    )
    torch.manual_seed(seed)
    module = _module(kind, model_cfg, settings, model, device)
    if kind == "ref":
        return FSDPEngine(module, settings, device=device)
    optim = role_cfg.optim

    def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> MasterAdamW:
        return MasterAdamW(
            named,
            schedule=Schedule.from_config(optim, total_steps),
            weight_decay=float(optim.weight_decay),
            betas=(float(optim.betas[0]), float(optim.betas[1])),
            eps=float(optim.eps),
            grad_clip=settings.grad_clip,
        )

    return FSDPEngine(module, settings, device=device, make_optimizer=make_optimizer)


def _module(
    kind: Kind, model_cfg: Any, settings: EngineSettings, model: Any, device: torch.device
) -> nn.Module:
    if model is None:
        if not model_cfg.path:
            raise ModelError(
                "no model is given; set actor_rollout_ref.model.path to a Hugging Face folder or name"
            )
        load = load_value_model if kind == "critic" else load_causal_lm
        return load(
            model_cfg.path,
            dtype=settings.dtype,
            device=device,
            trust_remote_code=bool(model_cfg.trust_remote_code),
            override_config=dict(model_cfg.override_config),
        )
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if kind == "critic" and not isinstance(model, ValueModel):
        model = ValueModel(getattr(model, "base_model", model))
    disable_dropout(model)
    if model_cfg.dtype == "auto":
        return model.to(device)
    return model.to(device=device, dtype=settings.dtype)
