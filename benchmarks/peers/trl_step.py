"""A GRPO step by TRL, timed from outside: run by `python -m benchmarks.step --against trl` in TRL's own environment.

Arguments: model folder, rows (jsonl), prompts, n, max tokens, steps, warm-up. Prints one JSON object.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def share_of_the(completions, ground_truth, **_):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [
        sum(word == truth for word in text.split()) / max(len(text.split()), 1)
        for text, truth in zip(texts, ground_truth, strict=True)
    ]


class Clock(TrainerCallback):
    def __init__(self):
        self.marks = []

    def on_step_begin(self, *_, **__):
        self.marks.append(time.perf_counter())

    def on_train_end(self, *_, **__):
        self.marks.append(time.perf_counter())


def main():
    model, rows = sys.argv[1:3]
    prompts, n, tokens, steps, warm_up = map(int, sys.argv[3:8])
    data = Dataset.from_list([json.loads(line) for line in Path(rows).read_text().splitlines()])
    gpu = torch.cuda.is_available()
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=prompts * n,
            num_generations=n,
            max_completion_length=tokens,
            max_steps=steps,
            learning_rate=1e-6,
            beta=0.0,
            bf16=gpu,
            use_cpu=not gpu,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            shuffle_dataset=False,
        )
        trainer = GRPOTrainer(
            model=model, reward_funcs=share_of_the, args=config, train_dataset=data, callbacks=[clock]
        )
        trainer.train()
    spans = [b - a for a, b in zip(clock.marks, clock.marks[1:], strict=False)][warm_up:]
    memory = torch.cuda.max_memory_allocated() / 1024**3 if gpu else 0.0
    sys.stdout.write(json.dumps({"step_s": statistics.median(spans), "memory_gb": memory}) + "\n")


if __name__ == "__main__":
    main()
