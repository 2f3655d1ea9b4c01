"""The weights of a Megatron-core GPT checkpoint under their Hugging Face names.

Megatron keeps queries, keys and values in one matrix, group by group, and gate and up projection in another; the
layers of a model are stacked in one tensor or have one each; norms belong to the layer that follows them (Transformer
Engine) or are separate; the vocabulary is padded. Only the rows of the requested weight are read.

Every weight of the architecture must be found, and every tensor of the checkpoint's model used; what does not fit is
refused by name before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint.megatron.distcp import METADATA, DistTensors, Region
from verl.checkpoint.weights import HF_FOLDER, CheckpointReader
from verl.errors import CheckpointError
from verl.models.loading import DTYPES

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
_NOT_WEIGHTS = re.compile(
    r"(^|\.)(optimizer|_extra_state|rng_state|rerun_state_machine_state|opt_param_scheduler)\b"
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_LAYERS = "decoder.layers."
_SUBFOLDERS = ("", "dist_ckpt", "model/dist_ckpt", "model", "actor/dist_ckpt", "actor/model/dist_ckpt")


def holds_megatron(local_dir: Path) -> bool:
    return _tensor_folder(local_dir) is not None


def find_megatron(local_dir: Path, base_dir: Path | None = None) -> tuple[Path, Path]:
    """The folders of the tensors and of config.json; `base_dir` is the second where it is not next to the first."""
    tensors = _tensor_folder(local_dir)
    if tensors is None:
        raise CheckpointError(
            f"--local_dir {local_dir} holds no Megatron checkpoint (a folder with {METADATA}); "
            "give .../global_step_N/actor"
        )
    if base_dir is not None:
        candidates = [base_dir]
    else:
        parents = (tensors, *list(tensors.parents)[:3])
        candidates = [folder for parent in parents for folder in (parent / HF_FOLDER, parent)]
    for candidate in candidates:
        if (candidate / "config.json").exists():
            return tensors, candidate
    where = f"in --base_dir {base_dir}" if base_dir is not None else f"next to {tensors}"
    raise CheckpointError(f"no config.json is {where}: give the folder of the trained model with --base_dir")


def _tensor_folder(local_dir: Path) -> Path | None:
    folders = (local_dir / name for name in _SUBFOLDERS)
    return next((folder for folder in folders if (folder / METADATA).is_file()), None)


def _split_qkv(fused: torch.Tensor, which: str, counts: tuple[int, int, int]) -> torch.Tensor:
    """The rows of queries, keys or values out of the joined matrix or bias."""
    groups, queries, head = counts
    span = {"q": (0, queries), "k": (queries, 1), "v": (queries + 1, 1)}[which]
    grouped = fused.view(groups, queries + 2, head, *fused.shape[1:])
    return grouped.narrow(1, *span).reshape(-1, *fused.shape[1:])


@dataclass(frozen=True)
class _Rows:
    """Rows of a Megatron tensor that make a weight; the tensor must have `total` rows (None: the rest is padding)."""

    name: str
    begin: int = 0
    count: int | None = None
    total: int | None = None
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class _Origin:
    """Where a weight comes from: a region of a tensor, and what is done to it after reading."""

    key: str
    region: Region
    stacked: bool
    """Whether the first dimension counts layers."""
    shape: tuple[int, ...]
    convert: Callable[[torch.Tensor], torch.Tensor] | None


class MegatronReader(CheckpointReader):
    """The weights of `model` (on the meta device), read from a distributed checkpoint one at a time."""

    def __init__(self, folder: Path, model: Any) -> None:
        config = model.config
        tensors = DistTensors(folder)
        if config.model_type not in MODEL_TYPES:
            raise CheckpointError(
                f"{config.model_type!r} models cannot be read from a Megatron checkpoint; "
                f"known: {', '.join(MODEL_TYPES)}"
            )
        heads = config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._heads = groups, heads // groups, size
        """Groups of attention heads (one key and one value head each), query heads in a group, size of a head."""
        self._layers = int(config.num_hidden_layers)
        self._tensors = tensors
        # Without the prefixes that wrappers add.
        self._by_name = {
            re.sub(r"^((model\d*|module)\.)+", "", key): key
            for key in tensors.tensors
            if not _NOT_WEIGHTS.search(key)
        }
        for key in self._by_name.values():
            if tensors.tensors[key].dtype not in DTYPES.values():
                raise CheckpointError(
                    f"{key!r} is {tensors.tensors[key].dtype}; only weights of {', '.join(DTYPES)} can be read"
                )
        found = {name: self._origin(name, tuple(w.shape)) for name, w in model.state_dict().items()}
        self._origins = {name: origin for name, origin in found.items() if origin is not None}
        self.weights = {
            name: torch.empty(origin.shape, dtype=tensors.tensors[origin.key].dtype, device="meta")
            for name, origin in self._origins.items()
        }
        used = {origin.key for origin in self._origins.values()}
        surplus = sorted(key for key in self._by_name.values() if key not in used)
        if surplus:
            raise CheckpointError(
                f"{folder} holds {len(surplus)} tensors that no weight of {type(model).__name__} uses, "
                f"first {surplus[0]!r}: config.json belongs to another model"
            )

    def get(self, name: str) -> torch.Tensor:
        origin = self._origins[name]
        rows = self._tensors.read(origin.key, origin.region)
        rows = rows[0] if origin.stacked else rows
        return origin.convert(rows) if origin.convert else rows

    def _find(self, name: str, layer: int | None) -> tuple[str, Region] | None:
        """The tensor of that name, and which range of its first dimension belongs to the layer."""
        if layer is None:
            key = self._by_name.get(name)
            return None if key is None else (key, ())
        separate = self._by_name.get(f"{_LAYERS}{layer}.{name}")
        if separate is not None:
            return separate, ()
        stacked = self._by_name.get(_LAYERS + name)
        if stacked is None:
            return None
        if self._tensors.tensors[stacked].size[0] != self._layers:
            raise CheckpointError(
                f"{stacked!r} holds {self._tensors.tensors[stacked].size[0]} layers, config.json says {self._layers}"
            )
        return stacked, ((layer, layer + 1),)

    def _origin(self, name: str, shape: tuple[int, ...]) -> _Origin | None:
        layer = _LAYER.fullmatch(name)
        number = int(layer.group(1)) if layer else None
        for rows in self._candidates(layer.group(2) if layer else name, shape):
            found = self._find(rows.name, number)
            if found is None:
                continue
            key, layers = found
            present, *rest = self._tensors.tensors[key].size[len(layers) :]
            if present != rows.total if rows.total is not None else present < shape[0]:
                raise CheckpointError(
                    f"{key!r} has {present} rows; with this config.json {name!r} needs {rows.total or shape[0]}"
                )
            end = present if rows.count is None else rows.begin + rows.count
            region = (*layers, (rows.begin, end), *((0, n) for n in rest))
            count = shape[0] if rows.convert is not None else end - rows.begin
            return _Origin(key, region, bool(layers), (count, *rest), rows.convert)
        return None

    def _candidates(self, name: str, shape: tuple[int, ...]) -> Iterator[_Rows]:
        """Where the rows of a weight may be, the likeliest first."""
        stem, _, kind = name.rpartition(".")
        if name in _VOCABULARY:
            yield _Rows(_VOCABULARY[name], 0, shape[0])
        for candidate in _SAME.get(stem, ()):
            yield _Rows(candidate.format(kind), total=shape[0])
        if name in _EXPERTS:
            yield _Rows(_EXPERTS[name], total=shape[0])
        if stem in _FUSED:
            groups, queries, head = self._heads
            convert = partial(_split_qkv, which=_FUSED[stem], counts=self._heads)
            rows = groups * (queries + 2) * head
            yield _Rows(f"self_attention.linear_qkv.{kind}", total=rows, convert=convert)
        if stem in _HALVES:
            half = _HALVES[stem]
            yield _Rows(f"mlp.linear_fc1.{kind}", half * shape[0], shape[0], total=2 * shape[0])
            yield _Rows(f"mlp.linear_fc1.{kind}_{'wv'[half]}", total=shape[0])


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
