"""Times of the native engine's kernels on a CUDA device, beside torch's own, for two model shapes.

    python benchmarks/rollout_kernels.py [--seconds 120]

Every figure is microseconds of one call inside a CUDA graph of many, which is how the engine runs them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from verl.rollout.native.kernels import attention, layers, rotary, sampling, selection
from verl.rollout.native.ops import DecodeInputs

SHAPES = {
    "smollm2-135m": (576, 1536, 9, 3, 64, 49152),
    "qwen2.5-7b": (3584, 18944, 28, 4, 128, 152064),
}


def micros(function: Callable[[], object], repeat: int = 20) -> float:
    """Best of three replays of a graph of `repeat` calls, per call."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            function()
    best = float("inf")
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1000 / repeat)
    return best


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def products(name: str, rows: int, hidden: int, inner: int, heads: int, kv: int, dim: int) -> None:
    def weight(width: int, depth: int) -> torch.Tensor:
        return torch.randn(width, depth, device="cuda", dtype=torch.bfloat16) * 0.02

    # Several layers' worth of weights, so that they come from memory as in the model and not from the cache.
    copies = 8 if hidden < 1024 else 1
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    qkv = [tuple(weight(n * dim, hidden) for n in (heads, kv, kv)) for _ in range(copies)]
    gates = [(weight(inner, hidden), weight(inner, hidden)) for _ in range(copies)]
    turn = [0]

    def next_of(items: list) -> tuple:
        turn[0] += 1
        return items[turn[0] % copies]

    def separate_qkv() -> None:
        ws = next_of(qkv)
        out = torch.empty(rows, (heads + 2 * kv) * dim, device="cuda", dtype=torch.bfloat16)
        for w, part in zip(ws, out.split([w.shape[0] for w in ws], 1), strict=True):
            torch.mm(x, w.t(), out=part)

    def separate_gate() -> None:
        gate, up = next_of(gates)
        out = torch.empty(rows, 2 * inner, device="cuda", dtype=torch.bfloat16)
        torch.mm(x, gate.t(), out=out[:, :inner])
        torch.mm(x, up.t(), out=out[:, inner:])
        layers.silu_mul(out[:, :inner], out[:, inner:])

    whole = [torch.cat(ws) for ws in qkv]
    single = micros(lambda: x @ next_of(whole).t())
    say(f"{name} M={rows} qkv: separate {micros(separate_qkv):.1f}, one product {single:.1f}")
    down_in = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    downs = [weight(hidden, inner) for _ in range(copies)]
    outs = [weight(hidden, heads * dim) for _ in range(copies)]
    mixed = torch.randn(rows, heads * dim, device="cuda", dtype=torch.bfloat16)
    say(
        f"{name} M={rows} down {micros(lambda: down_in @ next_of(downs).t()):.1f}, o "
        f"{micros(lambda: mixed @ next_of(outs).t()):.1f}, gate/up separate {micros(separate_gate):.1f}"
    )


def small_kernels(
    name: str, rows: int, hidden: int, inner: int, heads: int, kv: int, dim: int, vocab: int
) -> None:
    half = {"device": "cuda", "dtype": torch.bfloat16}
    x, weight = torch.randn(rows, hidden, **half), torch.randn(hidden, **half)
    context, size = 320, 16
    width = -(-(context + 64) // size)
    blocks = rows * width + 1
    cache = tuple(torch.randn(blocks, kv, size, dim, **half) for _ in range(2))
    table = torch.randperm(rows * width, device="cuda").view(rows, width).int()
    positions = torch.full((rows,), context - 1, device="cuda")
    active = torch.ones(rows, dtype=torch.int64, device="cuda")
    qkv = torch.randn(rows, (heads + 2 * kv) * dim, **half).split([heads * dim, kv * dim, kv * dim], 1)
    rope = tuple(torch.randn(context + 64, dim, **half) for _ in range(2))
    inputs = DecodeInputs(positions, positions, active, table)
    q = torch.randn(rows, heads, dim, **half)
    figures = {
        "norm": micros(lambda: layers.add_rms_norm(x, x, weight, 1e-5)),
        "rotary": micros(lambda: rotary.rotary_cache(qkv, cache, rope, inputs, None)),
    }
    floor = rows * context * kv * dim * 2 * 2 / 4.3e12 * 1e6
    for splits in (1, 2, 4, 8):
        figures[f"attention/{splits}"] = micros(
            lambda s=splits: attention.decode_attention(q, cache, inputs, dim**-0.5, None, None, s)
        )
    logits = torch.randn(rows, vocab, device="cuda")
    ones, zeros = torch.ones(rows, device="cuda"), torch.zeros(rows, dtype=torch.int64, device="cuda")
    figures["sample"] = micros(lambda: sampling.sample_plain(logits, ones, zeros, zeros, zeros))
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    top_p, top_k = ones * 0.9, zeros + 50
    figures["top-p by sort"] = micros(lambda: sorted_top_p(weights, top_p), repeat=2)
    figures["top-p by selection"] = micros(lambda: selection.smallest_kept(weights, None, top_p), repeat=2)
    figures["top-k by topk"] = micros(lambda: torch.topk(weights, 50, dim=-1), repeat=2)
    figures["top-k by selection"] = micros(lambda: selection.smallest_kept(weights, top_k, None), repeat=2)
    head = torch.randn(vocab, hidden, **half)
    figures["head"] = micros(lambda: torch.mm(x, head.t(), out_dtype=torch.float32))
    figures["head bf16"] = micros(lambda: x @ head.t())
    say(
        f"{name} M={rows} (attention's memory floor {floor:.0f}): "
        + ", ".join(f"{k} {v:.1f}" for k, v in figures.items())
    )


def sorted_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest weight of each row's nucleus by sorting the row, with float64 sums."""
    ordered = weights.sort(dim=-1, descending=True).values
    mass = ordered.double().cumsum(-1)
    stays = mass - ordered < top_p[:, None] * mass[:, -1:]
    return ordered.gather(1, stays.sum(-1, keepdim=True) - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    for rows in (1024, 16, 256, 64):
        for name, (hidden, inner, heads, kv, dim, vocab) in SHAPES.items():
            if time.monotonic() > deadline:
                say("out of time")
                return 0
            small_kernels(name, rows, hidden, inner, heads, kv, dim, vocab)
            products(name, rows, hidden, inner, heads, kv, dim)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
