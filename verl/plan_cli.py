"""`verl plan --model M --gpus N --gpu-memory G`: settings with which a model fits on GPUs that need not be here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from verl.config.batch_math import batch_plan
from verl.config.load import from_dict
from verl.config.machine import Device
from verl.config.memory import Estimate, estimate
from verl.config.model_sizes import ModelSizes, read_sizes
from verl.config.plan import USABLE, Plan, no_cache, render
from verl.config.schema import PPOConfig
from verl.errors import ConfigError

_ACTOR, _MODEL, _ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "model", "rollout"))
_TOKEN_BUDGETS = (32768, 16384, 8192, 4096)
# Settings that save memory, each slower than those before; a candidate has all up to one of them.
_SAVINGS: tuple[dict[str, Any], ...] = (
    {},
    {f"{_MODEL}.enable_gradient_checkpointing": True},
    {"actor_rollout_ref.ref.fsdp_config.param_offload": True},
    {f"{_ACTOR}.fsdp_config.optimizer_offload": True, "critic.fsdp_config.optimizer_offload": True},
    {f"{_MODEL}.enable_activation_offload": True, "critic.fsdp_config.param_offload": True},
    {f"{_ACTOR}.optim.moments": "int8", f"{_ACTOR}.optim.stochastic_rounding": True},
    {f"{_MODEL}.lora_rank": 32},
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a model folder, or an id of the Hugging Face hub")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs in all")
    parser.add_argument("--gpu-memory", type=float, required=True, help="GiB of each")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="default: 8")
    parser.add_argument("--prompts", type=int, default=256, help="prompts per step (default: 256)")
    parser.add_argument("--n", type=int, default=8, help="responses per prompt (default: 8)")
    parser.add_argument("--prompt-length", type=int, default=1024, help="tokens at most (default: 1024)")
    parser.add_argument("--response-length", type=int, default=2048, help="tokens at most (default: 2048)")
    parser.add_argument("--critic", action="store_true", help="PPO with a critic of the same size")
    parser.add_argument("--reference", action="store_true", help="with a reference policy (KL)")


def run(args: argparse.Namespace) -> int:
    for name, value in vars(args).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    if args.gpus > args.gpus_per_node and args.gpus % args.gpus_per_node:
        raise ConfigError(
            f"--gpus {args.gpus} is not a whole number of nodes; give a multiple of --gpus-per-node"
        )
    sizes = read_sizes(args.model, download=True)
    assert sizes is not None  # with `download` a model that cannot be had is an error
    keys, result, fits = propose(args, sizes)
    lines = [
        f"{args.model}: {sizes.parameters:,} parameters",
        "",
        *(f"  {key}={keys[key]}" for key in keys),
        "",
    ]
    sys.stdout.write("\n".join([*lines, render(result)]) + "\n")
    return 0 if fits else 1


def propose(args: argparse.Namespace, sizes: ModelSizes) -> tuple[dict[str, Any], Plan, bool]:
    """The first candidate whose every phase fits, or the last one: its keys, its plan, and whether it fits."""
    device = Device("cuda", "GPU", int(args.gpu_memory * 2**30), min(args.gpus, args.gpus_per_node))
    for keys in _candidates(args):
        share = _memory_share(args, _estimate(keys, sizes, device)[1])
        keys[f"{_ROLLOUT}.gpu_memory_utilization"] = share
        config, memory = _estimate(keys, sizes, device)
        peak = max(memory.phases, key=lambda phase: phase.total)
        fits = peak.total <= USABLE * args.gpu_memory * 2**30 and not no_cache(memory)
        if fits:
            break
    result = Plan(batch_plan(config), device, memory)
    if not fits:
        result.warnings.append(
            f"nothing tried fits: '{peak.name}' needs {peak.total / 2**30:.1f} GiB of {args.gpu_memory:g}. Use more "
            "GPUs, or shorten --response-length"
        )
    return keys, result, fits


def _candidates(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """From the fastest to the one that needs least memory."""
    base = {
        "trainer.nnodes": -(-args.gpus // args.gpus_per_node),
        "trainer.n_gpus_per_node": min(args.gpus, args.gpus_per_node),
        "data.train_batch_size": args.prompts,
        "data.max_prompt_length": args.prompt_length,
        "data.max_response_length": args.response_length,
        "algorithm.adv_estimator": "gae" if args.critic else "grpo",
        f"{_ROLLOUT}.n": args.n,
        f"{_ACTOR}.use_dynamic_bsz": True,
        f"{_ACTOR}.use_kl_loss": args.reference,
    }
    longest = args.prompt_length + args.response_length
    # Sharding within a node comes first: less data crosses the slower network.
    shard_sizes = [args.gpus_per_node, -1] if args.gpus > args.gpus_per_node else [-1]
    for saving in _SAVINGS:
        used = {"critic.": args.critic, "actor_rollout_ref.ref.": args.reference}
        base |= {
            key: value
            for key, value in saving.items()
            if all(wanted for prefix, wanted in used.items() if key.startswith(prefix))
        }
        for shards in shard_sizes:
            for budget in [size for size in _TOKEN_BUDGETS if size >= longest] or [longest]:
                sizes = {
                    f"{_ACTOR}.fsdp_config.fsdp_size": shards,
                    f"{_ACTOR}.ppo_max_token_len_per_gpu": budget,
                }
                yield base | sizes


def _estimate(keys: dict[str, Any], sizes: ModelSizes, device: Device) -> tuple[PPOConfig, Estimate]:
    config = from_dict(PPOConfig, keys, checked=False, quiet=True)
    return config, estimate(config, sizes, sizes if config.critic.enable else None, device)


def _memory_share(args: argparse.Namespace, memory: Estimate) -> float:
    """`gpu_memory_utilization`: what the trainer leaves, in steps of 0.05."""
    generate, whole = memory.phases[0], memory.roles[0].whole_weights
    used = generate.total - generate.parts["KV cache"] - whole
    share = int((USABLE - used / (args.gpu_memory * 2**30)) * 20) / 20
    return min(max(share, 0.05), 0.9)
