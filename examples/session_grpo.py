"""GRPO as a loop of your own, on the task of `verl demo`.

verl demo --out demo && python examples/session_grpo.py --demo demo
"""

import argparse
import random
from pathlib import Path

import pyarrow.parquet
import torch

from verl import DataProto, Session
from verl.demo.reward import compute_score


def scores(batch: DataProto) -> torch.Tensor:
    columns = batch.non_tensor_batch
    rows = zip(columns["response_text"], columns["ground_truth"], strict=True)
    return torch.tensor([compute_score("word_problems", text, truth) for text, truth in rows])


def accuracy(session: Session, problems: list[dict]) -> float:
    return float(scores(session.sample(problems, max_tokens=20, temperature=0)).mean())


def train(session: Session, problems: list[dict], steps: int, n: int = 8) -> None:
    draw = random.Random(0)
    for step in range(1, steps + 1):
        batch = session.sample(draw.sample(problems, 64), n=n, max_tokens=20)
        rewards = scores(batch).view(-1, n)
        centred = rewards - rewards.mean(-1, keepdim=True)
        batch.batch["advantages"] = (centred / (rewards.std(-1, keepdim=True) + 1e-6)).flatten()
        batch.batch["old_log_probs"] = session.log_probs(batch)
        for half in batch.chunk(2):
            session.forward_backward(half, "vanilla")
            metrics = session.optim_step(lr=5e-4 * min(1, session.step / 10 + 0.1))
        print(f"step {step}: reward {rewards.mean():.3f}, gradient {metrics['actor/grad_norm']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", type=Path, required=True, help="the folder that `verl demo --out` wrote")
    parser.add_argument("--steps", type=int, default=45)
    args = parser.parse_args()
    files = [args.demo / "data" / f"{name}.parquet" for name in ("train", "held_out")]
    problems, held_out = (pyarrow.parquet.read_table(file).to_pylist() for file in files)
    start = args.demo / "sft" / "global_step_450" / "actor" / "huggingface"
    with Session(start, device="cpu", overrides={"actor_rollout_ref.actor.clip_ratio_high": 0.28}) as session:
        before = accuracy(session, held_out)
        train(session, problems, args.steps)
        print(f"held-out accuracy {before:.2f} -> {accuracy(session, held_out):.2f}")
        print(f"saved in {session.save(args.demo / 'session')}")


if __name__ == "__main__":
    main()
