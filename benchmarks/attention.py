"""`python -m benchmarks.attention`: forward and backward of one layer's packed attention by each kernel that is here.

The shapes are those that the table in `verl/models/attention_backends.py` comes from. `--shape` gives others, e.g.
`--shape 64x512:12/2:128`: 64 ragged rows of up to 512 tokens, 12 / 2 heads of 128.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks import command
from benchmarks.train import backends, say, table, versions
from benchmarks.train_parts import timed
from verl.models.attention import AttentionCall, PackedAttention


class Shape(NamedTuple):
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    size: int

    @property
    def label(self) -> str:
        rows = f"{len(self.lengths)} x {max(self.lengths)}"
        if len(set(self.lengths)) > 1:
            rows = f"{len(self.lengths)} rows, {min(self.lengths)} to {max(self.lengths)}"
        return f"{rows}, {self.heads}/{self.kv_heads} heads of {self.size}"

    @property
    def flops(self) -> float:
        """Of the products of a causal attention: two forward, five backward."""
        return 7 * 2 * self.heads * self.size * sum(length * length / 2 for length in self.lengths)


SHAPES = (
    Shape((2048,) * 8, 12, 2, 128),
    Shape((488, 700, 1024, 1400, 1800, 2300, 2900, 3600, 4096), 12, 2, 128),
    Shape((219,) * 75, 9, 3, 64),
    Shape((16384,), 14, 2, 64),
    Shape((16384,), 28, 4, 128),
)


def parsed(text: str) -> Shape:
    """ROWSxLONGEST:HEADS/KV:SIZE, with ragged lengths."""
    rows, heads, size = text.split(":")
    count, longest = (int(number) for number in rows.split("x"))
    drawn = torch.randint(longest // 4 + 1, longest + 1, (count,), generator=torch.Generator().manual_seed(0))
    queries, keys = (int(number) for number in heads.split("/"))
    return Shape(tuple(drawn.tolist()), queries, keys, int(size))


def measured(shape: Shape, names: list[str], device: torch.device) -> Iterator[tuple[str, ...]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (
        torch.randn(1, sum(shape.lengths), n, shape.size, device=device, dtype=dtype)
        .transpose(1, 2)
        .requires_grad_()
        for n in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    for name in names:
        packed = PackedAttention.from_lengths(shape.lengths, device, name)  # type: ignore[arg-type]
        chosen = AttentionCall(q, k, v).backend(
            len(shape.lengths), max(shape.lengths), len(set(shape.lengths)) == 1
        )
        label = f"auto: {chosen}" if name == "auto" else name

        def call(packed: PackedAttention = packed) -> None:
            out = packed.attend(AttentionCall(q, k, v))
            torch.autograd.grad(out, (q, k, v), out.detach())

        try:
            milliseconds, _ = timed(call, device)
        except Exception as error:  # a kernel this device does not have
            yield (shape.label, label, type(error).__name__, (str(error).splitlines() or [""])[0][:60])
            continue
        yield (shape.label, label, f"{milliseconds:.2f}", f"{shape.flops / milliseconds / 1e9:.0f}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", action="append", default=[], metavar="ROWSxLONGEST:HEADS/KV:SIZE")
    parser.add_argument("--backend", metavar="NAME,NAME,...", help="by default every one that works here")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")


def run(args: argparse.Namespace) -> int:
    device = torch.device(
        args.device if args.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    )
    say(", ".join(f"{name} {value}" for name, value in versions(device).items()))
    names = args.backend.split(",") if args.backend else backends(device)
    shapes = [parsed(text) for text in args.shape] or list(SHAPES)
    rows = (row for shape in shapes for row in measured(shape, names, device))
    table("attention of a layer, forward + backward", ("rows", "kernel", "ms", "TFLOP/s"), rows)
    return 0


def main(argv: list[str] | None = None) -> int:
    return command("attention", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
