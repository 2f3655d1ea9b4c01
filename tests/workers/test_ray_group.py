"""Two ranks beside the group of one process: the same tokens whoever draws them, early ranks take what waits."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from verl.data.proto import DataProto

pytestmark = pytest.mark.components

_spec = importlib.util.spec_from_file_location("faults", Path(__file__).with_name("faults.py"))
assert _spec and _spec.loader
faults = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(faults)

PROMPTS, N = 13, 4


@pytest.fixture
def groups(overrides, tiny_tokenizer, tiny_model_dir, joined, tmp_path, monkeypatch):
    """One process, and two ranks of which the second is slow to generate; the model by a path from here."""
    from verl.config.load import load_ppo_config
    from verl.workers.local import LocalGroup
    from verl.workers.ray_group import RayGroup

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tiny_model_dir.parent)
    plugin = faults.write(tmp_path, "generate", "slow", rank=1, nth=None)
    settings = overrides(
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "actor_rollout_ref.actor.use_kl_loss=True",
        f"actor_rollout_ref.model.path={tiny_model_dir.name}",
    )
    local = LocalGroup(load_ppo_config(settings), tiny_tokenizer, training_steps=1)
    two = load_ppo_config([*settings, "trainer.n_gpus_per_node=2", f"trainer.plugins=[{plugin}]"])
    spread = RayGroup(two, tiny_tokenizer, training_steps=1, run_folder=tmp_path)
    yield local, spread
    spread.close()
    local.close()


def prompts() -> DataProto:
    draw = np.random.default_rng(0)
    ids = [draw.integers(3, 12, draw.integers(1, 9)).tolist() for _ in range(PROMPTS)]
    return DataProto.from_dict(non_tensors={"uid": [f"p{row}" for row in range(PROMPTS)], "prompt_ids": ids})


def test_same_tokens_and_log_probs_and_early_ranks_take_more(groups):
    from verl.workers.rollout import training_settings

    local, spread = groups
    settings = training_settings(local.cfg.actor_rollout_ref.rollout, 4, step=3)
    heard: list[int] = []
    found = spread.generate(prompts(), settings, lambda row, response: heard.append(row))
    expected = local.generate(prompts(), settings)

    assert sorted(heard) == list(range(PROMPTS * N))
    assert torch.equal(found.batch["responses"], expected.batch["responses"])
    torch.testing.assert_close(
        found.batch["rollout_log_probs"], expected.batch["rollout_log_probs"], rtol=1e-4, atol=1e-5
    )
    # Eight sequences at a time are two prompts; the slow rank got no more than it could serve.
    first, second = spread.rollout.engine.taken
    assert first + second == PROMPTS and first > second > 0
    # Responses come as they finish: those of the quick rank were not held back by the slow one's.
    slow = [place for place, row in enumerate(heard) if row // N in (2, 3)]
    assert min(slow) >= 2 * N

    for batch in (found, expected):
        batch.meta_info["temperature"] = 1.0
    ours = spread.log_probs(found, with_entropy=True).batch
    parts = spread._stored
    theirs = local.log_probs(expected, with_entropy=True).batch
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)
    reference = spread.ref_log_probs(found).batch["ref_log_prob"]
    assert spread._stored is parts, "the same rows are stored once"
    torch.testing.assert_close(reference, theirs["old_log_probs"], rtol=1e-4, atol=1e-5)
