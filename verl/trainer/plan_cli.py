"""`verl plan [FILE.yaml] [--model M] [--gpus N] [--gpu-memory G] key=value ...`: whether a run fits on GPUs that need
not be here, from how many on, and how long a step takes; with `--learn`, whether its prompts have a signal."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from verl.config.load import load_config
from verl.config.machine import Device, local_device
from verl.config.plan import RunPlan
from verl.config.plan_report import fits, idle_stage_warnings, memory_warnings, render, smallest_fit
from verl.config.run_checks import layout_errors, model_layout_errors
from verl.config.schema import PPOConfig
from verl.config.sizes import gib
from verl.config.sources import OPTIONS
from verl.errors import CommandAnswered, ConfigError, ModelError
from verl.runtime import run_command

_ABOUT = """Whether a run fits on GPUs that need not be here, from how many on, and about how long a step takes.
Takes the keys of `verl train` (`verl train --help`), a YAML file of them, --config-path and --config-name.
Ends with 1 where something does not fit.
With --learn: draws responses on this machine, and says how many groups have something to learn from."""

LEARNING: dict[str, tuple[int | float, str]] = {
    "prompts": (64, "prompts to draw"),
    "groups": (32, "groups with signal wanted in a step"),
    "share": (0.5, "share of groups that the proposed n gives a signal"),
}
"""Options of `--learn`: default and meaning."""


def build_parser(own: bool = False) -> argparse.ArgumentParser:
    """Its options and those of `verl train`, or only its own."""
    parser = argparse.ArgumentParser(
        prog="verl plan",
        usage="verl plan [FILE.yaml] [options] key=value ...",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
        parents=[] if own else [OPTIONS],
    )
    add = parser.add_argument
    add("--model", help="a model folder, or an id of the Hugging Face hub (default: that of the keys)")
    add("--gpus", type=int, help="GPUs in all (default: trainer.nnodes x trainer.n_gpus_per_node)")
    add("--gpu-memory", type=float, help="GiB of each (default: those of this machine's)")
    add("--gpus-per-node", type=int, help="default: 8, or trainer.n_gpus_per_node")
    add(
        "--learn",
        action="store_true",
        help="draw and score responses: the share of groups with signal, what to set",
    )
    for name, (default, about) in LEARNING.items():
        add(f"--{name}", type=type(default), help=f"with --learn: {about} (default: {default})")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    return run_command(lambda: run(arguments))


def run(arguments: list[str]) -> int:
    """Print the plan of a command line; 1 where something does not fit."""
    if {"-h", "--help"} & {*arguments}:
        sys.stdout.write(build_parser().format_help())
        return 0
    try:
        args, words = build_parser(own=True).parse_known_args(arguments)
    except SystemExit as error:  # argparse has said why
        raise CommandAnswered(error.code) from None
    for name in ("gpus", "gpu_memory", "gpus_per_node", *LEARNING):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
    if args.model:
        escaped = args.model.replace("'", "\\'")
        words.append(f"actor_rollout_ref.model.path='{escaped}'")
    if args.learn:
        if args.gpus or args.gpus_per_node or args.gpu_memory:
            raise ConfigError(
                "--learn draws on this machine; leave out --gpus, --gpus-per-node and --gpu-memory"
            )
        from verl.trainer.plan_learn import learn

        given: dict[str, Any] = {
            name: getattr(args, name) or default for name, (default, _) in LEARNING.items()
        }
        return learn(load_config(PPOConfig, words), **given)
    for name in LEARNING:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} is an option of --learn")
    if args.gpus:
        per_node = min(args.gpus, args.gpus_per_node or 8)
        if args.gpus % per_node:
            raise ConfigError(f"--gpus {args.gpus} is not a whole number of nodes of {per_node}")
        words += [f"trainer.nnodes={args.gpus // per_node}", f"trainer.n_gpus_per_node={per_node}"]
    config = load_config(PPOConfig, words, checked=False)
    if not config.actor_rollout_ref.model.path:
        raise ConfigError("no model: give --model, or actor_rollout_ref.model.path among the keys")
    gpus, per_node = config.trainer.nnodes * config.trainer.n_gpus_per_node, config.trainer.n_gpus_per_node
    if args.gpu_memory is not None:
        device = Device("cuda", f"{gpus} GPU{'s' * (gpus > 1)}", int(args.gpu_memory * 2**30), per_node)
    else:
        device = local_device("auto")
        if device.kind != "cuda":
            raise ConfigError(
                "--gpu-memory is needed, the GiB of each GPU (80, 140, ...): there is no GPU here"
            )
    plan = RunPlan(config, device, download=True)
    if plan.size_problem:
        raise ModelError(plan.size_problem)
    lines = (
        layout_errors(plan) + model_layout_errors(plan) + idle_stage_warnings(plan) + memory_warnings(plan)
    )
    sys.stdout.write(f"{render(plan, lines)}\n\n{_verdict(plan, args.gpus_per_node or max(per_node, 8))}\n")
    return 1 if lines else 0


def _verdict(plan: RunPlan, per_node: int) -> str:
    assert plan.device.memory is not None
    count, size = smallest_fit(plan, per_node), f"GPUs of {gib(plan.device.memory)}"
    now = f"{plan.world_size} of these {size}: {'fits' if fits(plan) else 'does not fit'}"
    if not count:
        return f"{now}. With these keys no number of such GPUs up to 1,024 is enough; the warnings say what would help"
    return f"{now}. With these keys it fits from {count} GPU{'s' * (count > 1)} on ({per_node} per node)"
