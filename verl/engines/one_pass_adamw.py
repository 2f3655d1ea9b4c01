"""The update rule for half-precision parameters on a GPU: our AdamW kernel, one launch per parameter.

What always holds: the same numbers as `TorchAdamW` up to float32 rounding; gradients are taken in the precision
they have, and parameters are written by the same kernel, so that neither float32 gradients nor a pass for
rounding is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class OnePassAdamW:
    """Parameters, their float32 masters and moments; all on one device, none of them sharded."""

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
        """Made when first asked for; the count lives on the host."""
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
