"""What a run in an asynchronous mode trained on, and what it saved, from its run folder."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tests.tiny_run import untimed

MODE = "trainer.async_training.mode"
STALENESS = "trainer.async_training.staleness"
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
POOL = ("actor_rollout_ref.rollout.n_gpus_per_node=1", "actor_rollout_ref.rollout.nnodes=1")

HOLD = """
import time
from verl.workers.rollout_rank import RolloutRank

_link, made = RolloutRank.do_link, 0

def link(self, size):
    _link(self, size)
    poll = self.engine.poll

    def held(timeout_s=None):
        global made
        if self.engine.version or self.sampler.suspended:  # the latter: what compares the first weights
            return poll(timeout_s)
        if made == {after}:
            time.sleep(0.01)
            return []
        made += 1
        return poll(0)

    self.engine.poll = held

RolloutRank.do_link = link
"""


def decodes_no_more_with_the_first_weights(folder: Path, *, after: int) -> str:
    """The key of a plugin in `folder`: a pool makes so many decode steps with its first weights and then waits for
    others."""
    (folder / "holds_decoding.py").write_text(HOLD.format(after=after))
    return "trainer.plugins=[holds_decoding]"


def trained(folder: Path) -> list[list[str]]:
    """The prompts of each step, as the run folder has them."""
    files = sorted((folder / "rollouts").glob("*.jsonl"), key=lambda file: int(file.stem))
    steps = [
        [json.loads(line)["uid"].split("#")[0] for line in file.read_text().splitlines()] for file in files
    ]
    return [list(dict.fromkeys(uids)) for uids in steps]


def steps_in_order(overrides: list[str], tokenizer: Any, steps: int) -> list[list[str]]:
    """The prompts of each step as a synchronous run trains them: in the order of the data."""
    from verl.config.load import load_ppo_config
    from verl.data.rl_dataset import training_loader

    batches = training_loader(load_ppo_config(overrides).data, tokenizer)
    return [list(map(str, batch.non_tensor_batch["uid"])) for batch in islice(batches, steps)]


def states(folder: Path, step: int) -> dict[str, Any]:
    """What a checkpoint holds: tensors by file and name, and the trainer's state without times."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for file in sorted((folder / f"global_step_{step}").rglob("*")):
        name = str(file.relative_to(folder))
        if file.suffix == ".safetensors":
            found |= {f"{name}:{key}": value for key, value in load_file(file).items()}
        elif file.name == "trainer_state.json":
            state = json.loads(file.read_text())
            state["metrics"] = untimed([state["metrics"]])
            state["health"]["steps"] = [(at, *untimed([row])) for at, row in state["health"]["steps"]]
            found[name] = state
    assert any("trainer_state" in name for name in found)
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        equal = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert equal, name
