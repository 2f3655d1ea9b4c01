"""Dr.GRPO: dividing by a response's length makes wrong answers longer, and dividing by the group's deviation weighs
very easy and very hard questions more.

Whether an answer is right is drawn with a fixed probability that the policy cannot change; what it chooses is how long
right and wrong answers are. Reward does not depend on length, so every drift of a length is the loss's own.
"""

from __future__ import annotations

import argparse
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

WIDTH, GROUP, GROUPS = 64, 8, 32
STOP = 1
LEARNING_RATE = {"seq-mean-token-mean": 2.0, "token-mean": 2.0, "seq-mean-token-sum-norm": 2.0 * WIDTH / 10}
"""A response has 10 tokens in the mean: with these a token weighs the same in all of them."""
VARIANTS = {
    "GRPO: mean of each response, by deviation": ("seq-mean-token-mean", True),
    "mean of each response": ("seq-mean-token-mean", False),
    "DAPO: mean of all tokens, by deviation": ("token-mean", True),
    "Dr.GRPO: sum by a constant": ("seq-mean-token-sum-norm", False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--right", type=float, default=0.3, help="share of right answers (default: 0.3)")


def run(args: argparse.Namespace) -> int:
    start = expected_lengths(new_policy())
    show(f"expected length before: right {start[1]:.2f}, wrong {start[0]:.2f}; after {args.steps} steps:\n")
    rows = []
    for name, (aggregation, by_deviation) in VARIANTS.items():
        ends = [train(args.steps, seed, args.right, aggregation, by_deviation) for seed in range(args.seeds)]
        rows.append([name, *(mean_and_error([end[kind] for end in ends]) for kind in (1, 0))])
    show_table(["loss", "right answers", "wrong answers"], rows)
    show("mean |advantage| of a group of 8, by the share of right answers:\n")
    shares = (0.05, 0.2, 0.5, 0.8, 0.95)
    weights = {
        name: [difficulty_weight(share, by_deviation) for share in shares]
        for name, by_deviation in (("divided by the deviation", True), ("not divided", False))
    }
    show_table(["", *map(str, shares)], [[name, *values] for name, values in weights.items()])
    return 0


def new_policy() -> Policy:
    """Two prompts: wrong (0) and right (1); a response stops with probability 0.1 after each token."""
    logits = torch.tensor([0.9, 0.1]).log().expand(2, 1, 2)
    return Policy(logits, WIDTH, eos=STOP)


def expected_lengths(policy: Policy) -> list[float]:
    stop = policy.table().detach().exp()[:, 0, STOP]
    return [float((1 - (1 - rate) ** WIDTH) / rate) for rate in stop]


def train(steps: int, seed: int, right: float, aggregation: str, by_deviation: bool) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    policy = new_policy()
    # Plain descent: Adam would make a step of the same size of any drift, however small.
    optimizer = torch.optim.SGD([policy.logits], lr=LEARNING_RATE[aggregation])
    groups = torch.arange(GROUPS).repeat_interleave(GROUP)
    for _ in range(steps):
        kinds = (torch.rand(len(groups), generator=generator) < right).long()
        tokens, mask = policy.draw(kinds, generator)
        advantages = group_advantages(kinds.to(DTYPE), mask, groups, norm_adv_by_std_in_grpo=by_deviation)
        old = policy.log_probs(kinds, tokens).detach()
        loss = policy_loss(policy, Batch(kinds, tokens, mask, old, advantages), "vanilla", aggregation)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return expected_lengths(policy)


def difficulty_weight(share: float, by_deviation: bool, groups: int = 4000) -> float:
    rewards = (torch.rand(groups * GROUP, generator=torch.Generator().manual_seed(0)) < share).to(DTYPE)
    mask = torch.ones(len(rewards), 1, dtype=torch.bool)
    index = torch.arange(groups).repeat_interleave(GROUP)
    advantages = group_advantages(rewards, mask, index, norm_adv_by_std_in_grpo=by_deviation)
    return float(advantages.abs().mean())


def main(argv: list[str] | None = None) -> int:
    return command("claims.dr_grpo", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
