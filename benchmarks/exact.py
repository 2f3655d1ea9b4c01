"""`python -m benchmarks.exact`: what `trainer.exact` costs: the same GRPO run with and without it, in turn.

The ratios are of the median seconds of steps and of their parts after the warm-up. Without a pass for old log-probs
exact mode can also save time: give `--mini-batches 2` to see that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.step import make_data, make_model, median, run_values

PARTS = ("step", "gen", "old_log_prob", "update_actor")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a Hugging Face folder; default: a random Llama")
    parser.add_argument("--hidden-size", type=int, default=256, help="of the random model")
    parser.add_argument("--data", help="jsonl with a column 'question' (GSM8K); default: random prompts")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--mini-batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="further config keys")
    parser.add_argument("--json", type=Path, help="write the figures there too")


def run(args: argparse.Namespace) -> int:
    from verl.config.load import from_dict
    from verl.config.schema import PPOConfig
    from verl.trainer.main_ppo import run as train

    found: dict[bool, list[dict[str, float | None]]] = {False: [], True: []}
    gaps: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = Path(args.model) if args.model else make_model(work / "model", args.hidden_size)
        data = make_data(work, args.prompts * args.steps, args.data)
        for turn in range(args.rounds):
            for exact in (False, True):
                values = run_values(args, model, data, work / f"run_{turn}_{exact}")
                values |= {
                    "actor_rollout_ref.actor.ppo_mini_batch_size": args.prompts // args.mini_batches,
                    "actor_rollout_ref.rollout.ignore_eos": True,
                    "trainer.exact": exact,
                }
                result = train(from_dict(PPOConfig, values | dict(item.split("=", 1) for item in args.set)))
                rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").open()]
                rows = [row for row in rows if "timing_s/step" in row][args.warm_up :]
                found[exact].append({part: median(rows, f"timing_s/{part}") for part in PARTS})
                if exact:
                    gaps += [row.get("training/rollout_probs_diff_max", 0.0) for row in rows]
    figures: dict[str, Any] = {"rollout_probs_diff_max": max(gaps)}
    lines = [f"{args.prompts} prompts x {args.n}, {args.max_tokens} tokens: seconds", ""]
    lines.append(f"{'':14}{'default':>10}{'exact':>10}{'ratio':>8}")
    for part in PARTS:
        plain, exact_s = (
            statistics.median([row[part] or 0.0 for row in found[exact]]) for exact in (False, True)
        )
        figures[part] = {"default": plain, "exact": exact_s, "ratio": exact_s / plain if plain else None}
        ratio = f"{exact_s / plain:.2f}" if plain else "-"
        lines.append(f"{part:14}{plain:>10.4g}{exact_s:>10.4g}{ratio:>8}")
    lines.append(f"training/rollout_probs_diff_max of the exact runs: {max(gaps)}")
    sys.stdout.write("\n".join(lines) + "\n")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


def main(argv: list[str] | None = None) -> int:
    return command("exact", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
