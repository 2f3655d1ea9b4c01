"""Conversations of several turns with vLLM, with MCP servers and with `verl tool-server`, each a real one, and what
their faults cost a run."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.agent_run import (
    MULTI_TURN,
    EveryTurn,
    Record,
    agent_run,
    chat_tokenizer,
    looked_up,
    number_of,
    recorded,
    save_chat_model,
    save_task,
)
from tests.tiny_run import read_metrics
from verl.agents import mcp, remote
from verl.agents.base import ToolCall
from verl.trainer.main_ppo import main

pytestmark = [pytest.mark.components, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(small_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(
        small_model(vocab_size=len(chat_tokenizer()), bos_token_id=None, eos_token_id=1),
        tmp_path_factory.mktemp("chat") / "model",
    )


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_task(tmp_path_factory.mktemp("task"))


# ---- vLLM


@pytest.mark.parametrize("mode", ["inprocess", "server"])
def test_vllm_rows_are_what_was_asked_and_answered(
    mode: str, model: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm", reason="needs vLLM (make test-components)")
    from verl.config.load import load_ppo_config
    from verl.trainer.main_ppo import run

    keys = [
        f"{MULTI_TURN}.tools={task}/tools.py",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.mode={mode}",
        "actor_rollout_ref.rollout.temperature=0.9",
        "actor_rollout_ref.rollout.max_model_len=128",
        # With it the trainer computes the log-probs of all rows before the update.
        "algorithm.rollout_correction.rollout_is=token",
    ]
    with recorded(monkeypatch) as record:
        run(load_ppo_config(agent_run(model, task, tmp_path / "run", *keys)))
    record.batches[0].check(looked_up, chat_tokenizer(), most_turns=3)
    tensors, columns = record.steps[0].batch, record.steps[0].non_tensor_batch
    for row, talk in enumerate(columns["conversation"]):
        length = len(talk.token_ids)
        assert tensors["responses"][row, :length].tolist() == talk.token_ids
        assert tensors["response_mask"][row].nonzero().flatten().tolist() == [
            at for at, own in enumerate(talk.response_mask) if own
        ]
        assert tensors["rollout_log_probs"][row, :length].tolist() == pytest.approx(talk.log_probs)
    mask = tensors["response_mask"].bool()
    torch.testing.assert_close(
        tensors["rollout_log_probs"][mask], tensors["old_log_probs"][mask], rtol=0, atol=5e-4
    )
    assert read_metrics(tmp_path / "run")[0]["actor/grad_norm"] > 0


LOOP = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register


@register("twice")
class Twice(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        ids, mask, log_probs = list(prompt_ids), [], []
        for turn in range(2):
            if turn:
                told = [{"role": "tool", "content": str(len(mask))}]
                read = await self.apply_chat_template(told, remove_system_prompt=True)
                ids, mask, log_probs = ids + read, mask + [0] * len(read), log_probs + [0.0] * len(read)
            output = await self.server_manager.generate(
                request_id="one", prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": 12}
            )
            ids, mask = ids + output.token_ids, mask + [1] * len(output.token_ids)
            log_probs += output.log_probs
        return AgentLoopOutput(prompt_ids, ids[len(prompt_ids):], mask, log_probs, reward_score=len(mask) / 48)
"""


def test_an_agent_loop_written_for_verl_trains_on_vllm(
    model: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows pass the audit, and the trainer finds the log-probs that vLLM drew with."""
    pytest.importorskip("vllm", reason="needs vLLM (make test-components)")
    from verl.config.load import load_ppo_config
    from verl.trainer.main_ppo import run

    (tmp_path / "twice.py").write_text(LOOP)
    keys = [
        f"trainer.plugins=[tests.agent_run,{tmp_path}/twice.py]",
        "actor_rollout_ref.rollout.agent.default_agent_loop=twice",
        f"{MULTI_TURN}.enable=False",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.max_model_len=128",
        "algorithm.rollout_correction.rollout_is=token",
    ]
    with recorded(monkeypatch) as record:
        run(load_ppo_config(agent_run(model, task, tmp_path / "run", *keys)))
    (step,) = record.steps
    mask = step.batch["response_mask"].bool()
    for row, talk in enumerate(step.non_tensor_batch["conversation"]):
        assert talk.error is None and [turn.role for turn in talk.turns] == ["assistant", "tool", "assistant"]
        assert mask[row].nonzero().flatten().tolist() == [
            at for at, own in enumerate(talk.response_mask) if own
        ]
    drawn, found = (step.batch[name][mask] for name in ("rollout_log_probs", "old_log_probs"))
    torch.testing.assert_close(drawn, found, atol=1e-3, rtol=0)
    (row,) = read_metrics(tmp_path / "run")
    assert row["reward/failed"] == 0


# ---- servers of tools

LONG_S = 300.0
"""A time no run reaches unless something is broken."""
SHORT_S = 1.0
PROGRAM = Path(__file__).parents[1] / "agents" / "mcp_server.py"
STEPS = 3


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LOST_AFTER_S", LONG_S)
    monkeypatch.setattr(mcp, "CHECK_S", SHORT_S)


@dataclass
class Server:
    """A server of one kind, and how the model's turns become calls of it: each asks for a number plus one."""

    kind: str
    port: int
    script: Path
    start_process: Callable[..., subprocess.Popen[bytes]]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        """The trainer itself starts one over standard input and output."""
        if self.kind == "mcp over stdio":
            return str(self.script)
        return f"http://127.0.0.1:{self.port}{'/mcp' if self.kind == 'mcp over http' else ''}"

    @property
    def keys(self) -> list[str]:
        tools = "tool_server" if self.kind == "tool-server" else "mcp"
        return [f"{MULTI_TURN}.{tools}={self.address}"]

    def start(self) -> None:
        """The trainer waits for it."""
        if self.kind == "tool-server":
            serve = ["-m", "verl", "tool-server", "--port", self.port, "--allow-unisolated"]
            self.started.append(self.start_process(*serve))
        elif self.kind == "mcp over http":
            self.started.append(self.start_process(PROGRAM, "--port", self.port))
        else:
            self.script.write_text(f"#!/bin/sh\nexec {shlex.join([sys.executable, str(PROGRAM)])}\n")
            self.script.chmod(0o700)

    def kill(self) -> None:
        """It cannot be reached before the next `start`."""
        found = [psutil.Process(process.pid) for process in self.started[-1:]]
        if self.kind == "mcp over stdio":
            self.script.write_text("#!/bin/sh\nexit 1\n")
            found = [child for child in psutil.Process().children(recursive=True) if is_server(child)]
            assert found
        for process in found:
            process.kill()
        psutil.wait_procs(found, LONG_S)

    def call(self, text: str) -> ToolCall:
        number = number_of(text) % 90
        if self.kind != "tool-server":
            return ToolCall("add", {"a": number, "b": 1})
        if number % 3:
            return ToolCall("calculator", {"expression": f"{number} + 1"})
        return ToolCall("python", {"code": f"print({number} + 1)"})

    def hanging_call(self) -> ToolCall:
        if self.kind == "tool-server":
            return ToolCall("python", {"code": "while True: pass"})
        return ToolCall("block" if self.kind == "mcp over stdio" else "hang", {})


def is_server(process: psutil.Process) -> bool:
    try:
        return str(PROGRAM) in process.cmdline()
    except psutil.Error:
        return False


def plus_one(text: str) -> str:
    return str(number_of(text) % 90 + 1)


@pytest.fixture
def server(request: pytest.FixtureRequest, start: Any, port: int, tmp_path: Path) -> Server:
    if request.param != "tool-server":
        pytest.importorskip("mcp", reason="needs the package mcp (make test-components)")
    server = Server(request.param, port, tmp_path / "server", start)
    server.start()
    return server


@dataclass
class Run:
    """Runs of a few steps with a server's tools; `before` is called with the number of the call about to be made."""

    command: list[str]
    server: Server
    monkeypatch: pytest.MonkeyPatch

    def __call__(self, before: Callable[[int], ToolCall | None], *extra: str) -> tuple[int, Record]:
        made = 0

        def call(text: str) -> ToolCall:
            nonlocal made
            made += 1
            return before(made) or self.server.call(text)

        with recorded(self.monkeypatch) as record, self.monkeypatch.context() as patch:
            patch.setattr(EveryTurn, "call", staticmethod(call))
            return main([*self.command, *extra]), record


@pytest.fixture
def train(server: Server, model: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    keys = [
        "data.train_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        f"trainer.total_training_steps={STEPS}",
        *server.keys,
    ]
    return Run(agent_run(model, task, tmp_path / "run", *keys), server, monkeypatch)


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_metrics(folder)]


every_server = pytest.mark.parametrize(
    "server", ["mcp over stdio", "mcp over http", "tool-server"], indirect=True
)


@every_server
def test_a_server_that_is_killed_and_started_again_costs_nothing(
    server: Server, train: Run, tmp_path: Path
) -> None:
    def restart(number: int) -> None:
        if number == 14:  # in the second step: the first has four conversations of at most three turns
            server.kill()
            server.start()

    code, record = train(restart)
    assert code == 0 and steps(tmp_path / "run") == list(range(1, STEPS + 1))
    assert len(record.batches) == STEPS
    for batch in record.batches:
        batch.check(plus_one, chat_tokenizer(), most_turns=3)


@every_server
def test_a_server_that_stays_away_stops_the_run_with_a_checkpoint(
    server: Server, train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def kill(number: int) -> None:
        if number == 14:
            monkeypatch.setattr(remote, "LOST_AFTER_S", SHORT_S)
            server.kill()

    code, record = train(kill)
    said = capfd.readouterr().err
    assert code == 3 and server.address in said and "resumes" in said
    saved = len(record.batches)
    assert 1 <= saved < STEPS
    assert (tmp_path / "run" / f"global_step_{saved}").is_dir()
    monkeypatch.setattr(remote, "LOST_AFTER_S", LONG_S)
    server.start()
    code, record = train(lambda number: None)
    assert code == 0 and len(record.batches) == STEPS - saved
    assert steps(tmp_path / "run") == list(range(1, STEPS + 1))


@every_server
def test_a_tool_that_hangs_in_the_server_costs_its_call(server: Server, train: Run, tmp_path: Path) -> None:
    def hang(number: int) -> ToolCall | None:
        return server.hanging_call() if number == 1 else None

    code, record = train(hang, f"{MULTI_TURN}.tool_timeout_s={SHORT_S}", "trainer.total_training_steps=1")
    assert code == 0
    records = [r for talk in record.batches[0].conversations for turn in talk.turns for r in turn.records]
    hung = server.hanging_call()
    (hanging,) = [each for each in records if (each.name, each.arguments) == (hung.name, hung.arguments)]
    assert hanging.failure == "timeout" and hanging.result.startswith("Error:")
    assert read_metrics(tmp_path / "run")[0][f"tools/timeout/{hung.name}"] >= 1
