"""`verl plan --gpus N --gpu-memory G --model M`: a proposal before anything is loaded, as text."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from verl.config.batch_math import text_table
from verl.config.model_shape import ModelShape, read_shape, shape_of
from verl.config.plan import gib
from verl.config.scale_plan import SAFE, Proposal, Wish, propose
from verl.config.step_time import Speeds
from verl.errors import ConfigError

_QWEN: dict[str, tuple[int, int, int, int, int, bool]] = {
    "0.5b": (896, 24, 14, 2, 4864, True),
    "1.5b": (1536, 28, 12, 2, 8960, True),
    "3b": (2048, 36, 16, 2, 11008, True),
    "7b": (3584, 28, 28, 4, 18944, False),
    "14b": (5120, 48, 40, 8, 13824, False),
    "32b": (5120, 64, 40, 8, 27648, False),
    "72b": (8192, 80, 64, 8, 29568, False),
}
"""Hidden size, layers, heads, key-value heads, MLP width and tied head of Qwen2.5, for planning without a folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help=f"a model folder, or a size: {', '.join(_QWEN)}")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs in all")
    parser.add_argument("--gpu-memory", type=float, required=True, help="GiB of each")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="default: 8")
    parser.add_argument("--prompts", type=int, default=256, help="prompts per step (default: 256)")
    parser.add_argument("--n", type=int, default=8, help="responses per prompt (default: 8)")
    parser.add_argument("--prompt-length", type=int, default=1024, help="tokens at most (default: 1024)")
    parser.add_argument("--response-length", type=int, default=2048, help="tokens at most (default: 2048)")
    parser.add_argument("--critic", action="store_true", help="PPO with a critic of the same size")
    parser.add_argument("--reference", action="store_true", help="with a reference policy (KL)")
    parser.add_argument(
        "--train-speed", type=float, help="tokens/s of `verl bench train` with this model on one such GPU"
    )
    parser.add_argument(
        "--generate-speed",
        type=float,
        help="tokens/s of `verl bench rollout` with this model on one such GPU",
    )


def run(args: argparse.Namespace) -> int:
    for name in ("gpus", "gpu_memory", "gpus_per_node", "prompts", "n", "prompt_length", "response_length"):
        if getattr(args, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
    shape = _shape(args.model)
    wish = Wish(
        gpus=args.gpus,
        gpu_memory=int(args.gpu_memory * 2**30),
        gpus_per_node=args.gpus_per_node,
        prompts=args.prompts,
        n=args.n,
        prompt_length=args.prompt_length,
        response_length=args.response_length,
        critic=args.critic,
        reference=args.reference,
    )
    speeds = Speeds.of(wish.gpu_memory, args.train_speed, args.generate_speed)
    proposal = propose(wish, shape, speeds)
    sys.stdout.write(render(wish, shape, proposal, args.model) + "\n")
    return 0 if proposal.fits else 1


def _shape(model: str) -> ModelShape:
    size = _QWEN.get(model.lower())
    if size is not None:
        hidden, layers, heads, kv_heads, width, tied = size
        values: dict[str, Any] = {
            "model_type": "qwen2",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": width,
            "vocab_size": 151936 if tied else 152064,
            "tie_word_embeddings": tied,
        }
        return shape_of(values)
    shape = read_shape(model)
    if shape is None:
        raise ConfigError(
            f"--model '{model}' is neither a folder nor in the Hugging Face cache; give a folder with config.json, or "
            f"a size: {', '.join(_QWEN)}"
        )
    return shape


def render(wish: Wish, shape: ModelShape, proposal: Proposal, name: str) -> str:
    """The proposal as text: keys, memory, the step, and what of it is an estimate."""
    node = f"{wish.nodes} nodes of {wish.gpus_per_node}" if wish.nodes > 1 else "one node"
    head = (
        f"{name}: {shape.parameters:,} parameters on {wish.gpus} GPU{'s' if wish.gpus > 1 else ''} of "
        f"{gib(wish.gpu_memory)} ({node})"
    )
    keys = "\n".join(f"  {key}={value}" for key, value in proposal.keys.items())
    verdict = "fits" if proposal.fits else "does not fit"
    memory = text_table(
        f"memory of one GPU: {verdict} ({SAFE:.0%} of it is planned with)",
        [
            (phase.name, gib(phase.total), " + ".join(f"{k} {gib(v)}" for k, v in phase.parts.items() if v))
            for phase in proposal.memory.phases
        ],
    )
    basis = [
        "exact: weights, gradients, optimiser state and KV cache. Estimated: activations.",
        "Times marked 'measured' scale what you gave; 'assumed' ones take a share of the makers' peaks and may be off "
        "by a factor of two: measure with `verl bench train` and `verl bench rollout`.",
        "Not counted: gathering sharded weights, rewards, the tail in which only the longest responses run.",
    ]
    lines = [f"note: {note}" for note in proposal.notes]
    step = [_step_table(proposal)] if proposal.fits else []
    return "\n\n".join([head, "keys\n" + keys, memory, *step, "\n".join([*basis, *lines])])


def _step_table(proposal: Proposal) -> str:
    total = sum(part.seconds for part in proposal.parts)
    lines = [
        (part.name, f"{part.seconds:.1f} s", f"{part.seconds / total:4.0%}  {part.source}")
        for part in proposal.parts
    ]
    lines.append(("together", f"{total:.1f} s", "an upper bound of what is counted"))
    return text_table("one step, every response at its longest", lines)
