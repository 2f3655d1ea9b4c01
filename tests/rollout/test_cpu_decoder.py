"""The layers over few tokens on the CPU, column by column, against the Hugging Face modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from verl.models.attention import use_verl_attention
from verl.rollout.native.cpu_runner import ChunkSpan, ColumnDecoder, PageCache, PagedAttention, make_segments
from verl.rollout.native.model import Backbone


def context(cache: PageCache) -> PagedAttention:
    """A chunk of five tokens of the sequence in page 0, then one token each for pages 1 to 3."""
    slots = [*range(2, 7), *(page * 16 + 4 for page in (1, 2, 3))]
    return PagedAttention(
        cache, torch.tensor(slots), [ChunkSpan(0, 0, 2, 5)], make_segments([1, 2, 3], [5] * 3, 5)
    )


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral_window"])
def test_columns_equal_the_modules(name: str, tiny: Callable[..., Any]) -> None:
    model = tiny(name, **({"sliding_window": 3} if name == "mistral_window" else {}))
    for param in model.parameters():  # biases and norms of their own, too
        torch.nn.init.normal_(param, 0.3 if param.ndim == 1 else 0.0, 0.2)
    use_verl_attention(model)
    columns = ColumnDecoder.match(model, 16)
    assert columns is not None
    ids, positions = torch.arange(8) + 3, torch.tensor([2, 3, 4, 5, 6, 4, 4, 4])
    found, caches = [], []
    with torch.no_grad():
        for layers in (Backbone(model), columns):
            cache = PageCache(4, 16)
            layers.hidden(ids.flip(0), positions, context(cache))
            found.append(layers.hidden(ids, positions, context(cache)))
            caches.append(cache)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    for index, pair in caches[0]._layers.items():
        for left, right in zip(caches[1]._layers[index], pair, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_other_layers_and_types_stay_with_their_modules(tiny: Callable[..., Any]) -> None:
    assert ColumnDecoder.match(tiny("gemma2"), 16) is None
    assert ColumnDecoder.match(tiny("llama").bfloat16(), 16) is None


def test_a_column_does_not_depend_on_the_others(tiny: Callable[..., Any]) -> None:
    model = tiny("llama").eval()
    columns = ColumnDecoder.match(model, 16)
    assert columns is not None
    found = []
    with torch.no_grad():
        for rows in (4, 9, 33):
            cache = PageCache(rows, 16)
            seen = PagedAttention(
                cache, torch.arange(rows) * 16, [], make_segments(list(range(rows)), [1] * rows, 0)
            )
            found.append(columns.hidden(torch.arange(rows), torch.zeros(rows, dtype=torch.long), seen)[:4])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-6)
