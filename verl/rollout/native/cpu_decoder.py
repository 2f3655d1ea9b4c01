"""The layers of the Llama family over few tokens on the CPU, with one column for each token.

A weight [out, in] times columns [in, N] is the form in which the CPU's library multiplies few tokens fastest, and its
result is the next product's input. A column is the same whatever the others are, and the same as the modules' row where
they have 16 tokens or more. No weight is copied.

Shape suffixes: N tokens, E features (hidden, or those of heads or the MLP), H heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from verl.models.attention import AttentionCall, AttentionContext
from verl.rollout.native.model import FusedDecoder, PlainProducts

FEWEST, MOST = 4, 64
"""Tokens; for fewer and for more the module's own products are as fast or faster."""


def _product(layer: nn.Linear, x_EN: torch.Tensor) -> torch.Tensor:
    if layer.bias is None:
        return torch.mm(layer.weight, x_EN)
    return torch.addmm(layer.bias[:, None], layer.weight, x_EN)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, dim: int) -> torch.Tensor:
    # Summed over neighbours in memory, as the modules do it: in another order results would differ in the last bits.
    scale = torch.rsqrt(x.movedim(dim, -1).contiguous().square().mean(-1).add_(eps))
    return (x * scale.unsqueeze(dim)).mul_(weight[:, None])


def _turned(x_HDN: torch.Tensor, cos_DN: torch.Tensor, sin_DN: torch.Tensor) -> torch.Tensor:
    first, second = x_HDN.chunk(2, dim=1)
    return (x_HDN * cos_DN).add_(torch.cat([-second, first], dim=1).mul_(sin_DN))


class ColumnDecoder:
    """Built by `match`. Positions are below the `max_length` given there."""

    def __init__(self, decoder: FusedDecoder) -> None:
        self._decoder = decoder

    @staticmethod
    def match(model: nn.Module, max_length: int) -> ColumnDecoder | None:
        """None where the layers are not exactly the known ones, or not float32."""
        if any(param.dtype != torch.float32 for param in model.parameters()):
            return None
        decoder = FusedDecoder.match(model, max_length)
        return None if decoder is None else ColumnDecoder(decoder)

    def hidden(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """As `Backbone.hidden`: ids and positions [N] -> [N, E]."""
        decoder, eps = self._decoder, self._decoder.eps
        cos_DN, sin_DN = (angles[position_ids].t().contiguous() for angles in decoder.rope)
        size = len(cos_DN)
        x_EN = F.embedding(input_ids, decoder.model.get_input_embeddings().weight).t().contiguous()
        for index, layer in enumerate(decoder.layers):
            products = layer.products
            assert isinstance(products, PlainProducts)
            normed_EN = _normed(x_EN, layer.input_norm, eps, 0)
            q_HDN, k_HDN, v_HDN = (
                _product(linear, normed_EN).unflatten(0, (-1, size))
                for linear in (products.q, products.k, products.v)
            )
            if layer.norms is not None:
                q_HDN = _normed(q_HDN, layer.norms[0], layer.norms[2], 1)
                k_HDN = _normed(k_HDN, layer.norms[1], layer.norms[2], 1)
            q_HDN, k_HDN = _turned(q_HDN, cos_DN, sin_DN), _turned(k_HDN, cos_DN, sin_DN)
            q, k, v = (x.permute(2, 0, 1).contiguous().transpose(0, 1)[None] for x in (q_HDN, k_HDN, v_HDN))
            mixed = context.attend(AttentionCall(q, k, v, layer.scale, layer.window, None, index))
            x_EN = x_EN + _product(products.out, mixed[0].flatten(1).t().contiguous())
            normed_EN = _normed(x_EN, layer.output_norm, eps, 0)
            gate_EN = F.silu(_product(products.gate, normed_EN), inplace=True)
            x_EN += _product(products.down, gate_EN.mul_(_product(products.up, normed_EN)))
        return _normed(x_EN, decoder.backbone.norm.weight, eps, 0).t().contiguous()
