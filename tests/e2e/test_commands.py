"""The commands as a user types them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_importing_verl_loads_nothing_heavy():
    heavy = "{'torch', 'transformers', 'numpy', 'hydra', 'omegaconf', 'rich', 'pyarrow'}"
    out = run("-c", f"import sys, verl; print(sorted({heavy} & set(sys.modules)))")
    assert out.stdout.strip() == "[]", out.stdout + out.stderr


@pytest.mark.parametrize("module", ["verl.trainer.main_ppo", "verl.trainer.sft_trainer"])
def test_help_answers_without_torch(module):
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['{module}', '--help']\n"
        "try:\n"
        f"    runpy.run_module('{module}', run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    print('code', stop.code, 'torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    out = run("-c", code)
    assert out.stdout.splitlines()[-1].startswith(("code 0 False False", "code None False False")), out.stderr
    assert "train_files" in out.stdout and "total_epochs" in out.stdout


@pytest.mark.slow(seconds=14)
def test_check_prints_the_plan_and_loads_no_weights(overrides, tiny_model_dir, tmp_path):
    out = run("-m", "verl.cli", "train", "--check", *overrides())
    assert out.returncode == 0, out.stderr
    for word in ("prompts per step", "weights", "gradients", "optimiser", "KV cache"):
        assert word.lower() in out.stdout.lower()
    assert not (tmp_path / "run").exists()


def test_cfg_job_prints_the_resolved_config(overrides):
    out = run("-m", "verl.trainer.main_ppo", "--cfg", "job", *overrides("trainer.nnode=1"))
    assert out.returncode == 0, out.stderr
    assert "ppo_mini_batch_size: 16" in out.stdout and "nnodes: 1" in out.stdout


def test_verl_lists_its_commands_and_refuses_others():
    out = run("-m", "verl")
    assert out.returncode == 0 and "demo" in out.stdout and "train" in out.stdout
    out = run("-m", "verl", "trian")
    assert out.returncode == 2 and "trian" in out.stderr


def test_a_user_yaml_with_config_path(overrides, tmp_path):
    keys = [line for line in overrides() if not line.startswith(("data.train_batch_size", "reward"))]
    (tmp_path / "mine.yaml").write_text("data:\n  train_batch_size: 8\nreward:\n  in_process: true\n")
    out = run(
        "-m",
        "verl.trainer.main_ppo",
        "--config-path",
        str(tmp_path),
        "--config-name",
        "mine",
        "--cfg",
        "job",
        *keys,
    )
    assert out.returncode == 0, out.stderr
    assert "train_batch_size: 8" in out.stdout
