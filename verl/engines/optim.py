"""AdamW over float32 master weights, whatever the parameters' own precision.

What always holds: the update, its moments and the sum of gradients over micro-batches are float32; a float32
parameter is its own master, so nothing is copied; a half-precision parameter gets a float32 master and is
overwritten in place after each step, so that whoever shares the tensor (the rollout engine) sees the new weights.
A step whose gradient is not finite changes nothing.

Matrices decay, vectors (norms, biases) do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from verl.engines.schedule import Schedule


def _local(x: torch.Tensor) -> torch.Tensor:
    """A sharded tensor's own part, or the tensor itself."""
    return x.to_local() if hasattr(x, "to_local") else x  # type: ignore[no-any-return]


class MasterAdamW:
    """The optimiser of one rank: its parameters (or shards), their masters, the schedule."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        schedule: Schedule,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        grad_clip: float = 0.0,
    ) -> None:
        self.schedule = schedule
        self.grad_clip = grad_clip
        self.step_count = 0
        self.params: dict[str, nn.Parameter] = dict(named_parameters)
        self.masters: dict[str, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        for name, param in self.params.items():
            if param.dtype in (torch.float32, torch.float64):
                self.masters[name] = param
            else:
                self.masters[name] = param.detach().float()
                self._hooks.append(
                    param.register_post_accumulate_grad_hook(self._collector(self.masters[name]))
                )
        groups = [
            {"params": [m for m in self.masters.values() if m.ndim >= 2], "weight_decay": weight_decay},
            {"params": [m for m in self.masters.values() if m.ndim < 2], "weight_decay": 0.0},
        ]
        on_cuda = any(master.is_cuda for master in self.masters.values())
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]] or [{"params": [torch.zeros(0)]}],
            lr=schedule.at(0),
            betas=betas,
            eps=eps,
            fused=on_cuda or None,
        )

    @staticmethod
    def _collector(master: torch.Tensor) -> Any:
        """Move a half-precision gradient into the master's float32 sum as soon as autograd has made it."""

        def collect(param: torch.Tensor) -> None:
            if param.grad is None:
                return
            if master.grad is None:
                master.grad = param.grad.float()
            else:
                master.grad.add_(param.grad)
            param.grad = None

        return collect

    def gradients(self) -> list[torch.Tensor]:
        return [master.grad for master in self.masters.values() if master.grad is not None]

    def gradient_norm(self) -> torch.Tensor:
        """Over all shards; a zero-dimensional tensor on the device."""
        grads = self.gradients()
        if not grads:
            return torch.zeros(())
        norm = torch.nn.utils.get_total_norm(grads)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def step(self) -> dict[str, float]:
        """Clip, check, update, clear gradients. The one wait for the device is reading the norm."""
        lr = self.schedule.at(self.step_count)
        norm = float(self.gradient_norm())
        finite = norm == norm and norm not in (float("inf"), float("-inf"))
        if finite:
            if self.grad_clip > 0 and norm > self.grad_clip:
                torch._foreach_mul_([_local(g) for g in self.gradients()], self.grad_clip / (norm + 1e-6))
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
            self.write_back()
            self.step_count += 1
        self.zero_grad()
        return {"grad_norm": norm, "lr": lr, "skipped": 0.0 if finite else 1.0}

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the half-precision parameters, in place."""
        pairs = [(p, self.masters[n]) for n, p in self.params.items() if self.masters[n] is not p]
        if pairs:
            torch._foreach_copy_([_local(p.data) for p, _ in pairs], [_local(m) for _, m in pairs])

    def zero_grad(self) -> None:
        for name, param in self.params.items():
            param.grad = None
            self.masters[name].grad = None

    def _state_of(self, master: torch.Tensor) -> dict[str, Any]:
        """AdamW makes its state at the first step; a checkpoint needs it to exist before."""
        state: dict[str, Any] = self.adamw.state[master]
        if not state:
            on_device = bool(self.adamw.param_groups[0].get("fused"))
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device if on_device else "cpu")
            state["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Moments by parameter name; the masters are the engine's `model` entry."""
        moments = {name: self._state_of(master) for name, master in self.masters.items()}
        return {
            "exp_avg": {name: state["exp_avg"].detach() for name, state in moments.items()},
            "exp_avg_sq": {name: state["exp_avg_sq"].detach() for name, state in moments.items()},
            "updates": {name: state["step"].detach() for name, state in moments.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, master in self.masters.items():
            own = self._state_of(master)
            own["exp_avg"].copy_(state["exp_avg"][name])
            own["exp_avg_sq"].copy_(state["exp_avg_sq"][name])
            own["step"].copy_(state["updates"][name])

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
