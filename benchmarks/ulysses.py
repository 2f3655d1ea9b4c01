"""`python -m benchmarks.ulysses`: one long sequence forward and backward, split over 1, 2, ... processes on the CPU.

For each degree, in new processes of one thread each: what autograd keeps of the sequence for the backward pass, and the
growth of the process while it runs, both of the rank with most; tokens of the sequence per second. The claim is the
memory of a rank against degree 1. Processes share the cores, so tokens per second show the cost of the exchange only
where there is a core for each.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import command
from verl.config.schema import ActorConfig, ModelConfig
from verl.data.proto import DataProto
from verl.engines import build_engine

_WARM_UP = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=8192, help="length of the sequence (default: 8192)")
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (default: 256)")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers (default: 4)")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing")


def make_engine(args: argparse.Namespace, degree: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=max(args.tokens, _WARM_UP),
    )
    torch.manual_seed(0)
    role = ActorConfig(ulysses_sequence_parallel_size=degree, ppo_micro_batch_size_per_gpu=1)
    model = ModelConfig(dtype="float32", enable_gradient_checkpointing=args.recompute)
    return build_engine("actor", model, role, model=LlamaForCausalLM(config), device="cpu", total_steps=10)


def one_sequence(tokens: int) -> DataProto:
    ids = torch.randint(3, 4096, (1, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "response_mask": mask[:, tokens // 8 :]}
    )


def loss_of(output: Any, micro: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    return -output.log_probs.sum() / micro.meta_info["batch_num_tokens"], {}


def one_pass(engine: Any, tokens: int) -> int:
    """Forward and backward; bytes that were kept for the backward pass, each storage once."""
    kept: dict[int, int] = {}

    def count(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        engine.forward_backward(one_sequence(tokens), loss_of)
    return sum(kept.values())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(rank: int, degree: int, args: argparse.Namespace, folder: str) -> None:
    """One rank; leaves its figures in the folder."""
    torch.set_num_threads(1)
    if degree > 1:
        store = dist.FileStore(f"{folder}/store{degree}", degree)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=degree)
    engine = make_engine(args, degree)
    weights = one_pass(engine, _WARM_UP)  # nearly only weights are kept for so few tokens
    before = resident_bytes()
    start = time.perf_counter()
    kept = one_pass(engine, args.tokens) - weights
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    Path(folder, f"{degree}_{rank}.json").write_text(
        json.dumps({"kept": kept, "peak": peak, "seconds": seconds})
    )
    if degree > 1:
        dist.destroy_process_group()


def figures(args: argparse.Namespace, degree: int) -> dict[str, float]:
    """Of the rank with most."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (degree, args, folder), nprocs=degree)
        ranks = [json.loads(Path(folder, f"{degree}_{rank}.json").read_text()) for rank in range(degree)]
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.stdout.write(
        f"one sequence of {args.tokens} tokens, Llama of {args.layers} layers of {args.hidden}, float32, "
        f"torch {torch.__version__}, {os.cpu_count()} cores\n\n"
        f"{'degree':>6} {'kept, MiB':>10} {'/ first':>8} {'peak, MiB':>10} {'/ first':>8} {'tokens/s':>9}\n"
    )
    first: dict[str, float] = {}
    for degree in args.degrees:
        found = figures(args, degree)
        first = first or found
        columns = (
            f"{found[name] / 2**20:>10.1f} {found[name] / max(first[name], 1):>7.2f}x"
            for name in ("kept", "peak")
        )
        sys.stdout.write(f"{degree:>6} {' '.join(columns)} {args.tokens / found['seconds']:>9.0f}\n")
        sys.stdout.flush()
    return 0


def main(argv: list[str] | None = None) -> int:
    return command("ulysses", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
