"""Tiny random models of every architecture the engines promise, and what tests compare them with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import build_model


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    return build_model


@pytest.fixture(scope="session")
def greedy_reference() -> Callable[[Any, list[int], int], tuple[list[int], list[float]]]:
    """Greedy continuation without any cache: the whole sequence through the model for every token."""

    @torch.no_grad()
    def run(model: Any, prompt: list[int], steps: int) -> tuple[list[int], list[float]]:
        before = model.config._attn_implementation
        model.set_attn_implementation("eager")
        ids, tokens, log_probs = list(prompt), [], []
        for _ in range(steps):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            token = int(logits.argmax())
            tokens.append(token)
            log_probs.append(float(logits.log_softmax(-1)[token]))
            ids.append(token)
        model.set_attn_implementation(before)
        return tokens, log_probs

    return run


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in (1, 5, 9, 17, 23)]
