"""LoRA adapters apart from the weights they sit on: those cross once, the adapter after every update.

What always holds: both sides hold the adapter in the type the trainer computes with; nothing is merged, so no update is
lost in the rounding of a large weight; ranks that share a model gather the adapter's weights one by one, in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.errors import RolloutError
from verl.models.lora import ADAPTER, plain_name
from verl.rollout.weight_sync.broadcast import Link
from verl.rollout.weight_sync.fingerprint import Manifest, fingerprint
from verl.rollout.weight_sync.receiving import load_into
from verl.rollout.weight_sync.weights import Pairs

_FILE = "adapter_model.safetensors"


def write_adapter(pairs: Pairs, config: Any, folder: Path) -> None:
    """As `peft.PeftModel.from_pretrained` and vLLM open it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    # Copies: what arrives from another process is only there until the next of it comes.
    weights = {_in_file(name): tensor.detach().cpu().contiguous().clone() for name, tensor in pairs}
    save_file(weights, folder / _FILE, metadata={"format": "pt"})
    config.save_pretrained(folder)


def read_adapter(folder: Path, sent: Manifest) -> Manifest:
    """Fingerprints of what a written adapter holds, under the names it was `sent` with."""
    from safetensors.torch import load_file

    names = {_in_file(name): name for name in sent}
    return Manifest(
        {names.get(key, key): fingerprint(tensor) for key, tensor in load_file(folder / _FILE).items()}
    )


def _in_file(name: str) -> str:
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def unless_empty(pairs: Pairs) -> Pairs | None:
    """The pairs, or None where there are none; the first is waited for."""
    rest = iter(pairs)
    first = next(rest, None)
    return None if first is None else chain([first], rest)


def take_adapter(module: nn.Module, link: Link) -> Manifest:
    """Into a module with an adapter of the same form: what it sits on, where the trainer sends it, then the adapter."""
    received = Manifest()
    carrier = unless_empty(link.receive())
    if carrier is not None:
        received.update(load_into(module, carrier, lambda name: plain_name(name) is not None))
    received.update(load_into(module, link.receive(), lambda name: plain_name(name) is None))
    return received


class NotYet:
    """The weights under an adapter, for an engine built before they arrive: it leaves word how it takes them."""

    def __init__(self, leave_word: Callable[[Callable[[Pairs, int], None]], None]) -> None:
        self.leave_word = leave_word

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise RolloutError("the weights are still with the trainer; they come with the first hand-over")
