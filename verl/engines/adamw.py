"""AdamW update rules over master weights, with moments reachable by parameter name.

`TorchAdamW` is torch's; `OnePassAdamW` is our Triton kernel for half-precision parameters on one GPU, with the same
numbers up to float32 rounding. Matrices decay, vectors (norms, biases) do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

BUCKET = 1 << 28


def local(x: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor on this rank, or the tensor itself."""
    return x.to_local() if hasattr(x, "to_local") else x  # type: ignore[no-any-return]


class TorchAdamW:
    """torch's AdamW. Half-precision gradients become float32 bucket by bucket, so that a full set never exists."""

    def __init__(self, masters: Mapping[str, torch.Tensor], weight_decay: float, **options: Any) -> None:
        self.masters = masters
        self.fused = any(master.is_cuda for master in masters.values())
        self.buckets: list[tuple[list[str], torch.optim.AdamW]] = []
        for names in _buckets(masters):
            groups = [
                {"params": [masters[n] for n in names if masters[n].ndim >= 2], "weight_decay": weight_decay},
                {"params": [masters[n] for n in names if masters[n].ndim < 2], "weight_decay": 0.0},
            ]
            full = [group for group in groups if group["params"]]
            self.buckets.append((names, torch.optim.AdamW(full, lr=0.0, fused=self.fused or None, **options)))
        self._optimizer_of = {name: adamw for names, adamw in self.buckets for name in names}

    def step(self, gradients: Mapping[str, torch.Tensor], lr: float, factor: float) -> None:
        """One update with every gradient times `factor`."""
        for names, adamw in self.buckets:
            for group in adamw.param_groups:
                group["lr"] = lr
            present = [name for name in names if name in gradients]
            for name in present:
                master = self.masters[name]
                master.grad = gradients[name].to(master.dtype)
            if not present:
                continue
            if self.fused and factor != 1.0:
                # The fused kernel divides by the scale itself, which saves a pass over the gradients.
                device = local(self.masters[present[0]]).device
                adamw.grad_scale = torch.full((), 1.0 / factor, device=device)  # type: ignore[attr-defined]
                adamw.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
            elif factor != 1.0:
                torch._foreach_mul_(
                    [local(g) for n in present if (g := self.masters[n].grad) is not None], factor
                )
            adamw.step()
            adamw.grad_scale = adamw.found_inf = None  # type: ignore[attr-defined]
            for name in present:
                self.masters[name].grad = None

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Allocated when first asked for: a checkpoint may come before the first step."""
        master = self.masters[name]
        state: dict[str, Any] = self._optimizer_of[name].state[master]
        if not state:
            state["step"] = torch.zeros(
                (), dtype=torch.float32, device=local(master).device if self.fused else "cpu"
            )
            state["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format)
        return state

    def has_state(self, name: str) -> bool:
        return bool(self._optimizer_of[name].state.get(self.masters[name]))

    @torch.no_grad()
    def load(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        for key, value in self.state(name).items():
            value.copy_(state[key])

    def move(self, device: torch.device) -> None:
        for _, adamw in self.buckets:
            for state in adamw.state.values():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.ndim > 0:
                        state[key] = value.to(device)


def _buckets(masters: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names in order, at most `BUCKET` numbers of this rank per bucket."""
    buckets: list[list[str]] = []
    free = 0
    for name, master in masters.items():
        size = local(master).numel()
        if not buckets or size > free:
            buckets.append([])
            free = BUCKET
        buckets[-1].append(name)
        free -= size
    return buckets


class OnePassAdamW:
    """One kernel launch per parameter reads the gradient in its own precision, updates master and moments and writes
    the parameter: neither float32 gradients nor a pass for rounding is needed. Parameters are not sharded."""

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        masters: Mapping[str, torch.Tensor],
        weight_decay: float,
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self.params, self.masters = params, masters
        self.weight_decay, self.betas, self.eps = weight_decay, betas, eps
        self._state: dict[str, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, torch.Tensor], lr: float, factor: float) -> None:
        from verl.models.kernels.adamw import adamw_step

        for name, gradient in gradients.items():
            master, state = self.masters[name], self.state(name)
            state["step"] += 1
            adamw_step(
                self.params[name].data,
                master,
                state["exp_avg"],
                state["exp_avg_sq"],
                gradient.contiguous(),
                updates=int(state["step"]),
                lr=lr,
                betas=self.betas,
                eps=self.eps,
                weight_decay=self.weight_decay if master.ndim >= 2 else 0.0,
                factor=factor,
            )

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Allocated when first asked for; the step count is on the host."""
        if name not in self._state:
            master = self.masters[name]
            self._state[name] = {
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
                "step": torch.zeros(()),
            }
        return self._state[name]

    def has_state(self, name: str) -> bool:
        return name in self._state

    @torch.no_grad()
    def load(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        for key, value in self.state(name).items():
            value.copy_(state[key])

    def move(self, device: torch.device) -> None:
        for state in self._state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].to(device)
