"""`python -m benchmarks.overhead`: the overhead of Ray: the same steps in this process and on one Ray worker.

A step is generate, recompute log-probabilities, update. Both sides have the same
weights, prompts and draws, so they do the same work (the last gradient norms are in the JSON). The figure is the
median step on the worker over the median step in process, less one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import command
from verl.errors import missing_package

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig
    from verl.data.proto import DataProto
    from verl.workers.group import WorkerGroup

BOUND = 0.05
PHASES = ("generate", "log_probs", "update")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a Hugging Face folder; default: a random Llama of 0.8M parameters")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="further config keys")
    parser.add_argument("--json", type=Path, help="write the figures there too")


def run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("ray") is None:
        raise missing_package("ray", "ray", "python -m benchmarks.overhead")
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(args, Path(folder))
    _table(args, figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Seconds of each phase on each side, step by step, and the ratio of the medians."""
    from benchmarks.step import make_model
    from verl.data.tokenizer import load_tokenizer
    from verl.workers.local import LocalGroup
    from verl.workers.ray_group import RayGroup

    model = args.model or str(make_model(work / "model"))
    cfg = _config(args, model)
    tokenizer = load_tokenizer(model)
    steps = args.warm_up + args.steps

    def in_process() -> WorkerGroup:
        return LocalGroup(cfg, tokenizer, training_steps=steps)

    def on_ray() -> WorkerGroup:
        return RayGroup(cfg, tokenizer, training_steps=steps, run_folder=work)

    seconds: dict[str, list[dict[str, float]]] = {}
    norms: dict[str, float] = {}
    # Sequentially: concurrent sides would share the device's memory and compete for cores.
    for name, build in (("in process", in_process), ("one Ray worker", on_ray)):
        group = build()
        try:
            found = [_step(group, cfg, _prompts(args, len(tokenizer), step), step) for step in range(steps)]
        finally:
            group.close()
        seconds[name] = [took for took, _ in found[args.warm_up :]]
        norms[name] = found[-1][1]
        del group
        _free_memory()
    medians = {name: _medians(parts) for name, parts in seconds.items()}
    ours, theirs = medians["in process"], medians["one Ray worker"]
    return {
        "median_seconds": medians,
        "overhead": {phase: theirs[phase] / ours[phase] - 1 for phase in (*PHASES, "step")},
        "last_grad_norm": norms,
    }


def _free_memory() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _config(args: argparse.Namespace, model: str) -> PPOConfig:
    from verl.config.load import from_dict
    from verl.config.schema import PPOConfig

    values: dict[str, Any] = {
        "data.train_batch_size": args.prompts,
        "data.max_response_length": args.max_tokens,
        "data.max_prompt_length": args.prompt_tokens,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.n": args.n,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": args.prompts,
        "algorithm.adv_estimator": "grpo",
    }
    values |= dict(item.split("=", 1) for item in args.set)
    return from_dict(PPOConfig, values, checked=False)


def _prompts(args: argparse.Namespace, vocabulary: int, step: int) -> DataProto:
    import numpy as np

    from verl.data.proto import DataProto

    draw = np.random.default_rng(step)
    ids = [draw.integers(3, vocabulary, args.prompt_tokens).tolist() for _ in range(args.prompts)]
    return DataProto.from_dict(
        non_tensors={"uid": [f"{step}-{row}" for row in range(args.prompts)], "prompt_ids": ids}
    )


def _step(group: Any, cfg: PPOConfig, prompts: DataProto, step: int) -> tuple[dict[str, float], float]:
    """One step's seconds by phase, and the gradient norm, which both sides must share."""
    import torch

    from verl.workers.roles import training_settings

    times = [time.perf_counter()]
    settings = training_settings(cfg.actor_rollout_ref.rollout, cfg.data.max_response_length, step)
    batch = group.generate(prompts, settings)
    times.append(time.perf_counter())
    batch.meta_info["temperature"] = 1.0
    batch.batch |= group.forward("actor", batch, ["old_log_probs"]).batch
    times.append(time.perf_counter())
    signs = torch.arange(len(batch)).remainder(2).mul(2).sub(1).float()
    batch.batch["advantages"] = signs.unsqueeze(-1).expand_as(batch.batch["response_mask"]).contiguous()
    metrics = group.update("actor", batch)
    times.append(time.perf_counter())
    took = {phase: times[i + 1] - times[i] for i, phase in enumerate(PHASES)}
    return took | {"step": times[-1] - times[0]}, metrics["actor/grad_norm"]


def _medians(parts: list[dict[str, float]]) -> dict[str, float]:
    return {phase: statistics.median(part[phase] for part in parts) for phase in (*PHASES, "step")}


def _table(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    medians, overhead = figures["median_seconds"], figures["overhead"]
    out = [
        f"{args.prompts} prompts x {args.n} responses of {args.max_tokens} tokens, {args.steps} steps each",
        f"{'':16}" + "".join(f"{phase:>12}" for phase in (*PHASES, "step")),
    ]
    for name, parts in medians.items():
        out.append(f"{name:16}" + "".join(f"{parts[phase]:11.3f}s" for phase in (*PHASES, "step")))
    out.append(f"{'overhead':16}" + "".join(f"{overhead[phase]:12.1%}" for phase in (*PHASES, "step")))
    verdict = "within" if overhead["step"] <= BOUND else "above"
    out.append(f"{verdict} the bound of {BOUND:.0%} of a step")
    sys.stdout.write("\n".join(out) + "\n")


def main(argv: list[str] | None = None) -> int:
    return command("overhead", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
