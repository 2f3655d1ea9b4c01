"""What is read off a row of logits: log-probability of the token taken, entropy, sum of squared probabilities.

The plain forms. The model room has fused ones that never hold the logits; they are tested against these.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-8


def scaled_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """In float32 at least: low-precision logits would cost digits in the sum over the vocabulary."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide / max(temperature, MIN_TEMPERATURE)


def logprobs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """log_softmax(logits / temperature) at `labels`; logits [..., V], labels [...]."""
    scaled = scaled_logits(logits, temperature)
    return scaled.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    scaled = scaled_logits(logits, temperature)
    return scaled.logsumexp(-1) - (scaled.softmax(-1) * scaled).sum(-1)


def sum_pi_squared_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Sum over the vocabulary of squared probabilities, the extra statistic of `optimal_token_baseline`."""
    return scaled_logits(logits, temperature).softmax(-1).square().sum(-1)
