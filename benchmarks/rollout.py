"""`python -m benchmarks.rollout`: tokens per second of the native engine, and of others on the same requests.

The workload is fixed by its seed: prompts of 64 to 192 random tokens, n samples each, response lengths drawn
from a log-normal distribution (median 200, sigma 0.7, at most 1024) and enforced per request, temperature 1,
log-probs on. A model is a folder, or the name of a shape, which gets random weights: the figures do not depend
on what the tokens mean.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import command
from verl.errors import ConfigError
from verl.rollout.base import Request, SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "kind": "LlamaConfig",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "kind": "LlamaConfig",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "kind": "Qwen2Config",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
    },
    "tiny": {
        "kind": "LlamaConfig",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help=f"a folder, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--prompts", type=int, default=128, help="prompts")
    parser.add_argument("--n", type=int, default=8, help="samples per prompt")
    parser.add_argument("--against", default="", help="other engines, comma separated: hf, vllm")
    parser.add_argument("--vllm-python", default=None, help="interpreter of an environment that has vLLM")
    parser.add_argument("--vllm-options", default="{}", help="arguments of vLLM's LLM, as JSON")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--dtype", default="auto", help="bfloat16, float32, fp8; auto: bfloat16 on CUDA")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest response")
    parser.add_argument("--median", type=float, default=200.0, help="median response length")
    parser.add_argument("--max-num-seqs", type=int, default=None, help="default: what the memory allows")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.8)
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--repeat", type=int, default=2, help="timed runs after a warm-up; the best counts")
    parser.add_argument("--no-warm-up", action="store_true", help="time the first run")
    parser.add_argument("--first-token", action="store_true", help="also: process start to first token")
    parser.add_argument("--one-token", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help="print where the device's time goes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=None, help="also write the figures to this JSON file")


def workload(
    prompts: int, n: int, vocab: int, max_tokens: int = 1024, median: float = 200.0, seed: int = 0
) -> list[Request]:
    """The same requests for every engine."""
    rng = random.Random(seed)
    requests = []
    for index in range(prompts):
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(64, 192))]
        length = min(max(1, round(math.exp(rng.gauss(math.log(median), 0.7)))), max_tokens)
        sampling = SamplingParams(max_tokens=length, ignore_eos=True)
        requests.append(Request(f"bench-{index}", prompt, sampling, n=n, seed=seed))
    return requests


def load_model(name: str, device: str, dtype: Any) -> Any:
    """A folder's model, or a shape with random weights, on the device and ready to generate."""
    import torch
    import transformers

    if Path(name).is_dir():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        return model.to(device).eval()
    if name not in SHAPES:
        raise ConfigError(f"--model {name!r} is neither a folder nor a known shape ({', '.join(SHAPES)})")
    shape = dict(SHAPES[name])
    config = getattr(transformers, shape.pop("kind"))(**shape)
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def run(args: argparse.Namespace) -> int:
    import torch

    device = args.device if args.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    wanted = args.dtype if args.dtype != "auto" else ("bfloat16" if device == "cuda" else "float32")
    dtype = torch.bfloat16 if wanted == "fp8" else getattr(torch, wanted, None)
    if dtype is None:
        raise ConfigError(f"--dtype {wanted!r} is unknown; known: bfloat16, float16, float32, fp8")
    peers = _peers(args)
    model = load_model(args.model, device, dtype)
    if args.one_token:
        return _one_token(args, model, wanted)
    requests = workload(
        args.prompts, args.n, int(model.config.vocab_size), args.max_tokens, args.median, args.seed
    )
    _say(
        f"{args.model} on {_device_name(device)}, {wanted}: {args.prompts} prompts x {args.n}, "
        f"{sum(r.n * r.sampling.max_tokens for r in requests)} tokens wanted"
    )
    figures = {"native": _native(args, model, requests, wanted)}
    for peer in peers:
        figures[peer] = _peer(peer, args, model, requests, wanted)
    _table(figures)
    if args.first_token:
        first = {"seconds": _first_token(args, True), "compiling_seconds": _first_token(args, False)}
        figures["first_token"] = first
        _say(
            f"process start to first token: {first['seconds']:.1f} s, on a machine's first run "
            f"{first['compiling_seconds']:.1f} s"
        )
    if args.out:
        Path(args.out).write_text(json.dumps(figures, indent=1))
    return 0


def _engine(args: argparse.Namespace, model: Any, dtype: str) -> Any:
    from verl.rollout.native import Limits, NativeRollout

    limits = Limits(
        max_num_seqs=args.max_num_seqs,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enforce_eager=args.enforce_eager,
        dtype="fp8" if dtype == "fp8" else "auto",
    )
    return NativeRollout(model, None, limits)


def _native(args: argparse.Namespace, model: Any, requests: list[Request], dtype: str) -> dict[str, float]:
    import torch

    from benchmarks.rollout_peers import run_engine

    engine = _engine(args, model, dtype)
    figures: dict[str, float] = {}
    if not args.no_warm_up:
        _, seconds = run_engine(engine, requests)
        figures["first_run_seconds"] = seconds
        _say(f"first run, compiling and capturing: {seconds:.1f} s")
    best: tuple[int, float] = (0, math.inf)
    runs, before = max(args.repeat, 1), engine.stats().prompt_passes
    for _ in range(runs):
        best = min(best, run_engine(engine, requests), key=lambda pair: pair[1])
    figures |= {"tokens": best[0], "seconds": best[1], "tokens_per_second": best[0] / best[1]}
    figures["prompt_passes"] = (engine.stats().prompt_passes - before) / runs
    _say(f"{figures['prompt_passes']:g} prompt passes a run")
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()  # the cache is not torch's: ask the device
        figures["device_gb"] = (total - free) / 1e9
    if args.profile:
        _profile(engine, requests)
    return figures


def _profile(engine: Any, requests: list[Request]) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as record:
        list(engine.generate(requests))
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    _say(record.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=70))


def _peers(args: argparse.Namespace) -> list[str]:
    """The engines to compare with, known to be runnable before anything is timed."""
    names = [name for name in args.against.split(",") if name]
    for name in names:
        if name not in ("hf", "vllm"):
            raise ConfigError(f"--against {name!r} is unknown; known: hf, vllm")
    if "vllm" in names and not Path(args.model).is_dir():
        raise ConfigError("--against vllm needs --model to be a folder: vLLM loads the weights itself")
    return names


def _peer(
    name: str, args: argparse.Namespace, model: Any, requests: list[Request], dtype: str
) -> dict[str, float]:
    from benchmarks import rollout_peers

    if name == "hf":
        tokens, seconds = rollout_peers.run_transformers(model, requests)
    else:
        options = json.loads(args.vllm_options)
        tokens, seconds = rollout_peers.run_vllm(args.vllm_python, args.model, dtype, requests, options)
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def _one_token(args: argparse.Namespace, model: Any, dtype: str) -> int:
    requests = workload(args.prompts, args.n, int(model.config.vocab_size), 1, args.median, args.seed)
    next(iter(_engine(args, model, dtype).generate(requests)))
    return 0


def _first_token(args: argparse.Namespace, compiled: bool) -> float:
    """A new process with the same model, until its first token has reached the host.

    Not `compiled`: as if nothing had ever run on this machine, kernels are compiled, too."""
    arguments = [sys.executable, "-m", "benchmarks.rollout", "--one-token", "--model", args.model]
    arguments += ["--prompts", str(args.prompts), "--n", str(args.n), "--device", args.device]
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ) if compiled else {**os.environ, "TRITON_CACHE_DIR": folder}
        start = time.perf_counter()
        subprocess.run(arguments, check=True, env=environment)
        return time.perf_counter() - start


def _table(figures: dict[str, dict[str, float]]) -> None:
    ours = figures["native"]["tokens_per_second"]
    _say(f"{'engine':10} {'tokens/s':>12} {'seconds':>9} {'native is':>10}")
    for name, row in figures.items():
        speed = row["tokens_per_second"]
        _say(f"{name:10} {speed:12.0f} {row['seconds']:9.2f} {ours / speed:9.2f}x")


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else f"CPU with {torch.get_num_threads()} threads"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    return command("rollout", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
