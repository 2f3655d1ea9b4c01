"""GSPO: importance ratios of whole sequences instead of tokens, where batches are stale.

The policy has moved since it drew the batch. How far is the expected gradient of either loss from the true one (sums
over all sequences, no clip), how much does it scatter from batch to batch, and what reward does training reach when
every batch is used for several updates?
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks import command
from benchmarks.claims.planted_mismatch import GROUP, PROMPTS, VOCABULARY, WIDTH, Problem
from benchmarks.claims.tabular import (
    DTYPE,
    Batch,
    Policy,
    cosine,
    every_sequence,
    gradient,
    group_advantages,
    mean_and_error,
    policy_loss,
    show,
    show_table,
)

OPEN: dict[str, Any] = {"clip_ratio_low": 0.999, "clip_ratio_high": 1e6, "clip_ratio_c": 1e6}
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "tokens (vanilla), clip 0.2": ("vanilla", {"clip_ratio": 0.2}),
    "sequences (gspo), clip 0.2": ("gspo", {"clip_ratio": 0.2}),
    "sequences (gspo), clip 0.05": ("gspo", {"clip_ratio": 0.05}),
    "geometric mean (geo_mean), clip 0.4": ("geo_mean", {"clip_ratio": 0.4}),
    "none (gpg)": ("gpg", {}),
}
AGGREGATION = "seq-mean-token-mean"
BATCH = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--distances", type=float, nargs="+", default=[0.1, 0.5, 1.5], help="moved since")
    parser.add_argument("--updates", type=int, nargs="+", default=[1, 8, 32], help="of one batch")
    parser.add_argument("--total", type=int, default=160, help="updates of a run")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--draws", type=int, default=300, help="batches that a deviation is measured on")


def run(args: argparse.Namespace) -> int:
    for distance in args.distances:
        rows = [[mode, *expected_gradient(mode, distance, args.draws)] for mode in ("vanilla", "gspo", "gpg")]
        show(f"logits moved by {distance:g}, no clip")
        show_table(["loss", "gradient: cosine", "gradient: length", "deviation of a batch of 64"], rows)
    rows = []
    for name, (mode, settings) in LOSSES.items():
        rewards = [
            [train(mode, settings, updates, args.total, seed) for seed in range(args.seeds)]
            for updates in args.updates
        ]
        rows.append([name, *map(mean_and_error, rewards)])
    show(f"reward after {args.total} updates, by how many of them one batch is used for\n")
    show_table(["ratio", *map(str, args.updates)], rows)
    return 0


def expected_gradient(mode: str, distance: float, draws: int, prompts: int = 4) -> tuple[float, float, float]:
    """(cosine to the true gradient, its length relative to that, deviation of a batch's gradient relative to that)."""
    problem = Problem(prompts, 0.0, 0.0, seed=0)
    before = problem.policy
    moved = torch.randn(before.logits.shape, generator=problem.generator, dtype=DTYPE)
    policy = Policy(before.logits.detach() + distance * moved, WIDTH)
    sequences = every_sequence(VOCABULARY, WIDTH)
    index = torch.arange(prompts).repeat_interleave(len(sequences))
    tokens = sequences.repeat(prompts, 1)
    rewards = problem.reward(index, tokens)
    chance = before.log_probs(index, tokens).detach().sum(-1).exp()
    baseline = torch.zeros(prompts, dtype=DTYPE).index_add_(0, index, chance * rewards)

    def gradient_of(index: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        advantages = (problem.reward(index, tokens) - baseline[index]).unsqueeze(-1).expand_as(tokens)
        old = before.log_probs(index, tokens).detach()
        batch = Batch(index, tokens, torch.ones_like(tokens, dtype=torch.bool), old, advantages)
        counts = {"global_batch_info": {"global_batch_size": 1}}
        weights = weights.unsqueeze(-1).expand_as(old)
        return gradient(
            policy, policy_loss(policy, batch, mode, AGGREGATION, weights=weights, **OPEN, **counts)
        )

    chances = policy.log_probs(index, tokens).sum(-1).exp()
    # The losses are means over the tokens of a response.
    true = gradient(policy, -(chances * (rewards - baseline[index])).sum() / WIDTH)
    mean = gradient_of(index, tokens, chance)
    drawn = torch.arange(prompts).repeat_interleave(BATCH // prompts)
    weights = torch.full((BATCH,), prompts / BATCH, dtype=DTYPE)
    squared = [
        (gradient_of(drawn, before.draw(drawn, problem.generator)[0], weights) - mean).square().sum()
        for _ in range(draws)
    ]
    deviation = float(torch.stack(squared).mean().sqrt())
    return cosine(mean, true), float(mean.norm() / true.norm()), deviation / float(true.norm())


def train(mode: str, settings: dict[str, Any], updates: int, total: int, seed: int) -> float:
    """The policy's reward after `total` updates, over all sequences."""
    problem = Problem(PROMPTS, 0.0, 0.0, seed)
    policy = problem.policy
    optimizer = torch.optim.Adam([policy.logits], lr=0.05)
    # As many samples for an update, whatever a batch is used for: a batch of more updates has more groups.
    index = torch.arange(PROMPTS).repeat_interleave(GROUP)
    for _ in range(total // updates):
        rows = index.repeat(updates)
        groups = torch.arange(PROMPTS * updates).repeat_interleave(GROUP)
        tokens, mask = policy.draw(rows, problem.generator)
        advantages = group_advantages(problem.reward(rows, tokens), mask, groups)
        batch = Batch(rows, tokens, mask, policy.log_probs(rows, tokens).detach(), advantages)
        for part in batch.split(updates, torch.arange(len(rows))):
            optimizer.zero_grad()
            policy_loss(policy, part, mode, AGGREGATION, **settings).backward()
            optimizer.step()
    return problem.expected_reward()


def main(argv: list[str] | None = None) -> int:
    return command("claims.stale_sequences", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
