"""vLLM in other processes: its HTTP server as a child, and tensor-parallel workers; weights through shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from verl import processes, watchdog
from verl.errors import RolloutError, TrainingHalted
from verl.rollout import build_rollout
from verl.rollout.base import Request, SamplingParams
from verl.rollout.source import ModuleWeights

pytest.importorskip("vllm", reason="needs vLLM (make test-components)")
pytestmark = [pytest.mark.components, pytest.mark.timeout(600)]

PROMPTS = [[5, 9, 33], [7], [100, 3, 44, 120, 18, 90, 61]]
LONG = 8192
"""Tokens that no server has written before somebody has read its first."""


@pytest.fixture(scope="module")
def model(small_model: Callable[..., Any]) -> Any:
    return small_model(max_position_embeddings=LONG)


@pytest.fixture(scope="module")
def server(model: Any, word_tokenizer: Any, rollout_section: Callable[..., Any]) -> Iterator[Any]:
    engine = build_rollout(
        "vllm", model, word_tokenizer, rollout_section(mode="server", temperature=0.7, max_model_len=LONG)
    )
    yield engine
    engine.close()


def agree(engine: Any, model: Any, reference: Callable[..., list[float]], temperature: float = 0.7) -> None:
    sampling = SamplingParams(max_tokens=10, temperature=temperature)
    requests = [Request(f"r{i}", prompt, sampling, n=2, seed=4) for i, prompt in enumerate(PROMPTS)]
    answers = {(r.request_id, r.sample): r for r in engine.generate(requests)}
    assert len(answers) == 6
    for (name, _), response in answers.items():
        expected = reference(model, PROMPTS[int(name[1:])], response.token_ids, temperature)
        assert response.log_probs == pytest.approx(expected, abs=2e-4)
        assert response.policy_version == engine.version


def shake(model: Any) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)


def test_the_server_follows_the_trainer(
    server: Any, model: Any, reference: Callable[..., list[float]]
) -> None:
    agree(server, model, reference)
    shake(model)
    server.update_weights(ModuleWeights(model), 3)
    agree(server, model, reference)
    agree(server, model, reference, temperature=1.0)


def test_stops_and_seeds_through_the_server(server: Any) -> None:
    def ask(**changes: Any) -> Any:
        sampling = SamplingParams(max_tokens=12, ignore_eos=True, **changes)
        (response,) = server.generate([Request("r", PROMPTS[2], sampling, seed=5)])
        return response

    free = ask().token_ids
    assert ask().token_ids == free and len(free) == 12
    end = free.index(free[5]) + 1
    for stopped in (ask(stop_token_ids=(free[5],)), ask(stop=(f"w{free[5]} ",))):
        assert stopped.token_ids == free[:end] and stopped.finish_reason == "stop"
        assert len(stopped.log_probs) == end


def test_abort_through_the_server(server: Any, monkeypatch: Any) -> None:
    """What is running when the abort comes ends with the tokens it has; the server answers on."""
    stream, aborted = server.stream, threading.Event()

    async def wait_for_the_abort(sample: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(stream(sample)) as pieces:
            async for piece in pieces:
                yield piece
                # However fast the server: a long answer is not read further before the short one was aborted on.
                while sample.request.request_id != "short" and not aborted.is_set():
                    await asyncio.sleep(0.01)

    monkeypatch.setattr(server, "stream", wait_for_the_abort)
    short = Request("short", [4], SamplingParams(max_tokens=2, ignore_eos=True))
    long = [
        Request(f"long{i}", [9, i + 3], SamplingParams(max_tokens=8000, ignore_eos=True)) for i in range(3)
    ]
    answers = {}
    for response in server.generate([*long, short]):
        answers[response.request_id] = response
        server.abort()
        aborted.set()
    assert next(iter(answers)) == "short" and answers["short"].finish_reason == "length"
    assert len(answers) == 4
    for request in long:
        answer = answers[request.request_id]
        assert answer.finish_reason == "abort" and 0 < len(answer.token_ids) < 8000
    (again,) = server.generate([short])
    assert again.finish_reason == "length" and len(again.token_ids) == 2


def test_requests_arrive_at_the_server_while_others_run_and_weights_change(
    server: Any, model: Any, reference: Callable[..., list[float]]
) -> None:
    server.submit([Request("early", [5, 9, 33], SamplingParams(max_tokens=8000, ignore_eos=True))])
    server.submit([Request("late", [7], SamplingParams(max_tokens=4, ignore_eos=True))])
    (late,) = server.poll()
    assert late.request_id == "late" and server.stats().running == 1
    before = server.version
    shake(model)
    server.update_weights(ModuleWeights(model), before + 1)
    beats = watchdog.beats
    while watchdog.beats < beats + 6:  # some tokens with the new weights
        assert server.poll(0.05) == []
    server.abort(["early"])
    (early,) = server.poll()
    assert early.finish_reason == "abort" and early.policy_version == before
    expected = reference(model, [5, 9, 33], early.token_ids)
    assert early.log_probs[-10:] == pytest.approx(expected[-10:], abs=5e-4)
    assert server.poll() == []


def test_a_value_changed_in_shared_memory_is_caught(server: Any, model: Any, monkeypatch: Any) -> None:
    from verl.rollout.weight_sync import shared_memory

    pack = shared_memory.pack

    def corrupt(bucket: dict[str, torch.Tensor], buffer: torch.Tensor) -> None:
        changed = {name: tensor.clone() for name, tensor in bucket.items()}
        changed["model.norm.weight"][7] *= 1.01
        pack(changed, buffer)

    monkeypatch.setattr(shared_memory, "pack", corrupt)
    with pytest.raises(TrainingHalted, match=r"1 of \d+ tensors differ.*\n  model.norm.weight: sent"):
        server.update_weights(ModuleWeights(model), 6)
    monkeypatch.undo()
    server.update_weights(ModuleWeights(model), 7)


def test_no_weights_stay_in_shared_memory(server: Any) -> None:
    """Of this process: others on this machine may be handing weights over right now."""
    assert not list(Path("/dev/shm").glob(f"verl-weights-*-{os.getpid():x}-*"))


def test_a_dead_server_is_said_with_its_log_and_leaves_nothing(server: Any, model: Any) -> None:
    """The last test of this server."""
    os.kill(server.process.pid, signal.SIGKILL)
    with pytest.raises(RolloutError, match="server (ended with status -9|did not answer|broke off)"):
        list(server.generate([Request("a", [5], SamplingParams(max_tokens=100, ignore_eos=True))]))
    with pytest.raises(RolloutError):
        server.update_weights(ModuleWeights(model), 1)
    server.close()
    assert not processes.group_members(server.process.pid), "closing waits for all of them"


ORPHAN = """
import sys, time
from transformers import AutoModelForCausalLM
from verl.config.schema import RolloutConfig
from verl.rollout import build_rollout
section = RolloutConfig(name="vllm", mode="server", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
engine = build_rollout("vllm", AutoModelForCausalLM.from_pretrained(sys.argv[1]), None, section)
print(engine.process.pid, flush=True)
time.sleep(600)
"""


def test_the_server_does_not_outlive_a_killed_trainer(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    command = [sys.executable, "-c", ORPHAN, str(tmp_path / "model")]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    group = int(trainer.stdout.readline())
    assert processes.group_members(group)
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 120
    while processes.group_members(group) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not processes.group_members(group)


def test_two_tensor_parallel_workers(
    small_model: Callable[..., Any],
    rollout_section: Callable[..., Any],
    reference: Callable[..., list[float]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = small_model(num_key_value_heads=2)
    with caplog.at_level(logging.INFO, "verl.rollout.vllm.base"):
        engine = build_rollout("vllm", model, None, rollout_section(tensor_model_parallel_size=2))
    try:
        # The embeddings, of which each worker has a part, and five norms; linear weights are packed on CPUs.
        assert "6 of 21 tensors are loaded, and compared, bit for bit" in caplog.text
        assert not engine.by_reference
        agree(engine, model, reference, temperature=1.0)
        shake(model)
        engine.update_weights(ModuleWeights(model), 2)
        agree(engine, model, reference, temperature=1.0)
    finally:
        engine.close()
