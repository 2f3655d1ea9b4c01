"""Where a rollout engine takes weights from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter apart from its base weights."""

    config: Any
    """peft's `LoraConfig`."""
    named_tensors: Iterator[tuple[str, torch.Tensor]]
    """The adapter's weights under the names its module gives them, whole, one at a time."""


@dataclass(frozen=True)
class SourceLogProbs:
    """Log-probs of given tokens as the owner of the weights computes them."""

    log_probs: Sequence[Sequence[float]]
    exact: Sequence[Sequence[float]] | None
    """The same with float32 arithmetic; None where that is not possible."""


class WeightSource(ABC):
    """The weights of one policy. With several ranks every method is collective: all ranks call it in the same order."""

    version: int = 0

    @abstractmethod
    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight under its Hugging Face name, whole, one at a time, adapters merged."""

    @abstractmethod
    def base_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight without adapters under its Hugging Face name, for engines that take adapters apart."""

    @abstractmethod
    def adapter(self) -> Adapter | None:
        """The LoRA adapter apart from its base; None without LoRA."""

    @abstractmethod
    def module(self) -> AbstractContextManager[nn.Module]:
        """The live module with whole weights, for engines in this process; released on exit."""

    @abstractmethod
    def structure(self) -> AbstractContextManager[nn.Module]:
        """The module for its config, names and shapes only: weights may be sharded or on another device."""

    @abstractmethod
    def log_probs(
        self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]
    ) -> SourceLogProbs | None:
        """Log-probs of each response after the prompt at temperature 1; None where the source cannot compute."""
