"""`python -m benchmarks.train`: training steps of ours beside plain Hugging Face, in the same run; with `--strategy
megatron`, of our Megatron engine beside our FSDP engine.

One shape: `--shape 1.5b --rows 2048`; lengths are ragged, as those of a run are, `--uniform` makes them equal and
`--backend all` compares the kernels of attention. Everything of the table in the docs: `--suite`. On a CPU the shapes
`tiny` and `135m` give ratios; utilisation needs a GPU's peak (`--peak-tflops`).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import command, token_budget, train_parts
from benchmarks.train_shapes import SHAPES
from benchmarks.train_steps import Measured, Workload, measure, our_step, plain_step, ragged

PEER_TOKENS_PER_S = 11_900


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), default=None, help="model shape (random weights)")
    parser.add_argument(
        "--rows",
        "--seq",
        dest="seq",
        type=int,
        default=2048,
        help="tokens of the longest sequence (e.g. 16384)",
    )
    parser.add_argument("--tokens", type=int, default=None, help="tokens per step (default 16384; CPU: 2048)")
    parser.add_argument(
        "--uniform",
        action="store_true",
        help="sequences of one length instead of long-tailed lengths up to it",
    )
    parser.add_argument(
        "--backend",
        metavar="NAME,NAME,...",
        default="auto",
        help="model.attention_backend of ours, a row for each; all: every one that works here",
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="recompute activations in the backward pass"
    )
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="train LoRA adapters of this rank"
    )
    parser.add_argument("--compile", action="store_true", help="use_torch_compile for ours")
    parser.add_argument(
        "--strategy", choices=("fsdp", "megatron"), default="fsdp", help="megatron: compared with fsdp"
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--only", choices=("ours", "plain"), default=None, help="measure one side only")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--peak-tflops", type=float, default=990.0, help="what 100 %% utilisation means")
    parser.add_argument("--suite", action="store_true", help="checks, parts and all rows of the table")
    parser.add_argument(
        "--parts", action="store_true", help="checks and parts only (attention, output layer)"
    )
    parser.add_argument(
        "--token-budgets",
        metavar="N,N,...",
        help="throughput and memory of an update for these sizes of micro-batch (--shape: one shape only)",
    )
    parser.add_argument(
        "--groups",
        metavar="PROMPTS,SAMPLES,PROMPT,RESPONSE",
        help="updates on groups with one prompt (e.g. 64,16,104,136), computed once and for each row",
    )
    parser.add_argument("--json", type=Path, default=None, help="write all figures to this file as well")


def say(*parts: str) -> None:
    sys.stdout.write("  ".join(parts).rstrip() + "\n")
    sys.stdout.flush()


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Rows are printed as they come: a long benchmark shows where it is."""
    say(f"\n## {title}")
    say("| " + " | ".join(head) + " |")
    say("|" + "---|" * len(head))
    for row in rows:
        say("| " + " | ".join(row) + " |")


class Bench:
    """One run: the device, what was measured so far, and the figures for the file."""

    def __init__(self, args: argparse.Namespace) -> None:
        name = args.device if args.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
        self.args = args
        self.device = torch.device(name)
        self.cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.tokens = args.tokens or (16384 if self.cuda else 2048)
        self.figures: dict[str, Any] = {"versions": versions(self.device)}

    def workload(self, shape: str, seq: int, **options: Any) -> Workload:
        count = max(self.tokens // seq, 1)
        lengths = (min(seq, self.tokens),) * count if self.args.uniform else ragged(seq, self.tokens)
        return Workload(SHAPES[shape], lengths, **options)

    def side(self, make: Any, work: Workload) -> Measured | str:
        try:
            steps = self.args.steps
            return measure(
                lambda: make(work, self.device, self.dtype), self.device, steps, 3 if self.cuda else 1
            )
        except torch.OutOfMemoryError:
            result = "out of memory"
        except Exception as error:  # one failing row must not cost the others
            result = f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
        return result

    def row(self, label: str, work: Workload) -> list[str]:
        """Ours beside plain; remembers the figures under `label`."""
        only = self.args.only
        ours = self.side(our_step, work) if only != "plain" else "-"
        if work.strategy == "fsdp":
            plain = self.side(plain_step, work) if only != "ours" else "-"
        else:
            plain = self.side(our_step, replace(work, strategy="fsdp")) if only != "ours" else "-"
        kept: dict[str, Any] = {}
        cells = [label]
        for name, found in (("ours", ours), ("plain", plain)):
            if isinstance(found, str):
                cells += [found, "", ""]
                kept[name] = found
                continue
            share = found.mfu(work, self.args.peak_tflops)
            kept[name] = {
                "seconds": found.seconds,
                "tokens_per_s": found.tokens_per_s(work),
                "mfu": share,
                "peak_gib": found.peak_gib,
                "loss": found.loss,
            }
            memory = f"{found.peak_gib:.1f}" if self.cuda else "-"
            cells += [f"{found.tokens_per_s(work):,.0f}", f"{share:.1%}" if self.cuda else "-", memory]
        both = isinstance(ours, Measured) and isinstance(plain, Measured)
        cells.append(f"{plain.seconds / ours.seconds:.2f}x" if both else "")  # type: ignore[union-attr]
        self.figures.setdefault("rows", {})[label] = kept
        return cells

    def rows(self, works: dict[str, Workload]) -> None:
        ours, peer = ("megatron", "fsdp") if self.args.strategy == "megatron" else ("ours", "plain HF")
        head = ("step", f"{ours} tok/s", "MFU", "GiB", f"{peer} tok/s", "MFU", "GiB", "speed-up")
        table("training steps", head, (self.row(label, work) for label, work in works.items()))

    def parts(self) -> None:
        checks = (
            *train_parts.check_packing(self.device),
            *train_parts.check_layers(self.device),
            *train_parts.check_head(self.device),
            *train_parts.check_offload(self.device),
        )
        table("checks", ("what", "difference", "verdict"), checks)
        self.figures["checks"] = [list(row) for row in checks]
        attention: list[list[str]] = []
        table(
            "attention, forward + backward of one layer",
            ("pack", "kernel", "time", "speed"),
            _kept(train_parts.compare_attention(self.device, self.dtype, self.tokens), attention),
        )
        self.figures["attention"] = attention
        vocab, hidden = (151936, 1536) if self.cuda else (49152, 576)
        rows, figures = train_parts.compare_head(self.device, self.dtype, self.tokens, hidden, vocab)
        title = f"output layer, {self.tokens} tokens x {vocab} vocabulary x {hidden}, forward + backward"
        table(title, ("variant", "time", "ratio", "peak memory"), rows)
        self.figures["head"] = figures

    def suite(self) -> None:
        self.parts()
        if not self.cuda:
            self.rows({"tiny, 256": self.workload("tiny", 256), "135m, 256": self.workload("135m", 256)})
            return
        self.rows(
            {
                "135m, 2k": self.workload("135m", 2048),
                "0.5b, 2k": self.workload("0.5b", 2048),
                "1.5b, 2k": self.workload("1.5b", 2048),
                "1.5b, 2k, compiled": self.workload("1.5b", 2048, compiled=True),
                "0.5b, 16k, recompute": self.workload("0.5b", 16384, checkpointing=True),
                "0.5b, 16k, recompute, compiled": self.workload(
                    "0.5b", 16384, checkpointing=True, compiled=True
                ),
                "7b, 2k, recompute, LoRA": self.workload("7b", 2048, checkpointing=True, lora_rank=32),
                "7b, 2k, recompute": self.workload("7b", 2048, checkpointing=True),
                "7b, 2k, recompute, compiled": self.workload("7b", 2048, checkpointing=True, compiled=True),
            }
        )
        self.verdicts()

    def token_budgets(self, budgets: Sequence[int]) -> None:
        shapes = [self.args.shape] if self.args.shape else ["135m", "1.5b", "7b"] if self.cuda else ["tiny"]
        head = ("shape", "tokens per micro-batch", "micro-batches", "update tok/s", "log-probs tok/s", "GiB")
        kept: list[list[str]] = []
        measured = (
            row
            for shape in shapes
            for row in token_budget.rows(
                token_budget.CASES[shape], budgets, self.device, self.dtype, self.args.tokens
            )
        )
        table("token budgets", head, _kept(measured, kept))
        self.figures["token_budgets"] = kept

    def groups(self, prompts: int, samples: int, prompt: int, response: int) -> None:
        """An update with `model.share_prefixes` off and on; responses of `response` tokens on average."""
        shape = self.args.shape or ("135m" if self.cuda else "tiny")
        around = torch.Generator().manual_seed(0)
        spread = torch.randint(response // 2, response * 3 // 2, (prompts * samples,), generator=around)
        lengths = tuple(prompt + count for count in spread.tolist())
        work = Workload(
            SHAPES[shape], lengths, checkpointing=self.args.checkpointing, lora_rank=self.args.lora,
            group=samples, prompt=prompt, shares_prompts=False,
        )  # fmt: skip
        found = [self.side(our_step, each) for each in (work, replace(work, shares_prompts=True))]
        rows = []
        for label, measured in zip(("each row", "once"), found, strict=True):
            if isinstance(measured, str):
                rows.append((label, measured, "", "", ""))
                continue
            memory = f"{measured.peak_gib:.1f}" if self.cuda else "-"
            speed = f"{measured.tokens_per_s(work):,.0f}"
            rows.append((label, f"{measured.seconds:.3f}", speed, memory, f"{measured.loss:.5f}"))
        title = f"update on {prompts} x {samples} rows of {prompt} + about {response} tokens, {shape}"
        table(title, ("prompts computed", "s", "tok/s", "GiB", "loss"), rows)
        if isinstance(found[0], Measured) and isinstance(found[1], Measured):
            say(f"speed-up {found[0].seconds / found[1].seconds:.2f}x")
        self.figures["groups"] = [list(row) for row in rows]

    def verdicts(self) -> None:
        """The measured figures beside their bars and aims."""

        def best(field: str, *labels: str) -> float:
            rows = (self.figures["rows"].get(label, {}).get("ours") for label in labels)
            return max((row[field] for row in rows if isinstance(row, dict)), default=float("nan"))

        head = self.figures["head"]
        speed = best("tokens_per_s", "0.5b, 16k, recompute", "0.5b, 16k, recompute, compiled")
        lines = [
            (
                "MFU 1.5B, no recompute",
                f"{best('mfu', '1.5b, 2k', '1.5b, 2k, compiled'):.1%}",
                "40 %",
                "55 %",
            ),
            ("MFU 7B, recompute, LoRA", f"{best('mfu', '7b, 2k, recompute, LoRA'):.1%}", "40 %", "50 %"),
            (
                "MFU 7B, recompute, full",
                f"{best('mfu', '7b, 2k, recompute', '7b, 2k, recompute, compiled'):.1%}",
                "40 %",
                "50 %",
            ),
            (
                "0.5B, 16k, against the published 11.9k tokens/s",
                f"{speed / PEER_TOKENS_PER_S:.1f}x",
                "3x",
                "5x",
            ),
            ("fused head, peak memory", f"1/{1 / head['fused, triton memory share']:.1f}", "1/10", "1/20"),
            ("fused head, time", f"{head['fused, triton time ratio']:.2f}x", "1.1x", "0.8x"),
        ]
        table("against the bars", ("figure", "measured", "bar", "aim"), lines)


def _kept(rows: Iterable[tuple[str, ...]], into: list[list[str]]) -> Iterable[tuple[str, ...]]:
    for row in rows:
        into.append(list(row))
        yield row


def backends(device: torch.device) -> list[str]:
    """The kernels of packed attention that this machine has."""
    if device.type != "cuda":
        return ["sdpa"]
    from verl.models.attention_backends import installed_backends

    return ["auto", "varlen", *installed_backends()]


def versions(device: torch.device) -> dict[str, str]:
    import transformers

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda)
    else:
        found["device"] = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return found


def run(args: argparse.Namespace) -> int:
    if args.device == "cuda" and not torch.cuda.is_available():
        say("--device cuda, but torch sees no GPU")
        return 2
    bench = Bench(args)
    say(", ".join(f"{name} {value}" for name, value in bench.figures["versions"].items()))
    if not args.token_budgets:
        say(
            f"{bench.tokens} tokens per step, {args.steps} timed steps, "
            f"100 % utilisation = {args.peak_tflops:g} TFLOP/s"
        )
    if args.suite:
        bench.suite()
    elif args.parts:
        bench.parts()
    elif args.token_budgets:
        bench.token_budgets([int(tokens) for tokens in args.token_budgets.split(",")])
    elif args.groups:
        prompts, samples, prompt, response = (int(number) for number in args.groups.split(","))
        bench.groups(prompts, samples, prompt, response)
    else:
        shape = args.shape or ("1.5b" if bench.cuda else "tiny")
        work = bench.workload(
            shape,
            args.seq,
            checkpointing=args.checkpointing,
            lora_rank=args.lora,
            compiled=args.compile,
            strategy=args.strategy,
        )
        notes = [
            note
            for note, on in (
                ("recompute", args.checkpointing),
                ("LoRA", args.lora),
                ("compiled", args.compile),
            )
            if on
        ]
        kind = "uniform" if args.uniform else "ragged"
        label = ", ".join([shape, f"{kind} up to {args.seq}", *notes])
        names = backends(bench.device) if args.backend == "all" else args.backend.split(",")
        bench.rows(
            {label if name == "auto" else f"{label}, {name}": replace(work, backend=name) for name in names}
        )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(bench.figures, indent=1))
    return 0


def main(argv: list[str] | None = None) -> int:
    return command("train", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
