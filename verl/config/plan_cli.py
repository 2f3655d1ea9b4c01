"""`verl plan --model M --gpus N --gpu-memory G key=value ...`: whether a run fits on GPUs that need not be here."""

from __future__ import annotations

import argparse
import sys

from verl.config.load import from_dict
from verl.config.machine import Device
from verl.config.plan import RunPlan
from verl.config.plan_report import idle_stage_warnings, memory_warnings, render
from verl.config.run_checks import layout_errors, model_layout_errors
from verl.config.schema import PPOConfig
from verl.config.sources import parse_overrides
from verl.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a model folder, or an id of the Hugging Face hub")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs in all")
    parser.add_argument("--gpu-memory", type=float, required=True, help="GiB of each")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="default: 8")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of `verl train`")


def run(args: argparse.Namespace) -> int:
    for name in ("gpus", "gpu_memory", "gpus_per_node"):
        if getattr(args, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
    per_node = min(args.gpus, args.gpus_per_node)
    if args.gpus % per_node:
        raise ConfigError(f"--gpus {args.gpus} is not a whole number of nodes of {per_node}")
    values = {override.name: override.value for override in parse_overrides(args.overrides)}
    values |= {"trainer.nnodes": args.gpus // per_node, "trainer.n_gpus_per_node": per_node}
    config = from_dict(PPOConfig, {"actor_rollout_ref.model.path": args.model, **values}, checked=False)
    device = Device("cuda", f"{args.gpus} GPUs", int(args.gpu_memory * 2**30), per_node)
    plan = RunPlan(config, device, download=True)
    lines = (
        layout_errors(plan) + model_layout_errors(plan) + idle_stage_warnings(plan) + memory_warnings(plan)
    )
    sys.stdout.write(render(plan, lines) + "\n")
    return 1 if lines else 0
