"""`python -m benchmarks.dpo`: one DPO step on pairs, by the preference trainer and by a peer.

Both sides train the same model folder in float32 on the same pairs, as many in each step, with one epoch over them; the
time of a step is the median after the warm-up plus the step's share of everything that computes the reference. Memory
is the peak of the process above what it had before the model was loaded. Each side runs in its own process, the peer in
its own environment (`--against trl --peer-python PATH`, through `benchmarks/peers/`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import command
from verl.errors import ConfigError

PEERS = Path(__file__).resolve().parent / "peers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a Hugging Face folder; default: a random Llama")
    parser.add_argument("--hidden", type=int, default=256, help="of the random model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--prompt", type=int, default=160, help="words of a prompt, on average")
    parser.add_argument("--answer", type=int, default=80, help="words of an answer, on average")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of a step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--against", choices=["trl"], help="also run a peer")
    parser.add_argument("--peer-python", help="the python of the environment the peer is installed in")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="further config keys")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--alone", nargs=2, metavar=("MODEL", "DATA"), help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if args.alone:
        sys.stdout.write(json.dumps(run_ours(args, *args.alone)) + "\n")
        return 0
    if args.against and not args.peer_python:
        raise ConfigError("--against trl needs --peer-python PATH: the python of an environment with trl")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = Path(args.model) if args.model else make_model(args, work / "model")
        data = make_pairs(args, work / "pairs.jsonl")
        words = [str(word) for name in ("pairs", "steps", "warm_up") for word in option(args, name)]
        words += [word for each in args.set for word in ("--set", each)]
        ours = [sys.executable, "-m", "benchmarks.dpo", "--alone", str(model), str(data), *words]
        figures = {"verl": figures_of("verl", ours, dict(os.environ))}
        if args.against:
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            numbers = [str(value) for value in (args.pairs, args.steps, args.warm_up)]
            for name, checkpointing in (("trl", "0"), ("trl, recomputing", "1")):
                peer = [
                    args.peer_python,
                    str(PEERS / "trl_dpo.py"),
                    str(model),
                    str(data),
                    *numbers,
                    checkpointing,
                ]
                figures[name] = figures_of(name, peer, environment)
    table(args, figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


def option(args: argparse.Namespace, name: str) -> tuple[str, Any]:
    return f"--{name.replace('_', '-')}", getattr(args, name)


def make_model(args: argparse.Namespace, folder: Path) -> Path:
    """A random Llama with a word-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(args.vocabulary - 3))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    return folder


def make_pairs(args: argparse.Namespace, path: Path) -> Path:
    """Lengths vary by half their average to both sides."""
    draw = random.Random(0)

    def text(words: int) -> str:
        length = draw.randint(max(words // 2, 1), words + words // 2)
        return " ".join(f"w{draw.randrange(args.vocabulary - 3)}" for _ in range(length))

    with open(path, "w") as file:
        for _ in range(args.pairs * args.steps):
            row = {
                "prompt": text(args.prompt) + " ",
                "chosen": text(args.answer),
                "rejected": text(args.answer),
            }
            file.write(json.dumps(row) + "\n")
    return path


def run_ours(args: argparse.Namespace, model: str, data: str) -> dict[str, Any]:
    import torch

    from verl.config.load import from_dict
    from verl.config.schema import DPOConfig
    from verl.trainer.dpo_trainer import run as train
    from verl.workers.preference import PreferenceRole

    reference_s, prepare = 0.0, PreferenceRole.prepare

    def timed(self: Any, *given: Any) -> None:
        nonlocal reference_s
        start = time.perf_counter()
        prepare(self, *given)
        reference_s += time.perf_counter() - start

    setattr(PreferenceRole, "prepare", timed)  # noqa: B010 (mypy)
    with tempfile.TemporaryDirectory() as folder:
        values: dict[str, Any] = {
            "model.path": model,
            "model.dtype": "float32",
            "data.train_files": [data],
            "data.train_batch_size": args.pairs,
            "data.max_length": 2048,
            "data.shuffle": False,
            "optim.weight_decay": 0.0,
            "trainer.logger": [],
            "trainer.default_local_dir": folder,
            "checkpoint.save_contents": ["extra"],
        }
        values |= dict(item.split("=", 1) for item in args.set)
        before = start_of_memory()
        result = train(from_dict(DPOConfig, values))
        memory = peak_of_memory(before)
        lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][args.warm_up :]
    step = statistics.median(row["timing_s/step"] for row in rows)
    return {
        "step_s": step + reference_s / args.steps,
        "reference_s": reference_s / args.steps,
        "memory_gb": memory,
        "loss": rows[0]["train/loss"],
        "torch": torch.__version__,
    }


def start_of_memory() -> int:
    """Bytes this process has; the peak is counted from now on."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak_of_memory(before: int) -> float:
    """GiB above `before`."""
    return (resident("VmHWM") - before) / 1024**3


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def figures_of(name: str, arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """The last line of a process's output is a JSON object."""
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise ConfigError(f"{name} failed:\n{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def table(args: argparse.Namespace, figures: dict[str, dict[str, Any]]) -> None:
    lines = [
        f"DPO step: {args.pairs} pairs, prompts of about {args.prompt} and answers of {args.answer} words"
    ]
    lines.append(f"{'':14}" + "".join(f"{name:>20}" for name in figures))
    for name in ("step_s", "reference_s", "memory_gb", "loss", "torch"):
        cells = (figures[peer].get(name) for peer in figures)
        shown = ("-" if c is None else c if isinstance(c, str) else format(c, ".4g") for c in cells)
        lines.append(f"{name:14}" + "".join(f"{cell:>20}" for cell in shown))
    for peer, column in figures.items():
        if peer != "verl":
            faster = column["step_s"] / figures["verl"]["step_s"]
            share = figures["verl"]["memory_gb"] / column["memory_gb"]
            lines.append(f"verl is {faster:.2f}x as fast as {peer} and takes {share:.2f} of its memory")
    sys.stdout.write("\n".join(lines) + "\n")


def main(argv: list[str] | None = None) -> int:
    return command("dpo", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
