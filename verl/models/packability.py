"""Find out, by trying, whether a model may be packed: once, when an engine is built.

What always holds: a model is packed only if, for a few tokens, it gives in a pack what it gives for each sequence
alone, and one sequence's answer does not move when its neighbour changes. Reading the architecture's name would
be quicker and wrong for the next architecture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from verl.models.fused_linear import HeadOptions
from verl.models.packing import Pack, pack, pad

log = logging.getLogger(__name__)

Run = Callable[[Pack, "HeadOptions | None"], dict[str, torch.Tensor]]
_LENGTHS = (7, 5)


def _rows(vocab: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two right-padded rows; the second is the same for every seed."""
    width = max(_LENGTHS)
    first = torch.randint(0, vocab, (width,), generator=torch.Generator().manual_seed(seed))
    second = torch.randint(0, vocab, (width,), generator=torch.Generator().manual_seed(97))
    ids = torch.stack([first, second])
    attended = torch.arange(width)[None, :] < torch.tensor(_LENGTHS)[:, None]
    wanted = attended.clone()
    wanted[:, 0] = False
    return ids, attended.long(), wanted.long()


@torch.no_grad()
def packing_fault(model: Any, run: Run, device: torch.device, stock_attention: str) -> str | None:
    """Why the model cannot be packed, or None. It uses our attention before and after the call.

    `run` is the model's forward on a pack; `stock_attention` the implementation the model came with."""
    vocab = int(model.config.get_text_config().vocab_size)
    low_precision = (
        next(model.parameters()).dtype not in (torch.float32, torch.float64) or device.type == "cuda"
    )
    bound = 0.1 if low_precision else 1e-3
    own = model.config._attn_implementation
    try:
        together = _answer(run, _rows(vocab, 11), device, packed=True)
        neighbour = _answer(run, _rows(vocab, 12), device, packed=True)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        return (
            f"its forward does not take packed sequences ({type(error).__name__}: {str(error).strip()[:200]})"
        )
    model.set_attn_implementation(stock_attention)
    try:
        alone = _answer(run, _rows(vocab, 11), device, packed=False)
    finally:
        model.set_attn_implementation(own)
    leak = float((together[1] - neighbour[1]).abs().max())
    gap = float((together - alone).abs().max())
    if not leak <= bound:
        return f"one sequence changes its neighbour's answer by {leak:.3g}"
    if not gap <= bound:
        return f"packed and padded answers differ by {gap:.3g}"
    return None


def _answer(
    run: Run, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], device: torch.device, packed: bool
) -> torch.Tensor:
    described = (pack if packed else pad)(*rows, device)
    return described.unpack(next(iter(run(described, None).values())).float())
