"""A thousand steps: memory, descriptors, threads, processes and files of a run do not grow with their number. By design
the files in rollouts/ and validation/ and the lines of metrics.jsonl do.

Measures resident memory on purpose, with a bound far above what it was when this was written: 4 to 5 MB from step 100
to 1,000, most of it before step 500. Not part of CI."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.agent_run import MULTI_TURN, agent_run, chat_tokenizer, save_chat_model, save_task

ROOT = Path(__file__).resolve().parents[2]
STEPS = int(os.environ.get("SOAK_STEPS", "1000"))
WARM = STEPS // 10
SPAN = STEPS // 20
"""Steps whose median is taken: at the end of the first tenth, and at the end of the run."""
MAX_RESIDENT_MB = 32
RARE = (
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={STEPS // 40}",
    f"trainer.test_freq={STEPS // 40}",
    "trainer.max_actor_ckpt_to_keep=2",
    "data.val_max_samples=4",
    "reward.in_process=False",
    "reward.num_workers=1",
)


@pytest.fixture
def soak(tmp_path: Path, fork_server: Any) -> Any:
    """Train as the command does; what the run held after each step."""

    def go(arguments: list[str]) -> list[dict[str, int]]:
        temporary, log, held = tmp_path / "tmp", tmp_path / "log.txt", tmp_path / "held.jsonl"
        temporary.mkdir()
        environment = {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "SOAK_LOG": str(held)}
        process = fork_server.start(
            "verl.trainer.main_ppo", arguments, output=log, environment=environment, folder=ROOT
        )
        try:
            assert process.wait() == 0, log.read_text()[-3000:]
        finally:
            process.kill()
        assert not list(temporary.iterdir()), "what a run leaves in TMPDIR"
        return [json.loads(line) for line in held.read_text().splitlines()]

    return go


def check(rows: list[dict[str, int]]) -> None:
    assert len(rows) == STEPS
    early, late = rows[WARM : WARM + SPAN], rows[-SPAN:]
    grown = {name: median(row[name] for row in late) - median(row[name] for row in early) for name in rows[0]}
    most = {name: max(row[name] for row in rows[WARM:]) for name in rows[0]}
    at_first = {name: max(row[name] for row in rows[:WARM]) for name in rows[0]}
    assert grown.pop("resident_kb") < MAX_RESIDENT_MB << 10, (grown, at_first, most)
    assert not any(growth > 0 for growth in grown.values()), (grown, at_first, most)


@pytest.mark.extended
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", ["off", "carry_over"])
def test_a_long_run_holds_no_more_at_its_end_than_after_its_first_steps(
    overrides: Any, digits_data: Path, soak: Any, mode: str
) -> None:
    ahead = (
        "trainer.async_training.over_sampling=1.5",
        "trainer.async_training.staleness=2",
        "algorithm.rollout_correction.bypass_mode=True",
    )
    rows = soak(
        overrides(
            "trainer.plugins=[tests.soak_plugin]",
            f"trainer.async_training.mode={mode}",
            *(ahead if mode == "carry_over" else ()),
            "data.train_batch_size=4",
            "actor_rollout_ref.rollout.n=2",
            f"data.val_files={digits_data}/val.jsonl",
            *RARE,
        )
    )
    check(rows)


@pytest.mark.extended
@pytest.mark.timeout(7200)
def test_a_long_run_with_tools_holds_no_more_at_its_end(tmp_path: Path, soak: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = LlamaConfig(
        vocab_size=len(chat_tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    model, task = save_chat_model(LlamaForCausalLM(size), tmp_path / "model"), save_task(tmp_path, 0.0)
    rows = soak(
        agent_run(
            model,
            task,
            tmp_path / "run",
            f"{MULTI_TURN}.tools={task}/tools.py",
            "data.train_batch_size=2",
            "actor_rollout_ref.rollout.n=2",
            f"data.val_files={task}/train.jsonl",
            "trainer.plugins=[tests.agent_run,tests.soak_plugin]",
            *RARE,
        )
    )
    check(rows)
