"""A policy of one table of logits, sequences drawn from it, and its loss by the functions that training takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from verl.algorithms import get_adv_estimator_fn, get_policy_loss_fn

DTYPE = torch.float64


class Policy:
    """The next token depends on the prompt and its position alone, so that sums over all sequences are short.

    `logits` [prompts, positions, vocabulary]; with one position all `width` of them share it."""

    def __init__(self, logits: Tensor, width: int, eos: int | None = None) -> None:
        self.logits = logits.to(DTYPE).clone().requires_grad_()
        self.width, self.eos = width, eos

    def table(self) -> Tensor:
        return self.logits.log_softmax(-1).expand(-1, self.width, -1)

    def log_probs(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        return self.table()[prompts].gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> float:
        """Of a token, the mean over prompts and positions."""
        table = self.table().detach()
        return float(-(table.exp() * table).sum(-1).mean())

    def draw(self, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(tokens, mask), [B, T] each: positions are drawn on their own, so all at once."""
        probabilities = self.table().detach().exp()[prompts]
        tokens = torch.multinomial(probabilities.flatten(0, 1), 1, generator=generator).view(len(prompts), -1)
        if self.eos is None:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        ended = (tokens == self.eos).cumsum(-1)
        return tokens, (ended == 0) | ((ended == 1) & (tokens == self.eos))


@dataclass
class Batch:
    prompts: Tensor
    tokens: Tensor
    mask: Tensor
    old: Tensor
    advantages: Tensor

    def split(self, parts: int, order: Tensor) -> Iterator[Batch]:
        for rows in order.chunk(parts):
            yield Batch(*(column[rows] for column in vars(self).values()))


def group_advantages(rewards: Tensor, mask: Tensor, prompts: Tensor, **settings: Any) -> Tensor:
    """By the estimator `grpo`; the rows of a prompt are a group."""
    last = mask.long().cumsum(-1).argmax(-1, keepdim=True)
    at_end = torch.zeros(mask.shape, dtype=DTYPE).scatter_(1, last, rewards.to(DTYPE).unsqueeze(-1))
    return get_adv_estimator_fn("grpo")(at_end, mask, index=prompts.tolist(), **settings)[0]


def policy_loss(policy: Policy, batch: Batch, mode: str, aggregation: str, **settings: Any) -> Tensor:
    weights = settings.pop("weights", None)
    loss, _ = get_policy_loss_fn(mode)(
        old_log_prob=batch.old,
        log_prob=policy.log_probs(batch.prompts, batch.tokens),
        advantages=batch.advantages,
        response_mask=batch.mask,
        loss_agg_mode=aggregation,
        config=SimpleNamespace(**settings),
        rollout_is_weights=weights,
    )
    return loss


def gradient(policy: Policy, loss: Tensor, keep_graph: bool = False) -> Tensor:
    (found,) = torch.autograd.grad(loss, policy.logits, retain_graph=keep_graph)
    return found


def every_sequence(vocabulary: int, width: int) -> Tensor:
    """[vocabulary ** width, width]: expectations are sums over these, without noise."""
    return torch.cartesian_prod(*[torch.arange(vocabulary)] * width)


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm() + 1e-30))


def mean_and_error(values: Sequence[float]) -> str:
    """Over seeds, with the standard error."""
    numbers = torch.tensor(values, dtype=DTYPE)
    return f"{float(numbers.mean()):.3f} ± {float(numbers.std() / len(numbers) ** 0.5):.3f}"


def show(text: str = "") -> None:
    sys.stdout.write(text + "\n")


def show_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Markdown, to be copied into the results."""
    for cells in [head, ["---"] * len(head), *rows]:
        texts = (f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells)
        show(f"| {' | '.join(texts)} |")
    show()
