"""Where each Hugging Face weight is in the parameters of a rank's stage.

Every place is a contiguous block of rows of one parameter, a view that can be written through. Loading, export,
checkpoints and the optimiser (its state is kept under Hugging Face names) all go by this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from verl.engines.megatron.layers import has_head_norms
from verl.engines.megatron.model import StageModel


@dataclass(frozen=True)
class Place:
    """A weight, or this rank's part of it, in a parameter of this stage."""

    name: str
    """In the state dict of the Hugging Face model."""
    parameter: str
    """Of the `StageModel`."""
    start: int
    """First row in the parameter; `rows` of them belong to this weight."""
    rows: int
    shape: tuple[int, ...]
    """Of the whole weight."""
    split: int | None = None
    """The dimension that is split over ranks: over tensor-parallel ranks, for experts over expert-parallel ranks. Each
    rank has an equal part, rounded up, so that the last ranks may have fewer."""
    part: int = 0
    """Which of the parts this rank has."""
    parts: int = 1
    expert: bool = False
    partial_gradient: bool = False
    """Every tensor-parallel rank holds all of it and computes a part of its gradient."""
    duplicate: bool = False
    """The last stage's copy of a tied embedding: filled like the original, never saved or counted."""

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """The block of rows of the parameter, or of a tensor of its shape (a gradient)."""
        return parameter.narrow(0, self.start, self.rows)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where this rank's part begins in the whole weight."""
        begin = [0] * len(self.shape)
        if self.split is not None:
            begin[self.split] = min(
                self.part * -(-self.shape[self.split] // self.parts), self.shape[self.split]
            )
        return tuple(begin)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of this rank's part."""
        sizes = list(self.shape)
        if self.split is not None:
            each = -(-self.shape[self.split] // self.parts)
            sizes[self.split] = max(min(each, self.shape[self.split] - self.offsets[self.split]), 0)
        return tuple(sizes)


def places(model: StageModel) -> list[Place]:
    """The table of this rank's stage, in the order of the Hugging Face state dict."""
    hf, groups, embedding = model.config, model.groups, "model.embed_tokens.weight"
    hidden, each = int(hf.hidden_size), hf.num_hidden_layers // groups.layout.pp
    table: list[Place] = []
    if groups.first:
        table.append(_vocabulary(model, embedding, "gpt.embedding.word_embeddings.weight"))
    for at in range(each):
        table += _layer(model, f"model.layers.{groups.stage * each + at}", f"gpt.decoder.layers.{at}")
    if not groups.last:
        return table
    table.append(Place("model.norm.weight", "gpt.decoder.final_layernorm.weight", 0, hidden, (hidden,)))
    if model.value_head:
        table.append(Place("score.weight", "score.weight", 0, 1, (1, hidden)))
        table.append(Place("score.bias", "score.bias", 0, 1, (1,)))
    elif not model.tied:
        table.append(_vocabulary(model, "lm_head.weight", "gpt.output_layer.weight"))
    elif not groups.first:
        table.append(_vocabulary(model, embedding, "gpt.output_layer.weight", duplicate=True))
    return table


def _vocabulary(model: StageModel, name: str, parameter: str, duplicate: bool = False) -> Place:
    shape = (int(model.config.vocab_size), int(model.config.hidden_size))
    rows, part, parts = model.vocabulary_shard.rows, model.groups.tp_rank, model.groups.layout.tp
    return Place(name, parameter, 0, rows, shape, 0, part, parts, duplicate=duplicate)


def _layer(model: StageModel, name: str, parameter: str) -> Iterator[Place]:
    hf, groups = model.config, model.groups
    hidden, tp = int(hf.hidden_size), groups.layout.tp
    head = int(getattr(hf, "head_dim", None) or hidden // hf.num_attention_heads)
    own = dict(model.get_submodule(parameter).named_parameters())

    def rows(block: str, linear: str, weights: dict[str, int], columns: int) -> Iterator[Place]:
        """Weights joined row by row in one matrix (and bias), split over ranks by rows."""
        for kind in ("weight", "bias"):
            if f"{block}.{linear}.{kind}" not in own:
                continue
            start = 0
            for weight, total in weights.items():
                shape = (total, columns) if kind == "weight" else (total,)
                target = f"{parameter}.{block}.{linear}.{kind}"
                yield Place(
                    f"{name}.{weight}.{kind}", target, start, total // tp, shape, 0, groups.tp_rank, tp
                )
                start += total // tp

    def columns(block: str, linear: str, weight: str, total: int) -> Iterator[Place]:
        """A matrix split over ranks by columns; its bias is added after the sum over ranks."""
        target = f"{parameter}.{block}.{linear}"
        yield Place(
            f"{name}.{weight}.weight", f"{target}.weight", 0, hidden, (hidden, total), 1, groups.tp_rank, tp
        )
        if f"{block}.{linear}.bias" in own:
            yield Place(f"{name}.{weight}.bias", f"{target}.bias", 0, hidden, (hidden,))

    def vector(weight: str, target: str, size: int, partial: bool = False) -> Place:
        """A vector that every rank has."""
        names = f"{name}.{weight}.weight", f"{parameter}.{target}.weight"
        return Place(*names, 0, size, (size,), partial_gradient=partial)

    queries, keys = hf.num_attention_heads * head, hf.num_key_value_heads * head
    qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    yield from rows("self_attention", "linear_qkv", qkv, hidden)
    yield from columns("self_attention", "linear_proj", "self_attn.o_proj", queries)
    if has_head_norms(hf):
        for which in ("q", "k"):
            yield vector(f"self_attn.{which}_norm", f"self_attention.{which}_layernorm", head, tp > 1)
    if "mlp.gate.weight" in own:
        experts = int(hf.num_experts)
        for weight, tensor in model.get_submodule(f"{parameter}.mlp").named_parameters():
            names = f"{name}.mlp.{weight}", f"{parameter}.mlp.{weight}"
            place = Place(*names, 0, tensor.shape[0], (experts, *tensor.shape[1:]))
            if weight.startswith("experts."):
                yield replace(place, split=0, part=groups.ep_rank, parts=groups.layout.ep, expert=True)
            else:
                yield replace(place, partial_gradient=tp > 1)
    else:
        size = int(hf.intermediate_size)
        yield from rows("mlp", "linear_fc1", {"mlp.gate_proj": size, "mlp.up_proj": size}, hidden)
        yield from columns("mlp", "linear_fc2", "mlp.down_proj", size)
    yield vector("input_layernorm", "input_layernorm", hidden)
    yield vector("post_attention_layernorm", "pre_mlp_layernorm", hidden)
