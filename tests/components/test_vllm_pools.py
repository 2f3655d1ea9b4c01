"""vLLM in a process of its own beside the trainer, and one tensor-parallel vLLM shared by two ranks that train."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.async_run import BYPASS, MODE, POOL, STALENESS, decodes_no_more_with_the_first_weights, trained
from tests.tiny_run import tiny_run
from verl import processes

pytest.importorskip("vllm", reason="needs vLLM (make test-components)")
pytest.importorskip("ray", reason="needs ray (make test-components)")
pytestmark = [pytest.mark.components, pytest.mark.slow(seconds=45), pytest.mark.timeout(900)]

STEPS = 3


@pytest.fixture(scope="module")
def model_dir(
    small_model: Callable[..., Any], tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Two heads of keys: one for each of two workers."""
    folder = tmp_path_factory.mktemp("small") / "model"
    ends = {"pad_token_id": tiny_tokenizer.pad_token_id, "eos_token_id": tiny_tokenizer.eos_token_id}
    model = small_model(vocab_size=len(tiny_tokenizer), bos_token_id=None, num_key_value_heads=2, **ends)
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def overrides(model: Path, task: Path, folder: Path, *placement: str) -> list[str]:
    return tiny_run(
        model,
        task,
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.temperature=0.8",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        "trainer.save_freq=-1",
        *placement,
        folder=folder,
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    """Whole rows only: the last one may be in the middle of being written."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def agree(found: list[dict[str, Any]]) -> None:
    differences = [row["training/rollout_probs_diff_mean"] for row in found]
    assert max(differences) < 0.005, differences
    assert min(row["actor/grad_norm"] for row in found) > 0, "the weights moved, and the engine's with them"


@pytest.fixture
def train(
    model_dir: Path, digits_data: Path, tmp_path: Path, joined: Any, fork_server: Any
) -> Callable[..., list[dict[str, Any]]]:
    """Train in the session's cluster; the rows of metrics.jsonl. Plugins are found in `tmp_path`."""

    def go(*keys: str) -> list[dict[str, Any]]:
        log = tmp_path / "log.txt"
        arguments = overrides(model_dir, digits_data, tmp_path / "run", *keys)
        plugins = {"PYTHONPATH": str(tmp_path)}
        process = fork_server.start("verl.trainer.main_ppo", arguments, output=log, environment=plugins)
        try:
            assert process.wait(timeout=850) == 0, log.read_text()[-6000:]
        finally:
            process.kill()
        return rows(tmp_path / "run")

    return go


@pytest.mark.extended
def test_vllm_in_a_process_of_its_own(train: Callable[..., list[dict[str, Any]]]) -> None:
    pool = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"]
    found = train(*pool, f"trainer.total_training_steps={STEPS}")
    assert len(found) == STEPS
    agree(found)


def test_weights_of_megatron_stages_arrive_whole(train: Callable[..., list[dict[str, Any]]]) -> None:
    """Fingerprints of what was sent and what arrived are compared by the run. The embedding is tied: both stages have
    it."""
    pytest.importorskip("megatron.core", reason="needs megatron-core (make test-components)")
    split = [
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        f"trainer.total_training_steps={STEPS}",
    ]
    found = train(*split)
    assert len(found) == STEPS
    agree(found)


COUNTING = """
from pathlib import Path
from verl.models.lora import plain_name
from verl.workers.train_rank import TrainRank
from verl.rollout.weight_sync import broadcast

_pack, _sync_weights, crossed = broadcast.pack, TrainRank.do_sync_weights, 0

def pack(bucket, buffer):
    global crossed
    crossed += sum(tensor.nbytes for tensor in bucket.values())
    _pack(bucket, buffer)

def sync_weights(self, version):
    global crossed
    crossed = 0
    sent = _sync_weights(self, version)
    with self.group.actor_engine.weights().structure() as module:
        held = module.state_dict()
    sizes = [(plain_name(name) is None, t.numel() * t.element_size()) for name, t in held.items()]
    adapter, everything = sum(size for own, size in sizes if own), sum(size for _, size in sizes)
    with Path({note!r}).open("a") as file:
        file.write(f"{{crossed}} {{adapter}} {{everything}}\\n")
    return sent

broadcast.pack, TrainRank.do_sync_weights = pack, sync_weights
"""


def test_an_adapter_to_vllm_in_a_process_of_its_own(
    train: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Everything crosses once, then only the adapter; vLLM computes with the newest."""
    note = tmp_path / "bytes"
    (tmp_path / "counting_bytes.py").write_text(COUNTING.format(note=str(note)))
    extra = [
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.model.lora_rank=4",
        "trainer.plugins=[counting_bytes]",
        f"trainer.total_training_steps={STEPS}",
    ]
    found = train(*extra)
    assert len(found) == STEPS
    agree(found)
    counts = [[int(number) for number in line.split()] for line in note.read_text().splitlines()]
    assert len(counts) == 1 + STEPS
    adapter, everything = counts[0][1:]
    assert [crossed for crossed, *_ in counts] == [everything] + [adapter] * STEPS
    assert adapter < everything / 4


NOTING = """
from pathlib import Path
from verl.trainer.loop import RLLoop

_step = RLLoop.step

def step(self):
    metrics, batch = _step(self), self.batch.batch
    rows = zip(batch["token_versions"], batch["response_mask"].bool())
    with Path({note!r}).open("a") as file:
        file.write(repr([sorted(set(row[own].tolist())) for row, own in rows]) + "\\n")
    return metrics

RLLoop.step = step
"""


def test_vllm_takes_weights_while_the_trainer_trains(
    train: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """It decodes the first batch and half of the second, then waits for the weights of the first update."""
    length, note = 24, tmp_path / "versions"
    (tmp_path / "notes_versions.py").write_text(NOTING.format(note=str(note)))
    decodes_no_more_with_the_first_weights(tmp_path, after=length + length // 2)
    keys = [
        *POOL,
        f"{MODE}=fully_async",
        f"{STALENESS}=2",
        BYPASS,
        f"data.max_response_length={length}",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.ignore_eos=True",
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "trainer.plugins=[holds_decoding,notes_versions]",
        f"trainer.total_training_steps={STEPS}",
    ]
    found = train(*keys)
    versions = [json.loads(line) for line in note.read_text().splitlines()]
    assert versions[:2] == [[[0]] * 8, [[0, 1]] * 8]
    assert all(row["training/age/max"] <= 2 for row in found)
    steps = trained(tmp_path / "run")
    assert [len(uids) for uids in steps] == [4] * STEPS
    assert max(Counter(chain(*steps)).values()) == 1


def living(pids: set[int]) -> dict[int, str]:
    """Those that still run, by what they call themselves."""
    found = {}
    for pid in filter(processes.is_alive, pids):
        with suppress(psutil.Error):
            found[pid] = " ".join(psutil.Process(pid).cmdline())[:400]
    return found


def family(pid: int) -> set[int]:
    return {process.pid for process in processes.descendants(pid)}


def until(reached: Callable[[], bool], seconds: float = 600) -> bool:
    """Long for a machine with other work to do: the limit only ends a test that hangs."""
    deadline = time.monotonic() + seconds
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.2)
    return reached()


@pytest.mark.timeout(2500)
def test_two_ranks_share_one_engine_and_it_goes_with_its_host(
    model_dir: Path, digits_data: Path, tmp_path: Path, fork_server: Any
) -> None:
    """Steps as usual; then the rank that hosts the engine is killed, and nothing of either stays. The ranks split the
    matrices of one model, so that the one without the engine takes part in every comparison of log-probs."""
    pytest.importorskip("megatron.core", reason="needs megatron-core (make test-components)")
    shared = [
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    ]
    endless = ["trainer.total_training_steps=5000", "trainer.total_epochs=1000"]
    arguments = overrides(model_dir, digits_data, tmp_path / "run", *shared, *endless)
    log = tmp_path / "log.txt"
    # A cluster of its own, so that every process of the run is a descendant of the command.
    process = fork_server.start(
        "verl.trainer.main_ppo", arguments, output=log, environment={"RAY_ADDRESS": "local"}
    )
    names: dict[int, str] = {}
    engines: dict[int, set[int]] = {}

    def everyone_is_seen() -> bool:
        """The engine's core and two workers below one of the ranks. They have vLLM's title only where the title's place
        in memory was found, which depends on the order of the environment; they are always spawned."""
        names.clear()
        names.update(living(family(process.pid)))
        engines.clear()
        for rank in [pid for pid, title in names.items() if "RankProcess" in title]:
            below = family(rank)
            engines[rank] = {
                pid for pid in below if "VLLM::" in names.get(pid, "") or "spawn_main" in names.get(pid, "")
            }
        return sorted(map(len, engines.values())) == [0, 3]

    try:
        assert until(lambda: len(rows(tmp_path / "run")) >= STEPS or process.poll() is not None)
        assert process.poll() is None, log.read_text()[-5000:]
        agree(rows(tmp_path / "run"))
        assert until(everyone_is_seen), f"{names}\n{log.read_text()[-5000:]}"
        host = max(engines, key=lambda rank: len(engines[rank]))
        os.kill(host, signal.SIGKILL)
        assert until(lambda: process.poll() is not None), log.read_text()[-5000:]
        assert process.returncode != 0
    finally:
        process.kill()
        process.wait()
    text = log.read_text()
    # The other rank may be heard first: that its connection broke, when the news of the death takes long.
    died, broke = rf"rank 0 on \S+ \(process {host}\) died in ", r"rank 1 on \S+ \(process \d+\), in "
    assert re.search(f"error: ({died}|{broke})", text), text[-5000:]
    everyone = set(engines).union(*engines.values())
    assert until(lambda: not living(everyone)), living(everyone)
