"""`verl --version` and `verl completion`."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest

import verl
from verl import cli
from verl.completion import _CONFIGS, SCRIPTS, suggest
from verl.config.recipes import help_text
from verl.errors import CommandAnswered

ROOT = Path(__file__).resolve().parents[2]


def complete(line: str) -> list[str]:
    return [word for word, _ in suggest(line.split(" "), cli.PROGRAMS)]


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True,
        timeout=240, check=True,
    )  # fmt: skip


# -- versions -----------------------------------------------------------------------------------------------------


def test_the_version_report_names_what_is_installed_without_importing_it() -> None:
    code = "import sys; from verl.cli import main; main(['--version']); print('torch' in sys.modules)"
    *report, imported = run(code).stdout.splitlines()
    versions = dict(line.split(" ", 1) for line in report)
    assert imported == "False"
    assert versions["verl"].split()[0] == verl.__version__
    assert versions["transformers"] == metadata.version("transformers")
    assert versions["torch"].split()[0] == metadata.version("torch")
    for name in ("ray", "vllm", "sglang", "megatron-core", "triton", "python", "platform", "gpu"):
        assert versions[name]


def test_the_version_report_counts_gpus(tmp_path: Path) -> None:
    """With a program that prints what nvidia-smi prints for a query."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nfor i in 1 2; do echo 'NVIDIA H200, 143771 MiB, 570.86.15'; done\n")
    program.chmod(0o755)
    report = run("from verl.cli import main; main(['-V'])", PATH=f"{tmp_path}:{os.environ['PATH']}").stdout
    assert report.splitlines()[-1] == "gpu 2 x NVIDIA H200, 143771 MiB, driver 570.86.15"
    program.write_text("#!/bin/sh\nexit 9\n")
    report = run("from verl.cli import main; main(['-V'])", PATH=f"{tmp_path}:{os.environ['PATH']}").stdout
    assert report.splitlines()[-1] == "gpu unknown (nvidia-smi fails)"


# -- completion ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tr", ["train", "trace"]),
        ("--v", ["--version"]),
        ("reward ", ["test", "train"]),
        ("train act", ["actor_rollout_ref.", "actor."]),
        ("train rollout.calculate_log", ["rollout.calculate_log_probs="]),
        ("train rollout.name=vl", ["rollout.name=vllm"]),
        ("train actor_rollout_ref.rollout.calculate_log", ["actor_rollout_ref.rollout.calculate_log_probs="]),
        ("train +algorithm.adv", ["+algorithm.adv_estimator="]),
        (
            "train algorithm.adv_estimator=rl",
            ["algorithm.adv_estimator=rloo", "algorithm.adv_estimator=rloo_vectorized"],
        ),
        ("train algorithm.adv_estimator=dap", []),
        ("train reward.in_process=", ["reward.in_process=true", "reward.in_process=false"]),
        ("train recipe=da", ["recipe=dapo"]),
        ("sft model.pat", ["model.path="]),
        ("sft algorithm.adv", []),
        ("train --ch", ["--check"]),
        ("train --cfg ", ["job"]),
        ("view --ser", ["--serve"]),
        ("ckpt ", ["ls", "verify", "prune"]),
        ("ckpt prune --mode ", ["max", "min"]),
        ("merge merge --dt", ["--dtype"]),
        ("prepare gsm", ["gsm8k"]),
        ("recipes gs", ["gspo"]),
        ("fork ", []),
        ("fork RUN algorithm.adv", ["algorithm.adv_estimator="]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("trian ", []),
    ],
)  # fmt: skip
def test_words_are_completed(line: str, expected: list[str]) -> None:
    assert complete(line) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "unknown command 'trian'. Did you mean `verl train`? `verl --help` lists all commands"),
        (["qqq"], "unknown command 'qqq'. `verl --help` lists all commands"),
        (["reward", "tset"], "unknown command 'tset'. Did you mean `verl reward test`?\nusage:"),
    ],
)
def test_a_misspelt_command_gets_the_nearest(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_every_command_can_be_completed_without_torch() -> None:
    """One process for all commands; each must know its own options."""
    code = (
        "import sys\n"
        "from verl import cli\n"
        "from verl.completion import suggest\n"
        "programs = cli.PROGRAMS\n"
        "for name, entry in programs.items():\n"
        "    for words in ([name, sub] for sub in entry) if isinstance(entry, dict) else [[name]]:\n"
        "        first = [word for word, _ in suggest([*words, ''], programs)] if name in ('ckpt', 'merge') else []\n"
        "        words += first[:1]\n"
        "        print(' '.join(words), [word for word, _ in suggest([*words, '--h'], programs)])\n"
        "print('torch' in sys.modules)\n"
    )
    *lines, torch = run(code).stdout.splitlines()
    assert torch == "False" and len(lines) >= 20
    assert [line for line in lines if "'--help'" not in line] == []


def test_keys_are_those_of_the_config_that_the_command_reads(capsys: pytest.CaptureFixture[str]) -> None:
    schema = importlib.import_module("verl.config.schema")
    for command, kind in _CONFIGS.items():
        if command in ("fork", "plan", "doctor", "env test"):
            continue  # they take the keys of `verl train`
        with suppress(CommandAnswered):
            assert cli.main([*command.split(), "--help"]) == 0
        assert capsys.readouterr().out == help_text(getattr(schema, kind), []), command


def shell(name: str) -> str:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    return program


def in_shell(command: list[str], tmp_path: Path) -> list[str]:
    """What a shell prints, with a `verl` on its PATH that runs this checkout."""
    verl_command = tmp_path / "verl"
    verl_command.write_text(f'#!/bin/sh\nexec {sys.executable} -m verl "$@"\n')
    verl_command.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_bash_replaces_only_what_follows_the_equals_sign(tmp_path: Path) -> None:
    (tmp_path / "completion").write_text(SCRIPTS["bash"])
    ask = 'COMP_LINE=$1; COMP_POINT=${#1}; _verl; printf "[%s]\\n" "${COMPREPLY[@]}"; '
    program = f"source {tmp_path}/completion; {ask} set -- 'A=1 verl train alg'; {ask}"
    found = in_shell([shell("bash"), "-c", program, "bash", "verl train trainer.device=c"], tmp_path)
    assert found == ["[cpu ]", "[cuda ]", "[algorithm.]"]


def test_fish_completes_keys_and_files(tmp_path: Path) -> None:
    (tmp_path / "completion").write_text(SCRIPTS["fish"])
    (tmp_path / "rows.parquet").touch()
    program = (
        f"source {tmp_path}/completion; complete -C 'verl train trainer.device=c';"
        "complete -C 'verl train data.train_files=row'"
    )
    found = in_shell([shell("fish"), "--no-config", "-c", program], tmp_path)
    assert [line.split("\t")[0] for line in found] == [
        "trainer.device=cpu", "trainer.device=cuda", "data.train_files=rows.parquet",
    ]  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_valid(name: str, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(SCRIPTS[name])
    in_shell([shell(name), "-n", str(tmp_path / "script")], tmp_path)
