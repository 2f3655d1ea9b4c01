"""Where a rollout engine takes weights from, and the tensors of a module in the forms engines need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from verl.models.lora import full_tensor, has_lora, merged_weights, plain_name
from verl.models.value_model import ValueModel

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Names = Literal["hf", "module"]
"""`hf`: as in the model's files, for other engines; `module`: as in the state dict, for a copy of the module."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter without its base weights."""

    config: Any
    """peft's `LoraConfig`."""
    named_tensors: NamedTensors
    """Under the names of the module's state dict, unsharded, one at a time."""


@dataclass(frozen=True)
class SourceLogProbs:
    """Log-probs of given tokens as the owner of the weights computes them."""

    log_probs: Sequence[Sequence[float]]
    exact: Sequence[Sequence[float]] | None
    """The same with float32 arithmetic; None where that is not possible."""


class WeightSource(ABC):
    """The weights of one policy. With several ranks every method is collective: all ranks call it in the same order,
    and iterate to the end."""

    version: int = 0
    remote: bool = False
    """The owner is another process: weights arrive when it sends them, and it compares log-probs itself."""
    dtype: torch.dtype
    """What the owner computes with; shards or masters may be wider."""
    device: torch.device
    """Where the owner computes; weights may be offloaded to host memory meanwhile."""

    @abstractmethod
    def named_tensors(self, names: Names = "hf") -> NamedTensors:
        """Every weight, unsharded, one at a time, adapters merged; a tied weight under each of its names."""

    @abstractmethod
    def base_tensors(self, names: Names = "hf") -> NamedTensors:
        """Every weight without the adapter, unsharded, one at a time."""

    @abstractmethod
    def adapter(self) -> Adapter | None:
        """The LoRA adapter without its base weights; None without LoRA."""

    @abstractmethod
    def module(self) -> AbstractContextManager[nn.Module]:
        """The live module with unsharded weights, for engines in this process; released on exit."""

    @abstractmethod
    def structure(self) -> AbstractContextManager[nn.Module]:
        """The module for its config, names and shapes only: its weights may be sharded or offloaded."""

    @abstractmethod
    def log_probs(
        self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]
    ) -> SourceLogProbs | None:
        """Log-probs of each response after the prompt at temperature 1; None where the source cannot compute."""


def remember_dtypes(model: Any, dtype: torch.dtype) -> None:
    """Before sharding makes all masters float32: which weights and buffers are of another type than `dtype`, such as
    those that transformers keeps in float32. They leave the trainer in the type they have now."""
    model.verl_own_dtypes = _own_dtypes(model, dtype)


def _own_dtypes(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    weights = ((plain_name(name), value) for name, value in model.state_dict(keep_vars=True).items())
    return {
        name: value.dtype
        for name, value in weights
        if name is not None and value.is_floating_point() and value.dtype != dtype
    }


def _sent_dtypes(model: Any, dtype: torch.dtype) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """(plain name, weight) -> the weight in the type in which it leaves the trainer."""
    own = getattr(model, "verl_own_dtypes", None)
    own = _own_dtypes(model, dtype) if own is None else own
    return lambda name, value: value.to(own.get(name, dtype)) if value.is_floating_point() else value


def merged_tensors(model: Any, dtype: torch.dtype, names: Names = "hf") -> NamedTensors:
    """Every weight with adapters merged. A tied weight comes under each of its names: an engine with a copy of the
    output matrix would otherwise keep a stale one."""
    cast = _sent_dtypes(model, dtype)
    for name, value in merged_weights(model):
        yield from renamed(model, name, cast(name, value), names)


def base_tensors(model: Any, dtype: torch.dtype, names: Names = "hf") -> NamedTensors:
    """Every weight without the adapter; with `module` names, as a module that has the adapter names them."""
    cast = _sent_dtypes(model, dtype)
    for name, value in model.state_dict(keep_vars=True).items():
        plain = plain_name(name)
        if plain is not None:
            tensor = cast(plain, full_tensor(value))
            yield from renamed(model, plain if names == "hf" else name, tensor, names)


def adapter_of(model: Any, dtype: torch.dtype) -> Adapter | None:
    """The adapter of a module that has one."""
    if not has_lora(model):
        return None
    weights = model.state_dict(keep_vars=True).items()
    tensors = ((name, full_tensor(value).to(dtype)) for name, value in weights if plain_name(name) is None)
    return Adapter(model.verl_lora_config, tensors)


def renamed(model: Any, name: str, value: torch.Tensor, names: Names) -> NamedTensors:
    """Splits tensors that transformers joins on loading (the experts of a mixture), as the model's files do."""
    if names == "module" or isinstance(model, ValueModel):
        yield name, value
        return
    from transformers.core_model_loading import revert_weight_conversion

    yield from revert_weight_conversion(model, {name: value}).items()
