"""The optimiser of one rank: AdamW or Muon over float32 master weights, whatever the precision of the parameters.

Updates, moments and sums of gradients over micro-batches are float32. A float32 parameter is its own master; a
half-precision one is overwritten in place after each step, so that every user of the tensor (the native rollout
engine) sees the new weights. A step whose gradient is not finite changes nothing. `moments` and `stochastic_rounding`
trade some of this for memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from verl.engines.adamw import AdamWOptions, LowMemoryAdamW, OnePassAdamW, TorchAdamW, local, move_state
from verl.errors import ConfigError
from verl.models.kernels import triton_fault

if TYPE_CHECKING:
    from verl.engines.muon import Muon

FIRST_LOSS_SCALE = 2.0**12
GROW_EVERY = 1000


@dataclass(frozen=True)
class Schedule:
    """Learning rate as a function of the optimiser step. `total_steps` is needed by cosine and linear only."""

    lr: float
    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.kind != "constant" and self.total_steps is None:
            raise ConfigError(
                f"optim.lr_scheduler_type={self.kind!r} needs the number of optimiser steps; set "
                "trainer.total_training_steps, or optim.lr_scheduler_type=constant"
            )

    @classmethod
    def from_config(cls, optim: Any, total_steps: int | None) -> Schedule:
        warmup = int(optim.lr_warmup_steps)
        ratio = float(optim.lr_warmup_steps_ratio)
        if warmup < 0:
            if ratio > 0 and total_steps is None:
                raise ConfigError(
                    f"optim.lr_warmup_steps_ratio={ratio} needs the number of optimiser steps; set "
                    "trainer.total_training_steps or optim.lr_warmup_steps"
                )
            warmup = int(ratio * (total_steps or 0))
        return cls(
            lr=float(optim.lr),
            kind=optim.lr_scheduler_type,
            warmup_steps=warmup,
            total_steps=total_steps,
            min_lr_ratio=float(optim.min_lr_ratio),
        )

    def at(self, step: int) -> float:
        """The rate of optimiser step `step` (the first is 0). Warm-up ends at the full rate, never starts at 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        if self.kind == "constant" or self.total_steps is None:
            return self.lr
        length = max(self.total_steps - self.warmup_steps, 1)
        done = min((step - self.warmup_steps) / length, 1.0)
        share = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * share)


class ExternalOptimizer:
    """A user's torch optimiser as update rule: it does the arithmetic, at its own learning rate and on the parameters
    themselves; clipping, the finite check and the counting stay with `MasterAdamW`."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Mapping[str, torch.Tensor]) -> None:
        known = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if not any(id(param) in known for param in params.values()):
            raise ConfigError(
                "the optimizer has none of the model's parameters; make it from model.parameters() of the model passed "
                "with it"
            )
        self.optimizer, self.params = optimizer, params

    @property
    def lr(self) -> float:
        return float(max(group["lr"] for group in self.optimizer.param_groups))

    def step(self, gradients: Mapping[str, torch.Tensor], lr: float, factor: float) -> None:
        for name, gradient in gradients.items():
            self.params[name].grad = (gradient * factor).to(self.params[name].dtype)
        self.optimizer.step()

    def has_state(self, name: str) -> bool:
        return bool(self.optimizer.state.get(self.params[name]))

    def move(self, device: torch.device) -> None:
        move_state(self.optimizer, device)


def collector(sums: dict[str, torch.Tensor], name: str) -> Callable[[torch.Tensor], None]:
    """A hook that takes a parameter's gradient as soon as autograd has computed it. The first stays as it is (a step of
    one micro-batch needs no more); from the second on the sum is float32. It must not refer to the optimiser: torch
    cannot collect a cycle through a hook."""

    def collect(param: torch.Tensor) -> None:
        gradient, param.grad = param.grad, None
        if gradient is None:
            return
        total = sums.get(name)
        if total is None:
            sums[name] = gradient
        elif total.dtype == torch.float32:
            total.add_(gradient)
        else:
            sums[name] = total.float().add_(gradient)

    return collect


class MasterAdamW:
    """Parameters (or shards), their masters, the update rule and the schedule."""

    loss_scale: float = 1.0
    """What the loss is multiplied by before the backward pass: above 1 only for float16, whose gradients underflow."""

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
        external: torch.optim.Optimizer | None = None,
        matrices: Collection[str] | None = None,
        momentum: float = 0.95,
    ) -> None:
        """`external`: a user's optimiser, which replaces AdamW and `schedule`. `matrices`: what Muon moves, with this
        `momentum`; None: nothing."""
        self.schedule = schedule
        self.grad_clip = grad_clip
        self.step_count = 0
        self.params: dict[str, nn.Parameter] = dict(named_parameters)
        self.masters: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._fixed_sums: dict[str, torch.Tensor] = {}
        self._prepared: tuple[dict[str, torch.Tensor], torch.Tensor] | None = None
        self._hooks: list[RemovableHandle] = []
        self._good_steps = 0
        in_place = stochastic_rounding or external is not None
        for name, param in self.params.items():
            half = param.dtype not in (torch.float32, torch.float64)
            self.masters[name] = param.detach().float() if half and not in_place else param
            if half:
                self._hooks.append(param.register_post_accumulate_grad_hook(collector(self._sums, name)))
        self._scales_loss = scale_loss
        if scale_loss:
            self.loss_scale = FIRST_LOSS_SCALE
        options = AdamWOptions(weight_decay, betas, eps)
        self.rule: TorchAdamW | OnePassAdamW | LowMemoryAdamW | Muon | ExternalOptimizer
        if external is not None:
            self.rule = ExternalOptimizer(external, self.params)
        elif matrices is not None:
            from verl.engines.muon import Muon

            self.rule = Muon(self.masters, matrices, options, momentum)
        elif moments != "float32" or stochastic_rounding:
            self.rule = LowMemoryAdamW(self.masters, options, int8=moments == "int8", seed=seed)
        # Every parameter half precision, not sharded, contiguous and on a GPU where our kernels work.
        elif self.params and all(
            self.masters[name] is not param
            and param.is_cuda
            and not hasattr(param, "to_local")
            and param.is_contiguous()
            and triton_fault(param.device) is None
            for name, param in self.params.items()
        ):
            self.rule = OnePassAdamW(self.params, self.masters, options)
        else:
            self.rule = TorchAdamW(self.masters, options)

    # -- gradients ----------------------------------------------------------------------------------------------

    def named_gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, param in self.params.items():
            gradient = self._sums.get(name, param.grad)
            if gradient is not None:
                found[name] = gradient
        return found

    def gradient_norm(self) -> torch.Tensor:
        """Over all shards, without the loss scale; a zero-dimensional tensor on the device."""
        grads = list(self.named_gradients().values())
        if not grads:
            return torch.zeros(())
        if hasattr(grads[0], "full_tensor"):
            if all(grad.dtype == torch.float32 for grad in grads):
                norm = torch.nn.utils.get_total_norm(grads)
            else:  # widened one by one, since memory is short
                norm = torch.linalg.vector_norm(
                    torch.stack([torch.linalg.vector_norm(grad.float()) for grad in grads])
                )
            norm = norm.full_tensor()  # type: ignore[attr-defined]
        else:
            each = torch._foreach_norm(grads, 2, dtype=torch.float32)
            norm = torch.linalg.vector_norm(torch.stack(each))
        return norm / self.loss_scale

    def gradient_snapshot(self) -> dict[str, torch.Tensor]:
        """Copies of the current gradients on the host; empty where nothing was added since the last step."""
        return {
            name: local(gradient).to("cpu", copy=True) for name, gradient in self.named_gradients().items()
        }

    @torch.no_grad()
    def restore_gradients(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Back to a snapshot."""
        for name, gradient in self.named_gradients().items():
            if name in snapshot:
                local(gradient).copy_(snapshot[name])
            else:
                self._sums.pop(name, None)
                self.params[name].grad = None

    def fixed_sums(self) -> dict[str, torch.Tensor]:
        """Float32 sums of gradients at addresses that stay the same, for passes captured as CUDA graphs."""
        if not self._fixed_sums:
            sizes = [param.numel() for param in self.params.values()]
            flat = torch.zeros(sum(sizes), device=next(iter(self.params.values())).device)
            parts = zip(self.params.items(), flat.split(sizes), strict=True)
            self._fixed_sums = {name: part.view(param.shape) for (name, param), part in parts}
        return self._fixed_sums

    @torch.no_grad()
    def begin_fixed_sums(self, names: Sequence[str]) -> None:
        """Before a captured pass adds gradients of these parameters: what was added since the last step is in their
        fixed sums afterwards."""
        new = [name for name in names if name not in self._sums]
        if new:
            torch._foreach_zero_([self._fixed_sums[name] for name in new])
        for name in names:
            fixed, total = self._fixed_sums[name], self._sums.get(name)
            if total is not None and total is not fixed:
                fixed.copy_(total)
            self._sums[name] = fixed

    def zero_grad(self) -> None:
        self._sums.clear()
        self._prepared = None
        for name, param in self.params.items():
            param.grad = None
            self.masters[name].grad = None

    # -- the step -----------------------------------------------------------------------------------------------

    def prepare_step(self) -> None:
        """Enqueue what a step with the gradients so far needs before it knows their norm."""
        if isinstance(self.rule, OnePassAdamW):
            gradients = self.named_gradients()
            self._prepared = (gradients, self.gradient_norm())
            self.rule.prepare(gradients)

    def step(self, lr: float | None = None) -> dict[str, float]:
        """Clip, check, update, clear gradients. The one wait for the device is reading the norm. `lr`: instead of the
        schedule's; a user's optimiser has its own."""
        if isinstance(self.rule, ExternalOptimizer):
            if lr is not None:
                raise ConfigError(
                    f"lr={lr:g} was given for one step, but the optimizer is your own: set the rate in its param_groups"
                )
            lr = self.rule.lr
        elif lr is None:
            lr = self.schedule.at(self.step_count)
        gradients = self.named_gradients()
        known, prepared = self._prepared or ({}, None)
        if known.keys() == gradients.keys() and all(known[name] is g for name, g in gradients.items()):
            gradients = known  # as they were prepared: there are no others since
        else:
            prepared = None
        norm = float(self.gradient_norm() if prepared is None else prepared)
        finite = math.isfinite(norm)
        if finite:
            factor = 1.0 / self.loss_scale
            if self.grad_clip > 0 and norm > self.grad_clip:
                factor *= self.grad_clip / (norm + 1e-6)
            self.rule.step(gradients, lr, factor)
            if not isinstance(self.rule, OnePassAdamW):
                self.write_back()
            self.step_count += 1
        if self._scales_loss:
            self._good_steps = self._good_steps + 1 if finite else 0
            if not finite:
                self.loss_scale = max(self.loss_scale / 2, 1.0)
            elif self._good_steps % GROW_EVERY == 0:
                self.loss_scale *= 2
        self.zero_grad()
        return {"grad_norm": norm, "lr": lr, "skipped": 0.0 if finite else 1.0}

    def take_loss_scale(self, scale: float) -> None:
        """From a checkpoint, unless either run does not scale its loss (its precision was another)."""
        if self._scales_loss and scale > 1:
            self.loss_scale = scale

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the half-precision parameters, in place."""
        pairs = [(p, self.masters[n]) for n, p in self.params.items() if self.masters[n] is not p]
        if pairs:
            torch._foreach_copy_([local(p.data) for p, _ in pairs], [local(m) for _, m in pairs])

    # -- state --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Moments by kind and parameter name; the masters are in the engine's `model` entry."""
        if isinstance(self.rule, ExternalOptimizer):
            return {"external": self.rule.optimizer.state_dict()}
        kinds: dict[str, dict[str, torch.Tensor]] = {}
        for name in self.masters:
            for kind, value in self.rule.state(name).items():
                kinds.setdefault(kind, {})[name] = value.detach()
        return kinds

    def load_state(self, state: dict[str, Any]) -> None:
        if isinstance(self.rule, ExternalOptimizer):
            self.rule.optimizer.load_state_dict(state["external"])
            return
        for name in self.masters:
            self.rule.load(name, {kind: values[name] for kind, values in state.items() if name in values})

    def bytes_to_allocate(self, kind: str, moments_on_host: bool) -> int:
        """What the optimiser will still allocate on the device besides a pass of `kind` ("train" or "forward"): moments
        before the first step and, in training, float32 sums of gradients."""
        sizes = {name: local(master).numel() for name, master in self.masters.items()}
        each = 2 if isinstance(self.rule, LowMemoryAdamW) and self.rule.int8 else 8
        moments = sum(each * size for name, size in sizes.items() if not self.rule.has_state(name))
        if kind == "train":
            return moments + sum(4 * size for size in sizes.values())
        return 0 if moments_on_host else moments

    def move(self, device: torch.device) -> None:
        """Moments, and masters that are not the parameters themselves, to `device`."""
        for name, master in self.masters.items():
            if master is not self.params[name]:
                master.data = master.data.to(device)
        self.rule.move(device)
        self._prepared = None  # a pass while it is elsewhere prepares no other

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
