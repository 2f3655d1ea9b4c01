"""Whether a Hugging Face folder holds what a checkpoint holds: every tensor, bit for bit, and the same logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint.hf_folder import (
    CheckpointReader,
    auto_class,
    cast_to,
    check_names,
    hf_reader,
    on_disk,
)
from verl.errors import CheckpointError
from verl.runtime import quiet_transformers

PROMPT_LENGTH = 12


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in type, shape and every bit; NaN equals NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def check_tensors(folder: Path, reader: CheckpointReader, model: Any, dtype: torch.dtype) -> int:
    """Compare every tensor of the folder with the checkpoint; the number compared. CheckpointError names the first
    that is missing, surplus or different, or less precise than transformers would have it in memory."""
    written, cast = hf_reader(folder), cast_to(dtype, model)
    loaded = _loaded_dtypes(folder, model, dtype)
    seen = set()
    for name in check_names(reader, model):
        weight = reader.get(name)
        kept = loaded.get(name, dtype)
        if not same_bits(cast(name, weight).to(kept), weight.to(kept)):
            raise CheckpointError(f"{name!r} was rounded; transformers keeps it in {kept}")
        for key, value in on_disk(model, name, cast(name, weight)).items():
            if key not in written.weights:
                raise CheckpointError(f"the merged folder lacks {key!r}")
            if not same_bits(written.get(key), value):
                raise CheckpointError(f"{key!r} in the merged folder differs from the checkpoint")
            seen.add(key)
    surplus = sorted(set(written.weights) - seen)
    if surplus:
        raise CheckpointError(f"the merged folder holds {surplus[0]!r}, which the checkpoint does not have")
    return len(seen)


def _loaded_dtypes(folder: Path, model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The types in which transformers itself has the weights of the folder in memory."""
    if not hasattr(type(model), "from_pretrained"):
        return {}
    with quiet_transformers():
        loaded = type(model).from_pretrained(folder, dtype=dtype, device_map="meta", trust_remote_code=False)
    return {name: weight.dtype for name, weight in loaded.state_dict().items()}


def check_logits(folder: Path, reader: CheckpointReader, config: Any, dtype: torch.dtype) -> None:
    """The model transformers loads from the folder answers a fixed prompt exactly as one built from the checkpoint's
    own tensors. The two are in memory one after the other."""
    kind = auto_class(config)

    def merged() -> Any:
        with quiet_transformers():
            return kind.from_pretrained(folder, dtype=dtype, trust_remote_code=False)

    expected = _logits(lambda: _from_reader(kind, config, reader, dtype), config)
    found = _logits(merged, config)
    if not same_bits(expected, found):
        worst = float((expected.float() - found.float()).abs().max())
        raise CheckpointError(
            f"the merged model and the checkpoint differ on a fixed prompt: logits by up to {worst:.3g}"
        )


def _from_reader(kind: Any, config: Any, reader: CheckpointReader, dtype: torch.dtype) -> Any:
    model = kind.from_config(config, dtype=dtype, trust_remote_code=False)
    weights, cast = model.state_dict(keep_vars=True), cast_to(dtype, model)
    for name in reader.weights:
        weights[name].data = cast(name, reader.get(name))
    model.tie_weights()
    return model


@torch.no_grad()
def _logits(build: Callable[[], Any], config: Any) -> torch.Tensor:
    """On a fixed prompt; the model is freed afterwards."""
    vocabulary = config.get_text_config().vocab_size
    prompt = torch.arange(PROMPT_LENGTH).mul(7919).add(3).remainder(vocabulary)
    logits: torch.Tensor = build().eval()(input_ids=prompt[None], use_cache=False).logits
    return logits.clone()


class ConvertedReader(CheckpointReader):
    """A checkpoint's weights under the names a Hugging Face folder gives them."""

    def __init__(self, reader: CheckpointReader, model: Any) -> None:
        self._reader, self._model = reader, model
        self._sources: dict[str, str] = {}
        self.weights = {}
        for name in check_names(reader, model):
            converted = on_disk(model, name, reader.weights[name])
            self._sources |= dict.fromkeys(converted, name)
            self.weights |= converted

    def get(self, name: str) -> torch.Tensor:
        source = self._sources[name]
        return on_disk(self._model, source, self._reader.get(source))[name]


def compare_weights(a: CheckpointReader, b: CheckpointReader) -> tuple[list[str], str]:
    """One line for each tensor that differs; and how those that are equal but for their storage type are stored."""
    names_a, names_b = set(a.weights), set(b.weights)
    lines = [f"{name}: only in the first" for name in sorted(names_a - names_b)]
    lines += [f"{name}: only in the second" for name in sorted(names_b - names_a)]
    stored = ""
    for name in sorted(names_a & names_b):
        x, y = a.get(name), b.get(name)
        if x.shape != y.shape:
            lines.append(f"{name}: shape {list(x.shape)} and {list(y.shape)}")
            continue
        narrow = min(x.dtype, y.dtype, key=lambda dtype: dtype.itemsize)
        if same_bits(x.to(narrow), y.to(narrow)):
            if x.dtype != y.dtype:
                stored = f"equal as {narrow}, stored as {x.dtype} and {y.dtype}".replace("torch.", "")
            continue
        gap = (x.double() - y.double()).abs()
        changed, worst = int((gap != 0).sum()), float(gap.max())
        lines.append(f"{name}: {changed} of {x.numel()} numbers differ, by at most {worst:.3g}")
    return lines, stored
