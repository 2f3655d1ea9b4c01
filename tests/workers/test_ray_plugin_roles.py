"""Roles of a plug-in on two ranks beside the group of one process: the same columns, the same update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from verl.data.proto import DataProto
from verl.observe.metrics import Timer

pytestmark = [pytest.mark.components, pytest.mark.timeout(900)]


@pytest.fixture
def groups(overrides, tiny_tokenizer, tiny_model_dir: Path, joined, tmp_path: Path):
    from tests.plugin_roles import with_roles
    from verl.config.load import load_ppo_config
    from verl.workers.local import LocalGroup
    from verl.workers.ray_group import RayGroup

    settings = overrides("trainer.plugins=[tests.plugin_roles]")
    one = with_roles(load_ppo_config(settings), str(tiny_model_dir))
    two = with_roles(load_ppo_config([*settings, "trainer.n_gpus_per_node=2"]), str(tiny_model_dir))
    local = LocalGroup(one, tiny_tokenizer, training_steps=1)
    spread = RayGroup(two, tiny_tokenizer, training_steps=1, run_folder=tmp_path)
    yield local, spread
    spread.close()
    local.close()


def rows() -> DataProto:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 12, (8, 9), generator=generator)
    mask = (torch.arange(4) < torch.randint(1, 5, (8, 1), generator=generator)).long()
    attention = torch.cat([torch.ones(8, 5, dtype=torch.long), mask], -1)
    tensors = {"input_ids": ids, "attention_mask": attention, "response_mask": mask}
    tensors["advantages"] = torch.randn(8, 4, generator=generator) * mask
    return DataProto.from_dict(tensors=tensors, meta_info={"temperature": 1.0})


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


def test_two_ranks_compute_and_learn_what_one_process_does(groups):
    local, spread = groups
    ours, theirs = rows(), rows()
    for _ in range(2):
        for group, batch in ((spread, ours), (local, theirs)):
            group.add_columns(batch, group.columns, Timer())
        same(ours.batch, theirs.batch)
        for role in ("imitator", "actor"):
            same(spread.update(role, ours, sync=False), local.update(role, theirs, sync=False))
        for batch in (ours, theirs):
            del batch.batch["imitator_log_prob"]
    assert set(spread.checkpoint_parts()) == set(local.checkpoint_parts()) == {"actor", "imitator"}
