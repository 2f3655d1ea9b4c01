"""KL estimators: which are unbiased as a value, how much they scatter, and which have the gradient of the KL when they
are a term of the loss (`actor.kl_loss_type`).

Expectations are sums over all sequences, so nothing here is noise.
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks import command
from benchmarks.claims.tabular import DTYPE, Policy, cosine, every_sequence, gradient, show, show_table
from verl.algorithms import kl_penalty

VOCABULARY, WIDTH = 8, 3
ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--distances", type=float, nargs="+", default=[0.1, 0.5, 1.5], help="of the logits")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    for distance in args.distances:
        exact, rows = compare(distance, args.seed)
        show(f"logits {distance:g} apart, exact KL {exact:.4f}")
        head = ["estimator", "mean", "deviation", "gradient: cosine", "gradient: length"]
        show_table(head, [[name, *numbers] for name, numbers in rows.items()])
    return 0


def compare(distance: float, seed: int) -> tuple[float, dict[str, list[float]]]:
    """(the exact KL, for each estimator the numbers of the table)."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(1, WIDTH, VOCABULARY, generator=generator, dtype=DTYPE)
    reference = Policy(start, WIDTH)
    policy = Policy(start + distance * torch.randn(start.shape, generator=generator, dtype=DTYPE), WIDTH)
    tokens = every_sequence(VOCABULARY, WIDTH)
    prompts = torch.zeros(len(tokens), dtype=torch.long)
    ours, theirs = policy.log_probs(prompts, tokens), reference.log_probs(prompts, tokens).detach()
    chance = ours.detach().sum(-1).exp()

    table = policy.table()
    exact = (table.exp() * (table - reference.table().detach())).sum()
    wanted = gradient(policy, exact)
    rows = {}
    for name in ESTIMATORS:
        value = kl_penalty(ours, theirs, name)
        each = value.detach().sum(-1)
        mean = float((chance * each).sum())
        deviation = float((chance * (each - mean).square()).sum().sqrt())
        found = gradient(policy, (chance.unsqueeze(-1) * value).sum(), keep_graph=True)
        rows[name] = [mean, deviation, cosine(found, wanted), float(found.norm() / wanted.norm())]
    return float(exact.detach()), rows


def main(argv: list[str] | None = None) -> int:
    return command("claims.kl_estimators", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
