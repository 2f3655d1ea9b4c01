"""Reinforcement learning with real megatron-core on Ray: FSDP's numbers, also after a killed rank or FSDP's steps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_run import read_metrics, tiny_run
from tests.workers import faults
from verl.errors import WorkersLost

pytest.importorskip("megatron.core", reason="needs megatron-core (make test-components)")
pytestmark = pytest.mark.components

ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"
# A large eps: with a small one AdamW makes whole steps of gradients that are rounding errors.
EPS = [f"{role}.optim.eps=1e-4" for role in (ACTOR, CRITIC)]
GRPO = [*EPS[:1], f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.ppo_mini_batch_size=5"]
PPO = [*EPS, "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True", "critic.optim.lr=1e-3"]

Run = Callable[..., Path]


def megatron(role: str = ACTOR, **sizes: int) -> list[str]:
    """The keys of a role's sizes, for instance `tensor=2`."""
    parallel = [f"{role}.megatron.{name}_model_parallel_size={size}" for name, size in sizes.items()]
    return [f"{role}.strategy=megatron", *parallel]


TENSOR = ["trainer.n_gpus_per_node=2", *megatron(tensor=2)]


@pytest.fixture(scope="module")
def go(tiny_model_dir: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run five steps, in a folder of this name; the folder."""
    from verl.config.load import load_ppo_config
    from verl.trainer.main_ppo import run

    root = tmp_path_factory.mktemp("megatron")
    usual = ["data.train_batch_size=10", "trainer.total_training_steps=5", "trainer.save_freq=2"]

    def train(name: str, *extra: str) -> Path:
        folder = root / name
        run(load_ppo_config(tiny_run(tiny_model_dir, digits_data, *usual, *extra, folder=folder)))
        return folder

    return train


@pytest.fixture(scope="module")
def fsdp(go: Run) -> Path:
    """One process."""
    return go("fsdp", *GRPO)


def losses(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith(("actor/", "critic/"))}


def assert_alike(folder: Path, expected: Path, steps: range = range(1, 6)) -> None:
    """Every metric of the roles in each of the steps, and the weights after the last."""
    mine, theirs = (
        {row["training/global_step"]: losses(row) for row in read_metrics(run)} for run in (folder, expected)
    )
    for step in steps:
        assert mine[step].keys() == theirs[step].keys()
        for name, value in theirs[step].items():
            assert mine[step][name] == pytest.approx(value, rel=2e-4, abs=2e-6), (step, name)
    for part in sorted(path.name for path in (expected / "global_step_5").iterdir() if path.is_dir()):
        saved = [
            run / "global_step_5" / part / "huggingface" / "model.safetensors" for run in (folder, expected)
        ]
        if saved[1].exists():
            ours, others = map(load_file, saved)
            assert ours.keys() == others.keys()
            for name, tensor in others.items():
                torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=2e-5, msg=f"{part} {name}")


def test_grpo_gives_the_numbers_of_fsdp(go, fsdp, joined):
    assert_alike(go("stages", *GRPO, "trainer.n_gpus_per_node=4", *megatron(tensor=2, pipeline=2)), fsdp)


def test_ppo_gives_the_numbers_of_fsdp(go, joined):
    """The critic has its value head on the last of two stages, the actor splits its matrices."""
    split = [*TENSOR, *megatron(CRITIC, tensor=1, pipeline=2)]
    assert_alike(go("ppo", *PPO, *split), go("ppo of fsdp", *PPO))


def test_killed_rank_is_named_and_the_run_goes_on_with_the_same_numbers(
    go, fsdp, joined, tmp_path, monkeypatch, session_folder
):
    monkeypatch.syspath_prepend(str(tmp_path))
    fault = faults.write(tmp_path, "train_actor", "kill", nth=7, once=tmp_path / "happened")
    with pytest.raises(WorkersLost) as caught:
        go("killed", *GRPO, *TENSOR, f"trainer.plugins=[{fault}]")
    message = str(caught.value)
    assert message.startswith("rank 1 on ") and "died in train_actor" in message, message
    assert faults.wait_for(lambda: not faults.rank_processes(session_folder), 240)
    saved = fsdp.with_name("killed") / "global_step_2" / "ckpt_contents.json"
    written = saved.stat().st_mtime_ns
    assert_alike(go("killed", *GRPO, *TENSOR), fsdp)
    assert saved.stat().st_mtime_ns == written, "it went on after step 2"


def test_run_of_fsdp_goes_on_under_megatron(go, fsdp, joined):
    """Weights, moments and counts of step 2, split by matrices."""
    target = fsdp.with_name("continued")
    shutil.copytree(fsdp / "global_step_2", target / "global_step_2")
    assert_alike(go("continued", *GRPO, *TENSOR), fsdp, range(3, 6))
