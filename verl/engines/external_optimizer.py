"""A user's own torch optimiser in the place of the engine's.

What always holds: the user's optimiser does the arithmetic, at its own learning rate and on the parameters
themselves; clipping, the finite check and the counting are the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from verl.engines.optim import MasterAdamW
from verl.engines.schedule import Schedule
from verl.errors import ConfigError


class _GivenRule:
    """The user's optimiser with the surface of an update rule."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Mapping[str, torch.Tensor]) -> None:
        self.optimizer, self.params = optimizer, params

    def step(self, gradients: Mapping[str, torch.Tensor], lr: float, factor: float) -> None:
        for name, gradient in gradients.items():
            self.params[name].grad = (gradient * factor).to(self.params[name].dtype)
        self.optimizer.step()

    def move(self, device: torch.device) -> None:
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    state[key] = value.to(device)


class ExternalOptimizer(MasterAdamW):
    """Steps an optimiser that was made outside; parameters are their own masters."""

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer, grad_clip: float) -> None:
        named = [(name, param) for name, param in engine.model.named_parameters() if param.requires_grad]
        known = {id(param) for group in optimizer.param_groups for param in group["params"]}
        strange = [name for name, param in named if id(param) not in known]
        if len(strange) == len(named):
            raise ConfigError(
                "the optimizer given holds none of the model's parameters; make it from model.parameters() of the "
                "very model that is handed over"
            )
        super().__init__([], schedule=Schedule.constant(0.0), grad_clip=grad_clip, stochastic_rounding=True)
        self.params = dict(named)
        self.masters = dict(named)
        self.given = optimizer
        self.rule = _GivenRule(optimizer, self.params)  # type: ignore[assignment]

    @classmethod
    def install(cls, engine: Any, optimizer: torch.optim.Optimizer, grad_clip: float) -> None:
        """Put the user's optimiser into an engine that was built with its own."""
        engine.optimizer.close()
        engine.optimizer = cls(engine, optimizer, grad_clip)

    def step(self) -> dict[str, float]:
        result = super().step()
        return {**result, "lr": float(max(group["lr"] for group in self.given.param_groups))}

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given.load_state_dict(state["given"])
