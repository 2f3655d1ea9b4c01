"""TIS and IcePop where the engine that samples is not quite the policy that trains.

The engine's log-probs are those of the policy but for an error on a few of its tokens, the same in every step, as of a
wrong kernel. Two questions: how far the expected gradient is from the true one (sums over all sequences, no noise), and
what reward training reaches.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from benchmarks import command
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
from verl.algorithms import compute_rollout_correction
from verl.config.sections.algorithm import RolloutCorrectionConfig

VOCABULARY, WIDTH = 6, 4
PROMPTS, GROUP = 16, 8
CORRECTIONS = {
    "none": None,
    "TIS: truncated at 2": {"rollout_is": "token", "rollout_is_threshold": "2.0"},
    "IcePop: zero outside 0.5 to 5": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    "weights of sequences, truncated at 2": {"rollout_is": "sequence", "rollout_is_threshold": "2.0"},
    "weights of sequences, up to 1000": {"rollout_is": "sequence", "rollout_is_threshold": "1000"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--errors", type=float, nargs="+", default=[0.0, 1.0, 3.0])
    parser.add_argument("--share", type=float, default=0.1, help="of the table that is wrong (default: 0.1)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=4)


def run(args: argparse.Namespace) -> int:
    for error in args.errors:
        rows = []
        for name, keys in CORRECTIONS.items():
            config = None if keys is None else RolloutCorrectionConfig(**keys)
            same, length = expected_gradient(config, error, args.share)
            rewards = [train(config, error, args.share, args.steps, seed) for seed in range(args.seeds)]
            rows.append([name, same, length, mean_and_error(rewards)])
        show(f"error {error:g} on {args.share:.0%} of the engine's logits")
        show_table(
            ["correction", "gradient: cosine", "gradient: length", f"reward after {args.steps} steps"], rows
        )
    return 0


class Problem:
    """A reward per prompt for the sequences it wants: the share of positions at which the wanted token stands, to the
    power of `WIDTH`, so that most of it is for whole answers."""

    def __init__(self, prompts: int, error: float, share: float, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        shape = (prompts, WIDTH, VOCABULARY)
        self.policy = Policy(torch.randn(shape, generator=self.generator, dtype=DTYPE), WIDTH)
        self.wanted = torch.randint(VOCABULARY, (prompts, WIDTH), generator=self.generator)
        wrong = torch.rand(shape, generator=self.generator) < share
        sign = torch.randint(2, shape, generator=self.generator) * 2 - 1
        self.error = (error * sign * wrong).to(DTYPE)

    def engine(self) -> Policy:
        return Policy(self.policy.logits.detach() + self.error, WIDTH)

    def reward(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        return (tokens == self.wanted[prompts]).to(DTYPE).mean(-1) ** WIDTH

    def expected_reward(self) -> float:
        sequences, prompts = every_sequence(VOCABULARY, WIDTH), len(self.wanted)
        index = torch.arange(prompts).repeat_interleave(len(sequences))
        tokens = sequences.repeat(prompts, 1)
        chance = self.policy.log_probs(index, tokens).detach().sum(-1).exp()
        return float((chance * self.reward(index, tokens)).sum() / prompts)


def corrected(
    config: RolloutCorrectionConfig | None, old: Tensor, drawn: Tensor, mask: Tensor
) -> tuple[Tensor | None, Tensor]:
    if config is None:
        return None, mask
    weights, remaining, _ = compute_rollout_correction(old, drawn, mask, config)
    return weights, remaining


def expected_gradient(
    config: RolloutCorrectionConfig | None, error: float, share: float, prompts: int = 8
) -> tuple[float, float]:
    """(cosine, length relative to the true one) of the gradient in the mean over what the engine draws."""
    problem = Problem(prompts, error, share, seed=0)
    policy, engine = problem.policy, problem.engine()
    sequences = every_sequence(VOCABULARY, WIDTH)
    index = torch.arange(prompts).repeat_interleave(len(sequences))
    tokens = sequences.repeat(prompts, 1)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    rewards = problem.reward(index, tokens)
    ours = policy.log_probs(index, tokens)
    true = gradient(policy, -(ours.sum(-1).exp() * rewards).sum())

    drawn = engine.log_probs(index, tokens).detach()
    chance = drawn.sum(-1).exp()
    baseline = torch.zeros(prompts, dtype=DTYPE).index_add_(0, index, chance * rewards)
    advantages = (rewards - baseline[index]).unsqueeze(-1).expand_as(tokens)
    old = policy.log_probs(index, tokens).detach()
    weights, mask = corrected(config, old, drawn, mask)
    expectation = chance.unsqueeze(-1) * (torch.ones_like(old) if weights is None else weights)
    batch = Batch(index, tokens, mask, old, advantages)
    found = gradient(policy, policy_loss(policy, batch, "vanilla", "token-sum", weights=expectation))
    return cosine(found, true), float(found.norm() / true.norm())


def train(config: RolloutCorrectionConfig | None, error: float, share: float, steps: int, seed: int) -> float:
    """The policy's own reward at the end, over all sequences."""
    problem = Problem(PROMPTS, error, share, seed)
    policy = problem.policy
    optimizer = torch.optim.Adam([policy.logits], lr=0.05)
    index = torch.arange(PROMPTS).repeat_interleave(GROUP)
    for _ in range(steps):
        engine = problem.engine()
        tokens, mask = engine.draw(index, problem.generator)
        advantages = group_advantages(problem.reward(index, tokens), mask, index)
        old = policy.log_probs(index, tokens).detach()
        weights, mask = corrected(config, old, engine.log_probs(index, tokens).detach(), mask)
        batch = Batch(index, tokens, mask, old, advantages)
        optimizer.zero_grad()
        policy_loss(policy, batch, "vanilla", "token-mean", weights=weights).backward()
        optimizer.step()
    return problem.expected_reward()


def main(argv: list[str] | None = None) -> int:
    return command("claims.planted_mismatch", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
