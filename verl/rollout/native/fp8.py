"""Weights in eight bits for decoding (`rollout.dtype=fp8`): e4m3 numbers and one scale for each output channel.

The trainer's weights are quantised whenever the engine starts to generate or takes new weights, into the same buffers,
so that captured graphs stay valid; inputs get one scale per row. Prompts, norms, attention, cache and output layer keep
the model's dtype. Layers that read the same input share one buffer and are one product.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import nn

from verl.errors import ConfigError
from verl.rollout.native.ops import FP8_MAX, FP8_TYPE, Ops

_MULTIPLE = 16
"""The device's product wants both sides of a weight to be multiples of this."""


def require_fp8_device(device: torch.device) -> None:
    """Eight-bit products need a device that has them; the CPU emulates them."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            f"rollout.dtype=fp8 needs compute capability 8.9 or newer; {torch.cuda.get_device_name(device)} has "
            f"{torch.cuda.get_device_capability(device)}; use rollout.dtype=auto"
        )


class Fp8Weight:
    """The weights of one or several linear layers side by side."""

    def __init__(self, layers: Seq[nn.Linear]) -> None:
        self.layers = list(layers)
        widths = [layer.out_features for layer in self.layers]
        inner = self.layers[0].in_features
        if sum(widths) % _MULTIPLE or inner % _MULTIPLE:
            raise ConfigError(
                f"rollout.dtype=fp8 needs layer sizes that are multiples of {_MULTIPLE}, not {inner} x "
                f"{sum(widths)}; use rollout.dtype=auto"
            )
        weight = self.layers[0].weight
        self.values = torch.empty(sum(widths), inner, dtype=FP8_TYPE, device=weight.device)
        self.scales = torch.empty(1, sum(widths), dtype=torch.float32, device=weight.device)
        self.bias: torch.Tensor | None = None
        if any(layer.bias is not None for layer in self.layers):
            self.bias = torch.zeros(sum(widths), dtype=weight.dtype, device=weight.device)

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantise the layers' current weights."""
        start = 0
        for layer in self.layers:
            part = slice(start, start + layer.out_features)
            weight = layer.weight.float()
            scale = weight.abs().amax(dim=1).clamp(min=1e-12) / FP8_MAX
            self.scales[0, part] = scale
            self.values[part] = (weight / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8_TYPE)
            if self.bias is not None and layer.bias is not None:
                self.bias[part] = layer.bias
            start += layer.out_features

    def product(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        rows, row_scales = ops.quantise_rows(x)
        out = ops.scaled_product(rows, row_scales, self.values, self.scales, x.dtype)
        return out if self.bias is None else out + self.bias


class Fp8Products:
    """The products of one layer; see `fused.PlainProducts`."""

    def __init__(self, q: nn.Linear, k: nn.Linear, v: nn.Linear, o: nn.Linear, gate: nn.Linear, up: nn.Linear,
                 down: nn.Linear) -> None:  # fmt: skip
        self._qkv = Fp8Weight([q, k, v])
        self._o = Fp8Weight([o])
        self._gate_up = Fp8Weight([gate, up])
        self._down = Fp8Weight([down])

    def refresh(self) -> None:
        for weight in (self._qkv, self._o, self._gate_up, self._down):
            weight.refresh()

    def qkv(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        return self._qkv.product(ops, x)

    def o(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        return self._o.product(ops, x)

    def mlp(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up.product(ops, x).chunk(2, dim=1)
        return self._down.product(ops, ops.silu_mul(gate, up))
