"""`python -m benchmarks.step`: one GRPO step (generate, score, update) through the training loop, and a peer's.

Both sides train the same model folder on the same prompts with the same batch (P prompts x n responses of at most
T tokens), reward and learning rate; the figure is the median time of the steps after the warm-up. The peer runs in
a separate environment (`--against trl --peer-python PATH`), through `benchmarks/peers/`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import command
from verl.errors import ConfigError

PEERS = Path(__file__).resolve().parent / "peers"
WORDS = "the a of to and in is was for on as with by at from it an be this that".split()  # noqa: SIM905
REWARD = """def compute_score(solution_str, ground_truth):
    words = solution_str.split()
    return sum(word == ground_truth for word in words) / max(len(words), 1)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a Hugging Face folder; default: a random Llama of 0.8M parameters")
    parser.add_argument("--data", help="jsonl with a column 'question' (GSM8K); default: random prompts")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--engine", default="native", help="rollout engine")
    parser.add_argument("--against", choices=["trl"], help="also run a peer")
    parser.add_argument("--peer-python", help="the python of the environment the peer is installed in")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="further config keys")
    parser.add_argument("--json", type=Path, help="write the figures there too")


def run(args: argparse.Namespace) -> int:
    if args.against and not args.peer_python:
        raise ConfigError(
            "--against trl needs --peer-python PATH: the python of an environment with trl installed"
        )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = Path(args.model) if args.model else make_model(work / "model")
        data = make_data(work, args.prompts * args.steps, args.data)
        ours = run_ours(args, model, data, work)
        figures: dict[str, Any] = {"verl": ours}
        if args.against:
            figures[args.against] = run_peer(args, model, data)
    table(args, figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


def make_model(folder: Path, hidden_size: int = 128) -> Path:
    """A random Llama with a word-level tokenizer and a chat template."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from verl.runtime import quiet_transformers

    quiet_transformers()
    words = ["<pad>", "<eos>", "<unk>", *WORDS, *(f"w{number}" for number in range(489))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 43 // 16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_data(work: Path, count: int, source: str | None = None) -> Path:
    """Rows for every step, and the reward in the same folder."""
    import random

    draw = random.Random(0)
    if source:
        lines = Path(source).read_text().splitlines()
        questions = [json.loads(lines[i % len(lines)])["question"] for i in range(count)]
    else:
        questions = [" ".join(draw.choices(WORDS, k=draw.randint(6, 20))) for _ in range(count)]
    path = work / "rows.jsonl"
    with open(path, "w") as file:
        for question in questions:
            row = {
                "prompt": [{"role": "user", "content": question}],
                "ground_truth": "the",
                "data_source": "bench",
            }
            file.write(json.dumps(row) + "\n")
    (work / "reward.py").write_text(REWARD)
    return path


def run_values(args: argparse.Namespace, model: Path, data: Path, folder: Path) -> dict[str, Any]:
    """Config keys of a GRPO run of `args.steps` steps of this batch, on a file of `make_data`."""
    return {
        "data.train_files": [str(data)],
        "data.train_batch_size": args.prompts,
        "data.max_response_length": args.max_tokens,
        "data.shuffle": False,
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.rollout.n": args.n,
        "actor_rollout_ref.actor.ppo_mini_batch_size": args.prompts,
        "algorithm.adv_estimator": "grpo",
        "reward.custom_reward_function.path": str(data.parent / "reward.py"),
        "trainer.total_training_steps": args.steps,
        "trainer.logger": [],
        "trainer.default_local_dir": str(folder),
        "actor_rollout_ref.actor.checkpoint.save_contents": ["extra"],
    }


def run_ours(args: argparse.Namespace, model: Path, data: Path, work: Path) -> dict[str, Any]:
    from verl.config.load import from_dict
    from verl.config.schema import PPOConfig
    from verl.trainer.main_ppo import run as train

    values = run_values(args, model, data, work / "run") | {"actor_rollout_ref.rollout.name": args.engine}
    values |= dict(item.split("=", 1) for item in args.set)
    result = train(from_dict(PPOConfig, values))
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "timing_s/step" in row][args.warm_up :]
    names = ("step", "gen", "reward", "old_log_prob", "update_actor")
    figures = {f"{name}_s": median(rows, f"timing_s/{name}") for name in names}
    figures["response_tokens"] = median(rows, "response_length/mean")
    figures["probs_diff_mean"] = median(rows, "training/rollout_probs_diff_mean")
    figures["memory_gb"] = max((row.get("perf/max_memory_allocated_gb", 0.0) for row in rows), default=0.0)
    return figures


def median(rows: list[dict[str, Any]], name: str) -> float | None:
    found = [row[name] for row in rows if name in row]
    return statistics.median(found) if found else None


def run_peer(args: argparse.Namespace, model: Path, data: Path) -> dict[str, Any]:
    """In its own process and environment; its last line of output is a JSON object."""
    arguments = [args.peer_python, str(PEERS / f"{args.against}_step.py"), str(model), str(data)]
    arguments += [str(value) for value in (args.prompts, args.n, args.max_tokens, args.steps, args.warm_up)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise ConfigError(f"the peer {args.against} failed:\n{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def table(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    names = list(dict.fromkeys(name for column in figures.values() for name in column))
    lines = [f"GRPO step: {args.prompts} prompts x {args.n}, at most {args.max_tokens} tokens"]
    lines.append(f"{'':16}" + "".join(f"{peer:>14}" for peer in figures))
    for name in names:
        cells = (figures[peer].get(name) for peer in figures)
        lines.append(f"{name:16}" + "".join(f"{'-' if c is None else format(c, '.4g'):>14}" for c in cells))
    for peer, column in figures.items():
        if peer != "verl":
            lines.append(f"verl is {column['step_s'] / figures['verl']['step_s']:.2f}x as fast as {peer}")
    sys.stdout.write("\n".join(lines) + "\n")


def main(argv: list[str] | None = None) -> int:
    return command("step", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
