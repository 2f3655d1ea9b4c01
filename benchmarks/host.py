"""`python -m benchmarks.host`: the host's part of a GRPO step, without a model.

Responses of one length are scored as they finish, assembled, turned into advantages and mini-batches, and packed; then
come the metrics and what the background thread writes. Processor time of the thread, so that what else the machine does
counts little. `--old` times the same in another checkout and prints the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import command

PROMPT_TOKENS = 104
VOCABULARY = 4000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=136, help="of a response, in the mean (default: 136)")
    parser.add_argument("--constant", type=float, default=0.7, help="share of groups with equal scores")
    parser.add_argument("--mini-batches", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--old", type=Path, help="another checkout, timed first")
    parser.add_argument("--json", action="store_true", help="print milliseconds as JSON only")


def run(args: argparse.Namespace) -> int:
    if args.json:
        sys.stdout.write(json.dumps(measured(args)) + "\n")
        return 0
    before = other_checkout(args) if args.old else {}
    now = measured(args)
    lines = [f"{args.prompts} prompts x {args.n}, {args.tokens} tokens each: milliseconds of the host"]
    for name, value in now.items():
        ratio = f"{before[name]:12.1f}{value / before[name]:8.2f}x" if before.get(name) else ""
        lines.append(f"{name:24}{value:10.1f}{ratio}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def other_checkout(args: argparse.Namespace) -> dict[str, float]:
    """The same file with the other checkout's `verl`."""
    names = ("prompts", "n", "tokens", "constant", "mini_batches", "repeat")
    options = [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "benchmarks").symlink_to(Path(__file__).parent.absolute())
        (Path(folder) / "verl").symlink_to(args.old.absolute() / "verl")
        path = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.host", "--json", *options],
            env=path,
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measured(args: argparse.Namespace) -> dict[str, float]:
    """Medians, in milliseconds."""
    rounds = [one_step(args, seed) for seed in range(args.repeat + 1)][1:]
    found = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    return {**found, "in the step": sum(v for name, v in found.items() if not name.startswith("background"))}


def one_step(args: argparse.Namespace, seed: int) -> dict[str, float]:
    from verl.algorithms.groups import group_metrics  # noqa: F401  (imported before anything is timed)
    from verl.data.proto import DataProto, object_column
    from verl.models.packing import pack
    from verl.observe.batch_metrics import age_metrics, batch_metrics, step_metrics
    from verl.observe.metrics import Timer
    from verl.observe.run_folder import RunFolder
    from verl.observe.token_table import TokenTable
    from verl.rollout.base import Response
    from verl.trainer import advantage
    from verl.trainer.experience import attach_scores, reward_metrics, submit_rewards
    from verl.trainer.validation import sample_rows
    from verl.workers.roles import rollouts_of

    spans: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.thread_time()
        yield
        spans[name] = (time.thread_time() - began) * 1000

    draw = np.random.default_rng(seed)
    rows, tokenizer, cfg = args.prompts * args.n, the_tokenizer(), the_config(args)
    prompts = DataProto.from_dict(non_tensors=prompt_columns(args.prompts, draw))
    lengths = np.clip(draw.normal(args.tokens, args.tokens / 4, rows), 1, 2 * args.tokens).astype(int)
    responses = [
        Response(
            request_id=f"p{row // args.n}",
            sample=row % args.n,
            token_ids=draw.integers(3, VOCABULARY, length).tolist(),
            log_probs=(-draw.random(length)).tolist(),
            finish_reason="stop",
            policy_version=seed,
        )
        for row, length in enumerate(lengths)
    ]
    rewards = the_rewards(args, draw)
    with timed("submit rewards"):
        repeated = prompts.repeat(args.n)
        texts: dict[int, str] = {}
        submit_rewards(rewards, tokenizer, repeated, list(enumerate(responses)), 0, texts)
    with timed("assemble"):
        batch = rollouts_of(prompts, responses, args.n, 0)
        batch.non_tensor_batch["response_text"] = object_column(texts[row] for row in range(rows))
    with timed("collect rewards"):
        results = rewards.collect()
        batch = attach_scores(batch, [results[row] for row in range(rows)])
        metrics = reward_metrics(batch)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    batch.meta_info["temperature"] = 1.0
    with timed("advantages"):
        metrics |= age_metrics(batch, seed, 0)
        metrics |= advantage.estimate(batch, cfg.algorithm)
    group = the_group(cfg, pack)
    group.policy_version = seed
    with timed("mini-batches, packing"):
        if hasattr(group, "prepare_update"):
            group.prepare_update(batch, Timer())
        metrics |= group.update("actor", batch)
    with timed("metrics"):
        metrics |= batch_metrics(batch, max_response_length=2 * args.tokens, max_prompt_length=512)
        metrics |= step_metrics(batch, {"step": 1.0})
    with tempfile.TemporaryDirectory() as name:
        with timed("background: tokens"):
            TokenTable.of(batch, tokenizer, None, seed).write(Path(name) / "1.parquet")
        with timed("background: samples"):
            folder: Any = RunFolder.__new__(RunFolder)
            folder._write_rows(Path(name) / "1.jsonl", sample_rows(batch, tokenizer))
    return spans


def prompt_columns(count: int, draw: np.random.Generator) -> dict[str, list[Any]]:
    return {
        "uid": [f"p{number}" for number in range(count)],
        "prompt_ids": [draw.integers(3, VOCABULARY, PROMPT_TOKENS).tolist() for _ in range(count)],
        "raw_prompt": [[{"role": "user", "content": f"question {number}"}] for number in range(count)],
        "prompt_text": [f"question {number}" for number in range(count)],
        "data_source": ["host"] * count,
        "ground_truth": [str(number) for number in range(count)],
        "extra_info": [{"index": number} for number in range(count)],
        "index": list(range(count)),
        "columns": [{} for _ in range(count)],
    }


def the_config(args: argparse.Namespace) -> Any:
    from verl.config.load import from_dict
    from verl.config.schema import PPOConfig

    values = {
        "data.train_files": ["x"],
        "data.train_batch_size": args.prompts,
        "actor_rollout_ref.model.path": "x",
        "actor_rollout_ref.actor.ppo_mini_batch_size": args.prompts // args.mini_batches,
        "actor_rollout_ref.rollout.n": args.n,
        "algorithm.adv_estimator": "grpo",
    }
    return from_dict(PPOConfig, values, checked=False)


def the_tokenizer(known: list[Any] | None = None) -> Any:
    """Byte-level, with as many tokens as the responses use."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    known = _TOKENIZER if known is None else known
    if not known:
        words = {f"Ġw{number:x}": number for number in range(VOCABULARY)}
        backend = Tokenizer(models.BPE(words, []))
        backend.decoder = decoders.ByteLevel()
        known.append(PreTrainedTokenizerFast(tokenizer_object=backend))
    return known[0]


_TOKENIZER: list[Any] = []


def the_rewards(args: argparse.Namespace, draw: np.random.Generator) -> Any:
    """A function in this process that looks a score up: what is left is the manager's own time."""
    from verl.config.schema import RewardConfig
    from verl.reward.managers import build_reward_manager

    constant = draw.random(args.prompts) < args.constant
    scores = np.where(constant[:, None], 0.0, draw.integers(0, 2, (args.prompts, args.n))).flatten().tolist()
    left = iter(scores)

    def score(solution_str: str, ground_truth: str, **_: Any) -> float:
        return next(left)

    return build_reward_manager(RewardConfig(in_process=True), function=score, max_response_length=512)


def the_group(cfg: Any, pack: Callable[..., Any]) -> Any:
    from verl.data.proto import DataProto
    from verl.workers.group import WorkerGroup

    class Packing(WorkerGroup):
        """Packs what a model would compute."""

        def forward(self, role: str, batch: DataProto, columns: Any) -> DataProto:
            self.pack(batch)
            return DataProto.from_dict({"old_log_probs": torch.zeros(batch.batch["response_mask"].shape)})

        def train(self, role: str, mini: DataProto, **options: Any) -> dict[str, Any]:
            self.pack(mini)
            return {}

        def pack(self, rows: DataProto) -> None:
            inputs = [rows.batch[name] for name in ("input_ids", "attention_mask", "response_mask")]
            pack(*inputs, torch.device("cpu"))

        def sync_weights(self) -> dict[str, float]:
            return {}

    Packing.__abstractmethods__ = frozenset()
    return Packing(cfg)


def main(argv: list[str] | None = None) -> int:
    return command("host", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
