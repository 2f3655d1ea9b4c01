"""Generation in processes of its own: the numbers of one process, weights that follow, and whoever fails is named."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.workers.faults import extended
from verl.errors import TrainingHalted, WorkersLost

pytestmark = [pytest.mark.components, pytest.mark.timeout(900)]

STEPS = 3
FEW = ["trainer.total_training_steps=3", "actor_rollout_ref.actor.ppo_mini_batch_size=5"]
COMPARED = ["actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"]


def placed(trainer: int, rollout: int) -> list[str]:
    return [
        f"trainer.n_gpus_per_node={trainer}",
        "actor_rollout_ref.rollout.nnodes=1",
        f"actor_rollout_ref.rollout.n_gpus_per_node={rollout}",
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted((folder / f"global_step_{STEPS}" / "actor" / "huggingface").glob("*.safetensors")):
        found |= load_file(file)
    return found


FAULT = """
import os, signal, time
from pathlib import Path
from verl.workers.rollout_rank import RolloutRank

original, seen = RolloutRank.do_{call}, 0

def planned(self, *args):
    global seen
    seen += 1
    if self.rank == {rank} and seen == {nth}:
        Path({happened!r}).touch()
        {action}
    return original(self, *args)

RolloutRank.do_{call} = planned
"""
ACTIONS = {"kill": "os.kill(os.getpid(), signal.SIGKILL)", "hang": "time.sleep(100_000)"}


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        return f"trainer.plugins=[{name}]"

    return write


@pytest.fixture
def happened(tmp_path) -> Path:
    """There from the moment of the fault on."""
    return tmp_path / "happened"


@pytest.fixture
def faulty(plugin, happened):
    """A process that generates fails in its nth call."""

    def plan(call: str, action: str, *, rank: int, nth: int) -> str:
        text = FAULT.format(call=call, rank=rank, nth=nth, action=ACTIONS[action], happened=str(happened))
        return plugin(f"pool_fault_{call}_{action}_{rank}", text)

    return plan


def processes() -> list[int]:
    """Ranks of either kind of this session's cluster: Ray writes the actor's class into the process title."""
    titles, parents = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                titles[int(entry.name)] = (entry / "cmdline").read_bytes()
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    found = []
    for pid, title in titles.items():
        above = pid
        while above not in (0, 1, os.getpid()):
            above = parents.get(above, 0)
        if above == os.getpid() and b"RankProcess" in title:
            found.append(pid)
    return found


def nobody_left() -> bool:
    deadline = time.monotonic() + 120
    while processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    return not processes()


VERSIONS = """
from pathlib import Path
from verl.workers.rollout_rank import RolloutRank

_generate = RolloutRank.do_generate

def generate(self, *args):
    for responses in _generate(self, *args):
        with Path({note!r}).open("a") as file:
            file.writelines(f"{{response.policy_version}}\\n" for response in responses)
        yield responses

RolloutRank.do_generate = generate
"""


def test_the_numbers_are_those_of_one_process(train, joined, plugin, tmp_path):
    """Two ranks that train beside one and beside two that generate; with adapters, which cross apart, likewise."""
    lora = ["actor_rollout_ref.model.lora_rank=4"]
    alone, folder = train(*FEW, folder="alone")
    adapted, _ = train(*FEW, *lora, folder="alone-lora")
    expected = weights(folder)
    note = tmp_path / "versions"
    noting = plugin("notes_versions", VERSIONS.format(note=str(note)))
    for name, extra, reference in (
        ("two-one", [*placed(2, 1), noting], alone),
        ("two-two", placed(2, 2), alone),
        ("two-one-lora", [*placed(2, 1), *lora], adapted),
    ):
        rows, folder = train(*FEW, *extra, folder=name)
        assert len(rows) == STEPS
        for mine, one in zip(rows, reference, strict=True):
            for metric in COMPARED:
                assert mine[metric] == pytest.approx(one[metric], rel=2e-3, abs=2e-5), (name, metric)
            # Only the weights of this very step give the trainer's own probabilities.
            assert mine["training/rollout_probs_diff_max"] < 1e-4, name
        if reference is alone:
            for key, tensor in expected.items():
                torch.testing.assert_close(
                    weights(folder)[key], tensor, rtol=1e-3, atol=2e-4, msg=f"{name} {key}"
                )
    assert note.read_text().split() == [str(step) for step in range(STEPS) for _ in range(40)]
    assert nobody_left()


@pytest.mark.parametrize("call", extended(["generate", "sync_weights"], ["generate"]))
def test_a_killed_rollout_rank_is_named_and_the_run_goes_on_after_it(call, train, joined, faulty):
    settings = [*FEW, *placed(2, 2), "trainer.save_freq=1"]
    with pytest.raises(WorkersLost) as caught:
        train(*settings, faulty(call, "kill", rank=1, nth=2))
    message = str(caught.value)
    assert message.startswith("rollout rank 1 on ") and f"died in {call}" in message, message
    assert "trainer.resume_mode=auto" in message
    assert nobody_left()
    if call == "generate":
        rows, _ = train(*settings)
        assert [row["training/global_step"] for row in rows] == [1, 2, 3]
        assert rows[-1]["training/rollout_probs_diff_max"] < 1e-4, (
            "the weights of the checkpoint were handed over"
        )


@pytest.mark.parametrize("call", extended(["generate", "sync_weights"], ["sync_weights"]))
def test_a_hang_of_a_rollout_rank_says_who_waits_for_whom(call, train, joined, faulty, happened, monkeypatch):
    from verl.workers.ray_calls import RankCalls

    look, hang = RankCalls.check_progress, faulty(call, "hang", rank=0, nth=2)
    # On a busy machine the start alone may take longer than this short limit: the watch begins with the fault.
    monkeypatch.setattr(RankCalls, "check_progress", lambda *args: look(*args) if happened.exists() else None)
    with pytest.raises(WorkersLost) as caught:
        train(*FEW, *placed(2, 1), "trainer.watchdog_s=6", hang)
    message = str(caught.value)
    assert f"no progress for 6 s (trainer.watchdog_s) in {call}" in message, message
    at = message.index("rollout rank 0 on")
    assert "is stuck" in message[at : at + 300] and "time.sleep(100_000)" in message
    if call == "sync_weights":
        assert "waits for rollout rank 0 at" in message
    assert nobody_left()


TRAINER_RANK_GONE = """
import os, signal, time
from pathlib import Path
from verl.workers.train_rank import TrainRank
from verl.workers.rollout_rank import RolloutRank

note = Path({note!r})
_link = TrainRank.do_link

def link(self, size):
    if self.rank == 1:
        note.write_text(str(os.getpid()))
    return _link(self, size)

def generate(self, *args):
    os.kill(int(note.read_text()), signal.SIGKILL)
    time.sleep(100_000)

TrainRank.do_link, RolloutRank.do_generate = link, generate
"""


def test_a_trainer_rank_that_dies_while_others_generate_is_noticed_at_once(train, joined, plugin, tmp_path):
    """Nobody asks it for anything then, and nobody who generates ever ends."""
    text = TRAINER_RANK_GONE.format(note=str(tmp_path / "pid"))
    with pytest.raises(WorkersLost) as caught:
        train(*FEW, *placed(2, 1), "trainer.watchdog_s=3000", plugin("trainer_rank_gone", text))
    assert str(caught.value).startswith("rank 1 on ") and "died in generate" in str(caught.value)
    assert nobody_left()


def test_a_restart_leaves_room_for_those_who_generate(overrides, joined):
    """Four places are there: with two for rollout, two of three ranks are left."""
    from verl.config.load import load_ppo_config
    from verl.workers.ray_cluster import Cluster, ClusterError

    def room(trainer: int, rollout: int) -> tuple[int, int]:
        cluster = Cluster(load_ppo_config(overrides(*placed(trainer, rollout))))
        cluster.connect()
        try:
            return cluster.capacity(0.0, 1.0, lambda *_: True)
        finally:
            cluster.close()

    assert room(2, 2) == (1, 2)
    assert room(3, 2) == (1, 2)
    with pytest.raises(ClusterError, match=r"actor_rollout_ref\.rollout\.nnodes=1 nodes with 9 CPU each"):
        room(1, 9)


def test_engines_over_two_gpus_are_half_as_many_processes(overrides):
    from verl.config.load import load_ppo_config
    from verl.workers.ray_cluster import pools

    two = [
        *placed(1, 4),
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ]
    trainer, rollout = pools(load_ppo_config(overrides(*two)))
    assert (trainer.key, trainer.processes) == ("trainer", 1)
    assert (rollout.processes, rollout.gpus_per_process, rollout.per_node) == (2, 2, 4)


CORRUPT = """
from verl.rollout.weight_sync.broadcast import Broadcast

_receive, _seen = Broadcast.receive, 0

def receive(self):
    global _seen
    _seen += 1
    for name, tensor in _receive(self):
        if _seen == 2 and name == "model.norm.weight":
            tensor[3] *= 1.01
        yield name, tensor

Broadcast.receive = receive
"""


def test_one_changed_number_in_the_second_hand_over_ends_the_run(train, joined, plugin):
    with pytest.raises(TrainingHalted) as caught:
        train(*FEW, *placed(2, 1), plugin("changes_one_number", CORRUPT))
    message = str(caught.value)
    assert "the weights rollout rank 0 on " in message and "policy version 1" in message, message
    assert (
        "1 of" in message
        and "model.norm.weight: sent float32:" in message
        and ", received float32:" in message
    )
    assert nobody_left()
