"""Install a wheel as a stranger would and try it: `make dist-test`.

The wheel and its requirements are installed into an empty environment, then the demo and at least one command of each
kind are typed in an empty folder, with an empty home and without this checkout. Every extra is then installed over that
environment, each in one of its own, and a command that fails without the extra is typed there. Only the standard
library is needed; packages come from the registry that pip is configured for.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.docs.run_pages import User

ROOT = Path(__file__).resolve().parents[2]
DEMO = "checkpoints/demo/run-1"
MODEL = f"{DEMO}/grpo/global_step_45/actor/huggingface"
TRAIN = (
    f"verl train algorithm.adv_estimator=grpo actor_rollout_ref.model.path={MODEL} "
    f"data.train_files={DEMO}/data/train.parquet data.val_files={DEMO}/data/held_out.parquet data.val_max_samples=8 "
    "data.train_batch_size=8 data.max_prompt_length=48 data.max_response_length=20 "
    f"reward.custom_reward_function.path={DEMO}/reward.py "
    "actor_rollout_ref.rollout.n=2 trainer.total_training_steps=1 trainer.device=cpu"
)
PAIRS = (
    f"model.path={MODEL} data.train_files=pairs.jsonl data.train_batch_size=4 data.max_length=64 "
    "trainer.total_training_steps=2 trainer.device=cpu"
)
COMMANDS = (
    "verl --version",
    "verl doctor",
    "verl demo",
    f"verl data inspect {DEMO}/data/train.parquet --model {MODEL}",
    f"verl reward test --fn {DEMO}/reward.py --data {DEMO}/data/train.parquet --rows 1 --response '#### 10'",
    "verl env test --by-hand --conversations 1 --prompt 'What is 17 + 25?' rollout.multi_turn.tools=tools.py "
    "<<< $'/add a=17 b=25\\nIt is 42.'",
    f"{TRAIN} --check",
    f"{TRAIN} trainer.experiment_name=first",
    "verl view checkpoints/verl/first",
    "verl ckpt verify checkpoints/verl/first",
    "verl trace checkpoints/verl/first",
    f"{TRAIN} trainer.experiment_name=long trainer.total_training_steps=2 trainer.save_freq=1",
    "verl replay checkpoints/verl/long --step 2",
    "verl why checkpoints/verl/long --step 2",
    "verl fork checkpoints/verl/long --step 1 --name forked --no-start",
    f"verl sft model.path={DEMO}/model data.train_files={DEMO}/data/sft_val.parquet data.train_batch_size=8 "
    "data.max_length=64 trainer.total_training_steps=2 trainer.device=cpu trainer.experiment_name=sft",
    f"verl dpo {PAIRS} trainer.experiment_name=dpo",
    f"verl reward train {PAIRS} trainer.experiment_name=reward",
    "verl merge merge --backend fsdp --local_dir checkpoints/verl/first/global_step_1/actor --target_dir merged",
    f"verl generate model.path=merged data.path={DEMO}/data/held_out.parquet data.max_samples=4 "
    "data.max_prompt_length=48 data.max_response_length=20 data.output_path=responses.parquet rollout.n=1",
    f"verl eval data.path=responses.parquet reward.custom_reward_function.path={DEMO}/reward.py",
    f"verl plan --model {MODEL} --gpus 8 --gpu-memory 80 data.train_batch_size=64",
    "verl prepare countdown --to countdown --count 8 --test_count 4",
    "verl recipes dapo",
    "verl completion bash",
    f"python train.py {MODEL}",
)
FILES = {
    "pairs.jsonl": "".join(
        json.dumps({"prompt": f"Mia has {number} apples.", "chosen": f"#### {number}", "rejected": "#### 99"})
        + "\n"
        for number in range(16)
    ),
    "math.jsonl": json.dumps(
        {"data_source": "math", "prompt": "x", "reward_model": {"ground_truth": "\\sqrt{2}"}}
    ),
    "tools.py": 'def add(a: int, b: int) -> int:\n    """Add two numbers."""\n    return a + b\n',
    "train.py": """\
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl import GRPOTrainer
from verl.trainer import TrainingConfig

model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
rows = [{"prompt": [{"role": "user", "content": f"Say {number}."}], "answer": str(number)} for number in range(8)]
if sys.argv[2:] == ["datasets"]:
    from datasets import Dataset
    rows = Dataset.from_list(rows)
config = TrainingConfig(total_epochs=1, batch_size=8, n=2, max_response_length=8, output_dir="from-python")
result = GRPOTrainer(model, tokenizer, config, reward_function=lambda response, answer: answer in response).train(rows)
assert result.steps == 1
""",
    "mcp_server.py": (ROOT / "tests/agents/mcp_server.py").read_text(encoding="utf-8"),
}
_LOGGED = f"{TRAIN} trainer.experiment_name={{0}} trainer.logger=[console,{{0}}]"
EXTRAS = {
    "ray": f"{TRAIN} trainer.experiment_name=ray trainer.n_gpus_per_node=2",
    "megatron": f"{TRAIN} trainer.experiment_name=megatron actor_rollout_ref.actor.strategy=megatron",
    "peft": f"{TRAIN} trainer.experiment_name=lora actor_rollout_ref.model.lora_rank=4",
    "wandb": "WANDB_MODE=offline " + _LOGGED.format("wandb"),
    "tensorboard": _LOGGED.format("tensorboard"),
    "mlflow": "MLFLOW_TRACKING_URI=sqlite:///mlflow.db " + _LOGGED.format("mlflow"),
    "trackio": "TRACKIO_DIR=trackio " + _LOGGED.format("trackio"),
    "swanlab": "SWANLAB_MODE=offline " + _LOGGED.format("swanlab"),
    "math": "verl reward test --data math.jsonl --response '\\boxed{\\frac{2}{\\sqrt{2}}}' | grep -E 'score +1'",
    "datasets": f"python train.py {MODEL} datasets",
    "mcp": f"{TRAIN} trainer.experiment_name=mcp actor_rollout_ref.rollout.multi_turn.enable=True "
    "actor_rollout_ref.rollout.multi_turn.mcp=\"['python mcp_server.py']\" "
    "actor_rollout_ref.rollout.multi_turn.max_turns=2 data.max_prompt_length=2048",
    "gym": "verl prepare gym/basic_arithmetic --to gym --count 8 --test_count 4",
    "gymnasium": f"{TRAIN} trainer.experiment_name=gymnasium actor_rollout_ref.rollout.multi_turn.enable=True "
    "actor_rollout_ref.rollout.multi_turn.environment=gym:FrozenLake-v1 "
    "actor_rollout_ref.rollout.multi_turn.max_turns=2 data.max_prompt_length=2048",
    "serve": f"timeout --preserve-status -s INT 60 verl serve {MODEL} --port 0 trainer.device=cpu || test $? = 130",
    "all": "verl --version",
    "dev": "pytest --version",
    "docs": "mkdocs --version",
}
LEFT_OUT = {
    "openenv": "needs a server of OpenEnv (make test-components has one)",
    "verifiers": "needs another version of mcp than vLLM (make test-components has an environment for it)",
    "attention": "needs an NVIDIA GPU and its version of torch",
    "vllm": "needs an NVIDIA GPU and its own version of torch",
    "sglang": "needs an NVIDIA GPU and its own version of torch",
}
"""Extras that need more than an environment on a CPU."""


@dataclass(frozen=True)
class Trial:
    """The wheel, the folder in which it is tried, and how long one command may take."""

    wheel: Path
    folder: Path
    seconds: float

    def environment(self, extra: str | None = None) -> Path:
        """Install into a new environment, with an extra over that without; its folder."""
        place = self.folder / (extra or "core")
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
        pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python"]
        if extra:
            (packages,) = place.glob("lib/python*/site-packages")
            (below,) = self.folder.glob("core/lib/python*/site-packages")
            (packages / "below.pth").write_text(f"{below}\n", encoding="utf-8")
            # The package again, for the program `verl` of this environment.
            subprocess.run(
                [*pip, "install", "-qq", "--no-deps", "--ignore-installed", self.wheel], check=True
            )
        requirement = f"verl[{extra}] @ {self.wheel.as_uri()}" if extra else str(self.wheel)
        subprocess.run([*pip, "install", "-qq", requirement], check=True)
        subprocess.run([*pip, "check"], check=True)
        report(f"ok     {time.monotonic() - started:4.0f} s  pip install {requirement}")
        return place

    def types(self, command: str, environment: Path, fails: bool = False) -> bool:
        """Type a command with the programs of an environment; whether it ended well, or, if that `fails`, did not."""
        path = f"{environment}/bin:/usr/local/bin:/usr/bin:/bin"
        work, log = self.folder / "work", self.folder / "log"
        started = time.monotonic()
        code = User(self.folder / "home", path, None).run(["bash", "-c", command], work, log, self.seconds)
        expected = (code != 0) == fails
        where = f"  (fails without the extra: exit code {code})" if fails else ""
        report(f"{'ok' if expected else 'FAILED':6} {time.monotonic() - started:4.0f} s  {command}{where}")
        if not expected:
            report(f"exit code {code}\n{log.read_text(encoding='utf-8', errors='replace')[-4000:]}")
        return expected


def report(text: str) -> None:
    print(f"dist-test: {text}", flush=True)


def programs(environment: Path) -> list[str]:
    """The commands of the installed package."""
    code = (
        "from verl.cli import PROGRAMS\n"
        "for word, entry in PROGRAMS.items():\n"
        "    print(*([word] if isinstance(entry, tuple) else [f'{word} {each}' for each in entry]), sep='\\n')"
    )
    listed = subprocess.run(
        [environment / "bin" / "python", "-I", "-c", code], check=True, capture_output=True, text=True
    )
    return listed.stdout.splitlines()


def try_core(trial: Trial) -> bool:
    """Every command; of those that COMMANDS lacks, such as servers, the help."""
    core = trial.environment()
    missing = [word for word in programs(core) if not any(f"verl {word} " in f"{line} " for line in COMMANDS)]
    commands = [*COMMANDS, *(f"verl {word} --help" for word in missing)]
    return all(trial.types(command, core) for command in commands)


def try_extra(trial: Trial, extra: str) -> bool:
    try:
        environment = trial.environment(extra)
    except subprocess.CalledProcessError as failed:
        report(f"FAILED verl[{extra}]: {failed}")
        return False
    needed = extra == "all" or trial.types(EXTRAS[extra], trial.folder / "core", fails=True)
    return trial.types(EXTRAS[extra], environment) and needed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--extras", nargs="*", default=list(EXTRAS), choices=EXTRAS, help="default: all")
    parser.add_argument("--seconds", type=float, default=1800, help="limit of a command")
    parser.add_argument("--keep", action="store_true", help="keep the folder with environments and runs")
    args = parser.parse_args()
    trial = Trial(args.wheel.resolve(), Path(tempfile.mkdtemp(prefix="verl-dist-")), args.seconds)
    try:
        for name in ("home", "work"):
            (trial.folder / name).mkdir()
        for name, text in FILES.items():
            (trial.folder / "work" / name).write_text(text, encoding="utf-8")
        report(f"in {trial.folder}")
        if not try_core(trial):
            return 1
        results = [try_extra(trial, extra) for extra in args.extras]
        for extra, reason in LEFT_OUT.items():
            report(f"not tried      verl[{extra}]: {reason}")
        return 0 if all(results) else 1
    finally:
        if not args.keep:
            shutil.rmtree(trial.folder, ignore_errors=True)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)  # the checkout must not be importable
    sys.exit(main())
