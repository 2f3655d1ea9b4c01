"""Find out, by trying, whether a model may be packed and its head fused: once, when an engine is built.

What always holds: a model is packed only if, for a few tokens, it gives in a pack what it gives for each sequence
alone, and one sequence's answer does not move when its neighbour changes. Reading the architecture's name would
be quicker and wrong for the next architecture.
"""

from __future__ import annotations

from typing import Any

import torch

from verl.models.forward import FORWARD_METHOD
from verl.models.fused_linear import HeadOptions
from verl.models.packing import pack, pad

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


def _bound(model: Any, device: torch.device, expected: torch.Tensor) -> float:
    """Random tokens are improbable, and half precision rounds improbable tokens coarsely: hence means, relative."""
    low_precision = (
        next(model.parameters()).dtype not in (torch.float32, torch.float64) or device.type == "cuda"
    )
    return (0.02 if low_precision else 1e-4) * (1 + float(expected.abs().mean()))


@torch.no_grad()
def packing_fault(model: Any, device: torch.device, stock_attention: str) -> str | None:
    """Why the model cannot be packed, or None. It uses our attention before and after the call.

    `stock_attention` is the implementation the model came with."""
    vocab = int(model.config.get_text_config().vocab_size)
    own = model.config._attn_implementation
    try:
        together = _probe(model, _rows(vocab, 11), device, packed=True)
        neighbour = _probe(model, _rows(vocab, 12), device, packed=True)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        return (
            f"its forward does not take packed sequences ({type(error).__name__}: {str(error).strip()[:200]})"
        )
    model.set_attn_implementation(stock_attention)
    try:
        alone = _probe(model, _rows(vocab, 11), device, packed=False)
    finally:
        model.set_attn_implementation(own)
    bound = _bound(model, device, alone)
    leak = float((together[1] - neighbour[1]).abs().mean())
    gap = float((together - alone).abs().mean())
    if not leak <= bound:
        return f"one sequence changes its neighbour's answer by {leak:.3g}"
    if not gap <= bound:
        return f"packed and padded answers differ by {gap:.3g}"
    return None


def _probe(
    model: Any, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], device: torch.device, packed: bool
) -> torch.Tensor:
    described = (pack if packed else pad)(*rows, device)
    return described.unpack(getattr(model, FORWARD_METHOD)(described, None, probe=True)["probe"])


@torch.no_grad()
def head_fault(model: Any, device: torch.device, packed: bool, stock_attention: str) -> str | None:
    """Why log-probabilities cannot be made of hidden states and output matrix, or None: the model's own forward may
    do more to its logits than we know."""
    ids, attended, wanted = _rows(int(model.config.get_text_config().vocab_size), 11)
    described = (pack if packed else pad)(ids[:1], attended[:1], wanted[:1], device)
    ours = getattr(model, FORWARD_METHOD)(described, HeadOptions())["log_probs"]
    own = model.config._attn_implementation
    model.set_attn_implementation(stock_attention)
    try:
        logits = model(input_ids=ids[:1].to(device), use_cache=False).logits
    finally:
        model.set_attn_implementation(own)
    logs = torch.log_softmax(logits[0, :-1].float(), dim=-1)
    plain = logs.gather(1, ids[0, 1:, None].to(device)).squeeze(1)
    gap = float((ours - plain).abs().mean())
    if gap <= _bound(model, device, plain):
        return None
    return f"its logits are not hidden states times output matrix (log-probabilities differ by {gap:.3g})"
