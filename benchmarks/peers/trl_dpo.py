"""DPO steps by TRL, timed from outside: run by `python -m benchmarks.dpo --against trl` in TRL's own environment.

Arguments: model folder, pairs (jsonl), pairs of a step, steps, warm-up, whether activations are recomputed. Prints one
JSON object.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer


class Clock(TrainerCallback):
    def __init__(self):
        self.marks = []

    def on_step_begin(self, *_, **__):
        self.marks.append(time.perf_counter())

    def on_train_end(self, *_, **__):
        self.marks.append(time.perf_counter())


def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def main():
    model, rows = sys.argv[1:3]
    pairs, steps, warm_up, recompute = map(int, sys.argv[3:7])
    data = Dataset.from_list([json.loads(line) for line in Path(rows).read_text().splitlines()])
    gpu = torch.cuda.is_available()
    clock = Clock()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    with tempfile.TemporaryDirectory() as out:
        config = DPOConfig(
            output_dir=out,
            per_device_train_batch_size=pairs,
            gradient_accumulation_steps=1,
            max_steps=steps,
            learning_rate=1e-6,
            beta=0.1,
            max_length=2048,
            bf16=False,
            use_cpu=not gpu,
            gradient_checkpointing=bool(recompute),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
            dataloader_pin_memory=False,
        )
        trainer = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            args=config,
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[clock],
        )
        trainer.train()
    spans = [b - a for a, b in zip(clock.marks, clock.marks[1:], strict=False)][warm_up:]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    figures = {
        "step_s": statistics.median(spans),
        "memory_gb": (resident("VmHWM") - before) / 1024**3,
        "loss": losses[warm_up],
        "torch": torch.__version__,
        "trl": trl.__version__,
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
