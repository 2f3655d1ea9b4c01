"""GRPO through vLLM on one GPU: full weights and LoRA, with and without CUDA graphs, sleep and wake included.

    python benchmarks/vllm_gpu.py --model SMOLLM2_FOLDER --data GSM8K_FOLDER [--cases full-eager,lora-graphs]

Every case is one run of the command, on prompts of GSM8K with a reward that every sample gets another amount of, so
that the weights move at every step. For each it prints one line of JSON: the exit status, the steps done, times, how
many tensors were compared bit for bit where vLLM holds them, and the gap and noise of the log-prob probe at every step.
Exits 1 unless every case ran through. The folders default to $VERL_SMOLLM2 and $VERL_SHARED/data/gsm8k.
`--server` has vLLM in other processes, which take the weights by CUDA IPC instead of by reference.
Cases that share the GPU with each other, each started on its own, need `--shared-gpu`. `--cpu` rehearses on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CASES = ("full-eager", "lora-eager", "full-graphs", "lora-graphs")
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str.count("e") / (1 + len(solution_str))
"""
SHARED_GPU = """import runpy
from vllm.v1.worker.gpu_worker import Worker

whole_sleep = Worker.sleep

def sleep(self, level=1):
    # Its last statement compares the device's free memory with that of before: other processes change it too.
    try:
        whole_sleep(self, level)
    except AssertionError as error:
        if "Memory usage increased" not in str(error):
            raise

Worker.sleep = sleep
runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
"""
COMPARED = re.compile(r"vllm: (\d+) of (\d+) tensors are loaded, and compared, bit for bit")
FOUND = ("differ from the trainer", "Error", "TrainingHalted", "does not compute")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def write_task(folder: Path, data: Path, rows: int) -> None:
    lines = (data / "train.jsonl").read_text().splitlines()[:rows]
    with (folder / "train.jsonl").open("w") as out:
        for line in lines:
            prompt = [{"role": "user", "content": json.loads(line)["question"]}]
            row = {"prompt": prompt, "reward_model": {"ground_truth": ""}, "data_source": "letters"}
            out.write(json.dumps(row) + "\n")
    (folder / "reward.py").write_text(REWARD)


def command(case: str, task: Path, run: Path, options: argparse.Namespace) -> list[str]:
    weights, _, mode = case.partition("-")
    rollout = "actor_rollout_ref.rollout"
    keys = {
        "data.train_files": task / "train.jsonl",
        "data.train_batch_size": options.prompts,
        "data.max_prompt_length": 256,
        "data.filter_overlong_prompts": True,
        "data.max_response_length": options.max_tokens,
        "actor_rollout_ref.model.path": options.model,
        "actor_rollout_ref.actor.optim.lr": "1e-4" if weights == "lora" else "1e-5",
        f"{rollout}.name": "vllm",
        f"{rollout}.n": options.n,
        f"{rollout}.enforce_eager": mode == "eager",
        f"{rollout}.mode": "server" if options.server else "inprocess",
        f"{rollout}.max_num_seqs": options.prompts * options.n,
        f"{rollout}.gpu_memory_utilization": options.memory,
        f"{rollout}.free_cache_engine": True,
        "algorithm.adv_estimator": "grpo",
        "reward.custom_reward_function.path": task / "reward.py",
        "reward.in_process": True,
        "trainer.logger": "[]",
        "trainer.total_training_steps": options.steps,
        "trainer.total_epochs": 1000,
        "trainer.default_local_dir": run,
    }
    if weights == "lora":
        keys |= {"actor_rollout_ref.model.lora_rank": 16, "actor_rollout_ref.model.lora_alpha": 16}
    if options.cpu:
        keys["trainer.device"] = "cpu"
    else:
        # Left to itself vLLM measures the free memory of the device, which other runs change meanwhile.
        keys[f"{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes"] = options.cache_gib << 30
    start = ["-c", SHARED_GPU] if options.shared_gpu else ["-m", "verl.trainer.main_ppo"]
    return [sys.executable, *start, *(f"{name}={value}" for name, value in keys.items())]


def metrics(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row for row in rows if "actor/grad_norm" in row]


def column(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def report(case: str, code: int, seconds: float, rows: list[dict[str, Any]], log: str, steps: int) -> bool:
    times, norms = column(rows, "timing_s/step"), column(rows, "actor/grad_norm")
    good = code == 0 and len(norms) == steps and min(norms) > 0
    compared = COMPARED.search(log)
    found = [line.strip()[:300] for line in log.splitlines() if any(word in line for word in FOUND)]
    figures: dict[str, Any] = {
        "case": case,
        "ok": good,
        "exit": code,
        "steps": len(rows),
        "seconds": round(seconds, 1),
        "tensors_compared": int(compared[1]) if compared else None,
        "tensors": int(compared[2]) if compared else None,
        "found": found[-6:],
    }
    if times:
        figures["step_s"] = round(statistics.median(times), 3)
        figures["gen_s"] = round(statistics.median(column(rows, "timing_s/gen")), 3)
    for name in ("rollout/probe_gap", "rollout/probe_noise", "training/rollout_probs_diff_mean"):
        figures[name] = [float(f"{value:.3g}") for value in column(rows, name)]
    if norms:
        figures["actor/grad_norm"] = [float(f"{value:.3g}") for value in (min(norms), max(norms))]
    say(json.dumps(figures))
    return good


def main() -> int:
    shared = Path(os.environ.get("VERL_SHARED", ROOT.parent / "shared"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=os.environ.get("VERL_SMOLLM2"))
    parser.add_argument("--data", type=Path, default=shared / "data" / "gsm8k")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--memory", type=float, default=0.15, help="rollout.gpu_memory_utilization")
    parser.add_argument("--cache-gib", type=int, default=2, help="GiB of vLLM's KV cache")
    parser.add_argument("--shared-gpu", action="store_true", help="other runs use the GPU at the same time")
    parser.add_argument(
        "--server", action="store_true", help="rollout.mode=server: weights cross by CUDA IPC"
    )
    parser.add_argument("--limit", type=float, default=240, help="seconds for one case")
    parser.add_argument("--logs", type=Path, help="folder for the output of every run")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    cases = options.cases.split(",")
    if not options.model or any(case not in CASES for case in cases):
        parser.error(f"--model (or VERL_SMOLLM2) must name a folder, --cases some of {', '.join(CASES)}")
    good = True
    with tempfile.TemporaryDirectory() as folder:
        write_task(Path(folder), options.data, max(64, 4 * options.prompts))
        for case in cases:
            run, start = Path(folder) / case, time.monotonic()
            env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
            log = (options.logs or Path(folder)) / f"{case}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("w") as out:
                try:
                    done = subprocess.run(
                        command(case, Path(folder), run, options),
                        env=env,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        timeout=options.limit,
                    ).returncode
                except subprocess.TimeoutExpired:
                    done = 124
            text = log.read_text(errors="replace")
            good &= report(case, done, time.monotonic() - start, metrics(run), text, options.steps)
            if done:
                say("     " + "\n     ".join(text.splitlines()[-25:]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
