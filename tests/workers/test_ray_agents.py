"""Conversations of several turns on several processes: the same as in one, each with its KV blocks where they are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agent_run import (
    ENDS,
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
from tests.async_run import BYPASS, MODE, POOL, STALENESS
from tests.workers import faults
from verl.agents import remote
from verl.agents.base import ToolCall
from verl.errors import WorkersLost
from verl.http_server import free_port

pytestmark = [pytest.mark.components, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, tokenizer = tmp_path_factory.mktemp("chat") / "model", chat_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.1,
    )
    return save_chat_model(LlamaForCausalLM(config), folder)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def command(model: Path, task: Path, tmp_path: Path) -> Callable[..., list[str]]:
    return lambda *extra, folder: agent_run(model, task, tmp_path / folder, *extra)


@pytest.fixture
def talk(
    command: Callable[..., list[str]], task: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Record]:
    from verl.config.load import load_ppo_config
    from verl.trainer.main_ppo import run

    def go(*extra: str, folder: str) -> Record:
        with recorded(monkeypatch) as record:
            run(load_ppo_config(command(f"{MULTI_TURN}.tools={task}/tools.py", *extra, folder=folder)))
        return record

    return go


def test_conversations_on_two_ranks_are_those_of_one_process(
    joined: Any, talk: Callable[..., Record]
) -> None:
    placements = {
        "alone": [],
        "ranks": ["trainer.n_gpus_per_node=2"],
        "pool": ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=2"],
    }
    batches = {name: talk(*keys, folder=name).batches[0] for name, keys in placements.items()}
    alone = batches["alone"]
    alone.check(looked_up, chat_tokenizer(), most_turns=3)
    for name, batch in batches.items():
        assert batch.rows == alone.rows, name
        if name != "alone":
            assert set(batch.engine.answered) == {0, 1}
        for mine, one in zip(batch.conversations, alone.conversations, strict=True):
            assert mine.log_probs == pytest.approx(one.log_probs, abs=1e-4)
        # Engines of a pool have computed something before, to prove their weights.
        if name != "pool":
            assert batch.prefilled <= batch.new_tokens, (
                f"{name}: a turn continued where its KV blocks are not"
            )


BOTH = '''
import time, uuid
from pathlib import Path


def lookup(key: int) -> str:
    """Answers once it was called twice.

    Args:
        key: what to look up
    """
    calls = Path(__file__).parent / "calls"
    calls.mkdir(exist_ok=True)
    (calls / uuid.uuid4().hex).touch()
    while len(list(calls.iterdir())) < 2:
        time.sleep(0.01)
    return "1"
'''


def test_generation_stays_open_while_every_conversation_waits_for_its_tool(
    joined: Any, talk: Callable[..., Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing it would release the weights and the KV blocks that the next turn needs."""
    from verl.workers.ray_calls import RankCalls, name_of

    calls: list[str] = []
    ask = RankCalls.all

    def count(self: RankCalls, call: Any, *args: Any) -> Any:
        calls.append(name_of(call))
        return ask(self, call, *args)

    monkeypatch.setattr(RankCalls, "all", count)
    (tmp_path / "both.py").write_text(BOTH)
    two = [
        "data.train_batch_size=1",
        "actor_rollout_ref.rollout.n=2",
        f"{MULTI_TURN}.tools={tmp_path}/both.py",
    ]
    (batch,) = talk(*two, "trainer.n_gpus_per_node=2", folder="two").batches
    assert all(len(each.model_turns) > 1 for each in batch.conversations)
    assert calls.count("open_generation") == calls.count("close_generation") == 1


ORDERED = '''
import time, uuid
from pathlib import Path


class World:
    def reset(self, number, **row):
        self.second_batch, self.called = number >= 4, False

    def lookup(self, key: int) -> str:
        """Conversations of the first batch wait for a turn of each one of the second, these for an update.

        Args:
            key: what to look up
        """
        called, updated = Path(__file__).parent / "called", Path(__file__).parent / "updated"
        if self.second_batch and not self.called:
            called.mkdir(exist_ok=True)
            (called / uuid.uuid4().hex).touch()
            self.called = True
        while not (updated.exists() if self.second_batch else called.exists() and len(list(called.iterdir())) >= 8):
            time.sleep(0.01)
        return "1"
'''


def test_conversations_continue_with_new_weights_while_the_trainer_trains(
    joined: Any,
    command: Callable[..., list[str]],
    task: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from verl.config.load import load_ppo_config
    from verl.trainer.loop import RLLoop
    from verl.trainer.main_ppo import run

    rows = [json.loads(line) for line in (task / "train.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "number": number}) + "\n" for number, row in enumerate(rows)]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    (tmp_path / "world.py").write_text(ORDERED)
    steps: list[Any] = []
    step = RLLoop.step

    def step_and_keep(loop: RLLoop) -> dict[str, float]:
        metrics = step(loop)
        steps.append(loop.batch)
        (tmp_path / "updated").touch()
        return metrics

    monkeypatch.setattr(RLLoop, "step", step_and_keep)
    keys = [
        f"{MODE}=fully_async",
        f"{STALENESS}=1",
        BYPASS,
        *POOL,
        f"{MULTI_TURN}.environment={tmp_path}/world.py:World",
        f"data.train_files={tmp_path}/train.jsonl",
        "data.shuffle=False",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=4",
    ]
    run(load_ppo_config(command(*keys, folder="async")))
    versions = []
    for number, batch in enumerate(steps):
        masks = batch.batch["response_mask"].bool()
        versions.append(
            [row[own].tolist() for row, own in zip(batch.batch["token_versions"], masks, strict=True)]
        )
        assert all(drawn == sorted(drawn) for drawn in versions[-1])
        assert all(number - 1 <= version <= number for drawn in versions[-1] for version in drawn)
    assert [set(drawn) for drawn in versions[0]] == [{0}] * 8
    assert [set(drawn) for drawn in versions[1]] == [{0, 1}] * 8
    uids = [uid for batch in steps for uid in batch.non_tensor_batch["uid"]]
    assert len(steps) == 4 and set(Counter(uids).values()) == {2} and len(set(uids)) == 16


@pytest.fixture
def nobody_left(session_folder: str) -> Callable[[], bool]:
    return lambda: faults.wait_for(lambda: not faults.rank_processes(session_folder), 240)


def test_a_rank_that_dies_between_turns_ends_the_run(
    joined: Any,
    talk: Callable[..., Record],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nobody_left: Callable[[], bool],
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "both.py").write_text(BOTH)
    # Each rank has one conversation, and both wait for their tools: the next turn is a second call of the rank.
    two = [
        "data.train_batch_size=1",
        "actor_rollout_ref.rollout.n=2",
        f"{MULTI_TURN}.tools={tmp_path}/both.py",
    ]
    plugin = faults.write(tmp_path, "generate", "kill", nth=2)
    with pytest.raises(WorkersLost, match="died in generate"):
        talk(*two, "trainer.n_gpus_per_node=2", f"trainer.plugins=[tests.agent_run,{plugin}]", folder="dying")
    assert nobody_left()


def test_a_lost_tool_server_ends_the_run_with_a_checkpoint(
    joined: Any,
    command: Callable[..., list[str]],
    fork_server: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
    nobody_left: Callable[[], bool],
) -> None:
    from verl.trainer.main_ppo import main

    port, made = free_port(), 0
    server = fork_server.start("verl", ["tool-server", "--port", str(port)], output=tmp_path / "server.txt")

    def call(text: str) -> ToolCall:
        nonlocal made
        made += 1
        if made == 50:  # the first step has at most 48
            monkeypatch.setattr(remote, "LOST_AFTER_S", 1.0)
            server.kill()
            server.wait(300)
        return ToolCall("calculator", {"expression": f"{number_of(text)} % 96"})

    monkeypatch.setattr(EveryTurn, "call", staticmethod(call))
    monkeypatch.setattr(remote, "LOST_AFTER_S", 300.0)
    keys = [f"{MULTI_TURN}.tool_server=http://127.0.0.1:{port}", "trainer.total_training_steps=3"]
    try:
        assert main(command(*keys, "trainer.n_gpus_per_node=2", folder="lost")) == 3
    finally:
        server.kill()
    assert f"http://127.0.0.1:{port} went away" in capfd.readouterr().err
    assert any((tmp_path / "lost" / f"global_step_{step}").is_dir() for step in (1, 2))
    assert nobody_left()


def test_generate_on_two_processes_writes_the_conversations_of_one(
    joined: Any, model: Path, task: Path, tmp_path: Path
) -> None:
    from verl.trainer.main_generation import main

    def rows(name: str, *placement: str) -> list[dict[str, Any]]:
        output = tmp_path / f"{name}.jsonl"
        keys = [
            f"model.path={model}",
            f"data.path={task}/train.jsonl",
            f"data.output_path={output}",
            f"data.cache_dir={tmp_path / 'cache'}",
            "data.max_prompt_length=16",
            "data.max_response_length=48",
            "rollout.n=2",
            f"rollout.stop_token_ids={ENDS}",
            "rollout.multi_turn.enable=True",
            "rollout.multi_turn.format=turns_are_calls",
            "rollout.multi_turn.max_turns=3",
            f"rollout.multi_turn.tools={task}/tools.py",
            "trainer.plugins=[tests.agent_run]",
            "trainer.device=cpu",
        ]
        assert main([*keys, *placement]) == 0
        return [json.loads(line) for line in output.read_text().splitlines()]

    alone = rows("alone")
    assert rows("two", "trainer.n_gpus_per_node=2") == alone
    assert len(alone) == 16 and "tool" in json.dumps(alone[0])


SENDING = """

def agent(row, base_url, api_key):
    client, messages = Client(base_url, api_key), list(row["prompt"])
    for number in range(2):
        messages += [client.say(messages), {"role": "user", "content": "1"}]
    return 1.0
"""


def test_agents_of_users_on_two_ranks_are_those_of_one_process(
    joined: Any, command: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.agents.clients import CLIENT
    from verl.config.load import load_ppo_config
    from verl.trainer.main_ppo import run

    (tmp_path / "agent.py").write_text(CLIENT + SENDING)
    own = (f"{MULTI_TURN}.agent={tmp_path}/agent.py:agent", f"{MULTI_TURN}.chains=longest")
    found = []
    for folder, keys in (("alone", ()), ("ranks", ("trainer.n_gpus_per_node=2",))):
        with recorded(monkeypatch) as record:
            run(load_ppo_config(command(*own, *keys, folder=folder)))
        found.append(record.batches[0])
    alone, ranks = found
    assert ranks.rows == alone.rows and set(ranks.engine.answered) == {0, 1}
    assert {len(each.model_turns) for each in alone.conversations} == {2}
