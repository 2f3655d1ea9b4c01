"""`python -m benchmarks.real_step`: a GRPO step on GSM8K, in a run as users start it.

The model is fine-tuned on the training answers by `verl sft`, then trained by `verl train`: two mini-batches a step,
the built-in reward, a run folder with token data and checkpoint as by default. The figures are means over the steps
after the warm-up: the step and its parts, tokens generated per second of generation, and the share of the time in
which the GPU runs a kernel (NVML's utilization, sampled while these steps run). `--start` names a model that is
fine-tuned already.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import command
from verl.errors import ConfigError

PARTS = ("step", "gen", "reward", "old_log_prob", "adv", "update_actor")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a Hugging Face folder to fine-tune first")
    parser.add_argument("--start", type=Path, help="a fine-tuned folder, instead of --model")
    parser.add_argument("--data", required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--mini-batches", type=int, default=2)
    parser.add_argument("--sft-epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="copy the fine-tuned model and the run's metrics there")
    parser.add_argument(
        "--set", action="append", default=[], metavar="key=value", help="further keys of the run"
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")


def run(args: argparse.Namespace) -> int:
    if bool(args.model) == bool(args.start):
        raise ConfigError("give --model (it is fine-tuned first) or --start (a fine-tuned folder)")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        verl(["prepare", "gsm8k", "--from", args.data, "--to", str(work / "gsm8k"), "--format", "jsonl"])
        start = args.start or fine_tuned(args, work)
        figures = measured(args, start, work)
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(work / "run" / "metrics.jsonl", args.keep)
            if args.model:
                shutil.copytree(start, args.keep / "model", dirs_exist_ok=True)
    lines = [f"GRPO on GSM8K: {args.prompts} prompts x {args.n}, at most {args.max_tokens} tokens"]
    lines += [f"{name:24}{value:12.4g}" for name, value in figures.items()]
    sys.stdout.write("\n".join(lines) + "\n")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


def verl(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "verl", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ConfigError(f"verl {arguments[0]} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def fine_tuned(args: argparse.Namespace, work: Path) -> Path:
    """The model after `verl sft` on the training answers, asked as the prompts of the run ask."""
    rows = work / "sft.jsonl"
    with open(work / "gsm8k" / "train.jsonl") as source, open(rows, "w") as target:
        for row in map(json.loads, source):
            target.write(
                json.dumps({"prompt": row["prompt"], "response": row["extra_info"]["answer"]}) + "\n"
            )
    folder = work / "sft"
    verl(
        [
            "sft",
            f"model.path={args.model}",
            f"data.train_files={rows}",
            "data.train_batch_size=64",
            "data.max_length=640",
            "optim.lr=1e-4",
            f"trainer.total_epochs={args.sft_epochs}",
            f"trainer.default_local_dir={folder}",
            "trainer.logger=[]",
        ]
    )
    return max(folder.glob("global_step_*/actor/huggingface"), key=lambda path: path.stat().st_mtime)


def measured(args: argparse.Namespace, start: Path, work: Path) -> dict[str, float]:
    values: dict[str, Any] = {
        "data.train_files": work / "gsm8k" / "train.jsonl",
        "data.train_batch_size": args.prompts,
        "data.max_prompt_length": 512,
        "data.max_response_length": args.max_tokens,
        "actor_rollout_ref.model.path": start,
        "actor_rollout_ref.rollout.n": args.n,
        "actor_rollout_ref.actor.ppo_mini_batch_size": args.prompts // args.mini_batches,
        "actor_rollout_ref.actor.optim.lr": 5e-6,
        "algorithm.adv_estimator": "grpo",
        "trainer.total_training_steps": args.steps,
        "trainer.default_local_dir": work / "run",
    }
    overrides = [f"{key}={value}" for key, value in values.items()] + args.set
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "verl", "train", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    samples: list[tuple[float, int, float]] = []
    watcher = threading.Thread(
        target=watch, args=(process, work / "run" / "metrics.jsonl", samples), daemon=True
    )
    watcher.start()
    output, _ = process.communicate()
    watcher.join()
    if process.returncode:
        raise ConfigError(f"verl train failed:\n{output[-3000:]}")
    rows = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "timing_s/step" in row]
    kept = rows[args.warm_up :]
    figures = {f"{part}_s": mean(kept, f"timing_s/{part}") for part in PARTS}
    figures["response_tokens"] = mean(kept, "response_length/mean")
    figures["generated_tokens_per_s"] = args.prompts * args.n * figures["response_tokens"] / figures["gen_s"]
    figures["groups_constant"] = mean(kept, "training/groups_constant")
    figures["reward"] = mean(kept, "critic/rewards/mean")
    figures["rollout_probs_diff"] = mean(kept, "training/rollout_probs_diff_mean")
    figures["first_step_s"] = rows[0]["timing_s/step"]
    figures["start_to_first_step_s"] = min((at for at, steps, _ in samples if steps), default=began) - began
    busy = [share for _, steps, share in samples if args.warm_up <= steps < args.steps]
    if busy:
        figures["gpu_busy"] = statistics.fmean(busy)
    return {name: value for name, value in figures.items() if not math.isnan(value)}


def mean(rows: list[dict[str, Any]], name: str) -> float:
    """NaN where no row has it."""
    values = [row[name] for row in rows if name in row]
    return statistics.fmean(values) if values else float("nan")


def watch(process: subprocess.Popen[str], metrics: Path, samples: list[tuple[float, int, float]]) -> None:
    """(moment, steps done, share of the time in which a kernel ran) while `process` runs."""
    query: subprocess.Popen[str] | None = None
    if shutil.which("nvidia-smi"):
        names = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
        query = subprocess.Popen(["nvidia-smi", *names], stdout=subprocess.PIPE, text=True)
    while process.poll() is None:
        if query is None or query.stdout is None:
            time.sleep(0.1)
            share = float("nan")
        else:
            share = float(query.stdout.readline()) / 100
        steps = metrics.read_text().count("timing_s/step") if metrics.exists() else 0
        samples.append((time.monotonic(), steps, share))
    if query is not None:
        query.kill()


def main(argv: list[str] | None = None) -> int:
    return command("real_step", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
