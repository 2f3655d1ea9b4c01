"""`python -m benchmarks.decode_kernels`: tile and launch settings of the decode kernels, on a CUDA device.

    python -m benchmarks.decode_kernels [--only layer attention qkv ...] [--before FILE] [--seconds 60]

For each model shape and number of rows one line per kernel: microseconds of a call (inside a CUDA graph of many) with
the settings the engine chooses, then the fastest candidates. The rows of the attention have contexts of 64 to 192
prompt tokens, shared by groups of eight, and up to 250 of their own; "shared" computes the prompts once per group.
"library" is the vendor's product with the kernels around it (without the residual addition for o and down).
`--before` is a file with another version of `verl/rollout/native/kernels/attention.py`, timed on the same rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.rollout_kernels import micros, say
from verl.rollout.native.kernels import attention, launch, layers, linear, rotary
from verl.rollout.native.ops import DecodeInputs

WORKERS = 16
GROUP = 8
BLOCK = 16


class Shape(NamedTuple):
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    rows: tuple[int, ...]


SHAPES = {
    "135m": Shape(576, 1536, 9, 3, 64, (1024, 256, 64)),
    "1b": Shape(2048, 8192, 32, 8, 64, (1024, 4096)),
    "7b": Shape(3584, 18944, 28, 4, 128, (512, 128)),
}
ATTENTION = [
    {"TILE": tile, "num_warps": warps, "num_stages": stages}
    for tile, warps, stages in (
        (16, 1, 3),
        (32, 1, 2),
        (32, 1, 3),
        (32, 2, 2),
        (32, 2, 3),
        (32, 4, 3),
        (64, 2, 2),
        (64, 4, 2),
        (64, 4, 3),
    )
]
TILES = [
    {"BM": bm, "BN": bn, "BK": bk, "num_warps": warps, "num_stages": stages}
    for bm, bn, bk, warps, stages in (
        (16, 32, 128, 4, 4),
        (32, 32, 128, 4, 4),
        (64, 32, 64, 4, 4),
        (64, 64, 64, 4, 3),
        (64, 64, 64, 4, 4),
        (64, 64, 128, 4, 2),
        (128, 64, 64, 4, 4),
        (128, 64, 64, 8, 3),
        (128, 128, 64, 8, 3),
    )
]
Timed = tuple[str, Callable[[], object]]


def label_of(settings: dict[str, int] | None) -> str:
    return "chosen" if settings is None else "/".join(str(value) for value in settings.values())


class AttentionRows:
    """A cache and rows of it, `GROUP` at a time of one prompt."""

    def __init__(self, shape: Shape, rows: int) -> None:
        rng = random.Random(0)
        tables: list[list[int]] = []
        lengths: list[int] = []
        shared: list[int] = []
        used = 0
        for row in range(rows):
            if row % GROUP == 0:
                prompt = rng.randint(64, 192)
                full = prompt // BLOCK
                common = list(range(used, used + full))
                used += full
            length = prompt + rng.randint(1, 250)
            own = -(-length // BLOCK) - full
            tables.append([*common, *range(used, used + own)])
            lengths.append(length)
            shared.append(full * BLOCK)
            used += own
        width = max(map(len, tables))
        table = torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32)
        half = {"device": "cuda", "dtype": torch.bfloat16}
        token = shape.kv_heads * shape.dim * 2 * 2
        # Several layers' worth, so that keys and values come from memory as in the model and not from the cache.
        layers = 1 + (256 << 20) // (used * BLOCK * token) if rows > 2 * GROUP else 1
        self._caches = [
            tuple(torch.randn(used + 1, shape.kv_heads, BLOCK, shape.dim, **half) for _ in range(2))
            for _ in range(layers)
        ]
        self._turn = 0
        self.q = torch.randn(rows, shape.heads, shape.dim, **half)
        positions = torch.tensor(lengths, device="cuda") - 1
        self.plain = DecodeInputs(positions, positions, torch.ones_like(positions), table.cuda())
        self.shared = self.plain._replace(
            shared=torch.tensor(shared, dtype=torch.int32, device="cuda"),
            most_sharing=GROUP,
            sharing=torch.tensor(
                [[rows // GROUP, 0], *([first, GROUP] for first in range(0, rows, GROUP))], dtype=torch.int32
            ).cuda(),
        )

    def next_cache(self) -> Any:
        """The keys and values of the next layer."""
        self._turn = (self._turn + 1) % len(self._caches)
        return self._caches[self._turn]


def attention_calls(shape: Shape, rows: int, before: Any, splits: int) -> Iterator[Timed]:
    """(label, call) of every candidate."""
    made = AttentionRows(shape, rows)
    rest = (shape.dim**-0.5, None, None, splits)
    if before is not None:
        old = tuple(made.plain[:4])
        yield "before", lambda: before.decode_attention(made.q, made.next_cache(), old, *rest)
    for settings in [None, *ATTENTION]:
        for name, inputs in (("", made.plain), ("shared ", made.shared)):
            given = (inputs, *rest, settings)
            yield (
                name + label_of(settings),
                lambda given=given: attention.decode_attention(made.q, made.next_cache(), *given),
            )


class Products:
    """The products of a small model's layer, of several layers' weights in turn."""

    def __init__(self, shape: Shape, rows: int) -> None:
        half = {"device": "cuda", "dtype": torch.bfloat16}
        wide = shape.heads * shape.dim, shape.kv_heads * shape.dim
        sizes = {
            "q": (shape.hidden, wide[0]),
            "k": (shape.hidden, wide[1]),
            "v": (shape.hidden, wide[1]),
            "o": (wide[0], shape.hidden),
            "gate": (shape.hidden, shape.inner),
            "up": (shape.hidden, shape.inner),
            "down": (shape.inner, shape.hidden),
        }
        self._layers = [
            {
                name: torch.nn.Linear(*size, bias=False, **half).requires_grad_(False)
                for name, size in sizes.items()
            }
            for _ in range(8 if shape.hidden < 1024 else 2)
        ]
        self._turn = 0
        self.x = torch.randn(rows, shape.hidden, **half)
        self.norm = torch.ones(shape.hidden, **half), 1e-5
        self.mixed = torch.randn(rows, wide[0], **half)
        self.gated = torch.randn(rows, shape.inner, **half)
        made = AttentionRows(shape, rows)
        self.cache, self.inputs = made.next_cache(), made.plain
        self.rope = tuple(torch.randn(512, shape.dim, **half) for _ in range(2))

    def of(self, *names: str) -> list[torch.nn.Linear]:
        self._turn = (self._turn + 1) % len(self._layers)
        return [self._layers[self._turn][name] for name in names]


def _product_calls(made: Products, name: str) -> tuple[Callable[[], object], Callable[[Any], object] | None]:
    """One product by the library with the kernels around it, and ours with some settings, where there is one."""
    x, norm = made.x, made.norm

    def library_qkv() -> object:
        normed = layers.add_rms_norm(x, x, *norm)[0]
        q, k, v = (torch.nn.functional.linear(normed, layer.weight) for layer in made.of("q", "k", "v"))
        return rotary.rotary_cache((q, k, v), made.cache, made.rope, made.inputs, None)

    def library_gate() -> object:
        normed = layers.add_rms_norm(x, x, *norm)[0]
        gate, up = (torch.nn.functional.linear(normed, layer.weight) for layer in made.of("gate", "up"))
        return layers.silu_mul(gate, up)

    def ours_qkv(config: Any) -> object:
        linears = made.of("q", "k", "v")
        normed = layers.add_rms_norm(x, x, *norm)[0]
        return linear.qkv_rotary(normed, linears, made.cache, made.rope, made.inputs, None, config)

    def ours_gate(config: Any) -> object:
        return linear.gated_linear(layers.add_rms_norm(x, x, *norm)[0], *made.of("gate", "up"), config)

    if name == "qkv":
        return library_qkv, ours_qkv
    if name == "gate":
        return library_gate, ours_gate
    given = made.mixed if name == "o" else made.gated
    return lambda: torch.nn.functional.linear(given, made.of(name)[0].weight), None


def product_calls(name: str) -> Callable[..., Iterator[Timed]]:
    def calls(shape: Shape, rows: int, before: Any, splits: int) -> Iterator[Timed]:
        if shape.hidden > 2048:
            return
        library, ours = _product_calls(Products(shape, rows), name)
        yield "library", library
        for settings in [None, *TILES] if ours is not None else []:
            yield label_of(settings), lambda given=settings: ours(given)

    return calls


def layer_calls(shape: Shape, rows: int, before: Any, splits: int) -> Iterator[Timed]:
    """The kernels of a small model's layer, one after the other; "early": each starts while the one before it
    still runs."""
    if shape.hidden > 1024:
        return
    made = Products(shape, rows)

    def layer(early: bool) -> object:
        launch.EARLY = early
        try:
            normed, residual = layers.add_rms_norm(made.x, made.x, *made.norm)
            rotated = (made.cache, made.rope, made.inputs, None)
            q = linear.qkv_rotary(normed, made.of("q", "k", "v"), *rotated)
            rest = (shape.dim**-0.5, None, None, splits)
            mixed = attention.decode_attention(q, made.cache, made.inputs, *rest).flatten(1)
            mixed = torch.nn.functional.linear(mixed, made.of("o")[0].weight)
            normed = layers.add_rms_norm(mixed, residual, *made.norm)[0]
            gated = linear.gated_linear(normed, *made.of("gate", "up"))
            return torch.nn.functional.linear(gated, made.of("down")[0].weight)
        finally:
            launch.EARLY = False

    yield "chosen", lambda: layer(False)
    yield "early", lambda: layer(True)


KERNELS = {
    "layer": layer_calls,
    "attention": attention_calls,
    **{name: product_calls(name) for name in ("qkv", "gate", "o", "down")},
}


def _load(path: str | None) -> Any:
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location("before", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["before"] = module
    spec.loader.exec_module(module)
    return module


def _compile(part: int, before: str | None, kernels: list[str]) -> None:
    """Every `WORKERS`-th candidate runs once, so that its binary is in the cache on disk."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    done: set[tuple[str, str, int, str]] = set()
    number = 0
    for kernel in kernels:
        for name, shape in SHAPES.items():
            for rows in shape.rows:
                splits = attention.choose_splits(rows, shape.kv_heads, processors)
                for label, call in KERNELS[kernel](shape, 2 * GROUP, _load(before), splits):
                    key = (kernel, name, splits, label)
                    if key in done:
                        continue
                    done.add(key)
                    number += 1
                    if number % WORKERS == part:
                        try:
                            call()
                        except Exception as error:  # a tile that does not fit is no reason to stop
                            say(f"{key}: {type(error).__name__}")
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(KERNELS), nargs="+", default=list(KERNELS))
    parser.add_argument("--before", default=None, help="another version of kernels/attention.py")
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    start = time.monotonic()
    kernels = options.only
    before = options.before and str(Path(options.before).resolve())
    # Compiled by processes forked before CUDA starts here; this one finds the binaries on disk.
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_compile, args=(part, before, kernels)) for part in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    say(f"compiled in {time.monotonic() - start:.0f} s")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for kernel in kernels:
        for name, shape in SHAPES.items():
            for rows in shape.rows:
                if time.monotonic() - start > options.seconds:
                    say("out of time")
                    return 0
                splits = attention.choose_splits(rows, shape.kv_heads, processors)
                timed: dict[str, float] = {}
                for label, call in KERNELS[kernel](shape, rows, _load(before), splits):
                    try:
                        timed[label] = micros(call)
                    except Exception as error:  # as above
                        say(f"{kernel} {name} {rows} {label}: {type(error).__name__}")
                if timed:
                    _table(kernel, name, rows, timed)
                torch.cuda.empty_cache()
    return 0


def _table(kernel: str, name: str, rows: int, timed: dict[str, float]) -> None:
    fixed = [label for label in ("before", "library", "chosen", "shared chosen") if label in timed]
    head = ", ".join(f"{label} {timed[label]:.1f}" for label in fixed)
    say(f"{kernel} {name} M={rows}: {head}")
    for prefix in ("", "shared "):
        found = {k: v for k, v in timed.items() if k not in fixed and k.startswith("shared ") == bool(prefix)}
        best = sorted(found, key=lambda label: found[label])[:6]
        if best:
            say("    " + ", ".join(f"{label} {found[label]:.1f}" for label in best))


if __name__ == "__main__":
    sys.exit(main())
