"""Proof that a Hugging Face folder holds what a checkpoint holds: every tensor, bit for bit, and the same logits.

What always holds: the folder is read by other code than wrote it (safetensors for the tensors, transformers for
the logits), and nothing is assumed from the way it was made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from verl.checkpoint.hf_weights import check_names, on_disk, out_dtype
from verl.checkpoint.source import Source
from verl.checkpoint.staging import free_memory
from verl.errors import CheckpointError

logger = logging.getLogger(__name__)

PROMPT_LENGTH = 12
HEADER_SLACK = 0.01
"""A folder may be larger than its tensors by headers; more than this share (and a megabyte) is not plausible."""


class HfTensors:
    """The tensors of a Hugging Face folder by name, read on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = sorted(folder.glob("*.safetensors"))
        if not self.files:
            raise CheckpointError(f"{folder} holds no *.safetensors file")
        self._handles = [safe_open(str(file), framework="pt") for file in self.files]
        self._where: dict[str, Any] = {}
        for file, handle in zip(self.files, self._handles, strict=True):
            for name in handle.keys():  # noqa: SIM118 - not a dict
                if name in self._where:
                    raise CheckpointError(
                        f"{folder}: tensor {name!r} is in two files, the second is {file.name}"
                    )
                self._where[name] = handle

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def get(self, name: str) -> torch.Tensor:
        return self._where[name].get_tensor(name)  # type: ignore[no-any-return]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in type, shape and every bit; NaN equals NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def check_tensors(folder: Path, source: Source, model: Any, dtype: torch.dtype) -> int:
    """Compare every tensor of the folder with the source; the number compared. CheckpointError names the first
    that is missing, surplus or different."""
    written = HfTensors(folder)
    expected_bytes = 0
    seen = set()
    for name in check_names(source, model):
        weight = source.get(name)
        for key, value in on_disk(model, name, weight.to(out_dtype(weight.dtype, dtype))).items():
            if key not in written.names:
                raise CheckpointError(f"the merged folder lacks {key!r}")
            if not same_bits(written.get(key), value):
                raise CheckpointError(f"{key!r} in the merged folder differs from the checkpoint")
            seen.add(key)
            expected_bytes += value.numel() * value.element_size()
    surplus = sorted(written.names - seen)
    if surplus:
        raise CheckpointError(f"the merged folder holds {surplus[0]!r}, which the checkpoint does not have")
    actual = sum(file.stat().st_size for file in written.files)
    if not expected_bytes <= actual <= expected_bytes * (1 + HEADER_SLACK) + 1_000_000:
        raise CheckpointError(
            f"the merged weights take {actual} bytes on the disk; {expected_bytes} were expected"
        )
    return len(seen)


def check_logits(folder: Path, source: Source, config: Any, dtype: torch.dtype, *, value_model: bool) -> None:
    """The model transformers loads from the folder answers a fixed prompt exactly as one made of the checkpoint's
    own tensors. The two are in memory one after the other."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    kind = AutoModelForTokenClassification if value_model else AutoModelForCausalLM
    trained = answers(lambda: _from_source(kind, config, source, dtype), config)
    merged = answers(
        lambda: quietly(kind.from_pretrained, folder, dtype=dtype, trust_remote_code=False), config
    )
    if not same_bits(trained, merged):
        worst = float((trained.float() - merged.float()).abs().max())
        raise CheckpointError(
            f"the merged model answers a fixed prompt otherwise than the training model (logits differ by {worst:.3g})"
        )


def memory_allows(config: Any, source: Source, dtype: torch.dtype) -> bool:
    """Whether one copy of the model fits into free host memory with room to spare."""
    free = free_memory()
    return free is None or source.numel() * dtype.itemsize * 1.5 < free


def quietly(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Without transformers' progress bars."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        return call(*arguments, **options)
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _from_source(kind: Any, config: Any, source: Source, dtype: torch.dtype) -> Any:
    model = kind.from_config(config, dtype=dtype, trust_remote_code=False)
    own: Mapping[str, torch.Tensor] = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name in source.names:
            weight = source.get(name)
            own[name].copy_(weight.to(out_dtype(weight.dtype, dtype)))
    model.tie_weights()
    return model


@torch.no_grad()
def answers(build: Callable[[], Any], config: Any) -> torch.Tensor:
    """Logits on the fixed prompt; the model is gone afterwards."""
    model = build().eval()
    logits: torch.Tensor = model(input_ids=fixed_prompt(config)[None], use_cache=False).logits
    return logits.clone()


def fixed_prompt(config: Any) -> torch.Tensor:
    vocabulary = config.get_text_config().vocab_size
    return torch.arange(PROMPT_LENGTH).mul(7919).add(3).remainder(vocabulary)
