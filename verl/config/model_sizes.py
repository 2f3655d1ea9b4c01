"""Sizes of a model, from a copy that transformers builds on the meta device: exact for every architecture it knows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import ModelError


@dataclass(frozen=True)
class ModelSizes:
    """Numbers of elements."""

    parameters: int
    embedding: int
    head: int  # of the output matrix; 0 where it is tied to the embedding
    hidden: int
    layers: int
    cache: int  # of the KV cache, per token
    kept: int  # kept per token and layer for the backward pass in the type of the weights (an estimate)
    kept_float32: int  # the same in float32, by norms
    linears: tuple[tuple[str, int], ...]  # name, inputs + outputs of each linear layer but the output matrix

    @property
    def value_parameters(self) -> int:
        """As a critic: one number per token in place of the output matrix."""
        return self.parameters - self.head + self.hidden

    def lora_parameters(self, rank: int, targets: list[str]) -> int:
        """Of LoRA adapters on the named modules."""
        endings = tuple(f".{target}" for target in targets)
        chosen = [
            size for name, size in self.linears if "all-linear" in targets or f".{name}".endswith(endings)
        ]
        return rank * sum(chosen)


def sizes_of(model: Any) -> ModelSizes:
    """The sizes of a transformers model, on the meta device or any other."""
    config = model.config.get_text_config()
    hidden, layers = config.hidden_size, config.num_hidden_layers
    heads = getattr(config, "num_attention_heads", 0)
    head_dim = getattr(config, "head_dim", None) or hidden // max(heads, 1)
    query, key_value = heads * head_dim, (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    width = getattr(config, "intermediate_size", None) or 4 * hidden
    experts = getattr(config, "num_experts_per_tok", None)
    if experts:
        width = experts * (getattr(config, "moe_intermediate_size", None) or width)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    linears, norms, qk_norm = [], 0, False
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and weight is not None:
            norms += weight.numel() == hidden
            qk_norm |= weight.numel() == head_dim != hidden
        if type(module).__name__ in ("Linear", "Conv1D") and module is not output:
            linears.append((name, sum(weight.shape)))
    norms = max(norms // layers, 1) * hidden
    normed = query + key_value if qk_norm else 0
    # Each norm keeps its input in float32 and two results; attention keeps its four projections, a gated MLP four
    # tensors of its width.
    kept = 2 * norms + 2 * query + 2 * key_value + normed + 4 * width
    tied = output is None or output.weight is embedding.weight
    return ModelSizes(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        embedding=embedding.weight.numel(),
        head=0 if tied else sum(parameter.numel() for parameter in output.parameters()),
        hidden=hidden,
        layers=layers,
        cache=2 * layers * key_value,
        kept=kept,
        kept_float32=norms + normed,
        linears=tuple(linears),
    )


def read_sizes(
    path: str, override: Mapping[str, Any] | None = None, *, download: bool = False
) -> ModelSizes | None:
    """The sizes of a model folder or hub id; None for an id that is not in the local cache (unless `download`)."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if path.startswith((".", "/", "~")) or path.count("/") != 1:
            raise ModelError(f"there is no model folder '{path}'")
        cached = cached_config(path)
        if cached is None and not download:
            return None
        folder = cached.parent if cached else Path(path)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        for name, value in (override or {}).items():
            setattr(config, name, value)
        with torch.device("meta"):
            return sizes_of(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    except Exception as error:  # transformers checks configs in many places, each with its own exceptions
        raise ModelError(
            f"no language model can be built from '{path}': {str(error).partition(chr(10))[0]}"
        ) from None


def cached_config(model_id: str) -> Path | None:
    """config.json of a hub model in the local cache."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    found = sorted((hub / f"models--{model_id.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    return found[-1] if found else None
