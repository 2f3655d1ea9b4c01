"""GRPO on SmolLM2-135M with vLLM generating, through the real command; LoRA adapters as adapters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_run import read_metrics, tiny_run
from verl.rollout import build_rollout
from verl.rollout.base import Request, SamplingParams
from verl.rollout.source import ModuleWeights

pytest.importorskip("vllm", reason="needs vLLM (make test-components)")
pytestmark = [pytest.mark.components, pytest.mark.slow(seconds=40), pytest.mark.timeout(900)]

STEPS = 3


@pytest.fixture(scope="module")
def words_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short answers are worth more: a reward every sample of any model gets a different amount of."""
    folder = tmp_path_factory.mktemp("words")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Say a word that rhymes with {word}."}],
            "reward_model": {"ground_truth": word},
            "data_source": "words",
        }
        for word in ("cat", "tree", "light", "moon", "stone", "rain", "clock", "bread")
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return solution_str.count('e') / (1 + len(solution_str))\n"
    )
    return folder


@pytest.fixture
def run_command(fork_server: Any, tmp_path: Path) -> Callable[..., None]:
    """Train with the command, to its end, in `tmp_path`/run."""

    def go(task: Path, model: Path, *extra: str) -> None:
        log = tmp_path / "log.txt"
        arguments = tiny_run(
            model,
            task,
            "data.train_batch_size=4",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.temperature=0.8",
            "actor_rollout_ref.rollout.max_num_seqs=16",
            "actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn=True",
            f"trainer.total_training_steps={STEPS}",
            "trainer.total_epochs=10",
            *extra,
            folder=tmp_path / "run",
        )
        process = fork_server.start("verl.trainer.main_ppo", arguments, output=log)
        try:
            assert process.wait(timeout=850) == 0, log.read_text()[-6000:]
        finally:
            process.kill()

    return go


def assert_both_sides_agree(folder: Path) -> None:
    rows = read_metrics(folder)
    differences = [row["training/rollout_probs_diff_mean"] for row in rows]
    assert len(differences) == STEPS and max(differences) < 0.005, differences
    assert min(row["actor/grad_norm"] for row in rows) > 0, "the weights moved"


def test_grpo_on_smollm2_keeps_both_sides_together(
    smollm2_dir: Path, words_task: Path, run_command: Callable[..., None], tmp_path: Path
) -> None:
    task = [
        "data.max_prompt_length=64",
        "data.max_response_length=16",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        f"reward.custom_reward_function.path={words_task}/reward.py",
    ]
    run_command(words_task, smollm2_dir, *task)
    assert_both_sides_agree(tmp_path / "run")


class Adapted:
    """A model with an adapter, tokens and log-probs from vLLM, and the same log-probs from transformers."""

    def __init__(self, model: Any, engine: Any) -> None:
        self.model, self.engine = model, engine


@pytest.fixture(scope="module")
def adapted(small_model: Callable[..., Any], rollout_section: Callable[..., Any]) -> Iterator[Adapted]:
    from verl.models.lora import add_lora

    model = small_model()
    add_lora(model, rank=4, alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    engine = build_rollout("vllm", model, None, rollout_section())
    yield Adapted(model, engine)
    engine.close()


def test_an_adapter_is_used_and_replaced(adapted: Adapted, reference: Callable[..., list[float]]) -> None:
    model, engine = adapted.model, adapted.engine
    request = Request("a", [5, 9, 33], SamplingParams(max_tokens=12, ignore_eos=True), seed=1)
    generator = torch.Generator().manual_seed(0)
    seen = []
    for version in (1, 2, 3):
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
        engine.update_weights(ModuleWeights(model), version)
        (response,) = engine.generate([request])
        assert response.policy_version == version
        assert response.log_probs == pytest.approx(reference(model, [5, 9, 33], response.token_ids), abs=5e-4)
        seen.append(tuple(response.token_ids))
    assert len(set(seen)) == 3, "every adapter speaks differently"
    assert engine.llm.llm_engine.list_loras() == {engine.adapter.lora_int_id}


@pytest.mark.parametrize(
    "placement",
    [
        ["actor_rollout_ref.rollout.mode=server"],
        ["trainer.n_gpus_per_node=2"],
    ],
    ids=["a server beside the trainer", "two ranks with an engine each"],
)
def test_runs_with_vllm_in_other_processes(
    placement: list[str],
    small_model_dir: Path,
    digits_data: Path,
    run_command: Callable[..., None],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    if "trainer.n_gpus_per_node=2" in placement:
        request.getfixturevalue("joined")
    run_command(digits_data, small_model_dir, "actor_rollout_ref.actor.optim.lr=1e-3", *placement)
    assert_both_sides_agree(tmp_path / "run")
