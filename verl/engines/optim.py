"""AdamW over float32 master weights, whatever the parameters' own precision.

What always holds: the update, its moments and the sum of gradients over micro-batches are float32; a float32
parameter is its own master, so nothing is copied; a half-precision parameter gets a float32 master and is
overwritten in place after each step, so that whoever shares the tensor (the rollout engine) sees the new weights.
A step whose gradient is not finite changes nothing. (`moments` and `stochastic_rounding` trade some of this for
memory, and only when asked to.)

Matrices decay, vectors (norms, biases) do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from verl.engines.low_memory_adamw import LowMemoryAdamW
from verl.engines.one_pass_adamw import OnePassAdamW
from verl.engines.schedule import Schedule
from verl.models.kernels import triton_fault

FIRST_LOSS_SCALE = 2.0**12
GROW_EVERY = 1000
BUCKET = 1 << 28


def local(x: torch.Tensor) -> torch.Tensor:
    """A sharded tensor's own part, or the tensor itself."""
    return x.to_local() if hasattr(x, "to_local") else x  # type: ignore[no-any-return]


class TorchAdamW:
    """torch's AdamW over the masters, with its state reachable by parameter name.

    Half-precision gradients are made float32 bucket by bucket, so that a whole set of them never exists."""

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
        self._home = {name: adamw for names, adamw in self.buckets for name in names}

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
                # The fused kernel divides by the scale on the way: no pass of its own over the gradients.
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
        """AdamW makes its state at the first step; a checkpoint needs it to exist before."""
        master = self.masters[name]
        state: dict[str, Any] = self._home[name].state[master]
        if not state:
            state["step"] = torch.zeros(
                (), dtype=torch.float32, device=local(master).device if self.fused else "cpu"
            )
            state["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format)
        return state

    def has_state(self, name: str) -> bool:
        return bool(self._home[name].state.get(self.masters[name]))

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
    """Names in order, cut where a bucket would exceed `BUCKET` numbers on this rank."""
    found: list[list[str]] = []
    room = 0
    for name, master in masters.items():
        size = local(master).numel()
        if not found or size > room:
            found.append([])
            room = BUCKET
        found[-1].append(name)
        room -= size
    return found


class MasterAdamW:
    """The optimiser of one rank: its parameters (or shards), their masters, the schedule."""

    loss_scale: float = 1.0
    """What the loss is multiplied by before the backward pass: above 1 only for float16, whose gradients vanish."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        schedule: Schedule,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        grad_clip: float = 0.0,
        moments: str = "float32",
        stochastic_rounding: bool = False,
        seed: int = 0,
        scale_loss: bool = False,
    ) -> None:
        self.schedule = schedule
        self.grad_clip = grad_clip
        self.step_count = 0
        self.params: dict[str, nn.Parameter] = dict(named_parameters)
        self.masters: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._good_steps = 0
        for name, param in self.params.items():
            half = param.dtype not in (torch.float32, torch.float64)
            self.masters[name] = param.detach().float() if half and not stochastic_rounding else param
            if half:
                self._hooks.append(param.register_post_accumulate_grad_hook(self._collector(name)))
        self._scales_loss = scale_loss
        if scale_loss:
            self.loss_scale = FIRST_LOSS_SCALE
        self.rule: TorchAdamW | OnePassAdamW | LowMemoryAdamW
        if moments == "float32" and not stochastic_rounding:
            if self._one_pass_fits():
                self.rule = OnePassAdamW(self.params, self.masters, weight_decay, betas=betas, eps=eps)
            else:
                self.rule = TorchAdamW(self.masters, weight_decay, betas=betas, eps=eps)
        else:
            self.rule = LowMemoryAdamW(
                self.masters, weight_decay, betas=betas, eps=eps, int8=moments == "int8", seed=seed
            )

    def _one_pass_fits(self) -> bool:
        """Every parameter half precision, whole, dense and on a GPU where our kernels work."""
        return bool(self.params) and all(
            self.masters[name] is not param
            and param.is_cuda
            and not hasattr(param, "to_local")
            and param.is_contiguous()
            and triton_fault(param.device) is None
            for name, param in self.params.items()
        )

    # -- gradients ----------------------------------------------------------------------------------------------

    def _collector(self, name: str) -> Any:
        """Take a half-precision gradient as soon as autograd has made it. The first stays as it is (a step of one
        micro-batch needs no more); from the second on the sum is float32."""

        def collect(param: torch.Tensor) -> None:
            gradient, param.grad = param.grad, None
            if gradient is None:
                return
            held = self._sums.get(name)
            if held is None:
                self._sums[name] = gradient
            elif held.dtype == torch.float32:
                held.add_(gradient)
            else:
                self._sums[name] = held.float().add_(gradient)

        return collect

    def named_gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, param in self.params.items():
            gradient = self._sums.get(name, param.grad)
            if gradient is not None:
                found[name] = gradient
        return found

    def gradients(self) -> list[torch.Tensor]:
        return list(self.named_gradients().values())

    def gradient_norm(self) -> torch.Tensor:
        """Over all shards, with the loss scale taken out; a zero-dimensional tensor on the device."""
        grads = self.gradients()
        if not grads:
            return torch.zeros(())
        if hasattr(grads[0], "full_tensor"):
            norm = torch.nn.utils.get_total_norm(grads).full_tensor()  # type: ignore[attr-defined]
        else:
            each = torch._foreach_norm(grads, 2, dtype=torch.float32)
            norm = torch.linalg.vector_norm(torch.stack(each))
        return norm / self.loss_scale

    def gradient_snapshot(self) -> dict[str, torch.Tensor]:
        """Copies of the gradients there are, on the host; none where nothing was added since the last step."""
        return {
            name: local(gradient).to("cpu", copy=True) for name, gradient in self.named_gradients().items()
        }

    @torch.no_grad()
    def restore_gradients(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Back to a snapshot: what was added since is forgotten."""
        for name, gradient in self.named_gradients().items():
            if name in snapshot:
                local(gradient).copy_(snapshot[name])
            else:
                self._sums.pop(name, None)
                self.params[name].grad = None

    def zero_grad(self) -> None:
        self._sums.clear()
        for name, param in self.params.items():
            param.grad = None
            self.masters[name].grad = None

    # -- the step -----------------------------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """Clip, check, update, clear gradients. The one wait for the device is reading the norm."""
        lr = self.schedule.at(self.step_count)
        norm = float(self.gradient_norm())
        finite = math.isfinite(norm)
        if finite:
            gradients = self.named_gradients()
            factor = 1.0 / self.loss_scale
            if self.grad_clip > 0 and norm > self.grad_clip:
                factor *= self.grad_clip / (norm + 1e-6)
            self.rule.step(gradients, lr, factor)
            if not isinstance(self.rule, OnePassAdamW):
                self.write_back()
            self.step_count += 1
        self._adapt_loss_scale(finite)
        self.zero_grad()
        return {"grad_norm": norm, "lr": lr, "skipped": 0.0 if finite else 1.0}

    def _adapt_loss_scale(self, finite: bool) -> None:
        if not self._scales_loss:
            return
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.loss_scale = max(self.loss_scale / 2, 1.0)
        elif self._good_steps % GROW_EVERY == 0:
            self.loss_scale *= 2

    def take_loss_scale(self, scale: float) -> None:
        """From a checkpoint. Where this run or the saved one scales nothing, its precision was another: search anew."""
        if self._scales_loss and scale > 1:
            self.loss_scale = scale

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the half-precision parameters, in place."""
        pairs = [(p, self.masters[n]) for n, p in self.params.items() if self.masters[n] is not p]
        if pairs:
            torch._foreach_copy_([local(p.data) for p, _ in pairs], [local(m) for _, m in pairs])

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Moments by parameter name; the masters are the engine's `model` entry."""
        states = {name: self.rule.state(name) for name in self.masters}
        keys = ("exp_avg", "exp_avg_sq", "step")
        return {key: {name: state[key].detach() for name, state in states.items()} for key in keys}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.masters:
            self.rule.load(name, {key: values[name] for key, values in state.items()})

    def missing_moments(self) -> int:
        """Bytes of the moments the first step will still allocate."""
        missing = sum(local(m).numel() for name, m in self.masters.items() if not self.rule.has_state(name))
        return (2 if isinstance(self.rule, LowMemoryAdamW) and self.rule.int8 else 8) * missing

    def gradient_sums(self) -> int:
        """Bytes of the float32 gradients summed over micro-batches."""
        return sum(4 * local(master).numel() for master in self.masters.values())

    def move(self, device: torch.device) -> None:
        """Moments, and masters that are not the parameters themselves, to `device`."""
        for name, master in self.masters.items():
            if master is not self.params[name]:
                master.data = master.data.to(device)
        self.rule.move(device)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
