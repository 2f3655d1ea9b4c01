"""A user's own torch optimiser in the place of the engine's."""

from __future__ import annotations

from typing import Any

import torch

from verl.engines.optim import MasterAdamW
from verl.engines.schedule import Schedule


class GivenOptimizer(MasterAdamW):
    """Steps an optimiser that was made outside. Parameters are their own masters: its arithmetic is its own."""

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer, grad_clip: float) -> None:
        self.optimizer = optimizer
        self.grad_clip = grad_clip
        self.step_count = 0
        self.params = {name: p for name, p in engine.model.named_parameters() if p.requires_grad}
        self.masters = dict(self.params)
        self.schedule = Schedule.constant(0.0)
        self._hooks = []

    @classmethod
    def install(cls, engine: Any, optimizer: torch.optim.Optimizer, grad_clip: float) -> None:
        engine.optimizer.close()
        engine.optimizer = cls(engine, optimizer, grad_clip)

    def step(self) -> dict[str, float]:
        norm = float(self.gradient_norm())
        finite = torch.isfinite(torch.tensor(norm)).item()
        if finite:
            if self.grad_clip > 0 and norm > self.grad_clip:
                torch._foreach_mul_(self.gradients(), self.grad_clip / (norm + 1e-6))
            self.optimizer.step()
            self.step_count += 1
        self.zero_grad()
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        return {"grad_norm": norm, "lr": float(lr), "skipped": 0.0 if finite else 1.0}
