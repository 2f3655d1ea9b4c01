"""Muon: the matrices of the decoder layers move by their orthogonalised momentum, all other weights by AdamW."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from verl.engines.adamw import AdamWOptions, TorchAdamW, local

COEFFICIENTS, ROUNDS = (3.4445, -4.775, 2.0315), 5
"""Of the Newton-Schulz iteration, with which singular values end between about 0.7 and 1.2."""
RMS = 0.2
"""Of an update, about that of AdamW: `lr` and `weight_decay` mean the same for both."""


def hidden_matrices(layers: Iterable[nn.Module]) -> set[int]:
    """The ids of parameters that Muon moves: matrices, and stacks of them, but no weights of convolutions."""
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    modules = [part for layer in layers for part in layer.modules() if not isinstance(part, conv)]
    return {id(weight) for part in modules for weight in part.parameters(recurse=False) if weight.ndim >= 2}


def orthogonalised(x: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with orthogonal rows or columns, approximately, in bfloat16; each matrix of a stack alone."""
    tall = x.size(-2) > x.size(-1)
    y = (x.mT if tall else x).bfloat16()
    shape = y.shape
    y = y.reshape(-1, *shape[-2:])
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    y = y.reshape(shape)
    return y.mT if tall else y


def _orthogonalised_shard(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part, of its part of the whole matrix; collective where `like` is sharded."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(like, DTensor):
        return orthogonalised(x)
    mesh, placements = like.device_mesh, like.placements
    part = DTensor.from_local(
        x.bfloat16(), mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    whole = DTensor.from_local(
        orthogonalised(part.full_tensor()), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    return whole.redistribute(placements=placements).to_local()


class Muon:
    """Update rule over masters: Muon for `matrices`, AdamW for the others."""

    def __init__(
        self,
        masters: Mapping[str, torch.Tensor],
        matrices: Collection[str],
        options: AdamWOptions,
        momentum: float,
    ) -> None:
        self.masters, self.momentum, self.weight_decay = masters, momentum, options.weight_decay
        self.matrices = [name for name in masters if name in matrices]
        self._momenta: dict[str, torch.Tensor] = {}
        self.others = TorchAdamW({n: m for n, m in masters.items() if n not in matrices}, options)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, torch.Tensor], lr: float, factor: float) -> None:
        """One update with every gradient times `factor`."""
        self.others.step({n: g for n, g in gradients.items() if n in self.others.masters}, lr, factor)
        for name in self.matrices:
            if name not in gradients:
                continue
            master = self.masters[name]
            gradient = local(gradients[name]).to(master.dtype) * factor
            momentum = local(self._momentum(name)).lerp_(gradient, 1 - self.momentum)
            update = _orthogonalised_shard(gradient.lerp_(momentum, self.momentum), master)
            weight, size = local(master), RMS * math.sqrt(max(master.shape[-2:]))
            weight.mul_(1 - lr * self.weight_decay).add_(update.to(weight.dtype), alpha=-lr * size)

    def _momentum(self, name: str) -> torch.Tensor:
        """Allocated when first asked for."""
        if name not in self._momenta:
            self._momenta[name] = torch.zeros_like(self.masters[name].detach())
        return self._momenta[name]

    def state(self, name: str) -> dict[str, torch.Tensor]:
        return self.others.state(name) if name in self.others.masters else {"momentum": self._momentum(name)}

    def has_state(self, name: str) -> bool:
        return name in self._momenta or (name in self.others.masters and self.others.has_state(name))

    @torch.no_grad()
    def load(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        if name in self.others.masters:
            self.others.load(name, state)
        else:
            self._momentum(name).copy_(state["momentum"])

    def move(self, device: torch.device) -> None:
        self._momenta = {name: momentum.to(device) for name, momentum in self._momenta.items()}
        self.others.move(device)
