"""Every key the README and the docs name exists, and their YAML loads: what is written there can be typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl.config.aliases import our_name
from verl.config.keys import schema_keys, sections
from verl.config.load import load_ppo_config
from verl.config.schema import (
    DPOConfig,
    EvaluationConfig,
    GenerationConfig,
    PPOConfig,
    RewardTrainingConfig,
    SFTConfig,
)

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
KINDS = (PPOConfig, SFTConfig, DPOConfig, RewardTrainingConfig, GenerationConfig, EvaluationConfig)
ROOTS = {name.partition(".")[0] for kind in KINDS for name in sections(kind)}
KEY = re.compile(r"(?<![\w./-])\+{0,2}((?:[a-z_]+\.)+[a-z_]+)=")


def known(name: str) -> bool:
    """Whether some command takes the key, under our name or another, or below one that takes anything."""
    for kind in KINDS:
        ours = our_name(kind, name)
        if any(ours == key or ours.startswith(f"{key}.") for key in schema_keys(kind)):
            return True
    # Prose leaves out the long prefix: `rollout.n`, `actor.clip_ratio`, `fsdp_config.param_offload`.
    return any(key.endswith(f".{name}") for kind in KINDS for key in schema_keys(kind))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_that_is_given_a_value_exists(page: Path) -> None:
    text = page.read_text()
    unknown = {name for name in KEY.findall(text) if not known(name) and name.partition(".")[0] in ROOTS}
    assert not unknown


def test_the_pages_name_many_keys() -> None:
    """So that the pattern above cannot go blind unnoticed."""
    found = {name for page in PAGES for name in KEY.findall(page.read_text()) if known(name)}
    assert len(found) > 40
    assert not known("actor.clip_ration") and not known("trainer.epochs")


def _blocks() -> list:
    found = []
    for page in PAGES:
        for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)):
            if "apiVersion" not in block:  # Kubernetes
                found.append(pytest.param(block, id=f"{page.stem}-{number}"))
    return found


@pytest.mark.parametrize("block", _blocks())
def test_every_yaml_block_loads(block: str, tmp_path: Path) -> None:
    (tmp_path / "page.yaml").write_text(block)
    flags = ["--config-path", str(tmp_path), "--config-name", "page"]
    config = load_ppo_config([*flags, "actor_rollout_ref.model.path=org/m", "data.train_files=org/d"])
    assert len(config.user_set) > 2
