"""One pipeline stage of a model: Megatron's GPTModel with our layers, and the passes engines make over packs."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import nn
from torch.utils.checkpoint import checkpoint

from verl.engines.megatron.groups import ParallelGroups
from verl.engines.megatron.layers import GatedMLP, Norm, SelfAttention, StageConfig, has_experts
from verl.engines.megatron.moe import MixtureOfExperts
from verl.models.fused_linear import HeadOptions, VocabularyShard, fused_head
from verl.models.introspection import backbone_of, per_row, row_lengths
from verl.models.packing import Pack


class StageModel(nn.Module):
    """The layers of this rank's stage, with the embedding on the first and the head on the last: log-probs over a
    vocabulary split over ranks, or (`value_head`) one number per token."""

    def __init__(
        self,
        hf: nn.Module,
        groups: ParallelGroups,
        *,
        dtype: torch.dtype,
        device: torch.device,
        value_head: bool = False,
        recompute: bool = False,
        fused: bool = False,
    ) -> None:
        """`hf`: the Hugging Face model on the meta device, for its config and its rotary embedding. Weights are not
        initialised."""
        super().__init__()
        backbone: Any = backbone_of(hf)
        config = backbone.config.get_text_config()
        self.groups, self.config, self.recompute = groups, config, recompute
        self.value_head = value_head
        self.tied = bool(config.tie_word_embeddings) and not value_head
        settings, tp = _stage_config(config, groups, dtype, device, fused), groups.layout.tp
        self.gpt = GPTModel(
            settings,
            _block(config, groups),
            vocab_size=tp * -(-config.vocab_size // tp),  # every rank as many rows
            max_sequence_length=config.max_position_embeddings,
            pre_process=groups.first,
            post_process=groups.last,
            share_embeddings_and_output_weights=self.tied,
            position_embedding_type="none",
            pg_collection=ProcessGroupCollection(
                tp=groups.megatron_tp, cp=groups.cp, pp=groups.pp, embd=None
            ),
        )
        if value_head and groups.last:
            del self.gpt.output_layer
            self.score = nn.Linear(config.hidden_size, 1, dtype=dtype)
        self.to(device)
        self._padding: int | None = backbone.get_input_embeddings().padding_idx
        rotary = copy.deepcopy(backbone.rotary_emb).to(device)
        per_row(rotary)
        self._rotary = [rotary]  # in a list: it is not part of the stage

    def forward(self, pack: Pack, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """The hidden states [N, 1, hidden] after this stage's layers; `hidden`: those of the stage before."""
        if hidden is None:
            hidden = self.gpt.embedding(input_ids=pack.input_ids, position_ids=None)
            if self._padding is not None and torch.is_grad_enabled():
                # As in transformers, the padding token's row gets no gradient where the token is an input.
                padding = (pack.input_ids == self._padding).view(-1, 1, 1)
                hidden = torch.where(padding, hidden.detach(), hidden)
        with row_lengths(pack.row_lengths):
            rotary = self._rotary[0](hidden, pack.position_ids)
        for layer in self.gpt.decoder.layers:
            run = partial(_layer, layer, rotary, pack.attention)
            if self.recompute and torch.is_grad_enabled():
                hidden = checkpoint(run, hidden, use_reentrant=False)
            else:
                hidden = run(hidden)
        assert hidden is not None
        return hidden

    def head(
        self, pack: Pack, hidden: torch.Tensor, options: HeadOptions | None = None
    ) -> dict[str, torch.Tensor]:
        """On the last stage: what `packed_forward` returns, of each target [M], from the last layer's output."""
        hidden = self.gpt.decoder.final_layernorm(pack.sources_of(hidden.flatten(0, 1)))
        if self.value_head:
            score = self.score
            values = nn.functional.linear(hidden.float(), score.weight.float(), score.bias.float())
            return {"values": values.sum(dim=-1)}
        hidden = copy_to_tensor_model_parallel_region(hidden, group=self.groups.megatron_tp)
        shard = self.vocabulary_shard
        embedding = self.gpt.embedding.word_embeddings if self.tied and self.groups.first else None
        weight = (embedding or self.gpt.output_layer).weight
        weight = weight if weight.shape[0] == shard.rows else weight[: shard.rows]
        out = fused_head(hidden, weight, pack.target, options=options, shard=shard)
        named = {"log_probs": out.log_probs, "entropy": out.entropy, "sum_pi_squared": out.sum_pi_squared}
        return {name: value for name, value in named.items() if value is not None}

    def verl_forward(self, pack: Pack, options: HeadOptions | None) -> dict[str, torch.Tensor]:
        """A whole pass, where there is one stage."""
        return self.head(pack, self(pack), options)

    @property
    def vocabulary_shard(self) -> VocabularyShard:
        """Which tokens' rows of the output matrix this rank has; the last ranks' padding is left out."""
        total, tp = int(self.config.vocab_size), self.groups.layout.tp
        each = -(-total // tp)
        first = self.groups.tp_rank * each
        return VocabularyShard(first, max(min(each, total - first), 0), self.groups.tp)


def _layer(layer: Any, rotary: Any, attention: Any, hidden: torch.Tensor) -> torch.Tensor:
    out, _ = layer(hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=attention)
    return out  # type: ignore[no-any-return]


def _stage_config(
    hf: Any, groups: ParallelGroups, dtype: torch.dtype, device: torch.device, fused: bool
) -> StageConfig:
    layout = groups.layout
    return StageConfig(
        hf=hf,
        groups=groups,
        fused=fused,
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        layernorm_epsilon=hf.rms_norm_eps,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        cuda_graph_scope=[],
    )


def _block(hf: Any, groups: ParallelGroups) -> TransformerBlockSubmodules:
    """The decoder layers of this rank's stage, of a model with this Hugging Face config."""

    def layer(mlp: type[nn.Module]) -> ModuleSpec:
        return ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=Norm,
                self_attention=ModuleSpec(module=SelfAttention),
                self_attn_bda=_residual,
                pre_cross_attn_layernorm=IdentityOp,
                pre_mlp_layernorm=Norm,
                mlp=mlp,
                mlp_bda=_residual,
            ),
        )

    each = hf.num_hidden_layers // groups.layout.pp
    indices = range(groups.stage * each, (groups.stage + 1) * each)
    mlps = (MixtureOfExperts if has_experts(hf, index) else GatedMLP for index in indices)
    return TransformerBlockSubmodules([layer(mlp) for mlp in mlps], layer_norm=Norm)


def _residual(training: bool, fused: bool) -> Any:
    """What Megatron calls its residual connection; here it is the sum alone."""
    return lambda out_and_bias, residual, dropout: residual + out_and_bias[0]
