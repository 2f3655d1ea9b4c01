"""The troubleshooting page has an entry for each diagnosis, answers the questions users know, and names what exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.observe.histories import SICK
from tests.observe.test_crashes import RECOGNISED, config
from verl.cli import main
from verl.config.aliases import our_name
from verl.config.keys import schema_keys
from verl.config.recipes import recipe_names
from verl.config.schema import DPOConfig, PPOConfig, RewardTrainingConfig, SFTConfig
from verl.observe.diagnoses.crashes import CRASHES, judge_crash
from verl.observe.diagnoses.steps import RULES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
DIAGNOSES = (*RULES, *CRASHES)
KINDS = (PPOConfig, SFTConfig, DPOConfig, RewardTrainingConfig)
KEYS = {key for kind in KINDS for key in schema_keys(kind)}
ROOTS = {key.partition(".")[0] for key in KEYS}
REPORTED = {
    "start": "Reported at the start as `{}`.",
    "step": "Reported after a step as `{}`.",
    "crash": "In `crash.txt`, as `{}`.",
}
DOTTED = re.compile(r"(?<![\w./-])\+{0,2}((?:[a-z][a-z_]*\.)+[a-z][a-z_]*)(?![\w/])")

# Words that the answers to frequent questions must have: the keys and commands that answer them elsewhere.
ENTRIES: dict[str, tuple[str, ...]] = {
    # troubleshooting
    "Reward increases but eval quality drops": ("algorithm.kl_ctrl.kl_coef=0.01", "length", "clipped"),
    "Loss oscillating or not decreasing": ("1e-6", "clip_ratio=0.1", "mini_batch", "rewards"),
    "KL divergence exploding": (
        "kl_coef=0.05",
        "use_kl_loss=True",
        "kl_loss_coef=0.01",
        "use_kl_in_reward=False",
    ),
    "OOM during rollout (vLLM)": ("gpu_memory_utilization", "max_num_seqs"),
    "OOM during training": (
        "ppo_micro_batch_size_per_gpu",
        "critic",
        "enable_gradient_checkpointing=True",
        "data.max_response_length",
    ),
    "OOM with large models": ("tensor_model_parallel_size=4", "trainer.n_gpus_per_node=8"),
    '"CUDA error" or communication error during rollout': ("enforce_eager=True", "gpu_memory_utilization"),
    "Rollout is very slow": (
        "tensor_model_parallel_size",
        "gpu_memory_utilization=0.6",
        "data.max_response_length",
    ),
    "Model generating empty or degenerate responses": (
        "temperature",
        "1.5",
        "template",
        "data.max_response_length",
    ),
    '"KeyError" when loading checkpoint': ("number of GPUs", "verl merge"),
    "Merged model produces bad output": ("compares every tensor", "verl generate"),
    "\"KeyError: 'prompt'\"": ("data.prompt_key=question",),
    "Reward function not being called": ("reward.custom_reward_function.path", "reward_model.reward_fn"),
    "Validation score always 0": ("val_kwargs.temperature=0", "data.val_files", "reward function"),
    "Nodes can't communicate": ("ray status", "reach"),
    "Inconsistent behavior across nodes": ("verl", "model", "Python", "CUDA", "data"),
    # frequent questions: installation and several machines
    "Which versions and images": ("Python 3.11", "image"),
    "Install without Docker": ("verl doctor",),
    "Dependency versions": ("version", "accepted range"),
    "How to use verl on a Slurm-managed cluster?": ("docs/slurm.md",),
    '"Unable to register worker with raylet"': ("ray_kwargs.ray_init.num_cpus",),
    "How to run multi-node post-training with Ray?": (
        "ray start --head",
        "ray start --address",
        "trainer.nnodes=4",
        "trainer.n_gpus_per_node=8",
        "shared file system",
    ),
    "How to generate ray timeline to analyse performance of a training job?": (
        "ray_kwargs.timeline_json_file",
        "Perfetto",
    ),
    "How to add breakpoint for debugging with distributed Ray?": ("breakpoint()", "distributed debugger"),
    # stability
    "KL coefficient": ("algorithm.kl_ctrl.kl_coef",),
    "Reward function output range": ("max(-1.0, min(1.0, reward))",),
    "Learning rate": ("1e-6",),
    "Sample diversity": ("rollout.n",),
    "Advantage normalization": ("algorithm.norm_adv_by_std_in_grpo",),
    "Reward function correctness": ("verl reward test",),
    "NaN loss": ("reward/min", "reward/max", "grad_clip=1.0", "critic", "float32"),
    "Missmatch between inference and training sequence (high actor/grad_norm)": (
        "calculate_log_probs=True",
        "training/rollout_probs_diff_mean",
        "0.005",
        "engine_kwargs.vllm.disable_cascade_attn=True",
    ),
    # memory
    "Rollout OOM": (
        "gpu_memory_utilization",
        "param_offload=True",
        "data.max_response_length",
        "tensor_model_parallel_size",
        "lora_rank",
    ),
    "CPU offloading": ("optimizer_offload=True", "param_offload=True", "ref", "offload_policy"),
    "What is the meaning of train batch size, mini batch size, and micro batch size?": (
        "data.train_batch_size",
        "ppo_mini_batch_size",
        "ppo_micro_batch_size_per_gpu",
    ),
    # algorithms
    "PPO or GRPO": ("adv_estimator=grpo", "adv_estimator=gae", "critic", "rollout.n"),
    "What is DAPO": ("clip_ratio_high", "filter_groups"),
    "Which advantage estimators": ("docs/algorithms.md",),
    # rewards
    "Implement a custom reward function": (
        "compute_score(data_source, solution_str, ground_truth, extra_info=None)",
        "reward.custom_reward_function.path",
    ),
    "Use a reward model": ("reward.reward_model.enable=True",),
    "Parallel reward computation": ("reward.num_workers=8",),
    # the rest
    "Illegal memory access": ("vLLM", "documentation"),
    "Triton ``compile_module_from_src`` error": ("use_torch_compile=False", "CUDA_HOME"),
    "NotImplementedError: TensorDict does not support membership checks with the `in` keyword.": (
        "not used",
        "arm64",
    ),
    "Checkpoints": ("verl merge --backend fsdp", "megatron"),
    "Checkpoints after a crash": ("manifest", "ignored"),
    "How to set proxy only for wandb?": ("trainer.wandb_proxy=",),
}


# The headings of the page that answer each.
ANSWERED_IN: dict[str, tuple[str, ...]] = {
    "Reward function output range": ("A few rewards are far from all others",),
    "Reward function correctness": ("All rewards are equal",),
    "Sample diversity": (
        "Most prompts get equal rewards for all their responses",
        "Responses of a prompt are all the same",
    ),
    "Reward function not being called": ("The reward function is not called",),
    "Reward increases but eval quality drops": ("Reward increases but validation falls",),
    "Validation score always 0": ("Validation score always 0",),
    "NaN loss": ("NaN loss or gradient",),
    "KL divergence exploding": ("KL to the reference is large",),
    "KL coefficient": ("KL to the reference is large", "The policy does not move"),
    "Missmatch between inference and training sequence (high actor/grad_norm)": (
        "Rollout and trainer disagree about the same tokens",
        "Gradient norm keeps growing",
    ),
    "Loss oscillating or not decreasing": ("Loss oscillating", "The policy does not move"),
    "Learning rate": ("Loss oscillating",),
    "Model generating empty or degenerate responses": (
        "Temperature is 0 or very high in training",
        "Responses are empty",
        "Responses repeat the same few tokens",
        "Responses are cut",
    ),
    "Rollout is very slow": ("Rollout is very slow",),
    "OOM during rollout (vLLM)": ("Out of memory while generating",),
    "Rollout OOM": ("Out of memory while generating",),
    "OOM during training": ("Out of memory while training",),
    "CPU offloading": ("Out of memory while training",),
    '"CUDA error" or communication error during rollout': ("CUDA error or communication error",),
    "Illegal memory access": ("CUDA error or communication error",),
    "Triton ``compile_module_from_src`` error": ("Triton cannot compile (`compile_module_from_src`)",),
    '"KeyError" when loading checkpoint': (
        '"KeyError" when loading a checkpoint, or another number of GPUs',
    ),
    "\"KeyError: 'prompt'\"": ("\"KeyError: 'prompt'\"",),
    "Inconsistent behavior across nodes": ("Inconsistent behavior across nodes",),
    '"Unable to register worker with raylet"': ("Unable to register worker with raylet",),
    "Nodes can't communicate": ("Nodes cannot communicate",),
    "Dependency versions": ("A package is missing or another version is installed",),
    "OOM with large models": ("Out of memory with a large model",),
    "What is the meaning of train batch size, mini batch size, and micro batch size?": (
        "What are train batch size, mini-batch size and micro-batch size?",
    ),
    "Checkpoints": ("How is a checkpoint converted to a Hugging Face model?",),
    "Merged model produces bad output": ("Merged model produces bad output",),
    "Checkpoints after a crash": ("What is left of a checkpoint when a run is killed while saving?",),
    "Implement a custom reward function": ("How is a reward function written?",),
    "Use a reward model": ("How is a reward function written?",),
    "Parallel reward computation": ("How is a reward function written?",),
    "PPO or GRPO": ("PPO or GRPO?",),
    "Which advantage estimators": ("PPO or GRPO?",),
    "Advantage normalization": ("PPO or GRPO?",),
    "What is DAPO": ("What is DAPO?",),
    "Which versions and images": ("What has to be installed?",),
    "Install without Docker": ("What has to be installed?",),
    "How to run multi-node post-training with Ray?": ("How does a run use several nodes?",),
    "How to use verl on a Slurm-managed cluster?": ("How does a run use several nodes?",),
    "How to add breakpoint for debugging with distributed Ray?": (
        "How is a breakpoint set in a process on Ray?",
    ),
    "How to generate ray timeline to analyse performance of a training job?": (
        "How is the time of a run analysed?",
    ),
    "How to set proxy only for wandb?": ("How is a proxy set for wandb alone?",),
    "NotImplementedError: TensorDict does not support membership checks with the `in` keyword.": (
        "TensorDict does not support membership checks with `in`",
    ),
}


def sections() -> dict[str, str]:
    """The texts of the page by their headings, the headings included."""
    parts = re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: part.partition("\n## ")[0] for part in parts}


def test_every_entry_users_know_is_answered() -> None:
    answers = sections()
    for entry, words in ENTRIES.items():
        text = " ".join(answers[heading] for heading in ANSWERED_IN[entry])
        assert [word for word in words if word not in text] == [], entry


def test_the_page_has_every_diagnosis_with_its_meaning_and_no_other() -> None:
    page = PAGE.read_text()
    for entry in DIAGNOSES:
        meaning = entry.meaning[0].upper() + entry.meaning[1:]
        assert f"{meaning}. {REPORTED[entry.when].format(entry.name)}" in page, entry.name
    named = re.findall(r"(?:Reported (?:at the start|after a step)|In `crash.txt`,) as `(\w+)`", page)
    assert named == [entry.name for entry in DIAGNOSES]


def advice() -> Iterator[tuple[str, str]]:
    """Every text that advises: of the page, and findings with the values of a run."""
    yield from sections().items()
    for name, cases in SICK.items():
        for case in cases:
            yield name, case.reported()[0].line
    for name, entries in RECOGNISED.items():
        for make, keys, _ in entries:
            found = judge_crash(make(), config(**keys))
            assert found is not None
            yield name, found.try_


def exists(name: str) -> bool:
    """A key, a section, or one below a key that takes anything; under our name or an older one."""
    for kind in KINDS:
        ours = our_name(kind, name)
        if any(ours == k or ours.startswith(f"{k}.") or k.startswith(f"{ours}.") for k in schema_keys(kind)):
            return True
    return False


def test_every_key_in_an_advice_exists() -> None:
    named = {(rule, name) for rule, text in advice() for name in DOTTED.findall(text)}
    named = {(rule, name) for rule, name in named if name.partition(".")[0] in ROOTS}
    assert len(named) > 60
    assert {each for each in named if not exists(each[1])} == set()


def test_every_command_in_an_advice_exists(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {text for _, advised in advice() for text in re.findall(r"`(verl [^`]*)`", advised)}
    assert len(commands) > 8
    for command in sorted(commands):
        options = [word for word in command.split() if word.startswith("--")]
        try:
            code = main([*command.split()[1:], "--help"])
        except SystemExit as done:
            code = done.code or 0
        printed = capsys.readouterr().out
        assert code == 0, command
        assert [option for option in options if option not in printed] == [], command


def test_every_recipe_and_page_in_an_advice_exists() -> None:
    text = "\n".join(advised for _, advised in advice())
    recipes = set(re.findall(r"recipe=(\w+)", text))
    assert recipes and recipes <= set(recipe_names())
    pages = set(re.findall(r"docs/[\w-]+\.md", text))
    assert pages and all((PAGE.parents[1] / name).is_file() for name in pages)
