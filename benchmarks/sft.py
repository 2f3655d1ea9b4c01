"""`python -m benchmarks.sft`: tokens per second of supervised fine-tuning, and what a step waits for.

Random weights of a named shape, rows of log-normal lengths (the first third of each a prompt), and the role the trainer
uses (`verl.workers.offline.SFTRole`) behind its loader: pack, forward and backward, clip, AdamW. Busy time of the GPU
comes from torch's profiler over further steps; `--profile` lists kernels by kind and name.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import command
from benchmarks.train import say, table, versions
from benchmarks.train_shapes import SHAPES, Shape
from verl.config.load import from_dict
from verl.config.schema import SFTConfig
from verl.data.loader import Loader
from verl.data.offline_dataset import SFTItem, sft_collate
from verl.data.proto import DataProto
from verl.workers.offline import SFTRole

KINDS = (
    ("attention", ("flash", "fmha", "attn")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "cublas", "splitk", "xmma")),
    ("output layer", ("_statistics", "_gradient")),
    ("norm, gate, rotary", ("_rms", "_gated", "_rotary")),
    ("optimiser and norm", ("_adamw", "multi_tensor", "lpnorm")),
    ("copies and fills", ("memcpy", "memset", "copy", "fill", "cat")),
)
"""Kernels by parts of their names, the first that fits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), default=None, help="default 135m; CPU: tiny")
    parser.add_argument("--rows", type=int, default=64, help="rows of a batch")
    parser.add_argument("--median", type=float, default=220, help="median length of a row, in tokens")
    parser.add_argument("--sigma", type=float, default=0.45, help="of the logarithm of the length")
    parser.add_argument("--longest", type=int, default=1024, help="rows are cut here")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--warmup", type=int, default=12, help="steps before them")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--profile", action="store_true", help="kernels by kind and by name")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a key of verl.trainer.sft_trainer"
    )


def random_rows(count: int, median: float, sigma: float, longest: int, vocab: int) -> list[SFTItem]:
    random = np.random.default_rng(0)
    items = []
    for number in range(count):
        length = int(np.clip(random.lognormal(np.log(median), sigma), 4, longest))
        ids = random.integers(0, vocab, length).astype(np.int32)
        mask = (np.arange(length) >= max(length // 3, 1)).astype(np.int8)
        items.append(SFTItem(ids, mask, number))
    return items


def build_role(shape: Shape, device: str, longest: int, changes: Sequence[str]) -> SFTRole:
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(shape.config(longest), dtype=dtype)
        model.save_pretrained(folder)
        del model
        values: dict[str, Any] = {"model.path": folder, "trainer.device": device}
        values.update(dict(change.split("=", 1) for change in changes))
        cfg = from_dict(SFTConfig, values, checked=False, quiet=True)
        return SFTRole(cfg, training_steps=1000, bad_batch_dir=Path(folder) / "bad")


@dataclass
class Clock:
    """Times calls, each until the device has finished."""

    cuda: bool

    def __call__(self, call: Callable[[], Any]) -> float:
        self.wait()
        begin = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - begin

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


class Rows:
    """The encoded rows as the trainer's loader takes them."""

    def __init__(self, items: Sequence[SFTItem]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, positions: Sequence[int], uids: Sequence[str]) -> DataProto:
        return sft_collate([self.items[position] for position in positions], 0)

    def row_number(self, position: int) -> int:
        return position


def batches(items: Sequence[SFTItem], rows: int) -> Iterator[DataProto]:
    loader = Loader(Rows(items), rows, num_workers=SFTConfig().data.dataloader_num_workers)
    while True:
        yield from loader


def parts(role: SFTRole, feed: Iterator[DataProto], clock: Clock, steps: int) -> dict[str, float]:
    """Seconds of each part of a step, each waited for: their sum is longer than a step."""

    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(steps):
        batch: list[DataProto] = []
        found["batch of the loader"].append(clock(lambda batch=batch: batch.append(next(feed))))  # type: ignore[misc]
        found["forward and backward"].append(
            clock(lambda batch=batch: role.engine.forward_backward(batch[0], role.loss))  # type: ignore[misc]
        )
        found["clip and AdamW"].append(clock(role.engine.optimizer_step))
    return {name: statistics.median(times) for name, times in found.items()}


def kernel_times(run: Callable[[], None], steps: int) -> tuple[float, list[tuple[str, float, int]]]:
    """Seconds in which at least one kernel ran, and name, seconds and count of each, all per step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    spans: list[tuple[float, float]] = []
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            by_name[event.name].append(event.time_range.elapsed_us())
    busy, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    kernels = [(name, sum(times) / 1e6 / steps, len(times) // steps) for name, times in by_name.items()]
    return busy / 1e6 / steps, sorted(kernels, key=lambda kernel: -kernel[1])


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, marks in KINDS if any(mark in name for mark in marks)), "other")


def run(args: argparse.Namespace) -> int:
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    cuda = device == "cuda"
    shape = SHAPES[args.shape or ("135m" if cuda else "tiny")]
    say(", ".join(f"{name} {value}" for name, value in versions(torch.device(device)).items()))
    role = build_role(shape, device, args.longest, args.set)
    items = random_rows(8 * args.rows, args.median, args.sigma, args.longest, shape.vocab_size)
    feed, clock = batches(items, args.rows), Clock(cuda)
    lengths = [len(item.input_ids) for item in items]
    say(
        f"{shape.name}, batches of {args.rows} rows: {sum(lengths) / 8:,.0f} tokens, rows of {min(lengths)} to "
        f"{max(lengths)}, median {statistics.median(lengths):g}"
    )
    first = clock(lambda: role.train(next(feed)))
    for _ in range(args.warmup - 1):
        last = role.train(next(feed))
    tokens = 0
    times = []
    for _ in range(args.steps):
        begin = time.perf_counter()
        batch = next(feed)
        last = role.train(batch)
        clock.wait()
        times.append(time.perf_counter() - begin)
        tokens += int(batch.batch["attention_mask"].sum())
    wall = sum(times) / len(times)
    rows = [
        ("tokens/s", f"{tokens / sum(times):,.0f}"),
        ("step", f"{1e3 * wall:.1f} ms (median {1e3 * statistics.median(times):.1f})"),
        ("first step", f"{first:.1f} s"),
    ]
    kernels: list[tuple[str, float, int]] = []
    if cuda:
        rows.append(("peak memory", f"{torch.cuda.max_memory_reserved() / 2**30:.1f} GiB reserved"))
        busy, kernels = kernel_times(lambda: role.train(next(feed)) and None, 8)
        rows.append(("GPU busy", f"{1e3 * busy:.1f} ms ({busy / wall:.0%} of a step)"))
        rows.append(("GPU waits for the CPU", f"{1e3 * max(wall - busy, 0):.1f} ms"))
        rows.append(("kernels of a step", f"{sum(count for *_, count in kernels)}"))
    rows += [(name, f"{1e3 * found:.1f} ms") for name, found in parts(role, feed, clock, 8).items()]
    rows.append(("loss, gradient norm", f"{last['train/loss']:.4f}, {last['train/grad_norm']:.4f}"))
    table("fine-tuning", ("figure", "measured"), rows)
    if args.profile and kernels:
        kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        for name, seconds, count in kernels:
            kinds[kind_of(name)][0] += seconds
            kinds[kind_of(name)][1] += count
        ordered = sorted(kinds.items(), key=lambda kind: -kind[1][0])
        head = ("kernels", "ms a step", "count")
        table("by kind", head, ((kind, f"{1e3 * s:.2f}", f"{n:g}") for kind, (s, n) in ordered))
        table("by name", head, ((name[:90], f"{1e3 * s:.2f}", f"{n}") for name, s, n in kernels[:30]))
    role.close()
    return 0


def main(argv: list[str] | None = None) -> int:
    return command("sft", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
