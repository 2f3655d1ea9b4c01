"""The YAML blocks and override lines of the seed documents load as they stand."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from verl.config.checks import unavailable
from verl.config.load import from_dict, load_ppo_config, load_sft_config
from verl.config.schema import PPOConfig

ROOT = Path(__file__).resolve().parents[2]


def _seed_files() -> list[Path]:
    """The seed documents: from VERL_SHARED, or the folder `shared` beside the repository."""
    shared = Path(os.environ.get("VERL_SHARED", ROOT.parent / "shared"))
    return sorted((shared / "seeds").glob("*.txt"))


def _yaml_blocks(text: str) -> list[str]:
    """Fenced YAML blocks, and indented ones that stand free in running text."""
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    lines = re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines()
    roots = re.compile(r"^(data|actor_rollout_ref|critic|reward|algorithm|trainer|rollout|model|optim):\s*$")
    at = 0
    while at < len(lines):
        if not roots.match(lines[at]):
            at += 1
            continue
        end = at + 1
        while end < len(lines) and (lines[end].startswith("  ") or not lines[end].strip()):
            end += 1
        blocks.append("\n".join(lines[at:end]))
        at = end
    return blocks


_OVERRIDE = re.compile(
    r"^\s*(?:\+{0,2}(?:data|actor_rollout_ref|critic|reward|reward_model|custom_reward_function|algorithm|trainer"
    r"|rollout|ray_kwargs|ray_init)\.[\w.]+=\S.*)$"
)


def _override_lines(text: str) -> list[str]:
    """Every `key=value` of the text's shell lines, comments and line continuations removed."""
    found: list[str] = []
    for line in text.splitlines():
        if not _OVERRIDE.match(line):
            continue
        line = re.sub(r"\s+#.*$", "", line).rstrip().removesuffix("\\").strip()
        found += [line] if "<" in line else line.split()
    return found + re.findall(r"`((?:\w+\.)+\w+=[^`]+)`", text)


SEEDS = _seed_files()
NEEDED = ["actor_rollout_ref.model.path=org/model", "data.train_files=train.parquet"]


def _blocks() -> list[Any]:
    found = []
    for path in SEEDS:
        for number, block in enumerate(_yaml_blocks(path.read_text())):
            found.append(pytest.param(block, id=f"{path.name[:3]}-{number}"))
    return found or [
        pytest.param(None, marks=pytest.mark.skip(reason="no seed documents here (set VERL_SHARED)"))
    ]


def _lines() -> list[Any]:
    found = {line for path in SEEDS for line in _override_lines(path.read_text())}
    return [pytest.param(line, id=line) for line in sorted(found)] or [
        pytest.param(None, marks=pytest.mark.skip(reason="no seed documents here (set VERL_SHARED)"))
    ]


@pytest.mark.parametrize("block", _blocks())
def test_every_yaml_block_of_the_seeds_loads(block: str, tmp_path: Path) -> None:
    (tmp_path / "user.yaml").write_text(block)
    flags = ["--config-path", str(tmp_path), "--config-name", "user"]
    if "response_key" in block:
        assert load_sft_config(flags).trainer.project_name == "my-sft"
        return
    given = [line for line in NEEDED if "train_files" not in line or "train_files" not in block]
    config = load_ppo_config([*flags, *given])
    assert config.user_set
    assert unavailable(config) == []


def test_the_seeds_have_every_kind_of_block() -> None:
    if not SEEDS:
        pytest.skip("no seed documents here (set VERL_SHARED)")
    text = "\n".join(block for path in SEEDS for block in _yaml_blocks(path.read_text()))
    for word in (
        "adv_estimator: gae",
        "adv_estimator: grpo",
        "clip_ratio_high",
        "peft_type",
        "max_turns",
        "fp8",
    ):
        assert word in text
    for word in (
        "prometheus",
        "warmup_steps_proportion",
        "offload_policy",
        "custom_reward_function",
        "num_workers: 8",
    ):
        assert word in text


@pytest.mark.parametrize("line", _lines())
def test_every_override_line_of_the_seeds_loads(line: str) -> None:
    line = line.replace("<number_allowed_by_your_cluster>", "8")
    extra = {
        "algorithm.adv_estimator=grpo": ["actor_rollout_ref.rollout.n=8"],
        "reward_model.enable=True": ["reward_model.model.path=org/reward"],
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4": ["trainer.n_gpus_per_node=4"],
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2": ["trainer.n_gpus_per_node=4"],
    }.get(line, [])
    if "megatron" in line:
        extra = ["actor_rollout_ref.actor.strategy=megatron", "trainer.n_gpus_per_node=8"]
    config = load_ppo_config([*NEEDED, *extra, line])
    assert config.user_set - {"actor_rollout_ref.model.path", "data.train_files"}


# The same forms in our own words, for machines without the seed documents.


def test_a_grpo_yaml_means_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text(
        """
data:
  train_files: train.parquet
  train_batch_size: 128
  max_response_length: 1024
actor_rollout_ref:
  model: {path: org/model}
  actor:
    optim: {lr: 1e-6}
    use_kl_loss: true
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: 2
  rollout: {name: vllm, n: 8, tensor_model_parallel_size: 2}
algorithm: {adv_estimator: grpo}
critic:
trainer: {n_gpus_per_node: 4, total_epochs: 20, logger: [console, wandb]}
"""
    )
    config = load_ppo_config(["--config-path", str(tmp_path), "--config-name", "grpo.yaml"])
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6  # plain YAML would call this a text
    assert config.actor_rollout_ref.rollout.n == 8
    assert config.critic.enable is False
    assert config.data.train_files == ["train.parquet"]
    assert config.trainer.logger == ["console", "wandb"]


def test_an_sft_yaml_means_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(
        """
data: {train_files: a.parquet, prompt_key: q, response_key: a, micro_batch_size_per_gpu: 4}
model: {path: org/model}
optim: {lr: 2e-5, weight_decay: 0.01, warmup_steps_proportion: 0.1, lr_scheduler: cosine}
trainer: {n_gpus_per_node: 4, nnodes: 1, total_epochs: 3, save_freq: 500}
"""
    )
    config = load_sft_config(["-cp", str(tmp_path), "-cn", "sft"])
    assert (config.optim.lr, config.optim.lr_scheduler_type) == (2e-5, "cosine")
    assert config.optim.lr_warmup_steps_ratio == 0.1
    assert config.data.response_key == "a"


ALIASES = [
    ({"actor_rollout_ref.actor.lora_rank": 8}, "actor_rollout_ref.model.lora_rank", 8),
    ({"actor_rollout_ref.actor.peft.lora_rank": 16}, "actor_rollout_ref.model.lora_rank", 16),
    (
        {"actor_rollout_ref.actor.peft.target_modules": ["q_proj"]},
        "actor_rollout_ref.model.target_modules",
        ["q_proj"],
    ),
    ({"custom_reward_function.path": "r.py"}, "reward.custom_reward_function.path", "r.py"),
    ({"reward_model.reward_fn.name": "f"}, "reward.custom_reward_function.name", "f"),
    ({"reward_model.enable": True}, "reward.reward_model.enable", True),
    ({"reward_model.model.path": "org/rm"}, "reward.reward_model.model_path", "org/rm"),
    ({"reward_model.micro_batch_size_per_gpu": 4}, "reward.reward_model.micro_batch_size_per_gpu", 4),
    ({"reward_model.reward_manager": "prime"}, "reward.reward_manager.name", "prime"),
    ({"trainer.nnode": 2}, "trainer.nnodes", 2),
    ({"ray_init.num_cpus": 8}, "ray_kwargs.ray_init.num_cpus", 8),
    ({"ray_init.timeline_file": "t.json"}, "ray_kwargs.timeline_json_file", "t.json"),
    (
        {"actor_rollout_ref.actor.optim.lr_scheduler": "cosine"},
        "actor_rollout_ref.actor.optim.lr_scheduler_type",
        "cosine",
    ),
]


@pytest.mark.parametrize(("given", "key", "value"), ALIASES, ids=[case[1] for case in ALIASES])
def test_an_alias_resolves_with_one_notice(
    given: dict[str, Any], key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from verl.config.keys import get

    config = from_dict(PPOConfig, given, checked=False)
    assert get(config, key) == value
    assert key in config.user_set
    notices = [record.getMessage() for record in caplog.records if "is read as" in record.getMessage()]
    assert len(notices) == 1
    assert next(iter(given)).split(".")[0] in notices[0]
