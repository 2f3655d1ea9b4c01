"""Fine-tuning on Ray: one, two and three ranks give the same numbers, and a run outlives its ranks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from verl.errors import WorkersLost
from verl.runtime import STOPPED

pytestmark = [pytest.mark.components, pytest.mark.slow(seconds=15), pytest.mark.timeout(900)]

PLUGIN = """
import os, signal, time
from pathlib import Path
from verl.workers.offline import SFTRole

train, seen = SFTRole.train, 0

def planned(self, batch):
    global seen
    seen += 1
    if self.rank == 1 and seen == 3 and not Path({once!r}).exists():
        Path({once!r}).touch()
        {action}
    return train(self, batch)

SFTRole.train = planned
"""
ACTIONS = {"kill": "os.kill(os.getpid(), signal.SIGKILL)", "hang": "time.sleep(100_000)"}


@pytest.fixture
def words(tiny_model_dir: Path, tmp_path: Path) -> Callable[..., list[str]]:
    draw = random.Random(0)
    for name, count in (("train", 32), ("val", 9)):
        rows = []
        for _ in range(count):
            digits = [str(draw.randrange(10)) for _ in range(draw.randint(1, 12))]
            prompt = [{"role": "user", "content": "repeat " + " ".join(digits)}]
            rows.append({"prompt": prompt, "response": " ".join(digits)})
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(*extra: str, folder: str = "run") -> list[str]:
        return [
            f"model.path={tiny_model_dir}",
            f"data.train_files={tmp_path}/train.jsonl",
            f"data.val_files={tmp_path}/val.jsonl",
            "data.train_batch_size=8",
            "data.max_length=64",
            "optim.lr=3e-3",
            "trainer.device=cpu",
            "trainer.logger=[]",
            "trainer.total_training_steps=4",
            "trainer.test_freq=2",
            "trainer.save_freq=2",
            f"trainer.default_local_dir={tmp_path}/{folder}",
            *extra,
        ]

    return make


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "global_step_4/actor/huggingface/model.safetensors")


def alike(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            assert mine[name] == pytest.approx(other[name], rel=2e-4, abs=1e-6), name


@pytest.mark.parametrize("more", [[], ["model.lora_rank=4"]], ids=["full", "lora"])
def test_one_two_and_three_ranks_agree_and_load_each_others_checkpoints(more, words, joined, tmp_path):
    """Batches of seven rows do not divide by the ranks; the last validation batch has fewer rows than three ranks. Two
    ranks also split the sequences of the same rows."""
    from verl.config.load import load_sft_config
    from verl.trainer.sft_trainer import run

    def run_on(world: int, folder: str, *options: str) -> list[dict[str, float]]:
        sizes = f"trainer.n_gpus_per_node={world}", "data.train_batch_size=7"
        return metrics(run(load_sft_config(words(*sizes, *more, *options, folder=folder))).folder)

    worlds = (1, 2) if more else (1, 2, 3)
    found = {world: run_on(world, f"world{world}") for world in worlds}
    for world in worlds[1:]:
        alike(found[world], found[1])
        for name, tensor in weights(tmp_path / "world1").items():
            torch.testing.assert_close(
                weights(tmp_path / f"world{world}")[name], tensor, rtol=1e-3, atol=1e-5
            )
    split = "model.ulysses_sequence_parallel_size=2"
    alike(run_on(2, "split", split), found[1])
    for saved, loaded in ((2, 1),) if more else ((2, 1), (1, 3), (3, 2)):
        given = f"trainer.resume_from_path={tmp_path}/world{saved}/global_step_2"
        # The line of step 2 comes with the checkpoint.
        alike(run_on(loaded, f"from{saved}to{loaded}", given), found[1][1:])


@pytest.mark.parametrize("command", ["dpo", "reward"])
def test_pairs_of_answers_on_two_ranks_agree_with_one(command, words, joined, tmp_path):
    from verl.config.load import load_config
    from verl.config.schema import DPOConfig, RewardTrainingConfig
    from verl.trainer.offline_trainer import run

    for name in ("train", "val"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        pairs = [{**row, "chosen": row["response"], "rejected": row["response"] + " 1 2"} for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    kind = {"dpo": DPOConfig, "reward": RewardTrainingConfig}[command]
    found = []
    for world in (1, 2):
        sizes = f"trainer.n_gpus_per_node={world}", "data.train_batch_size=7", "optim.eps=1e-4"
        found.append(metrics(run(load_config(kind, words(*sizes, folder=f"world{world}"))).folder))
    alike(*found[::-1])


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing_", "perf/")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(action: str) -> str:
        text = PLUGIN.format(once=str(tmp_path / action), action=ACTIONS[action])
        (tmp_path / f"sft_{action}.py").write_text(text)
        return f"trainer.plugins=[sft_{action}]"

    return write


def test_killed_rank_is_restarted_and_the_run_ends_as_if_it_never_was(words, joined, tmp_path, plugin):
    from verl.config.load import load_sft_config
    from verl.trainer.sft_trainer import run

    timeline = tmp_path / "timeline.json"
    two, more = "trainer.n_gpus_per_node=2", f"ray_kwargs.timeline_json_file={timeline}"
    run(load_sft_config(words(two, plugin("kill"), "trainer.max_restarts=1", more, folder="killed")))
    assert (tmp_path / "kill").exists()
    run(load_sft_config(words(two, folder="plain")))
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "plain")
    assert any("serve" in str(event.get("name")) for event in json.loads(timeline.read_text()))


def test_hung_rank_is_named(words, joined, tmp_path, plugin, monkeypatch):
    from verl.config.load import load_sft_config
    from verl.trainer.sft_trainer import run
    from verl.workers.ray_calls import RankCalls

    hung, look = tmp_path / "hang", RankCalls.check_progress
    # On a busy machine the start alone may take longer than this short limit: the watch begins with the fault.
    monkeypatch.setattr(RankCalls, "check_progress", lambda *args: look(*args) if hung.exists() else None)
    with pytest.raises(WorkersLost) as caught:
        run(load_sft_config(words("trainer.n_gpus_per_node=2", "trainer.watchdog_s=12", plugin("hang"))))
    message = str(caught.value)
    assert "no progress for 12 s (trainer.watchdog_s) in fit." in message, message
    assert "time.sleep(100_000)" in message and "waits for rank 1" in message
    assert "no progress" in (tmp_path / "run" / "crash.txt").read_text()
    assert nobody_left(joined)


def nobody_left(cluster: Any) -> bool:
    deadline = time.monotonic() + 120
    while sft_ranks(cluster) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not sft_ranks(cluster)


def sft_ranks(cluster: Any) -> list[int]:
    """Ray writes the actor's class into the process title and its output into the cluster's folder."""
    session = cluster.head_node.get_session_dir_path()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title, log = (entry / "cmdline").read_bytes(), os.readlink(entry / "fd" / "2")
            except OSError:
                continue
            if b"RankProcess" in title and log.startswith(session):
                found.append(int(entry.name))
    return found


def test_sigterm_saves_and_leaves_no_rank(words, joined, tmp_path, fork_server):
    log = tmp_path / "log.txt"
    arguments = words("trainer.n_gpus_per_node=2", "trainer.total_training_steps=100000")
    process = fork_server.start("verl.trainer.sft_trainer", arguments, output=log)
    try:
        lines = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 400
        while not (lines.exists() and "\n" in lines.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        assert len(sft_ranks(joined)) == 2
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=300)
    except subprocess.TimeoutExpired:
        pytest.fail(f"it does not end: {log.read_text()[-3000:]}")
    finally:
        process.kill()
    assert code == STOPPED, log.read_text()[-3000:]
    saved = int((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text())
    assert metrics(tmp_path / "run")[-1]["step"] == saved
    assert nobody_left(joined)


def test_two_ranks_repeat_a_step_and_save_nothing(words, joined, tmp_path, capsys):
    from verl import cli

    assert cli.main(["sft", *words("trainer.n_gpus_per_node=2")]) == 0
    assert cli.main(["replay", str(tmp_path / "run"), "--step", "3", "--keep"]) == 0
    assert "numbers of step 3 are equal" in capsys.readouterr().out
    kept = next((tmp_path / "run" / "replays").iterdir())
    assert [json.loads(line)["step"] for line in (kept / "metrics.jsonl").read_text().splitlines()] == [2, 3]
    assert not list(kept.glob("global_step_*"))
