"""vLLM's own processes are killed or stopped, while generating and while taking weights: the trainer says so within
`trainer.watchdog_s`, and neither a process nor shared memory of theirs stays behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny_run import tiny_run
from verl import processes
from verl.errors import EngineLost
from verl.models.weight_source import NamedTensors, Names
from verl.rollout import build_rollout, stale_files
from verl.rollout.base import Request, SamplingParams
from verl.rollout.external_engine import Sample
from verl.rollout.source import ModuleWeights

pytest.importorskip("vllm", reason="needs vLLM (make test-components)")
pytestmark = [pytest.mark.components, pytest.mark.slow(seconds=25), pytest.mark.timeout(900)]

TOKENS = 8000
"""More than any engine has written before somebody has read its first."""
LONG = Request("a", [5, 9, 33], SamplingParams(max_tokens=TOKENS, ignore_eos=True))
SHORT = Request("b", [5, 9, 33], SamplingParams(max_tokens=1, ignore_eos=True))
"""Done when the other has hardly begun; a sample may be reported at its end only."""
SIZES = {"max_model_len": 8192, "max_num_batched_tokens": 256}


def descendants(pid: int) -> dict[int, str]:
    """Living descendants of a process and their titles."""
    found = {}
    for process in processes.descendants(pid):
        with suppress(psutil.Error):
            found[process.pid] = " ".join(process.cmdline())
    return found


def left_of(running: dict[int, str]) -> dict[int, str]:
    """Those that are still there after a while."""
    wait_until(lambda: not any(map(processes.is_alive, running)))
    return {pid: title for pid, title in running.items() if processes.is_alive(pid)}


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


def named(running: dict[int, str], title: str) -> list[int]:
    return sorted(pid for pid, own in running.items() if title in own)


@pytest.fixture
def faulty(
    started: Any, small_model: Any, rollout_section: Any, monkeypatch: Any
) -> Iterator[Callable[..., str]]:
    """Starts an engine, sends `number` to the process called `title` in the middle of `phase`, and gives the error."""
    engines = []

    def go(phase: str, title: str, number: signal.Signals, **settings: Any) -> str:
        model = small_model(num_key_value_heads=2, max_position_embeddings=8192)
        engine: Any = build_rollout("vllm", model, None, rollout_section(**SIZES, **settings))
        engines.append(engine)
        running = started()
        victims = named(running, title)[-1:]  # one of the workers is enough
        assert victims, running

        def strike() -> None:
            while victims:
                os.kill(victims.pop(), number)
            if number == signal.SIGSTOP:
                # This short only from here on: a start may take longer.
                engine.watchdog.watchdog_s = 2.0

        class InTheMiddle(ModuleWeights):
            def named_tensors(self, names: Names = "hf") -> NamedTensors:
                for pair in super().named_tensors(names):
                    yield pair
                    strike()

        if phase == "generate":
            append = Sample.append

            def at_the_first_answer(*args: Any) -> Any:
                strike()
                return append(*args)

            monkeypatch.setattr(Sample, "append", at_the_first_answer)
        memory = [
            stale_files.MEMORY / name for name in processes.mapped_shared_memory(running, stale_files.SEGMENT)
        ]
        assert memory, "vLLM's processes talk through shared memory"
        memory += [Path(line) for line in (engine.folder / "files").read_text().splitlines()]
        assert any(
            path.name.startswith("vllm_dist_") and path.parent != stale_files.MEMORY for path in memory
        )
        with pytest.raises(EngineLost) as caught:
            if phase == "generate":
                list(engine.generate([SHORT, LONG]))
            else:
                engine.update_weights(InTheMiddle(model), 1)
        engine.close()
        assert not victims and not left_of(running)
        assert not [path for path in (*memory, engine.folder) if path.exists()]
        return str(caught.value)

    yield go
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    ("phase", "number", "words"),
    [
        ("generate", signal.SIGKILL, r"vllm's server (ended|does not work any more)"),
        (
            "weight sync",
            signal.SIGSTOP,
            r"made no progress for 2 s .* in /collective_rpc: .*EngineCore\) stopped",
        ),
    ],
)
def test_the_servers_engine_is_lost(phase: str, number: signal.Signals, words: str, faulty: Any) -> None:
    """The process that answers is alive, and says that it is well; the one that computes, its child, is not."""
    message = faulty(phase, "EngineCore", number, mode="server")
    assert re.search(words, message), message
    assert "trainer.resume_mode=auto" in message and "End of its log:\n" in message


@pytest.mark.parametrize(
    ("phase", "title", "number", "words"),
    [
        (
            "generate",
            "Worker",
            signal.SIGSTOP,
            r"made no progress for 2 s .* in generate: .*Worker\S*\) stopped",
        ),
        ("weight sync", "Worker", signal.SIGKILL, r"vLLM's engine died"),
        pytest.param(
            "generate", "EngineCore", signal.SIGKILL, r"vLLM's engine died", marks=pytest.mark.extended
        ),
    ],
)
def test_a_tensor_parallel_engine_is_lost(
    phase: str, title: str, number: signal.Signals, words: str, faulty: Any
) -> None:
    message = faulty(phase, title, number, tensor_model_parallel_size=2)
    assert re.search(words, message), message
    assert "trainer.resume_mode=auto" in message


@pytest.fixture
def scratch() -> Iterator[Path]:
    """For temporary files; the path of a socket must not be long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


PLUGIN = """
import os, signal
from pathlib import Path
from verl.rollout.vllm.server import VLLMServerRollout as Engine

saved, killed = Path({saved!r}), Path({killed!r})
stream, deliver = Engine.stream, Engine.deliver

async def killed_while_generating(self, sample):
    if saved.exists() and not killed.exists():
        killed.touch()
        os.kill(self.process.pid, signal.SIGKILL)
    async for piece in stream(self, sample):
        yield piece

def stopped_while_taking_weights(self, pairs):
    if killed.exists() and self.version > 1:
        os.killpg(self.process.pid, signal.SIGSTOP)
        self.watchdog.watchdog_s = 2.0
    return deliver(self, pairs)

Engine.stream, Engine.deliver = killed_while_generating, stopped_while_taking_weights
"""


def test_a_run_goes_on_after_its_server_is_killed_and_ends_when_it_hangs(
    small_model_dir: Path, digits_data: Path, tmp_path: Path, scratch: Path, fork_server: Any
) -> None:
    """One restart is allowed. Without Ray: the trainer's process is the only one that could notice."""
    tracker = tmp_path / "run" / "latest_checkpointed_iteration.txt"
    (tmp_path / "lost_twice.py").write_text(
        PLUGIN.format(saved=str(tracker), killed=str(tmp_path / "killed"))
    )
    arguments = tiny_run(
        small_model_dir,
        digits_data,
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.mode=server",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        "reward.in_process=False",
        "trainer.save_freq=1",
        "trainer.total_training_steps=100000",
        "trainer.max_restarts=1",
        "trainer.plugins=[lost_twice]",
        folder=tmp_path / "run",
    )
    search = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = fork_server.start(
        "verl.trainer.main_ppo",
        arguments,
        output=tmp_path / "log.txt",
        environment={"PYTHONPATH": search, "TMPDIR": str(scratch)},
    )
    seen: dict[int, str] = {}
    try:
        while run.poll() is None:
            seen |= descendants(run.pid)
            time.sleep(0.5)
    finally:
        run.kill()
        run.wait()
    log = (tmp_path / "log.txt").read_text(errors="replace")
    assert run.returncode == EngineLost.exit_code and "Traceback" not in log, (
        f"{run.returncode}: {log[-4000:]}"
    )
    first, second = (
        log.index("vllm's server ended with status -9"),
        log.index("error: vllm's server made no progress"),
    )
    assert first < log.index("restart 1 of 1 (trainer.max_restarts)") < second
    assert "for 2 s (trainer.watchdog_s) while the trainer" in log and ") stopped" in log[second:]
    assert tracker.read_text().strip() == "1", "the second step was on its way both times"
    assert not left_of(seen)
    assert not list(scratch.glob("verl-*")) and not list(stale_files.MEMORY.glob(f"verl-*-{run.pid:x}-*"))


TRAINER = """
import sys, time
from transformers import AutoModelForCausalLM
from verl.config.schema import RolloutConfig
from verl.rollout import build_rollout
section = RolloutConfig(name="vllm", mode="server", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
engine = build_rollout("vllm", AutoModelForCausalLM.from_pretrained(sys.argv[1]), None, section)
print(engine.process.pid, flush=True)
time.sleep(100_000)
"""


def test_a_killed_trainer_takes_a_hung_server_along_and_its_scratch_files_are_swept(
    small_model_dir: Path, scratch: Path
) -> None:
    """The server does not hear that it should end; those that it started end it."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(small_model_dir)],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert trainer.stdout is not None
        server = int(trainer.stdout.readline())
        running = descendants(trainer.pid)
        memory = [
            stale_files.MEMORY / name for name in processes.mapped_shared_memory(running, stale_files.SEGMENT)
        ]
        os.kill(server, signal.SIGSTOP)
    finally:
        trainer.kill()
        trainer.wait()
    assert named(running, "EngineCore") and not left_of(running)
    assert len(list(scratch.glob("verl-rollout-*"))) == 1 and memory
    assert stale_files.sweep([scratch]) and not list(scratch.glob("verl-rollout-*"))
    assert not [path for path in memory if path.exists()]
