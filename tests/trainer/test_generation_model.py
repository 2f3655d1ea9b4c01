"""What `model.path` may be: folders of runs, checkpoints without whole weights, adapters, and what it may not."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny_run import tiny_run
from verl.config.load import load_ppo_config
from verl.config.schema import GenerationModelConfig
from verl.errors import ModelError
from verl.trainer.generation_model import ModelChoice, choose_model
from verl.trainer.main_ppo import run

Choose = Callable[..., ModelChoice]


def choose(path: Path | str, **more: str) -> ModelChoice:
    return choose_model(GenerationModelConfig(path=str(path), **more))


@pytest.fixture(scope="module")
def train(
    tiny_model_dir: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """One step of a small run; its folder."""

    def go(*more: str) -> Path:
        folder = tmp_path_factory.mktemp("run") / "run"
        reward = folder.parent / "reward.py"
        # Responses of random weights differ in this, so there is something to learn.
        reward.write_text("def compute_score(solution_str):\n    return len(set(solution_str.split()))\n")
        keys = tiny_run(
            tiny_model_dir,
            digits_data,
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "actor_rollout_ref.rollout.n=2",
            f"reward.custom_reward_function.path={reward}",
            "trainer.total_training_steps=1",
            *more,
            folder=folder,
        )
        run(load_ppo_config(keys))
        return folder

    return go


@pytest.fixture(scope="module")
def trained(train: Callable[..., Path]) -> Path:
    return train()


def test_every_folder_of_a_run_means_its_policy(trained: Path) -> None:
    weights = trained / "global_step_1" / "actor" / "huggingface"
    for folder in (weights, weights.parent, weights.parent.parent, trained):
        choice = choose(folder)
        assert choice == ModelChoice(str(weights), str(weights))


def test_a_plain_folder_and_a_name_of_the_hub_are_themselves(tiny_model_dir: Path) -> None:
    assert choose(tiny_model_dir).path == str(tiny_model_dir)
    assert choose("owner/name").path == "owner/name"


def test_a_checkpoint_without_whole_weights_is_answered_with_the_command_that_makes_them(
    train: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    from verl import model_merger

    folder = train("actor_rollout_ref.actor.checkpoint.save_contents=[model]")
    for given in (folder, folder / "global_step_1" / "actor" / "huggingface"):
        with pytest.raises(ModelError) as refused:
            choose(given)
        (command,) = [line for line in str(refused.value).splitlines() if "verl.model_merger" in line]
        assert "set model.path=OUT" in str(refused.value)
    words = shlex.split(command.replace("OUT", str(tmp_path / "merged")))
    assert model_merger.main(words[words.index("verl.model_merger") + 1 :]) == 0
    assert choose(tmp_path / "merged").path == str(tmp_path / "merged")
    assert load_file(tmp_path / "merged" / "model.safetensors")


def test_a_lora_run_without_whole_weights_is_its_adapter_on_its_model(
    train: Callable[..., Path], tiny_model_dir: Path
) -> None:
    from verl.models.loading import load_causal_lm
    from verl.models.lora import merge_adapter

    lora = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.checkpoint.save_contents=[model]")
    actor = train(*lora) / "global_step_1" / "actor"
    choice = choose(actor)
    assert (choice.path, choice.adapter) == (str(tiny_model_dir), actor / "lora_adapter")
    assert choice.tokenizer == str(actor / "huggingface")
    assert choose(tiny_model_dir, lora_path=str(actor)).adapter == actor / "lora_adapter"
    with pytest.raises(ModelError, match="is an adapter"):
        choose(actor, lora_path=str(actor))
    plain = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device="cpu")
    merged = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device="cpu")
    assert merge_adapter(merged, actor / "lora_adapter") == 14
    moved = [not torch.equal(a, b) for a, b in zip(plain.parameters(), merged.parameters(), strict=True)]
    assert sum(moved) == 14


def test_a_critic_is_not_taken_for_a_policy(train: Callable[..., Path]) -> None:
    folder = train("algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=1")
    with pytest.raises(ModelError, match="gives numbers and no text"):
        choose(folder / "global_step_1" / "critic" / "huggingface")


def test_an_unfinished_run_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    (tmp_path / "global_step_3").mkdir()
    with pytest.raises(ModelError, match="no checkpoint of .* is complete"):
        choose(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="neither a Hugging Face folder with weights nor a run folder"):
        choose(tmp_path / "empty")


def test_the_fingerprint_follows_the_files(tiny_model_dir: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(tiny_model_dir, tmp_path / "model")
    before = choose(tmp_path / "model").fingerprint()
    assert choose(tmp_path / "model").fingerprint() == before
    with (tmp_path / "model" / "generation_config.json").open("a") as file:
        file.write("\n")
    assert choose(tmp_path / "model").fingerprint() != before
