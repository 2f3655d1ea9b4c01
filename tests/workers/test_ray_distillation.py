"""Distillation on two ranks: the teacher's outputs and the updates are those of one process."""

from __future__ import annotations

import shutil

import pytest
import torch

pytestmark = pytest.mark.components

SETTINGS = {
    "full": ["actor_rollout_ref.actor.ppo_mini_batch_size=5"],
    "top": ["actor_rollout_ref.teacher.top_k=6", "actor_rollout_ref.teacher.kl=forward"],
    "self": [
        "actor_rollout_ref.teacher.path=",
        "actor_rollout_ref.teacher.source=current",
        "actor_rollout_ref.teacher.top_k=6",
        "actor_rollout_ref.teacher.prompt_template='{prompt} {prompt}'",
    ],
}
COMPARED = ("actor/distillation_kl", "actor/pg_loss", "actor/grad_norm", "critic/score/mean")


@pytest.mark.parametrize("kind", SETTINGS)
def test_one_and_two_processes_agree(kind, train, joined, tiny_model_dir, tmp_path):
    from transformers import AutoConfig, LlamaForCausalLM

    teacher = tmp_path / "teacher"
    torch.manual_seed(7)
    LlamaForCausalLM(AutoConfig.from_pretrained(tiny_model_dir)).save_pretrained(teacher)
    shutil.copy(tiny_model_dir / "tokenizer.json", teacher)
    settings = [
        "actor_rollout_ref.actor.policy_loss.loss_mode=distillation",
        f"actor_rollout_ref.teacher.path={teacher}",
        "trainer.total_training_steps=3",
        *SETTINGS[kind],
    ]
    alone, _ = train(*settings, folder="alone")
    rows, folder = train(*settings, "trainer.n_gpus_per_node=2", folder="two")
    assert len(rows) == len(alone) == 3 and alone[0]["actor/distillation_kl"] > 0.001
    for mine, one in zip(rows, alone, strict=True):
        for name in COMPARED:
            assert mine[name] == pytest.approx(one[name], rel=2e-3, abs=2e-5), name
    parts = {each.name for each in (folder / "global_step_3").iterdir() if each.is_dir()}
    assert "actor" in parts and "teacher" not in parts, "a teacher is not saved"
