"""vLLM's own processes are killed or stop answering: the trainer says so, and none of them stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from verl.errors import RolloutError
from verl.rollout import build_rollout
from verl.rollout.base import Request, SamplingParams

pytest.importorskip("vllm", reason="needs vLLM (make test-components)")
pytestmark = [pytest.mark.components, pytest.mark.timeout(900)]

LONG = Request("a", [5, 9, 33], SamplingParams(max_tokens=100, ignore_eos=True))


def descendants(pid: int) -> dict[int, str]:
    """Living descendants of a process and their titles."""
    parents, titles = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                titles[int(entry.name)] = (entry / "cmdline").read_text(errors="replace")
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= more
    return {child: titles[child] for child in found}


def is_gone(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def left_of(processes: dict[int, str]) -> dict[int, str]:
    """Those that are still there after a while."""
    wait_until(lambda: all(map(is_gone, processes)))
    return {pid: title.rstrip("\0") for pid, title in processes.items() if not is_gone(pid)}


def wait_until(reached: Callable[[], bool], seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.1)
    return reached()


@pytest.fixture
def started() -> Iterator[Callable[[], dict[int, str]]]:
    """Processes that were not there before the test; Python's helper that stays for as long as this one is none."""
    before = descendants(os.getpid())
    yield lambda: {
        pid: title
        for pid, title in descendants(os.getpid()).items()
        if pid not in before and "resource_tracker" not in title
    }


def named(processes: dict[int, str], title: str) -> list[int]:
    return sorted(pid for pid, own in processes.items() if title in own)


def test_the_servers_engine_is_killed(
    started: Any, small_model: Any, word_tokenizer: Any, rollout_section: Any
) -> None:
    """The process that answers is alive; the one that computes, its child, is not."""
    engine = build_rollout("vllm", small_model(), word_tokenizer, rollout_section(mode="server"))
    try:
        processes = started()
        (core,) = named(processes, "EngineCore")
        os.kill(core, signal.SIGKILL)
        with pytest.raises(RolloutError, match="vllm's server"):
            list(engine.generate([LONG]))
    finally:
        engine.close()
    assert not left_of(processes)


def test_a_tensor_parallel_worker_is_killed(started: Any, small_model: Any, rollout_section: Any) -> None:
    engine = build_rollout(
        "vllm", small_model(num_key_value_heads=2), None, rollout_section(tensor_model_parallel_size=2)
    )
    try:
        processes = started()
        workers = named(processes, "Worker")
        assert len(workers) == 2, processes
        os.kill(workers[1], signal.SIGKILL)
        with pytest.raises(RolloutError, match="EngineCore"):
            list(engine.generate([LONG]))
    finally:
        engine.close()
    assert not left_of(processes)


def test_a_run_whose_server_is_killed_ends_with_its_reason(
    small_model_dir: Path, digits_data: Path, tmp_path: Path
) -> None:
    arguments = [
        f"data.train_files={digits_data}/train.jsonl",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=4",
        f"actor_rollout_ref.model.path={small_model_dir}",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.mode=server",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        "algorithm.adv_estimator=grpo",
        f"reward.custom_reward_function.path={digits_data}/digits_reward.py",
        "trainer.device=cpu",
        "trainer.logger=[]",
        "trainer.save_freq=1",
        "trainer.total_training_steps=100000",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    with (tmp_path / "log.txt").open("wb") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    tracker = tmp_path / "run" / "latest_checkpointed_iteration.txt"
    try:
        assert wait_until(lambda: tracker.exists() or run.poll() is not None, 400)
        processes = descendants(run.pid)
        os.kill(named(processes, "api_server")[0], signal.SIGKILL)
        code = run.wait(300)
    finally:
        run.kill()
        run.wait()
    log = (tmp_path / "log.txt").read_text(errors="replace")
    assert code not in (0, 1) and "Traceback" not in log and "error: vllm's server" in log, (
        f"{code}: {log[-4000:]}"
    )
    assert not left_of(processes)
