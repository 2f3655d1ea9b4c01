"""A few log-probs of the engine beside the trainer's: the check that sees what happened after the weights arrived.

A matrix that was received and then not used (a stale copy, a fused part left out) shows here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from verl.data.proto import DataProto
from verl.errors import TrainingHalted
from verl.rollout.source import generation_mode

PROMPT_TOKENS = 16
RESPONSE_TOKENS = 8
_STRIDE = 7919

TOLERANCE = {"float32": 2e-3, "bfloat16": 0.1, "float16": 0.05, "fp8": 0.5}
"""Largest mean difference of a log-prob that arithmetic of this type explains."""


def probe_prompt(vocab_size: int) -> list[int]:
    """A fixed prompt with ids from all over the vocabulary."""
    return [(_STRIDE * (place + 1)) % vocab_size for place in range(PROMPT_TOKENS)]


def trainer_log_probs(source: Any, prompt: Sequence[int], tokens: Sequence[int]) -> list[float] | None:
    """Log-probs of `tokens` after `prompt` at temperature 1; None where the source cannot compute."""
    ids = torch.tensor([[*prompt, *tokens]])
    if hasattr(source, "log_probs"):
        batch = DataProto.from_dict(
            tensors={
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "response_mask": torch.ones(1, len(tokens), dtype=torch.int64),
            }
        )
        log_probs_BT: torch.Tensor = source.log_probs(batch, temperature=1.0)["log_probs"]
        return [float(value) for value in log_probs_BT[0]]
    if isinstance(source, nn.Module):
        with torch.no_grad(), generation_mode(source, None) as model:
            logits_BLV = model(ids.to(model.get_input_embeddings().weight.device), use_cache=False).logits
        rows_TV = logits_BLV[0, len(prompt) - 1 : -1].float().log_softmax(-1).cpu()
        return [float(row[token]) for row, token in zip(rows_TV, tokens, strict=True)]
    return None


def check_probe(
    engine: Sequence[float],
    trainer: Sequence[float],
    precision: str,
    version: int,
    name: str,
    advice: str = "use actor_rollout_ref.rollout.name=native if it happens again",
) -> float:
    """The mean difference; TrainingHalted, with both sides, when arithmetic cannot explain it."""
    pairs = list(zip(engine, trainer, strict=True))
    difference = sum(abs(a - b) for a, b in pairs) / len(pairs)
    allowed = TOLERANCE[precision]
    if difference <= allowed:
        return difference
    shown = "  ".join(f"{a:.4f}/{b:.4f}" for a, b in pairs)
    raise TrainingHalted(
        f"{name} does not compute with the trainer's weights of policy version {version}: log-probs of a fixed "
        f"prompt differ by {difference:.4g} on average, {allowed:g} is what {precision} explains "
        f"({name}/trainer: {shown}). Going on would train on responses of another policy; restart from the last "
        f"checkpoint, and {advice}"
    )
