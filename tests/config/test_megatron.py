"""Layouts of strategy=megatron and of Ulysses: what is refused before a model is loaded, and what the plan says."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl.config.load import from_dict, load_ppo_config
from verl.config.machine import Device, missing_packages
from verl.config.parallelism import Layout, bubble_share
from verl.config.plan import RunPlan, batch_plan
from verl.config.plan_report import check_text, layout_table, render, warnings
from verl.config.roles import model_roles
from verl.config.run_checks import model_layout_errors
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.sizes import gib, read_sizes
from verl.errors import ConfigError

Make = Callable[..., Path]
ACTOR, CRITIC, REF, MODEL = (
    "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref", "actor_rollout_ref.model",
)  # fmt: skip
TP, PP, CP, EP = (
    f"megatron.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model")
)
ULYSSES = "ulysses_sequence_parallel_size"
GPU = Device("cuda", "a GPU", 80 * 2**30, 8)


def ppo(path: str | Path = "org/model", **values: Any) -> PPOConfig:
    """GRPO on megatron with 8 ranks unless told otherwise; `actor`, `critic`, ...: keys of those sections."""
    given: dict[str, Any] = {
        f"{MODEL}.path": str(path),
        "data.train_files": "org/data",
        "data.train_batch_size": 64,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 8,
        "trainer.n_gpus_per_node": 8,
        f"{ACTOR}.strategy": "megatron",
    }
    return from_dict(PPOConfig, given | values)


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as error:
        ppo(**values)
    return str(error.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({f"{ACTOR}.{TP}": 4, f"{ACTOR}.{PP}": 4}, [f"{TP} 4 x {PP} 4 = 16 ranks", "the 8 of", "2, 4, 8"]),
        ({f"{ACTOR}.{TP}": 3}, [f"{TP} 3 = 3 ranks", "1, 2, 4, 8", "or 3 ranks"]),
        ({f"{ACTOR}.{CP}": 2, f"{ACTOR}.{ULYSSES}": 8}, [f"{CP} 2 x {ULYSSES} 8 = 16"]),
        ({f"{ACTOR}.strategy": "fsdp", f"{ACTOR}.{ULYSSES}": 3}, [f"{ULYSSES} 3 = 3 ranks"]),
        ({f"{ACTOR}.{PP}": 2, f"{ACTOR}.{EP}": 8}, [f"'{ACTOR}.{EP}' is 8", "the 4 ranks", "1, 2, 4"]),
        ({f"{ACTOR}.megatron.sequence_parallel": True}, ["sequence_parallel' is True", "Set it to False"]),
        ({f"{MODEL}.lora_rank": 8}, [f"'{MODEL}.lora_rank' is 8", f"{ACTOR}.strategy=fsdp"]),
        ({f"{ACTOR}.use_torch_compile": True}, [f"'{ACTOR}.use_torch_compile'", "set it to False"]),
        ({f"{ACTOR}.optim.name": "muon"}, [f"'{ACTOR}.optim.name' is muon", "set it to adamw"]),
        ({f"{ACTOR}.optim.moments": "int8"}, [f"'{ACTOR}.optim.moments' is int8", "Set it to float32"]),
        ({f"{ACTOR}.optim.stochastic_rounding": True}, [f"'{ACTOR}.optim.stochastic_rounding'", "to False"]),
        ({f"{MODEL}.use_remove_padding": False}, [f"'{MODEL}.use_remove_padding' is False", "leave it out"]),
        (
            {f"{ACTOR}.strategy": "fsdp", f"{ACTOR}.{ULYSSES}": 2, f"{MODEL}.use_remove_padding": False},
            [f"'{MODEL}.use_remove_padding' is False, but {ULYSSES}"],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_line(values: dict[str, Any], words: list[str]) -> None:
    text = refusal(**values)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_roles_follow_the_actor_unless_they_are_told_otherwise() -> None:
    sizes = {f"{ACTOR}.{TP}": 2, f"{ACTOR}.{PP}": 2, f"{ACTOR}.{ULYSSES}": 2}
    both = {**sizes, "algorithm.adv_estimator": "gae", f"{ACTOR}.use_kl_loss": True}
    roles = {role.name: role.layout for role in model_roles(ppo(**both))}
    assert roles == dict.fromkeys(("actor", "ref", "critic"), Layout(dp=1, tp=2, pp=2, cp=2))
    own = ppo(**both, **{f"{CRITIC}.{TP}": 1, f"{REF}.strategy": "fsdp", f"{REF}.{ULYSSES}": 4})
    roles = {role.name: role.layout for role in model_roles(own)}
    assert roles["critic"] == Layout(dp=2, tp=1, pp=2, cp=2)
    assert roles["ref"] == Layout(dp=2, cp=4)
    assert [role.name for role in model_roles(ppo(**sizes))] == ["actor"]


def test_an_error_of_followers_is_said_once_and_their_own_by_their_keys() -> None:
    values = {"algorithm.adv_estimator": "gae", f"{ACTOR}.use_kl_loss": True}
    assert refusal(**values, **{f"{ACTOR}.{TP}": 3}).count("3 ranks for one copy") == 1
    text = refusal(**values, **{f"{CRITIC}.{TP}": 3, f"{CRITIC}.optim.moments": "int8"})
    assert text.startswith(f"'{CRITIC}': {TP} 3")
    assert f"'{CRITIC}.optim.moments' is int8" in text and "actor" not in text


def test_the_role_with_most_shards_needs_that_many_sequences() -> None:
    few = {"data.train_batch_size": 1, "actor_rollout_ref.rollout.n": 2, "algorithm.adv_estimator": "gae"}
    ppo(**few, **{f"{ACTOR}.{TP}": 8})
    text = refusal(**few, **{f"{ACTOR}.{TP}": 8, f"{CRITIC}.{TP}": 2})
    assert "2 sequences for 4 groups of 2 ranks; set it to at least 2" in text


def test_offloading_has_keys_in_the_section_of_the_strategy() -> None:
    values = {f"{ACTOR}.megatron.param_offload": True, f"{ACTOR}.fsdp_config.param_offload": True}
    shown = warnings(RunPlan(ppo(**values, **{"trainer.device": "cuda"}), GPU))
    assert any(f"'{ACTOR}.fsdp_config.param_offload'=True has no effect" in line for line in shown)
    assert not any(f"'{ACTOR}.megatron.param_offload'" in line for line in shown)


# -- with the model's config.json -----------------------------------------------------------------------------------

MOE = {"model_type": "qwen3_moe", "num_experts": 12, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("model", "values", "words"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, {TP: 4}, [f"{TP}' is 4", "6 attention heads", "1, 2"]),
        ({"num_attention_heads": 8}, {TP: 4}, ["2 key-value heads", "Values that work: 1, 2"]),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 100},
            {TP: 8},
            ["100 columns", "Values that work: 1, 2, 4"],
        ),
        ({}, {TP: 2, CP: 4}, [f"{CP}' is 4", "2 attention heads of each tensor-parallel rank (4 / 2)", "1, 2"]),
        ({}, {TP: 2, ULYSSES: 4}, [f"{ULYSSES}' is 4"]),
        ({"num_hidden_layers": 6}, {PP: 4}, [f"{PP}' is 4", "6 layers", "1, 2, 3, 6"]),
        ({}, {EP: 2}, [f"{EP}' is 2", "has no experts", "set it to 1"]),
        (MOE, {EP: 8}, [f"{EP}' is 8", "12 experts", "4, 6, 12"]),
        ({"model_type": "gemma2"}, {}, ["model type gemma2", "llama, mistral, qwen2, qwen3, qwen3_moe, mixtral"]),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, ["quantised weights", f"{ACTOR}.strategy=fsdp"]),
        ({"num_attention_heads": 12}, {"strategy": "fsdp", ULYSSES: 8}, [f"{ULYSSES}' is 8", "12 attention heads"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_does_not_fit_the_model_names_what_does(
    model_folder: Make, model: dict[str, Any], values: dict[str, Any], words: list[str]
) -> None:
    config = ppo(model_folder(**model), **{f"{ACTOR}.{key}": value for key, value in values.items()})
    with pytest.raises(ConfigError) as refused:  # --check
        check_text(config)
    for word in words:
        assert word in str(refused.value)
    assert model_layout_errors(RunPlan(config)) == [str(refused.value)]


def test_what_fits_the_model_passes(model_folder: Make) -> None:
    fits = [
        ({}, {TP: 2, PP: 2, CP: 2}),
        (MOE, {PP: 2, EP: 4}),
        (MOE, {TP: 4, EP: 4}),  # experts are split over the ranks that split matrices, too
        ({"model_type": "gemma2"}, {"strategy": "fsdp2", ULYSSES: 4}),
    ]
    for model, values in fits:
        config = ppo(model_folder(**model), **{f"{ACTOR}.{key}": value for key, value in values.items()})
        assert model_layout_errors(RunPlan(config)) == []
    assert model_layout_errors(RunPlan(ppo("org/nowhere", **{f"{ACTOR}.{TP}": 8}))) == []  # nothing to read


def test_another_model_of_the_critic_is_judged_by_its_own_config(model_folder: Make) -> None:
    folder, other = model_folder(num_key_value_heads=4), model_folder(num_hidden_layers=3)
    values = {"algorithm.adv_estimator": "gae", "critic.model.path": str(other), f"{ACTOR}.{PP}": 2}
    (line,) = model_layout_errors(RunPlan(ppo(folder, **values)))
    assert line.startswith(f"'{CRITIC}.{PP}' is 2") and "3 layers" in line


def test_the_package_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        if name.startswith("megatron"):
            raise ModuleNotFoundError(name)
        return object()

    monkeypatch.setattr(importlib.util, "find_spec", find)
    (line,) = missing_packages(ppo())
    assert f"{ACTOR}.strategy=megatron needs the package 'megatron-core'" in line
    assert "pip install 'megatron-core>=0.16.1,<0.17'" in line
    assert missing_packages(ppo(**{f"{ACTOR}.strategy": "fsdp"})) == []


# -- fine-tuning ----------------------------------------------------------------------------------------------------


def sft(path: str | Path = "org/model", **values: Any) -> SFTConfig:
    given = {"model.path": str(path), "data.train_files": "org/data", "model.strategy": "megatron"}
    return from_dict(SFTConfig, {**given, "trainer.n_gpus_per_node": 4, **values})


def test_fine_tuning_counts_groups_of_ranks(model_folder: Make) -> None:
    config = sft(model_folder(), **{f"model.{TP}": 2, "data.train_batch_size": 2})
    assert batch_plan(config).rank_sequences == 1
    with pytest.raises(ConfigError, match="fewer rows than the 4 ranks"):
        sft(**{"data.train_batch_size": 2})
    with pytest.raises(ConfigError, match=r"'optim.moments' is int8.*or model.strategy=fsdp"):
        sft(**{"optim.moments": "int8"})
    with pytest.raises(ConfigError, match="each of the 2 groups of 2 ranks has 4 of the 8 rows"):
        sft(**{f"model.{PP}": 2, "data.train_batch_size": 8, "data.micro_batch_size_per_gpu": 5})
    (line,) = model_layout_errors(RunPlan(sft(model_folder(num_hidden_layers=3), **{f"model.{PP}": 2})))
    assert line.startswith(f"'model.{PP}' is 2")


# -- the plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ({}, Layout(tp=2, pp=1)),
        ({"num_hidden_layers": 4}, Layout(tp=2, pp=4)),
        ({"num_hidden_layers": 4, "tie_word_embeddings": True}, Layout(pp=2)),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_hidden_layers": 2, "num_experts_per_tok": 2},
            Layout(dp=4, pp=2, ep=4),
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_hidden_layers": 2, "num_experts_per_tok": 2},
            Layout(tp=2, dp=2, ep=4),
        ),
    ],
)  # fmt: skip
def test_the_weights_of_a_stage_against_counting_them(
    model_folder: Make, model: dict[str, Any], layout: Layout
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = model_folder(**model)
    sizes = read_sizes(str(folder))
    assert sizes is not None
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    stages = [[0, 0] for _ in range(layout.pp)]
    norms = 0
    for name, weight in built.named_parameters(remove_duplicate=False):
        expert = ".experts." in name
        if ".layers." in name:
            at = int(name.split(".layers.")[1].split(".")[0]) * layout.pp // sizes.layers
        else:
            at = 0 if "embed" in name else layout.pp - 1
        if layout.pp == 1 and name == "lm_head.weight" and model.get("tie_word_embeddings"):
            continue
        norms += weight.numel() if "norm" in name else 0
        stages[at][expert] += weight.numel() // (layout.ep if expert else layout.tp)
    dense, experts = sizes.stage_weights(layout, value_head=False)
    assert experts == stages[0][1]
    assert abs(dense - max(stage[0] for stage in stages)) <= norms


def test_memory_of_a_rank_follows_the_layout(model_folder: Make) -> None:
    """Weights and gradients by TP and PP, optimiser state by all ranks, tokens by CP."""
    folder = model_folder(
        hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=16,
        intermediate_size=4096, vocab_size=32000,
    )  # fmt: skip

    def held(**sizes: int) -> tuple[Any, dict[str, int]]:
        keys = {f"{ACTOR}.{key}": value for key, value in sizes.items()}
        memory = RunPlan(ppo(folder, **keys, **{f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4}), GPU).memory
        assert memory is not None
        return memory.roles[0], memory.phases[1].parts

    whole, whole_parts = held()
    total = whole.parameters
    assert (whole.weights, whole.gradients, whole.optimiser) == (2 * total, 4 * total, 12 * total // 8)
    split, split_parts = held(**{TP: 4})
    assert split.weights == pytest.approx(2 * total / 4, rel=1e-3)
    assert split.optimiser == pytest.approx(whole.optimiser, rel=1e-3)
    assert 0.25 < split_parts["activations"] / whole_parts["activations"] < 0.6  # norms are not split
    staged, staged_parts = held(**{PP: 4})
    ends = 32000 * 1024
    assert staged.weights == pytest.approx(2 * ((total - 2 * ends) / 4 + ends), rel=1e-3)
    assert staged.optimiser == pytest.approx(12 * staged.weights / 2 / 2, rel=1e-3)
    # four stages keep a quarter of the layers of up to four micro-batches
    assert staged_parts["activations"] == whole_parts["activations"]
    cut, cut_parts = held(**{CP: 4})
    assert (cut.weights, cut.optimiser) == (whole.weights, whole.optimiser)
    assert cut_parts["activations"] == whole_parts["activations"] // 4


def test_generating_needs_a_copy_of_weights_that_are_split(model_folder: Make) -> None:
    def weights(**values: Any) -> tuple[int, Any]:
        memory = RunPlan(ppo(model_folder(), **values), GPU).memory
        assert memory is not None
        return memory.phases[0].parts["weights"], memory.roles[0]

    held, actor = weights()
    assert held == actor.weights == actor.full_weights  # the native engine uses the trainer's
    held, actor = weights(**{f"{ACTOR}.{TP}": 2})
    assert held == actor.weights + actor.full_weights
    vllm = {
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 4,
    }
    held, actor = weights(**vllm)
    assert held == actor.weights + actor.full_weights // 4


def test_the_layout_and_its_bubble_are_printed(model_folder: Make) -> None:
    values = {
        f"{ACTOR}.{TP}": 2, f"{ACTOR}.{PP}": 2, f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.ppo_mini_batch_size": 8, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
        f"{REF}.log_prob_micro_batch_size_per_gpu": 16,
    }  # fmt: skip
    config = ppo(model_folder(), **values)
    text = render(RunPlan(config, GPU))
    assert "8 ranks  megatron: TP 2, PP 2, CP 1, DP 2" in text
    assert "of each mini-batch, on 2 groups of 4 ranks" in text
    rows = {name: (number, remark) for name, number, remark in layout_table(RunPlan(config, GPU))}
    assert rows["actor: layers per stage"] == ("1", "of 2")
    assert rows["actor: micro-batches per stage"] == ("8", "each stage waits 1 of 9 turns: 11.1 %")
    assert rows["ref: micro-batches per stage"][0] == "16"  # all sequences at once, not a mini-batch
    assert bubble_share(2, 8) == 1 / 9
    assert (
        layout_table(
            RunPlan(ppo(model_folder(), **{f"{ACTOR}.strategy": "fsdp", "trainer.n_gpus_per_node": 1}), GPU)
        )
        == []
    )


def test_stages_that_wait_are_warned_of(model_folder: Make) -> None:
    values = {
        f"{ACTOR}.{PP}": 8,
        f"{ACTOR}.ppo_mini_batch_size": 2,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 8,
    }
    shown = warnings(RunPlan(ppo(model_folder(num_hidden_layers=8), **values), GPU))
    (line,) = [line for line in shown if "a rank has" in line]
    assert "is 8, but a rank has 2 micro-batches: each stage waits 78 %" in line
    assert f"{ACTOR}.ppo_micro_batch_size_per_gpu=2" in line
    better = {**values, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2}
    assert not any(
        "a rank has" in line
        for line in warnings(RunPlan(ppo(model_folder(num_hidden_layers=8), **better), GPU))
    )


def test_a_finer_split_is_proposed_where_it_is_possible(model_folder: Make) -> None:
    folder = model_folder(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=2,
        intermediate_size=14336, vocab_size=128256,
    )  # fmt: skip
    values = {f"{ACTOR}.{TP}": 2, "trainer.n_gpus_per_node": 4, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1}
    shown = warnings(RunPlan(ppo(folder, **values), Device("cuda", "a GPU", 40 * 2**30, 8)))
    line = next(line for line in shown if line.startswith("'update actor'"))
    assert f"{ACTOR}.{PP}=2 (-" in line
    assert f"{ACTOR}.{TP}=4" not in line  # two key-value heads
    assert "lora_rank" not in line


# -- docs/megatron.md -----------------------------------------------------------------------------------------------

LLAMA_70B = {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "intermediate_size": 28672, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip


def test_the_numbers_of_the_page_are_those_of_the_plan(model_folder: Make, tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "megatron.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    shown = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.partition("| per GPU |")[2].splitlines()[2:12]
    ]
    folder = model_folder(**LLAMA_70B)
    assert len(blocks) == 2
    for column, (block, memory) in enumerate(zip(blocks, (140, 80), strict=True), start=1):
        (tmp_path / "page.yaml").write_text(block)
        flags = ["--config-path", str(tmp_path), "--config-name", "page"]
        config = load_ppo_config([*flags, f"{MODEL}.path={folder}", "data.train_files=org/data"])
        result = RunPlan(config, Device("cuda", "a GPU", memory * 2**30, 8))
        assert not [line for line in warnings(result) if "needs about" in line or "does not divide" in line]
        assert result.memory is not None
        generate, update = result.memory.phases
        parts = ("weights", "gradients", "optimiser", "activations", "output matrix", "other roles")
        micro, waits = next(
            row[1:] for row in layout_table(result) if row[0] == "actor: micro-batches per stage"
        )
        expected = [
            *(gib(update.parts[part]) if update.parts[part] else "0" for part in parts),
            gib(update.total),
            gib(generate.total),
            micro,
            waits.rpartition(": ")[2],
        ]
        assert [row[column] for row in shown] == expected
    small = RunPlan(
        load_ppo_config([*flags, f"{MODEL}.path={folder}", "trainer.nnodes=2", "data.train_files=o/d"]), GPU
    )
    assert any(line.startswith("'update actor' needs about") for line in warnings(small))
