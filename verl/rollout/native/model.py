"""How the engine runs the model: through its Hugging Face module (`Backbone`), or, for the Llama family, fused over the
module's own weight tensors (`FusedDecoder`), in decode steps and prompt passes.

Llama, Mistral, Qwen2 and Qwen3 layers differ in three details (biases, a norm per head, a sliding window), which the
fused decoder follows; everything else, adapters included, goes through the module itself. No weight is copied, so an
optimiser step is seen at once, by captured graphs, too.

With `rollout.dtype=fp8` the fused decoder multiplies by e4m3 weights with one scale for each output channel. They are
quantised whenever the engine starts to generate or takes new weights, into the same buffers, so that captured graphs
stay valid; inputs get one scale per row. Prompts, norms, attention, cache and output layer keep the model's dtype.
Layers that read the same input share one buffer and are one product.

Logits are float32 and computed as the trainer computes them (product accumulated in float32, cap and scale of the
architecture applied), so that log-probs agree. Nothing waits for the device.

Shapes: M rows, one token each; N tokens of a prompt pass; D hidden size; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from verl.errors import ConfigError
from verl.models.attention import AttentionCall, Backend, asked_backend
from verl.models.introspection import backbone_of, class_of, is_exact, output_head
from verl.rollout.native.ops import (
    FP8_MAX,
    FP8_TYPE,
    DecodeInputs,
    Norm,
    Norms,
    Ops,
    Pair,
    Three,
    side_by_side,
)

if TYPE_CHECKING:
    from verl.rollout.native.device_attention import PromptAttention, PromptInputs

_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings that depend on the position alone."""
SMALL = 1024
"""Up to this width of the model our own products in few kernels beat the library's."""
_SHARED_QUERIES = 64
"""Of rows with a common prompt, that one program of the attention serves."""
_LEAST_SHARED = 384
"""Attention to a prompt is computed once for all its samples from this many tokens on: it saves reading their keys and
values for every sample and costs one more kernel a layer. (One H200, 1,024 rows, 16 samples of a prompt: 1.08 times as
fast at 300 tokens, 1.9 at 1,000; slower at 128.)"""
_FP8_MULTIPLE = 16
"""The device's eight-bit product wants both sides of a weight to be multiples of this."""


class Backbone:
    """Calls the model's layers with an attention context of ours."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.backbone = backbone_of(model)

    def hidden(self, input_ids: torch.Tensor, position_ids: torch.Tensor, context: Any) -> torch.Tensor:
        """Ids and positions [N] of the tokens of a step -> hidden states [N, D]."""
        with self._arithmetic():
            out = self.backbone(
                input_ids=input_ids[None],
                position_ids=position_ids[None],
                # A four-dimensional mask is used as it is; otherwise transformers would look for packed sequences in
                # the positions, which waits for the device. Our attention never reads it.
                attention_mask=position_ids.new_zeros((1, 1, 1, 1)),
                use_cache=False,
                verl_attn=context,
            )
        return out.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, D] -> [M, V] in float32."""
        return self.bent(self.raw_logits(hidden))

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The product alone."""
        head = output_head(self.model)
        if self.exact:
            from verl.models.exact import raw_logits

            return raw_logits(hidden, head.weight, head.bias)
        if hidden.dtype == torch.float32:
            logits = hidden @ head.weight.t()
        elif hidden.is_cuda:
            logits = torch.mm(hidden, head.weight.t(), out_dtype=torch.float32)
        else:
            logits = (hidden @ head.weight.t()).float()
        if head.bias is not None:
            logits += head.bias
        return logits

    def bent(self, logits: torch.Tensor) -> torch.Tensor:
        """With what the architecture does to them."""
        head = output_head(self.model)
        if head.softcap is not None:
            logits = torch.tanh(logits / head.softcap) * head.softcap
        return logits * head.scale if head.scale != 1.0 else logits

    def _arithmetic(self) -> AbstractContextManager[Any]:
        if not self.exact:
            return nullcontext()
        from verl.models.exact import ExactArithmetic

        return ExactArithmetic()

    @property
    def exact(self) -> bool:
        """Whether log-probs have to be those of the trainer bit for bit (`exact_log_probs`)."""
        return is_exact(self.model)

    def exact_log_probs(
        self, raw: torch.Tensor, tokens: torch.Tensor, temperatures: Seq[float]
    ) -> torch.Tensor:
        """[M] from `raw_logits`."""
        from verl.models.exact import log_probs_of

        head = output_head(self.model)
        return log_probs_of(raw, tokens, temperatures, head.softcap, head.scale)


@dataclass
class PlainProducts:
    """The matrix products of a layer by the module's own linear layers."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    out: nn.Linear
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear

    def qkv(
        self, ops: Ops, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm
    ) -> tuple[Three, torch.Tensor]:
        """Queries, keys and values of the norm of x + residual, and that sum."""
        normed, total = ops.add_rms_norm(x, residual, *norm)
        # Each into a tensor of its own: the library adds a bias within the product only where rows are not apart.
        return (_linear(self.q, normed), _linear(self.k, normed), _linear(self.v, normed)), total

    def o(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        return _linear(self.out, x)

    def mlp(
        self, ops: Ops, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The MLP's output for the norm of x + residual, and that sum."""
        normed, total = ops.add_rms_norm(x, residual, *norm)
        if self.small:
            gated = ops.gated_linear(normed, self.gate, self.up)
        else:
            gated = ops.silu_mul(_linear(self.gate, normed), _linear(self.up, normed))
        return _linear(self.down, gated), total

    @property
    def small(self) -> bool:
        """Whether products are one kernel with what follows them."""
        biases = {layer.bias is None for layer in (self.q, self.k, self.v)}
        gated = self.gate.bias is None and self.up.bias is None
        return self.q.in_features <= SMALL and len(biases) == 1 and gated

    def refresh(self) -> None:
        pass


def require_fp8_device(device: torch.device, key: str) -> None:
    """Eight-bit numbers need a device that has them; the CPU emulates them."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            f"{key}=fp8 needs compute capability 8.9 or newer; {torch.cuda.get_device_name(device)} has "
            f"{torch.cuda.get_device_capability(device)}; use {key}=auto"
        )


class Fp8Weight:
    """The weights of one or several linear layers side by side."""

    def __init__(self, layers: Seq[nn.Linear]) -> None:
        self.layers = list(layers)
        widths = [layer.out_features for layer in self.layers]
        inner = self.layers[0].in_features
        if sum(widths) % _FP8_MULTIPLE or inner % _FP8_MULTIPLE:
            raise ConfigError(
                f"rollout.dtype=fp8 needs layer sizes that are multiples of {_FP8_MULTIPLE}, not {inner} x "
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

    def product(self, ops: Ops, x: Pair, dtype: torch.dtype) -> torch.Tensor:
        """The output for numbers and their scales."""
        return ops.scaled_product(x, (self.values, self.scales), self.bias, dtype)


class Fp8Products:
    """The products of one layer; see `PlainProducts`."""

    def __init__(self, q: nn.Linear, k: nn.Linear, v: nn.Linear, o: nn.Linear, gate: nn.Linear, up: nn.Linear,
                 down: nn.Linear) -> None:  # fmt: skip
        self._qkv = Fp8Weight([q, k, v])
        self._o = Fp8Weight([o])
        self._gate_up = Fp8Weight([gate, up])
        self._down = Fp8Weight([down])

    def refresh(self) -> None:
        for weight in (self._qkv, self._o, self._gate_up, self._down):
            weight.refresh()

    def qkv(
        self, ops: Ops, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm
    ) -> tuple[Three, torch.Tensor]:
        normed, total = ops.quantised_norm(x, residual, *norm)
        widths = [layer.out_features for layer in self._qkv.layers]
        q, k, v = self._qkv.product(ops, normed, x.dtype).split(widths, dim=1)
        return (q, k, v), total

    def o(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        return self._o.product(ops, ops.quantise_rows(x), x.dtype)

    def mlp(
        self, ops: Ops, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = ops.quantised_norm(x, residual, *norm)
        gate, up = self._gate_up.product(ops, normed, x.dtype).chunk(2, dim=1)
        return self._down.product(ops, ops.quantised_silu_mul(gate, up), x.dtype), total


@dataclass
class FusedLayer:
    input_norm: torch.Tensor
    output_norm: torch.Tensor
    products: PlainProducts | Fp8Products
    norms: Norms
    window: int | None
    scale: float
    plain: PlainProducts
    """What prompts are multiplied with."""
    backend: Backend
    """`model.attention_backend`, for prompts."""


class FusedDecoder(Backbone):
    """Built by `match`; `decode` runs the layers. Positions are below `max_length`."""

    def __init__(self, model: Any, layers: list[FusedLayer], max_length: int) -> None:
        super().__init__(model)
        self.layers = layers
        self.eps = float(model.config.rms_norm_eps)
        # The module's own code computes the tables, so that every kind of static scaling is right.
        weight = model.get_input_embeddings().weight
        cos, sin = self.backbone.rotary_emb(
            weight[:1, None], torch.arange(max_length, device=weight.device)[None]
        )
        self.rope = cos[0].contiguous(), sin[0].contiguous()
        config = model.config
        self.heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or self.heads)
        self.sharing_rows = max(_SHARED_QUERIES * kv_heads // self.heads, 1)
        """How many rows compute their attention to a common prompt together."""
        self.shares = any(layer.window is None for layer in layers)
        """A window moves with the row: what lies in it is not shared."""
        self.refresh()

    @staticmethod
    def match(model: Any, max_length: int, fp8: bool = False) -> FusedDecoder | None:
        """A fused decoder over this model's weights, or None where its layers are not exactly the known ones."""
        backbone = backbone_of(model)
        if not hasattr(backbone, "layers") or getattr(model.config, "hidden_act", None) != "silu":
            return None
        rope_type = getattr(getattr(backbone, "rotary_emb", None), "rope_type", None)
        if not isinstance(rope_type, str) or rope_type not in _STATIC_ROPE:  # or one for each kind of layer
            return None
        layers = [_match_layer(layer, fp8) for layer in backbone.layers]
        known = [layer for layer in layers if layer is not None]
        return FusedDecoder(model, known, max_length) if len(known) == len(layers) else None

    def shared_tokens(self, prompt: int, samples: int, block_size: int) -> int:
        """Leading tokens that the samples of a prompt attend to together: its full blocks, or none. A property of the
        request, whoever runs beside it, since it decides how a row's sums are split."""
        tokens = prompt // block_size * block_size
        return tokens if self.shares and tokens >= _LEAST_SHARED and samples > 1 else 0

    def refresh(self) -> None:
        """The weights may be new."""
        for layer in self.layers:
            layer.products.refresh()

    def decode(
        self, ops: Ops, inputs: DecodeInputs, caches: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """[M, D] hidden states of the rows' tokens; their keys and values are written to the caches."""
        x = F.embedding(inputs.tokens, self.model.get_input_embeddings().weight)
        residual: torch.Tensor | None = None
        for layer, cache in zip(self.layers, caches, strict=True):
            products = layer.products
            norm = (layer.input_norm, self.eps)
            if isinstance(products, PlainProducts) and products.small:
                normed, residual = ops.add_rms_norm(x, residual, *norm)
                linears = (products.q, products.k, products.v)
                q = ops.qkv_rotary(normed, linears, cache, self.rope, inputs, layer.norms)
            else:
                qkv, residual = products.qkv(ops, x, residual, norm)
                q = ops.rotary_cache(qkv, cache, self.rope, inputs, layer.norms)
            mixed = ops.decode_attention(q, cache, inputs, layer.scale, layer.window, None)
            x = products.o(ops, mixed.flatten(1))
            x, residual = products.mlp(ops, x, residual, (layer.output_norm, self.eps))
        return ops.add_rms_norm(x, residual, self.backbone.norm.weight, self.eps)[0]

    def prompt(self, ops: Ops, inputs: PromptInputs, attention: PromptAttention) -> torch.Tensor:
        """[N, D] hidden states of the tokens of prompts; their keys and values are written to the cache.

        The products are the library's: it is as fast as any for many tokens, and no kernel is compiled for their
        number, which differs from pass to pass."""
        x = F.embedding(inputs.tokens, self.model.get_input_embeddings().weight)
        residual: torch.Tensor | None = None
        places = (inputs.positions, inputs.slots)
        for index, layer in enumerate(self.layers):
            normed, residual = ops.add_rms_norm(x, residual, layer.input_norm, self.eps)
            weights = layer.plain
            qkv = side_by_side(normed, (weights.q, weights.k, weights.v))
            cache = attention.cache.layers[index]
            qkv = ops.rotary_prompt(qkv, cache, self.rope, places, self.heads, layer.norms)
            kv_heads, dim = cache[0].shape[1], cache[0].shape[3]
            q, k, v = (
                part.transpose(0, 1)[None]
                for part in qkv.unflatten(1, (-1, dim)).split([self.heads, kv_heads, kv_heads], dim=1)
            )
            call = AttentionCall(q, k, v, layer.scale, layer.window, None, index, layer.backend)
            x = _linear(weights.out, attention.read(call)[0].flatten(1))
            normed, residual = ops.add_rms_norm(x, residual, layer.output_norm, self.eps)
            both = side_by_side(normed, (weights.gate, weights.up))
            x = _linear(weights.down, ops.silu_mul(*both.chunk(2, dim=1)))
        return ops.add_rms_norm(x, residual, self.backbone.norm.weight, self.eps)[0]


def _linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, layer.weight, layer.bias)


def _match_layer(layer: Any, fp8: bool) -> FusedLayer | None:
    kind = class_of(layer)
    if kind.__name__ not in _LAYERS or not kind.__module__.startswith("transformers.models."):
        return None
    attention, mlp = layer.self_attn, layer.mlp
    names = [(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    names += [(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")]
    linears = [getattr(owner, name, None) for owner, name in names]
    if any(type(linear) is not nn.Linear for linear in linears):
        return None
    norms: Norms = None
    if hasattr(attention, "q_norm"):
        q_norm, k_norm = attention.q_norm, attention.k_norm
        norms = (q_norm.weight, k_norm.weight, float(q_norm.variance_epsilon))
    if hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    else:
        is_mistral = kind.__name__ == "MistralDecoderLayer"
        window = getattr(attention.config, "sliding_window", None) if is_mistral else None
    known = [linear for linear in linears if linear is not None]
    plain = PlainProducts(*known)
    return FusedLayer(
        layer.input_layernorm.weight,
        layer.post_attention_layernorm.weight,
        Fp8Products(*known) if fp8 else plain,
        norms=norms,
        window=window,
        scale=float(attention.scaling),
        plain=plain,
        backend=asked_backend(attention),
    )
