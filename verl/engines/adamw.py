"""AdamW update rules over master weights, with moments reachable by parameter name.

`TorchAdamW` is torch's; `OnePassAdamW` is our Triton kernel for half-precision parameters on one GPU, with the same
numbers up to float32 rounding; `LowMemoryAdamW` keeps 8-bit moments, or half-precision weights without masters (why
not torchao: docs/dependencies.md). Matrices decay, vectors (norms, biases) do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

BUCKET = 1 << 28
BLOCK = 256


def local(x: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor on this rank, or the tensor itself."""
    return x.to_local() if hasattr(x, "to_local") else x  # type: ignore[no-any-return]


@dataclass(frozen=True)
class AdamWOptions:
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


class TorchAdamW:
    """torch's AdamW. Half-precision gradients become float32 bucket by bucket, so that a full set never exists."""

    def __init__(self, masters: Mapping[str, torch.Tensor], options: AdamWOptions) -> None:
        self.masters = masters
        self.fused = any(master.is_cuda for master in masters.values())
        self.buckets: list[tuple[list[str], torch.optim.AdamW]] = []
        for names in _buckets(masters):
            decaying = [masters[name] for name in names if masters[name].ndim >= 2]
            others = [masters[name] for name in names if masters[name].ndim < 2]
            groups = [
                {"params": params, "weight_decay": decay}
                for params, decay in ((decaying, options.weight_decay), (others, 0.0))
                if params
            ]
            adamw = torch.optim.AdamW(
                groups, lr=0.0, fused=self.fused or None, betas=options.betas, eps=options.eps
            )
            self.buckets.append((names, adamw))
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
            move_state(adamw, device)


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """The state of a torch optimiser to `device`, but for counts."""
    for state in optimizer.state.values():
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
    """One kernel launch for all parameters reads gradients in their own precision, updates masters and moments and
    writes the parameters: neither float32 gradients nor a pass for rounding is needed. Parameters are not sharded."""

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        masters: Mapping[str, torch.Tensor],
        options: AdamWOptions,
    ) -> None:
        self.params, self.masters, self.options = params, masters, options
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._updates: dict[str, int] = dict.fromkeys(masters, 0)
        self._prepared: tuple[Mapping[str, torch.Tensor], list[tuple[int, Any]]] | None = None

    def prepare(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Send the addresses of a step to the device, which `step` with the same gradients then uses."""
        from verl.models.kernels.adamw import AdamWUpdate

        alike: dict[tuple[Any, ...], list[str]] = {}
        for name, gradient in gradients.items():
            kind = (self._updates[name] + 1, gradient.dtype, self.params[name].dtype)
            alike.setdefault(kind, []).append(name)
        self._prepared = (gradients, [])
        for (updates, *_), names in alike.items():
            firsts, seconds = zip(*(self._moments_of(name) for name in names), strict=True)
            update = AdamWUpdate(
                [self.params[name] for name in names],
                [self.masters[name] for name in names],
                firsts,
                seconds,
                [gradients[name].contiguous() for name in names],
                [self.masters[name].ndim >= 2 for name in names],
            )
            self._prepared[1].append((updates, update))

    @torch.no_grad()
    def step(self, gradients: Mapping[str, torch.Tensor], lr: float, factor: float) -> None:
        if self._prepared is None or self._prepared[0] is not gradients:
            self.prepare(gradients)
        assert self._prepared is not None
        for updates, update in self._prepared[1]:
            update.launch(updates=updates, lr=lr, factor=factor, **asdict(self.options))
        self._prepared = None
        for name in gradients:
            self._updates[name] += 1

    def _moments_of(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocated when first asked for."""
        if name not in self._moments:
            master = self.masters[name]
            self._moments[name] = (torch.zeros_like(master), torch.zeros_like(master))
        return self._moments[name]

    def state(self, name: str) -> dict[str, torch.Tensor]:
        first, second = self._moments_of(name)
        return {"exp_avg": first, "exp_avg_sq": second, "step": torch.tensor(float(self._updates[name]))}

    def has_state(self, name: str) -> bool:
        return name in self._moments

    @torch.no_grad()
    def load(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        for own, key in zip(self._moments_of(name), ("exp_avg", "exp_avg_sq"), strict=True):
            own.copy_(state[key])
        self._updates[name] = int(state["step"])
        self._prepared = None

    def move(self, device: torch.device) -> None:
        for name, (first, second) in self._moments.items():
            self._moments[name] = (first.to(device), second.to(device))
        self._prepared = None


def _blocks(x: torch.Tensor) -> torch.Tensor:
    flat = x.flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


class Quantised:
    """A float32 tensor stored as 8-bit codes with one float32 scale per `BLOCK` numbers. A code is the square root of a
    number's share of the block's largest, so that small numbers keep their digits."""

    def __init__(self, like: torch.Tensor, signed: bool) -> None:
        blocks = -(-like.numel() // BLOCK)
        self.shape, self.signed = like.shape, signed
        self.levels = 127 if signed else 255
        self.codes = torch.zeros(
            blocks, BLOCK, dtype=torch.int8 if signed else torch.uint8, device=like.device
        )
        self.scales = torch.zeros(blocks, 1, dtype=torch.float32, device=like.device)

    def dequantize(self) -> torch.Tensor:
        codes = self.codes.float()
        flat = (codes * codes.abs() / self.levels**2 * self.scales).flatten()
        return flat[: self.shape.numel()].view(self.shape)

    def quantize_(self, x: torch.Tensor) -> None:
        """A dequantised value gives the same code again. What is not signed divides a step: it does not become 0."""
        blocks = _blocks(x)
        self.scales = blocks.abs().amax(dim=1, keepdim=True)
        roots = (blocks.abs() / self.scales.clamp(min=1e-38)).sqrt_().mul_(self.levels).round_()
        roots.clamp_(0 if self.signed else 1, self.levels)
        self.codes = roots.copysign_(blocks).to(self.codes.dtype)

    def move(self, device: torch.device) -> None:
        self.codes, self.scales = self.codes.to(device), self.scales.to(device)


def round_stochastically(x: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """float32 -> bfloat16 or float16, to the nearer neighbour with the larger probability: right on average."""
    if dtype == torch.bfloat16:
        # The upper half of float32: adding a random lower half and cutting it off does it.
        bits = x.contiguous().view(torch.int32)
        noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
        rounded = ((bits + noise) & ~0xFFFF).view(torch.float32)
        return torch.where(torch.isfinite(x), rounded, x).to(dtype)
    # In units of the distance between neighbours, which is the same for all numbers below the smallest normal one.
    limits = torch.finfo(dtype)
    exponent = torch.frexp(x).exponent.clamp(min=math.frexp(limits.tiny)[1])
    unit = torch.ldexp(torch.full_like(x, limits.eps / 2), exponent)
    steps = x / unit
    below = steps.floor()
    draw = torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    rounded = (below + (draw < steps - below)) * unit
    return torch.where(x.abs() <= limits.max, rounded, x).to(dtype)


class LowMemoryAdamW:
    """AdamW with 8-bit moments and, with stochastic rounding, half-precision weights without a master copy.

    Arithmetic is float32, only what is stored between steps is smaller. The second moment is stored as its square root.
    Stochastic rounding makes updates below the rounding step right on average instead of lost. A state that is saved
    and loaded gives the same codes again, so resuming is exact."""

    def __init__(
        self, masters: Mapping[str, torch.Tensor], options: AdamWOptions, int8: bool, seed: int
    ) -> None:
        self.masters, self.options, self.int8, self.seed = masters, options, int8, seed
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
        store[name].quantize_(value)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, torch.Tensor], lr: float, factor: float) -> None:
        beta1, beta2 = self.options.betas
        for at, (name, gradient) in enumerate(gradients.items()):
            master = local(self.masters[name])
            grad = local(gradient).float() * factor
            self._steps[name] += 1
            count = self._steps[name]
            first = self._read(self._first, name).lerp(grad, 1 - beta1)
            second = self._read(self._root_second, name).square().mul_(beta2)
            second.addcmul_(grad, grad, value=1 - beta2)
            self._write(self._first, name, first, signed=True)
            self._write(self._root_second, name, second.sqrt(), signed=False)
            root = (second / (1 - beta2**count)).sqrt_().add_(self.options.eps)
            weight = master.float()
            if master.ndim >= 2:
                weight = weight * (1 - lr * self.options.weight_decay)
            weight = weight.addcdiv(first, root, value=-lr / (1 - beta1**count))
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
