"""The weights of a Megatron-core GPT model under their Hugging Face names.

Megatron keeps queries, keys and values in one matrix, group by group, and gate and up projection in another, one
after the other; the layers of a model are stacked in one tensor or have one each; norms belong to the layer that
follows them (Transformer Engine) or stand alone; the vocabulary is padded. All of this is undone here by reading
only the rows that a weight is made of.

What always holds: every weight the architecture wants has one place it comes from, and every tensor of the
checkpoint that belongs to the model is used; what does not fit is refused by name before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from verl.checkpoint.megatron.distcp import DistTensors, Region
from verl.errors import CheckpointError
from verl.models.dtypes import DTYPES

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
_NOT_WEIGHTS = re.compile(
    r"(^|\.)(optimizer|_extra_state|rng_state|rerun_state_machine_state|opt_param_scheduler)\b"
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_LAYERS = "decoder.layers."


@dataclass(frozen=True)
class Layout:
    """The numbers that say how Megatron's matrices are laid out."""

    groups: int
    """Of attention heads, each with one key and one value head."""
    queries: int
    """Query heads in a group."""
    head: int
    """Size of a head."""

    @classmethod
    def of(cls, config: Any) -> Layout:
        heads = config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        head = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(groups, heads // groups, head)

    def take(self, fused: torch.Tensor, which: str) -> torch.Tensor:
        """The rows of queries, keys or values out of the joined matrix or bias."""
        span = {"q": (0, self.queries), "k": (self.queries, 1), "v": (self.queries + 1, 1)}[which]
        grouped = fused.view(self.groups, self.queries + 2, self.head, *fused.shape[1:])
        return grouped.narrow(1, *span).reshape(-1, *fused.shape[1:])


@dataclass(frozen=True)
class _Way:
    """One way to make a weight: rows of a tensor, of which there must be `of` (None: more are padding)."""

    name: str
    begin: int = 0
    count: int | None = None
    of: int | None = None
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class _Origin:
    """Where a weight comes from: a box of a tensor, and what is still to be done to it."""

    key: str
    region: Region
    stacked: bool
    """Whether the first dimension counts layers."""
    shape: tuple[int, ...]
    finish: Callable[[torch.Tensor], torch.Tensor]


class MegatronSource:
    """The weights that `model` (an empty one) wants, read from a distributed checkpoint one at a time."""

    def __init__(self, tensors: DistTensors, model: Any) -> None:
        config = model.config
        if config.model_type not in MODEL_TYPES:
            raise CheckpointError(
                f"{config.model_type!r} models cannot be read from a Megatron checkpoint; "
                f"known: {', '.join(MODEL_TYPES)}"
            )
        self.layout = Layout.of(config)
        self.layers = int(config.num_hidden_layers)
        self._tensors = tensors
        self._by_name = {_bare(key): key for key in tensors.names if not _NOT_WEIGHTS.search(key)}
        for key in self._by_name.values():
            if tensors.dtype(key) not in DTYPES.values():
                raise CheckpointError(
                    f"{key!r} is {tensors.dtype(key)}; only weights of {', '.join(DTYPES)} can be read"
                )
        self._origins: dict[str, _Origin] = {}
        for name, wanted in model.state_dict().items():
            origin = self._origin(name, tuple(wanted.shape))
            if origin is not None:
                self._origins[name] = origin
        used = {origin.key for origin in self._origins.values()}
        surplus = sorted(key for key in self._by_name.values() if key not in used)
        if surplus:
            raise CheckpointError(
                f"{tensors.folder} holds {len(surplus)} tensors that no weight of {type(model).__name__} is made of, "
                f"first {surplus[0]!r}: config.json belongs to another model"
            )

    # -- as every source of weights -----------------------------------------------------------------------------

    @property
    def names(self) -> Collection[str]:
        return self._origins

    def shape(self, name: str) -> tuple[int, ...]:
        return self._origins[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors.dtype(self._origins[name].key)

    def numel(self) -> int:
        return sum(torch.Size(origin.shape).numel() for origin in self._origins.values())

    def get(self, name: str) -> torch.Tensor:
        origin = self._origins[name]
        box = self._tensors.read(origin.key, origin.region)
        return origin.finish(box[0] if origin.stacked else box)

    # -- in Megatron's own words --------------------------------------------------------------------------------

    def has(self, name: str, layer: int | None = None) -> bool:
        return self._find(name, layer) is not None

    def own(self, name: str, layer: int | None = None) -> torch.Tensor:
        """A tensor under its Megatron name (of a layer: without the layer's part), as the model uses it."""
        found = self._find(name, layer)
        if found is None:
            raise CheckpointError(f"{self._tensors.folder} has no {name!r} of layer {layer}")
        key, first = found
        whole = self._tensors.read(key, (*first, *((0, n) for n in self._tensors.size(key)[len(first) :])))
        return whole[0] if first else whole

    def _find(self, name: str, layer: int | None) -> tuple[str, Region] | None:
        """The tensor of that name, and which part of its first dimension belongs to the layer."""
        if layer is None:
            key = self._by_name.get(name)
            return None if key is None else (key, ())
        apart = self._by_name.get(f"{_LAYERS}{layer}.{name}")
        if apart is not None:
            return apart, ()
        stacked = self._by_name.get(_LAYERS + name)
        if stacked is None:
            return None
        if self._tensors.size(stacked)[0] != self.layers:
            raise CheckpointError(
                f"{stacked!r} holds {self._tensors.size(stacked)[0]} layers, config.json says {self.layers}"
            )
        return stacked, ((layer, layer + 1),)

    # -- from Hugging Face names to Megatron's ------------------------------------------------------------------

    def _origin(self, name: str, shape: tuple[int, ...]) -> _Origin | None:
        layer = _LAYER.fullmatch(name)
        number = int(layer.group(1)) if layer else None
        for way in self._ways(layer.group(2) if layer else name, shape):
            found = self._find(way.name, number)
            if found is None:
                continue
            key, first = found
            rows, *rest = self._tensors.size(key)[len(first) :]
            if way.of is not None and rows != way.of:
                raise CheckpointError(
                    f"{key!r} has {rows} rows; with this config.json {name!r} wants {way.of}"
                )
            if way.of is None and rows < shape[0]:
                raise CheckpointError(f"{key!r} has {rows} rows; {name!r} wants {shape[0]}")
            end = rows if way.count is None else way.begin + way.count
            region = (*first, (way.begin, end), *((0, n) for n in rest))
            made = shape[0] if way.finish is not None else end - way.begin
            return _Origin(key, region, bool(first), (made, *rest), way.finish or _as_is)
        return None

    def _ways(self, name: str, shape: tuple[int, ...]) -> Iterator[_Way]:
        """What a weight may be made of, the likeliest first."""
        stem, _, kind = name.rpartition(".")
        if name in _VOCABULARY:
            yield _Way(_VOCABULARY[name], 0, shape[0])
        for candidate in _SAME.get(stem, ()):
            yield _Way(candidate.format(kind), of=shape[0])
        if name in _EXPERTS:
            yield _Way(_EXPERTS[name], of=shape[0])
        if stem in _FUSED:
            which, layout = _FUSED[stem], self.layout
            rows = layout.groups * (layout.queries + 2) * layout.head
            yield _Way(
                f"self_attention.linear_qkv.{kind}", of=rows, finish=lambda fused: layout.take(fused, which)
            )
        if stem in _HALVES:
            half = _HALVES[stem]
            yield _Way(f"mlp.linear_fc1.{kind}", half * shape[0], shape[0], of=2 * shape[0])
            yield _Way(f"mlp.linear_fc1.{kind}_{'wv'[half]}", of=shape[0])


def _as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _bare(key: str) -> str:
    """Wrappers put words of their own in front."""
    return re.sub(r"^((model\d*|module)\.)+", "", key)


_VOCABULARY = {  # Megatron pads it
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "lm_head.weight": "output_layer.weight",
}
_SAME = {
    "model.norm": ("decoder.final_layernorm.{}",),
    "input_layernorm": ("self_attention.linear_qkv.layer_norm_{}", "input_layernorm.{}"),
    "post_attention_layernorm": ("mlp.linear_fc1.layer_norm_{}", "pre_mlp_layernorm.{}"),
    "self_attn.q_norm": ("self_attention.q_layernorm.{}",),
    "self_attn.k_norm": ("self_attention.k_layernorm.{}",),
    "self_attn.o_proj": ("self_attention.linear_proj.{}",),
    "mlp.down_proj": ("mlp.linear_fc2.{}",),
    "mlp.gate": ("mlp.router.{}",),
}
_EXPERTS = {
    "mlp.experts.gate_up_proj": "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.down_proj": "mlp.experts.experts.linear_fc2.weight",
}
_FUSED = {"self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v"}
_HALVES = {"mlp.gate_proj": 0, "mlp.up_proj": 1}
