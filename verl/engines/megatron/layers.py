"""The layers of a Megatron stage: Megatron's parallel linear layers around the norm, rotary embedding and packed
attention that the other engines use.

Rows of joined matrices are laid out so that each Hugging Face weight is a contiguous block of them: a rank's
`linear_qkv` holds its query rows, then its key rows, then its value rows; `linear_fc1` its gate rows, then its up rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from verl.engines.megatron.groups import ParallelGroups
from verl.models.attention import AttentionCall, asked_backend


@dataclass
class StageConfig(TransformerConfig):
    """Megatron's settings with ours: the Hugging Face config of the model and the process groups."""

    hf: Any = None
    groups: Any = None
    fused: bool = False
    """Whether our Triton kernels compute norms and gated products."""

    @property
    def parallel(self) -> ParallelGroups:
        return self.groups  # type: ignore[no-any-return]


class Norm(LlamaRMSNorm):
    """transformers' RMS norm, or our kernel for it."""

    def __init__(self, config: StageConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        self.fused = config.fused
        self.weight.data = self.weight.data.to(config.params_dtype)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.fused:
            return super().forward(hidden_states)
        from verl.models.kernels.layers import rms_norm

        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class SelfAttention(nn.Module):
    """Attention within the sequences of a pack, with the heads of this tensor-parallel rank."""

    def __init__(self, config: StageConfig, layer_number: int, **_: Any) -> None:
        """`layer_number` counts from 1 over all stages."""
        super().__init__()
        hf, tp = config.hf, config.parallel.layout.tp
        self.layer_idx = layer_number - 1
        self.head_dim = int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)
        self.heads, self.kv_heads = hf.num_attention_heads // tp, hf.num_key_value_heads // tp
        self.scaling = self.head_dim**-0.5
        self.sliding_window = sliding_window(hf, self.layer_idx)
        common: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "skip_bias_add": False,
            "tp_group": config.parallel.megatron_tp,
        }
        self.linear_qkv = ColumnParallelLinear(
            hf.hidden_size,
            (hf.num_attention_heads + 2 * hf.num_key_value_heads) * self.head_dim,
            bias=qkv_bias(hf),
            gather_output=False,
            **common,
        )
        self.linear_proj = RowParallelLinear(
            hf.num_attention_heads * self.head_dim,
            hf.hidden_size,
            bias=bool(getattr(hf, "attention_bias", False)),
            input_is_parallel=True,
            **common,
        )
        head_norms = has_head_norms(hf)
        self.q_layernorm = Norm(config, self.head_dim, config.layernorm_epsilon) if head_norms else None
        self.k_layernorm = Norm(config, self.head_dim, config.layernorm_epsilon) if head_norms else None

    def forward(
        self, hidden_states: torch.Tensor, rotary_pos_emb: Any, packed_seq_params: Any, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """[N, 1, hidden]; `rotary_pos_emb` is (cos, sin), `packed_seq_params` an `AttentionContext`."""
        qkv, _ = self.linear_qkv(hidden_states)
        sizes = [count * self.head_dim for count in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3) for x in qkv.split(sizes, dim=-1))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        q, k = apply_rotary_pos_emb(q, k, *rotary_pos_emb)  # [1, heads, N, head_dim]
        asked = asked_backend(self)
        call = AttentionCall(q, k, v, self.scaling, self.sliding_window, layer=self.layer_idx, asked=asked)
        out = packed_seq_params.attend(call)
        out, _ = self.linear_proj(out.flatten(2).transpose(0, 1))
        return out, None


class GatedMLP(nn.Module):
    """silu(gate) * up, then down."""

    def __init__(self, config: StageConfig, **_: Any) -> None:
        super().__init__()
        hf = config.hf
        self.fused = config.fused
        common: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": bool(getattr(hf, "mlp_bias", False)),
            "skip_bias_add": False,
            "tp_group": config.parallel.megatron_tp,
        }
        self.linear_fc1 = ColumnParallelLinear(
            hf.hidden_size, 2 * hf.intermediate_size, gather_output=False, **common
        )
        self.linear_fc2 = RowParallelLinear(
            hf.intermediate_size, hf.hidden_size, input_is_parallel=True, **common
        )

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        both, _ = self.linear_fc1(hidden_states)
        out, _ = self.linear_fc2(gated(both, self.fused))
        return out, None


def gated(both: torch.Tensor, fused: bool) -> torch.Tensor:
    """silu(gate) * up, which are side by side."""
    if fused:
        from verl.models.kernels.layers import gated_joined

        return gated_joined(both)
    gate, up = both.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


# -- what the Hugging Face config says -------------------------------------------------------------------------------


def is_mixture(hf: Any) -> bool:
    return hf.model_type in ("qwen3_moe", "mixtral")


def has_experts(hf: Any, layer: int) -> bool:
    """Of a mixture: some layers of Qwen3-MoE may be dense."""
    if hf.model_type != "qwen3_moe":
        return is_mixture(hf)
    return layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0


def has_head_norms(hf: Any) -> bool:
    """Qwen3 norms each head's queries and keys."""
    return hf.model_type in ("qwen3", "qwen3_moe")


def qkv_bias(hf: Any) -> bool:
    """Qwen2 always has it; others by a key."""
    return hf.model_type == "qwen2" or bool(getattr(hf, "attention_bias", False))


def sliding_window(hf: Any, layer: int) -> int | None:
    """How far back a layer's attention reaches; None: to the beginning."""
    types = getattr(hf, "layer_types", None)
    if types is not None and types[layer] != "sliding_attention":
        return None
    window = getattr(hf, "sliding_window", None)
    return None if window is None else int(window)
