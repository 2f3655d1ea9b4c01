"""AdamW with 8-bit moments and, with stochastic rounding, half-precision weights without a master copy.

Arithmetic is float32, only what is kept between steps is smaller. A block of `BLOCK` numbers shares one float32 scale.
The second moment is kept as its square root and rounded up, so that rounding can only make a step smaller. Stochastic
rounding makes updates below the rounding step right on average instead of lost. A state that is saved and loaded gives
the same codes again, so resuming is exact. (Why not torchao: docs/dependencies.md.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from verl.engines.adamw import local

BLOCK = 256


def _blocks(x: torch.Tensor) -> torch.Tensor:
    flat = x.flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


class Quantised:
    """A float32 tensor kept as 8-bit codes and one scale per block."""

    def __init__(self, like: torch.Tensor, signed: bool) -> None:
        blocks = -(-like.numel() // BLOCK)
        self.shape = like.shape
        self.levels = 127 if signed else 255
        self.codes = torch.zeros(
            blocks, BLOCK, dtype=torch.int8 if signed else torch.uint8, device=like.device
        )
        self.scales = torch.zeros(blocks, 1, dtype=torch.float32, device=like.device)

    def dequantize(self) -> torch.Tensor:
        flat = (self.codes.float() * self.scales).flatten()
        return flat[: self.shape.numel()].view(self.shape)

    def quantize_(self, x: torch.Tensor, up: bool = False) -> None:
        blocks = _blocks(x)
        self.scales = blocks.abs().amax(dim=1, keepdim=True) / self.levels
        ratio = blocks / self.scales.clamp(min=1e-38)
        # A dequantised value must give the same code again: hence the small step down before rounding up.
        self.codes = (
            (ratio.sub_(1e-3).ceil_() if up else ratio.round_())
            .clamp_(-self.levels, self.levels)
            .to(self.codes.dtype)
        )

    def move(self, device: torch.device) -> None:
        self.codes, self.scales = self.codes.to(device), self.scales.to(device)


def round_stochastically(x: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """float32 -> bfloat16, to the nearer neighbour with the larger probability.

    bfloat16 is the upper half of float32: adding a random lower half and cutting it off does it."""
    if dtype != torch.bfloat16:
        return x.to(dtype)
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    rounded = ((bits + noise) & ~0xFFFF).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x).to(dtype)


class LowMemoryAdamW:
    def __init__(
        self,
        masters: Mapping[str, torch.Tensor],
        weight_decay: float,
        *,
        betas: tuple[float, float],
        eps: float,
        int8: bool,
        seed: int,
    ) -> None:
        self.masters, self.weight_decay, self.betas, self.eps = masters, weight_decay, betas, eps
        self.int8 = int8
        self.seed = seed
        self._first: dict[str, Any] = {}
        self._root_second: dict[str, Any] = {}
        self._steps: dict[str, int] = dict.fromkeys(masters, 0)

    def _read(self, store: dict[str, Any], name: str) -> torch.Tensor:
        if name not in store:
            return torch.zeros_like(local(self.masters[name]), dtype=torch.float32)
        stored = store[name]
        return stored.dequantize() if isinstance(stored, Quantised) else stored  # type: ignore[no-any-return]

    def _write(self, store: dict[str, Any], name: str, value: torch.Tensor, signed: bool) -> None:
        if not self.int8:
            store[name] = value
            return
        if name not in store:
            store[name] = Quantised(value, signed)
        store[name].quantize_(value, up=not signed)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, torch.Tensor], lr: float, factor: float) -> None:
        for at, (name, gradient) in enumerate(gradients.items()):
            master = local(self.masters[name])
            grad = local(gradient).float() * factor
            self._steps[name] += 1
            count = self._steps[name]
            first = self._read(self._first, name).lerp(grad, 1 - self.betas[0])
            second = self._read(self._root_second, name).square().mul_(self.betas[1])
            second.addcmul_(grad, grad, value=1 - self.betas[1])
            self._write(self._first, name, first, signed=True)
            self._write(self._root_second, name, second.sqrt(), signed=False)
            root = (second / (1 - self.betas[1] ** count)).sqrt_().add_(self.eps)
            weight = master.float()
            if master.ndim >= 2:
                weight = weight * (1 - lr * self.weight_decay)
            weight = weight.addcdiv(first, root, value=-lr / (1 - self.betas[0] ** count))
            if master.dtype in (torch.float32, torch.float64):
                master.copy_(weight)
            else:
                generator = torch.Generator(master.device).manual_seed(self.seed + 1_000_003 * count + at)
                master.copy_(round_stochastically(weight, master.dtype, generator))

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """In float32 and in the shape of the weight: a checkpoint does not depend on `moments` or on sharding."""
        master = self.masters[name]
        return {
            "exp_avg": _sharded_like(master, self._read(self._first, name)),
            "exp_avg_sq": _sharded_like(master, self._read(self._root_second, name).square()),
            "step": torch.tensor(float(self._steps[name])),
        }

    def has_state(self, name: str) -> bool:
        return name in self._first

    @torch.no_grad()
    def load(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        self._write(self._first, name, local(state["exp_avg"]).clone(), signed=True)
        self._write(self._root_second, name, local(state["exp_avg_sq"]).sqrt(), signed=False)
        self._steps[name] = int(state["step"])

    def move(self, device: torch.device) -> None:
        for store in (self._first, self._root_second):
            for name, stored in store.items():
                if isinstance(stored, Quantised):
                    stored.move(device)
                else:
                    store[name] = stored.to(device)


def _sharded_like(master: Any, shard: torch.Tensor) -> torch.Tensor:
    """A rank's shard as the same kind of DTensor as the weight."""
    if not hasattr(master, "to_local"):
        return shard
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard, master.device_mesh, master.placements, shape=master.shape, stride=master.stride()
    )
