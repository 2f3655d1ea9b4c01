"""DAPO: a higher upper clip (0.2 below, 0.28 above) keeps the entropy that a symmetric clip loses.

An answer is right if each of its tokens is one of four that are right at its place, so a policy can be always right and
still random. A batch is updated on several times, as a clip has nothing to do in the first.
"""

from __future__ import annotations

import argparse
import math
import sys

import torch

from benchmarks import command
from benchmarks.claims.tabular import (
    DTYPE,
    Batch,
    Policy,
    group_advantages,
    mean_and_error,
    policy_loss,
    show,
    show_table,
)

VOCABULARY, WIDTH, RIGHT = 16, 3, 4
PROMPTS, GROUP = 16, 16
PARTS, EPOCHS = 4, 2
CLIPS = {
    "0.2 and 0.2": (0.2, 0.2),
    "0.2 and 0.28": (0.2, 0.28),
    "0.2 and 1": (0.2, 1.0),
    "0.28 and 0.28": (0.28, 0.28),
}
REACHED = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.05)


def run(args: argparse.Namespace) -> int:
    show(
        f"entropy of a token: {math.log(VOCABULARY):.3f} at random, {math.log(RIGHT):.3f} of a policy that gives all "
        f"right answers alike; after {args.steps} steps:\n"
    )
    rows = []
    for name, (low, high) in CLIPS.items():
        ends = [train(args.steps, args.lr, seed, low, high) for seed in range(args.seeds)]
        rows.append([name, *map(mean_and_error, zip(*ends, strict=True))])
    show_table(["clip below and above", "reward", "entropy", f"entropy at reward {REACHED}"], rows)
    return 0


def train(steps: int, lr: float, seed: int, low: float, high: float) -> tuple[float, float, float]:
    """(reward, entropy) at the end, and the entropy when the reward first reached `REACHED`."""
    generator = torch.Generator().manual_seed(seed)
    start = 0.5 * torch.randn(PROMPTS, WIDTH, VOCABULARY, generator=generator, dtype=DTYPE)
    right = torch.rand(start.shape, generator=generator).topk(RIGHT).indices
    is_right = torch.zeros_like(start).scatter_(-1, right, 1.0)
    policy = Policy(start, WIDTH)
    optimizer = torch.optim.Adam([policy.logits], lr=lr)
    index = torch.arange(PROMPTS).repeat_interleave(GROUP)
    at_reached = math.nan
    for _ in range(steps):
        tokens, mask = policy.draw(index, generator)
        rewards = is_right[index].gather(-1, tokens.unsqueeze(-1)).squeeze(-1).prod(-1)
        advantages = group_advantages(rewards, mask, index)
        batch = Batch(index, tokens, mask, policy.log_probs(index, tokens).detach(), advantages)
        for _ in range(EPOCHS):
            for part in batch.split(PARTS, torch.randperm(len(index), generator=generator)):
                optimizer.zero_grad()
                settings = {"clip_ratio_low": low, "clip_ratio_high": high}
                policy_loss(policy, part, "vanilla", "token-mean", **settings).backward()
                optimizer.step()
        if math.isnan(at_reached) and expected_reward(policy, is_right) >= REACHED:
            at_reached = policy.entropy()
    return expected_reward(policy, is_right), policy.entropy(), at_reached


def expected_reward(policy: Policy, is_right: torch.Tensor) -> float:
    return float((policy.table().detach().exp() * is_right).sum(-1).prod(-1).mean())


def main(argv: list[str] | None = None) -> int:
    return command("claims.clip_higher", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
