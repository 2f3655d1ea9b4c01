"""Two ranks beside the group of one process: the same tokens whoever draws them, early ranks take what waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.data.proto import DataProto

pytestmark = [pytest.mark.components, pytest.mark.timeout(900)]

PROMPTS, N = 13, 4
LATE = {1, 3}
"""Prompts of the second rank, which has eight sequences at once."""
PLUGIN = """
import threading, time
from pathlib import Path
from verl.rollout.native import engine
from verl.rollout.native.scheduler import Scheduler
from verl.workers.train_rank import TrainRank

_generate, _schedule, late = TrainRank.do_generate, Scheduler.schedule, threading.Event()
engine.verify = lambda *args: None  # whose steps would stand still as well

def generate(self, *args):
    if self.rank == 1:
        late.set()
    return _generate(self, *args)

def schedule(self, *args, **kwargs):
    while late.is_set() and not Path({gate!r}).exists():
        time.sleep(0.01)
    return _schedule(self, *args, **kwargs)

TrainRank.do_generate, Scheduler.schedule = generate, schedule
"""


@pytest.fixture
def groups(overrides, tiny_tokenizer, tiny_model_dir, joined, tmp_path, monkeypatch):
    """One process, and two ranks of which the second stands still until the file `gate` is there; the model by a path
    from here."""
    from verl.config.load import load_ppo_config
    from verl.workers.local import LocalGroup
    from verl.workers.ray_group import RayGroup

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tiny_model_dir.parent)
    (tmp_path / "late_rank.py").write_text(PLUGIN.format(gate=str(tmp_path / "gate")))
    settings = overrides(
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "actor_rollout_ref.actor.use_kl_loss=True",
        f"actor_rollout_ref.model.path={tiny_model_dir.name}",
    )
    local = LocalGroup(load_ppo_config(settings), tiny_tokenizer, training_steps=1)
    two = load_ppo_config([*settings, "trainer.n_gpus_per_node=2", "trainer.plugins=[late_rank]"])
    spread = RayGroup(two, tiny_tokenizer, training_steps=1, run_folder=tmp_path)
    yield local, spread
    spread.close()
    local.close()


def prompts() -> DataProto:
    draw = np.random.default_rng(0)
    ids = [draw.integers(3, 12, draw.integers(1, 9)).tolist() for _ in range(PROMPTS)]
    return DataProto.from_dict(non_tensors={"uid": [f"p{row}" for row in range(PROMPTS)], "prompt_ids": ids})


def test_same_tokens_and_log_probs_and_early_ranks_take_more(groups, tmp_path):
    from verl.workers.roles import training_settings

    local, spread = groups
    settings = training_settings(local.cfg.actor_rollout_ref.rollout, 4, step=3)
    heard: list[int] = []

    def hear(row, response) -> None:
        heard.append(row)
        if len(heard) == (PROMPTS - len(LATE)) * N:
            (tmp_path / "gate").touch()

    found = spread.generate(prompts(), settings, hear)
    expected = local.generate(prompts(), settings)

    assert sorted(heard) == list(range(PROMPTS * N))
    assert torch.equal(found.batch["responses"], expected.batch["responses"])
    torch.testing.assert_close(
        found.batch["rollout_log_probs"], expected.batch["rollout_log_probs"], rtol=1e-4, atol=1e-5
    )
    # The first rank took all but what the second had, and was not held back by it.
    assert {row // N for row in heard[-len(LATE) * N :]} == LATE
    assert spread.rollout.answered == {0: (PROMPTS - len(LATE)) * N, 1: len(LATE) * N}

    for batch in (found, expected):
        batch.meta_info["temperature"] = 1.0
    ours = spread.forward("actor", found, ["old_log_probs"]).batch
    parts = spread._shards[2]
    theirs = local.forward("actor", expected, ["old_log_probs"]).batch
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)
    reference = spread.forward("ref", found, ["ref_log_prob"]).batch["ref_log_prob"]
    assert spread._shards[2] is parts, "the same rows are stored once"
    torch.testing.assert_close(reference, theirs["old_log_probs"], rtol=1e-4, atol=1e-5)
