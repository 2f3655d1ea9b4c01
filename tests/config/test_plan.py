"""The memory estimate against real tensors, and what the plan says about what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl.config.load import from_dict, load_ppo_config, load_sft_config
from verl.config.machine import Device, local_device, parse_gpus
from verl.config.plan import RunPlan
from verl.config.plan_report import render, warnings
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.sizes import activation_bytes, gib, read_sizes, sizes_of

Make = Callable[..., Path]
GPU = Device("cuda", "a GPU", 80 * 2**30, 8)
BIG = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
PARAMETERS = 7_615_616_512


def grpo(folder: Path, **values: Any) -> PPOConfig:
    given = {
        "actor_rollout_ref.model.path": str(folder),
        "data.train_files": str(folder / "config.json"),
        "data.train_batch_size": 64,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 8,
        **{key.replace("__", "."): value for key, value in values.items()},
    }
    return from_dict(PPOConfig, given)


def test_weights_gradients_and_optimiser_are_exact(model_folder: Make) -> None:
    result = RunPlan(grpo(model_folder(**BIG)), GPU)
    assert result.memory is not None
    (actor,) = result.memory.roles
    assert actor.weights == 2 * PARAMETERS
    assert actor.gradients == 4 * PARAMETERS
    assert actor.optimiser == 12 * PARAMETERS  # two float32 moments and the float32 copy
    cpu = RunPlan(grpo(model_folder(**BIG)), Device("cpu", "CPU", None))
    assert cpu.memory is not None
    assert cpu.memory.roles[0].weights == 4 * PARAMETERS
    assert cpu.memory.roles[0].optimiser == 8 * PARAMETERS


def test_sharding_divides_what_a_rank_holds(model_folder: Make) -> None:
    folder = model_folder(**BIG)
    one = RunPlan(grpo(folder), GPU).memory
    four = RunPlan(grpo(folder, trainer__n_gpus_per_node=4), GPU).memory
    hybrid = RunPlan(
        grpo(folder, trainer__n_gpus_per_node=4, actor_rollout_ref__actor__fsdp_config__fsdp_size=2), GPU
    ).memory
    assert one and four and hybrid
    assert four.roles[0].optimiser == one.roles[0].optimiser // 4
    assert hybrid.roles[0].optimiser == one.roles[0].optimiser // 2
    assert four.phases[0].parts["weights"] > four.roles[0].weights  # whole while generating


def test_roles_follow_the_algorithm(model_folder: Make) -> None:
    folder = model_folder()

    def roles(config: PPOConfig) -> list[str]:
        memory = RunPlan(config, GPU).memory
        assert memory is not None
        return [role.role for role in memory.roles]

    assert roles(grpo(folder)) == ["actor"]
    assert roles(grpo(folder, actor_rollout_ref__actor__use_kl_loss=True)) == ["actor", "ref"]
    lora = grpo(folder, actor_rollout_ref__actor__use_kl_loss=True, actor_rollout_ref__model__lora_rank=8)
    assert roles(lora) == ["actor"]  # the reference is the actor without its adapters
    assert roles(grpo(folder, algorithm__adv_estimator="gae", algorithm__use_kl_in_reward=True)) == [
        "actor",
        "ref",
        "critic",
    ]
    prime = {"algorithm__adv_estimator": "prime"}
    assert roles(grpo(folder, **prime)) == ["actor", "implicit_reward", "implicit_reward's start"]
    assert roles(grpo(folder, **prime, implicit_reward__model__lora_rank=8)) == ["actor", "implicit_reward"]


def test_the_reward_model_counts_with_its_own_model_and_its_frozen_start(model_folder: Make) -> None:
    small, large = model_folder(), model_folder(**BIG)
    both = grpo(small, algorithm__adv_estimator="prime", implicit_reward__model__path=str(large))
    memory = RunPlan(both, GPU).memory
    assert memory is not None
    actor, trained, start = memory.roles
    assert trained.parameters == start.parameters == PARAMETERS > actor.parameters
    assert start.weights == trained.weights and not start.trained and not start.optimiser
    update = next(phase for phase in memory.phases if phase.name == "update implicit_reward")
    assert update.parts["other roles"] == actor.idle + start.idle
    missing = RunPlan(
        grpo(small, algorithm__adv_estimator="prime", implicit_reward__model__path="org/absent"), GPU
    )
    assert any("implicit_reward is not in the estimate: 'org/absent'" in line for line in warnings(missing))


def test_lora_trains_adapters_only(model_folder: Make) -> None:
    memory = RunPlan(grpo(model_folder(**BIG), actor_rollout_ref__model__lora_rank=16), GPU).memory
    assert memory is not None
    actor = memory.roles[0]
    assert actor.gradients == 4 * actor.trained
    assert actor.trained < PARAMETERS // 100


def test_the_cache_is_exact(model_folder: Make) -> None:
    result = RunPlan(grpo(model_folder(**BIG)), Device("cuda", "g", None))
    assert result.memory is not None
    assert result.memory.cache_tokens == 64 * 8 * 1024
    # keys and values, 28 layers, 4 heads of 128, two bytes
    assert result.memory.cache_bytes == 64 * 8 * 1024 * 2 * 28 * 4 * 128 * 2
    fewer = RunPlan(
        grpo(model_folder(**BIG), actor_rollout_ref__rollout__max_num_seqs=16), Device("cuda", "g", None)
    )
    assert fewer.memory is not None and fewer.memory.cache_tokens == 16 * 1024


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "phi3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow(seconds=1)
def test_activations_are_near_what_autograd_keeps(kind: str, dtype: str) -> None:
    """The estimate has one layer of slack for the backward pass; without it, it is near what is saved."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = {
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if kind in ("phi", "phi3") else 2,
        "intermediate_size": 160,
        "vocab_size": 97,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **({"head_dim": 16} if kind in ("qwen3", "gemma") else {}),
    }
    config = CONFIG_MAPPING[kind](**values)
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    tokens = 128
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=False)
    measured = sum(storage.nbytes() for storage in kept.values()) / tokens
    sizes = sizes_of(model)
    element = 4 if dtype == "float32" else 2
    estimated = (
        activation_bytes(sizes, element, checkpointing=False, offload=False)
        * sizes.layers
        / (sizes.layers + 1)
    )
    assert 0.75 < estimated / measured < 1.25, (estimated, measured)


def test_checkpointing_and_offload_keep_less(model_folder: Make) -> None:
    sizes = read_sizes(str(model_folder(**BIG)))
    assert sizes is not None
    full = activation_bytes(sizes, 2, checkpointing=False, offload=False)
    recomputed = activation_bytes(sizes, 2, checkpointing=True, offload=False)
    offloaded = activation_bytes(sizes, 2, checkpointing=False, offload=True)
    assert offloaded < recomputed < full / 5


def test_what_does_not_fit_is_said_with_keys_and_amounts(model_folder: Make) -> None:
    config = grpo(
        model_folder(**BIG),
        actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=4,
        actor_rollout_ref__actor__use_kl_loss=True,
    )
    result = RunPlan(config, GPU)
    update = next(line for line in warnings(result) if line.startswith("'update actor'"))
    assert "80.0 GiB" in update
    assert "trainer.n_gpus_per_node=2" in update
    assert "actor_rollout_ref.model.lora_rank=16" in update
    generate = next(line for line in warnings(result) if line.startswith("'generate'"))
    assert f"actor_rollout_ref.actor.fsdp_config.optimizer_offload=True (-{gib(12 * PARAMETERS)})" in generate
    large = RunPlan(config, Device("cuda", "a GPU", 1000 * 2**30))
    assert not [line for line in warnings(large) if "needs about" in line]


def test_a_model_that_leaves_no_memory_for_the_cache_is_warned_about(model_folder: Make) -> None:
    offloaded = {
        f"actor_rollout_ref__actor__fsdp_config__{name}": True
        for name in ("param_offload", "optimizer_offload")
    }
    config = grpo(model_folder(**BIG), actor_rollout_ref__rollout__gpu_memory_utilization=0.1, **offloaded)
    assert any(
        "no memory for the KV cache of one sequence" in line for line in warnings(RunPlan(config, GPU))
    )
    assert not any("KV cache of one" in line for line in warnings(RunPlan(grpo(model_folder(**BIG)), GPU)))


def test_a_named_remedy_saves_what_it_says(model_folder: Make) -> None:
    folder = model_folder(**BIG)
    before = RunPlan(grpo(folder), GPU).memory
    after = RunPlan(grpo(folder, actor_rollout_ref__actor__fsdp_config__optimizer_offload=True), GPU).memory
    assert before and after
    assert before.phases[0].total - after.phases[0].total == 12 * PARAMETERS


def test_the_critic_uses_its_own_micro_batch(model_folder: Make) -> None:
    config = grpo(
        model_folder(**BIG),
        algorithm__adv_estimator="gae",
        actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=4,
        critic__ppo_micro_batch_size_per_gpu=2,
    )
    memory = RunPlan(config, GPU).memory
    assert memory is not None
    held = {phase.name: phase.parts["activations"] for phase in memory.phases if phase.name != "generate"}
    assert held["update actor"] == 2 * held["update critic"]


def test_missing_files_packages_and_gpus_are_named(model_folder: Make) -> None:
    config = grpo(
        model_folder(), data__train_files="/no/such/train.parquet", actor_rollout_ref__rollout__name="sglang",
        trainer__n_gpus_per_node=16,
    )  # fmt: skip
    lines = "\n".join(warnings(RunPlan(config, GPU)))
    assert "no file or folder '/no/such/train.parquet'" in lines
    assert "pip install 'sglang>=" in lines
    assert "this machine has 8 GPUs" in lines


def test_a_model_that_is_not_here_is_planned_without_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    result = RunPlan(
        from_dict(PPOConfig, {"actor_rollout_ref.model.path": "org/model", "data.train_files": "org/data"}),
        GPU,
    )
    assert result.memory is None
    assert "prompts per step" in render(result)
    assert "memory is not estimated" in render(result)


def test_check_prints_the_plan_and_ends(model_folder: Make, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folder()
    given = [
        f"actor_rollout_ref.model.path={folder}",
        f"data.train_files={folder}/config.json",
        "trainer.device=cpu",
    ]
    with pytest.raises(SystemExit) as ended:
        load_ppo_config(["--check", *given])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for words in (
        "prompts per step",
        "actor: weights",
        "actor: gradients",
        "actor: optimiser",
        "activations",
        "KV cache",
    ):
        assert words in shown
    assert "no warnings" in shown


def test_check_of_fine_tuning(model_folder: Make, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folder()
    with pytest.raises(SystemExit):
        load_sft_config(
            [
                f"model.path={folder}",
                f"data.train_files={folder}/config.json",
                "--check",
                "trainer.device=cpu",
            ]
        )
    assert "peak, update model" in capsys.readouterr().out
    result = RunPlan(from_dict(SFTConfig, {"model.path": str(folder), "data.train_files": "x"}), GPU)
    assert result.memory is not None and len(result.memory.phases) == 1


def test_gpus_are_read_from_nvidia_smi() -> None:
    answer = "0, NVIDIA H200, 143771\n1, NVIDIA A100, 81920\n"
    assert parse_gpus(answer, None) == [("NVIDIA H200", 143771 * 2**20), ("NVIDIA A100", 81920 * 2**20)]
    assert parse_gpus(answer, "1") == [("NVIDIA A100", 81920 * 2**20)]
    assert parse_gpus(answer, "GPU-abc") == [("NVIDIA H200", 143771 * 2**20)]
    assert parse_gpus("no devices were found\n", None) == []


def test_processes_on_a_cpu_share_its_memory() -> None:
    one, two = local_device("cpu", 1), local_device("cpu", 2)
    assert one.memory is not None and two.memory is not None
    assert 0.4 < two.memory / one.memory < 0.6
    assert local_device("cpu").kind == "cpu"
