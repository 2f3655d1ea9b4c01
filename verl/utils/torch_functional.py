"""Masked sums and means, log-probs and learning rates under verl's import path; the home of the first is
`verl.algorithms.aggregation`."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from verl.algorithms.aggregation import masked_mean, masked_sum, masked_var, masked_whiten
from verl.missing_names import explain

__all__ = [
    "get_constant_schedule_with_warmup",
    "get_cosine_schedule_with_warmup",
    "logprobs_from_logits",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
]


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Log-probs of the tokens `labels` [...], from logits [..., V]."""
    flat = cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none")
    return -flat.view_as(labels)


def get_constant_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1
) -> LRScheduler:
    """transformers' schedule of this name."""
    from transformers import get_constant_schedule_with_warmup

    return get_constant_schedule_with_warmup(optimizer, num_warmup_steps, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LRScheduler:
    """transformers' cosine schedule that ends at `min_lr_ratio` of the learning rate."""
    from transformers import get_cosine_with_min_lr_schedule_with_warmup

    return get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, num_warmup_steps, num_training_steps, num_cycles, last_epoch, min_lr_rate=min_lr_ratio
    )


__getattr__ = explain(__name__)
