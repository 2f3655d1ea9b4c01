"""`verl plan --model M --gpus N --gpu-memory G key=value ...`: whether a run fits on GPUs that need not be here."""

from __future__ import annotations

import argparse
import sys

from verl.config.async_checks import async_rows
from verl.config.batch_math import batch_plan
from verl.config.layout_checks import layout_errors
from verl.config.load import from_dict
from verl.config.machine import Device
from verl.config.plan import Plan, add_layout, add_memory, render
from verl.config.schema import PPOConfig
from verl.config.sizes import read_sizes
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
    batches = batch_plan(config)
    result = Plan(batches, device, async_rows(config, batches))
    sizes = read_sizes(args.model, config.actor_rollout_ref.model.override_config, download=True)
    result.warnings += layout_errors(config)
    add_layout(result, config)
    assert sizes is not None  # with `download` a model that cannot be read is an error
    add_memory(result, config, sizes)
    sys.stdout.write(render(result) + "\n")
    return 1 if result.warnings else 0
