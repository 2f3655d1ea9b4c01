"""What a model folder's config.json says about sizes: parameters, layers, cache. No weights, no torch.

Exact for the families in FAMILIES (tests compare with transformers); another model is counted as if it were
built like Llama, and says so (`exact` is False).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import ModelError
from verl.json_input import read_json


@dataclass(frozen=True)
class Family:
    """How a family of models differs from Llama."""

    tied: bool = False
    """The output matrix is the embedding, where config.json does not say."""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    layer_norms: int = 2
    norm_bias: bool = False
    gated: bool = True
    mlp_bias: bool = False
    head_bias: bool = False
    experts: bool = False
    learned_positions: bool = False


_GEMMA = Family(tied=True)
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts=True),
    "mixtral": Family(experts=True),
    "gemma": _GEMMA,
    "gemma2": Family(tied=True, layer_norms=4),
    "gemma3_text": Family(tied=True, layer_norms=4, qk_norm=True),
    "phi": Family(
        qkv_bias=True,
        out_bias=True,
        layer_norms=1,
        norm_bias=True,
        gated=False,
        mlp_bias=True,
        head_bias=True,
    ),
    "phi3": Family(),
    "gpt2": Family(
        tied=True,
        qkv_bias=True,
        out_bias=True,
        norm_bias=True,
        gated=False,
        mlp_bias=True,
        learned_positions=True,
    ),
}

_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}


@dataclass(frozen=True)
class Linear:
    """One kind of matrix and how often the model has it."""

    name: str
    inputs: int
    outputs: int
    bias: bool
    count: int

    @property
    def parameters(self) -> int:
        return self.count * (self.inputs * self.outputs + (self.outputs if self.bias else 0))


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model."""

    model_type: str
    exact: bool
    layers: int
    hidden: int
    intermediate: int
    """Width of the MLP a token passes through: of all its experts together in a mixture."""
    query: int
    """Heads x head size."""
    key_value: int
    """Key-value heads x head size."""
    vocab: int
    tied: bool
    norms: int
    """Norms over the hidden size per layer."""
    qk_norm: bool
    linears: tuple[Linear, ...]
    experts: int
    """Parameters of all experts."""
    other: int
    """Norms and positions."""
    head: int
    """Parameters of the output matrix that are not the embedding's."""

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        matrices = sum(linear.parameters for linear in self.linears)
        return self.embedding + matrices + self.experts + self.other + self.head

    @property
    def value_parameters(self) -> int:
        """As a critic: one number per token in place of the output matrix."""
        return self.parameters - self.head + self.hidden

    @property
    def cache_elements(self) -> int:
        """Of the KV cache, per token."""
        return 2 * self.layers * self.key_value

    def lora_parameters(self, rank: int, targets: list[str]) -> int:
        """Of adapters on the named modules; all-linear: on every linear layer but the output."""
        chosen = [linear for linear in self.linears if "all-linear" in targets or linear.name in targets]
        return sum(linear.count * rank * (linear.inputs + linear.outputs) for linear in chosen)


def read_shape(path: str, override: Mapping[str, Any] | None = None) -> ModelShape | None:
    """The sizes of a model folder, or of a model id in the local Hugging Face cache; None where neither is here."""
    file = _config_file(path)
    if file is None:
        return None
    try:
        values = read_json(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read '{file}': {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"'{file}' holds no config of a model")
    if isinstance(values.get("text_config"), dict):
        values = values["text_config"]
    return shape_of({**values, **(override or {})}, str(file))


def _config_file(path: str) -> Path | None:
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"the model folder '{path}' has no config.json (actor_rollout_ref.model.path)")
        return folder / "config.json"
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelError(f"no model folder '{path}' (actor_rollout_ref.model.path)")
    return cached_config(path)


def cached_config(model_id: str) -> Path | None:
    """config.json of a model of the hub in the local cache."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    found = sorted((hub / f"models--{model_id.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    return found[-1] if found else None


def shape_of(values: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """The sizes a config.json describes."""
    kind = str(values.get("model_type", ""))
    family = FAMILIES.get(kind, Family())

    def size(name: str, default: int | None = None) -> int:
        value = values.get(name)
        if value is None and kind == "gpt2":
            value = values.get(_GPT2_NAMES.get(name, name))
        if value is None:
            value = default
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{where} has {name}={value!r}; a whole number above 0 is needed")
        return value

    hidden, layers, heads = size("hidden_size"), size("num_hidden_layers"), size("num_attention_heads")
    head_size = size("head_dim", hidden // heads)
    query, key_value = heads * head_size, size("num_key_value_heads", heads) * head_size
    width = size("intermediate_size", 4 * hidden)
    vocab = size("vocab_size")
    tied = bool(values.get("tie_word_embeddings", family.tied))
    qkv_bias = family.qkv_bias or bool(values.get("attention_bias", False))
    out_bias = family.out_bias or bool(values.get("attention_bias", False))
    mlp_bias = family.mlp_bias or bool(values.get("mlp_bias", False))

    sparse = _sparse_layers(values, layers) if family.experts else 0
    dense = layers - sparse
    linears = _attention(kind, hidden, query, key_value, qkv_bias, out_bias, layers)
    linears += _mlp(kind, family, hidden, width, mlp_bias, dense)
    experts, used_width = 0, width
    if sparse:
        number = size("num_experts" if values.get("num_experts") is not None else "num_local_experts")
        expert_width = size("moe_intermediate_size", width)
        experts = sparse * number * (3 * hidden * expert_width + hidden)
        used_width = expert_width * size("num_experts_per_tok")
    norm = 2 * hidden if family.norm_bias else hidden
    other = (family.layer_norms * layers + 1) * norm
    if family.qk_norm:
        other += 2 * head_size * layers
    if family.learned_positions:
        other += size("max_position_embeddings") * hidden
    return ModelShape(
        model_type=kind or "unknown",
        exact=kind in FAMILIES,
        layers=layers,
        hidden=hidden,
        intermediate=used_width,
        query=query,
        key_value=key_value,
        vocab=vocab,
        tied=tied,
        norms=family.layer_norms,
        qk_norm=family.qk_norm,
        linears=tuple(linears),
        experts=experts,
        other=other,
        head=(0 if tied else vocab * hidden) + (vocab if family.head_bias else 0),
    )


def _sparse_layers(values: Mapping[str, Any], layers: int) -> int:
    """Layers whose MLP is a mixture of experts."""
    step = values.get("decoder_sparse_step", 1) or 1
    dense = set(values.get("mlp_only_layers") or [])
    return sum(1 for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)


def _attention(
    kind: str, hidden: int, query: int, key_value: int, qkv_bias: bool, out_bias: bool, layers: int
) -> list[Linear]:
    out = {"phi": "dense", "gpt2": "c_proj"}.get(kind, "o_proj")
    joined = {"phi3": "qkv_proj", "gpt2": "c_attn"}.get(kind)
    if joined:
        first = [Linear(joined, hidden, query + 2 * key_value, qkv_bias, layers)]
    else:
        sizes = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
        first = [Linear(name, hidden, width, qkv_bias, layers) for name, width in sizes.items()]
    return [*first, Linear(out, query, hidden, out_bias, layers)]


def _mlp(kind: str, family: Family, hidden: int, width: int, bias: bool, layers: int) -> list[Linear]:
    if layers == 0:
        return []
    if kind == "phi3":
        names = [Linear("gate_up_proj", hidden, 2 * width, bias, layers)]
        return [*names, Linear("down_proj", width, hidden, bias, layers)]
    if not family.gated:
        up, down = ("c_fc", "c_proj") if kind == "gpt2" else ("fc1", "fc2")
        return [Linear(up, hidden, width, bias, layers), Linear(down, width, hidden, bias, layers)]
    return [
        Linear("gate_proj", hidden, width, bias, layers),
        Linear("up_proj", hidden, width, bias, layers),
        Linear("down_proj", width, hidden, bias, layers),
    ]
