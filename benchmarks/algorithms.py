"""`python -m benchmarks.algorithms`: every estimator and every policy loss against a plain loop over sequences.

Both sides get the same tensors on the same device; the best of several runs counts; the largest difference between
their results is printed beside the ratio. Losses are timed with their backward pass.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks import algorithm_loops as loops
from benchmarks import command
from verl.algorithms import (
    get_adv_estimator_fn,
    get_policy_loss_fn,
    get_policy_loss_prepare,
)
from verl.config.methods import POLICY_LOSS, builtin_names

CONFIG = SimpleNamespace()  # every loss at its defaults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=8192, help="sequences (default: 8192)")
    parser.add_argument("--width", type=int, default=2048, help="response positions (default: 2048)")
    parser.add_argument("--group", type=int, default=8, help="responses per prompt (default: 8)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of ours; the best counts (default: 3)")
    parser.add_argument("--loop-repeat", type=int, default=1, help="runs of the loop (default: 1)")
    parser.add_argument(
        "--only", nargs="*", default=None, metavar="NAME", help="estimators and losses to time"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--threads", type=int, default=None, help="CPU threads of both sides (default: torch's)"
    )
    parser.add_argument("--seed", type=int, default=0)


def make_batch(rows: int, width: int, group: int, device: str, seed: int) -> loops.Batch:
    """Long-tailed lengths, one tool call (a hole in the mask) in every third response."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    lengths = (width * 0.35 * (0.7 * normal(rows)).exp()).long().clamp(2, width)
    position = torch.arange(width)
    mask = position < lengths.unsqueeze(-1)
    hole = (position >= (lengths // 3).unsqueeze(-1)) & (position < (lengths // 2).unsqueeze(-1))
    mask &= ~(hole & (torch.arange(rows) % 3 == 0).unsqueeze(-1))
    last = lengths - 1
    rewards = torch.zeros(rows, width).scatter_(1, last.unsqueeze(-1), normal(rows, 1)) - 0.001 * normal(
        rows, width
    )
    old = -normal(rows, width).abs()
    batch = loops.Batch(
        rewards=rewards,
        mask=mask.float(),
        index=[f"prompt-{i // group}" for i in range(rows)],
        values=normal(rows, width),
        old=old,
        log_prob=old * (0.3 * normal(rows, width)).exp(),
        advantages=normal(rows, width),
        sum_pi_squared=torch.rand(rows, width, generator=g),
        baselines=normal(rows),
        process_rewards=normal(rows, width),
        by_key={"correct": normal(rows), "format": normal(rows)},
    )
    for name, value in vars(batch).items():
        if isinstance(value, Tensor):
            setattr(batch, name, value.to(device))
    batch.by_key = {name: value.to(device) for name, value in batch.by_key.items()}
    return batch


def best_time(call: Callable[[], Any], repeat: int, device: str) -> tuple[float, Any]:
    """Seconds of the fastest of `repeat` runs, and the last result."""
    best, result = float("inf"), None
    for _ in range(repeat):
        result = None
        gc.collect()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best, result


def estimator_calls(name: str, b: loops.Batch) -> tuple[Callable[[], Any], Callable[[], Any]]:
    fn = get_adv_estimator_fn(name)

    def ours() -> tuple[Tensor, Tensor]:
        return fn(
            token_level_rewards=b.rewards,
            response_mask=b.mask,
            index=b.index,
            config=None,
            values=b.values,
            gamma=b.gamma,
            lam=b.lam,
            reward_baselines=b.baselines,
            old_log_probs=b.old,
            sum_pi_squared=b.sum_pi_squared,
            process_rewards=b.process_rewards,
            rewards_by_key=b.by_key,
        )

    return ours, lambda: loops.ESTIMATORS[name](b)


def loss_calls(name: str, b: loops.Batch) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The choice of tokens (clip_cov, kl_cov) is made once for both and not timed: it is a separate step."""
    fn, prepare = get_policy_loss_fn(name), get_policy_loss_prepare(name)
    prepared = prepare and prepare(b.old, b.log_prob, b.advantages, b.mask, CONFIG)
    chosen = None if prepared is None else next(iter(prepared.values()))
    more = {} if prepared is None else {"prepared": prepared}

    def with_gradient(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaf = b.log_prob.detach().requires_grad_()
        value = call(leaf)
        value.backward()
        if leaf.grad is None:
            raise RuntimeError(f"{name}: no gradient")
        return value.detach(), leaf.grad

    def ours() -> tuple[Tensor, Tensor]:
        return with_gradient(
            lambda leaf: fn(
                old_log_prob=b.old,
                log_prob=leaf,
                advantages=b.advantages,
                response_mask=b.mask,
                loss_agg_mode="token-mean",
                config=CONFIG,
                rollout_is_weights=None,
                kl=leaf,
                **more,
            )[0]
        )

    return ours, lambda: with_gradient(lambda leaf: loops.loss(name, b, leaf, chosen))


def difference(ours: tuple[Tensor, Tensor], loop: tuple[Tensor, Tensor]) -> float:
    """The largest difference, relative to the largest value of the loop's result."""
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in zip(ours, loop, strict=True)
    )


def run(args: argparse.Namespace) -> int:
    write = sys.stdout.write
    if args.threads:
        torch.set_num_threads(args.threads)
    kinds = [("estimator", name, estimator_calls) for name in loops.ESTIMATORS]
    kinds += [
        ("loss", name, loss_calls)
        for name in builtin_names(POLICY_LOSS, lambda method: not method.whole_groups)
    ]
    if args.only:
        known = {name for _, name, _ in kinds}
        unknown = sorted(set(args.only) - known)
        if unknown:
            sys.stderr.write(f"--only: not known: {', '.join(unknown)}; known: {', '.join(sorted(known))}\n")
            return 2
        kinds = [kind for kind in kinds if kind[1] in args.only]
    batch = make_batch(args.batch, args.width, args.group, args.device, args.seed)
    tokens = int(batch.mask.sum())
    write(
        f"B = {args.batch}, T = {args.width}, groups of {args.group}, {tokens:,} policy tokens, {args.device}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads\n\n"
    )
    write(f"{'kind':<10} {'name':<30} {'ours ms':>10} {'loop ms':>10} {'ratio':>8} {'difference':>11}\n")
    for kind, name, calls in kinds:
        ours, loop = calls(name, batch)
        loop_s, loop_result = best_time(loop, args.loop_repeat, args.device)
        ours_s, our_result = best_time(ours, args.repeat, args.device)
        apart = difference(our_result, loop_result)
        times = f"{ours_s * 1e3:>10.1f} {loop_s * 1e3:>10.1f} {loop_s / ours_s:>7.1f}x"
        write(f"{kind:<10} {name:<30} {times} {apart:>11.1e}\n")
        sys.stdout.flush()
    return 0


def main(argv: list[str] | None = None) -> int:
    return command("algorithms", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
