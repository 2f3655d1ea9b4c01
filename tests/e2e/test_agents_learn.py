"""The example agents: what they show the model at first is what it sees in training, and it learns to use its tools."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.tiny_run import read_metrics

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "agents"
AGENTS = sorted(file.parent.name for file in EXAMPLES.glob("*/agent.py"))


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{file.parent.name}_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    return load(EXAMPLES / "prepare.py")


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Train as the example's command does, on the files of `folder`; the rows of metrics.jsonl."""
    from verl.config.load import load_ppo_config
    from verl.trainer.main_ppo import run

    monkeypatch.chdir(EXAMPLES.parents[1])

    def go(name: str, folder: Path, *extra: str, run_folder: str = "run") -> list[dict[str, Any]]:
        arguments = [
            "--config-path",
            str(EXAMPLES / name / "agent.yaml"),
            f"data.train_files={folder}/train.jsonl",
            f"data.val_files={folder}/held_out.jsonl",
            f"actor_rollout_ref.model.path={folder}/model",
            f"trainer.default_local_dir={folder}/{run_folder}",
            "trainer.logger=[]",
            *extra,
        ]
        return read_metrics(run(load_ppo_config(arguments)).folder)

    return go


def validation(rows: list[dict[str, Any]], name: str) -> list[float]:
    key = f"val-core/{name}/reward/mean@1"
    return [row[key] for row in rows if key in row]


@pytest.mark.parametrize("name", AGENTS)
def test_demonstrations_begin_as_the_prompts_of_training_do(name, prepare, monkeypatch):
    from verl.agents.tools import load_environment, load_tools
    from verl.config.sources import read_yaml
    from verl.data.chat import ChatFormat

    monkeypatch.chdir(EXAMPLES.parents[1])
    agent, rng = load(EXAMPLES / name / "agent.py"), random.Random(0)
    tasks = [agent.task(rng) for _ in range(30)]
    demonstrations = [agent.demonstration(task, rng) for task in tasks]
    chat = ChatFormat(prepare.build_tokenizer(map(json.dumps, demonstrations)))
    multi_turn = read_yaml(str(EXAMPLES / name / "agent.yaml"), None)["actor_rollout_ref"]["rollout"][
        "multi_turn"
    ]
    spec = multi_turn.get("tools")
    hosted = [load_tools(spec)] if spec else load_environment(multi_turn["environment"])
    tools = [schema for factory in hosted for schema in factory.info.schemas]
    for task, messages in zip(tasks, demonstrations, strict=True):
        prompt = chat.render(task["prompt"], generate=True, tools=tools)
        assert chat.render(messages, generate=False).startswith(prompt)
        assert chat.tokenizer.decode(chat.encode([prompt])[0]) == prompt


@pytest.mark.slow(seconds=12)
@pytest.mark.timeout(900)
def test_the_guessing_agent_trains(prepare, train, tmp_path):
    """Its command runs, with a model that has learned next to nothing: the user answers whatever it says."""
    prepare.prepare("guessing", tmp_path, fine_tuning_steps=5)
    small = ["data.train_batch_size=4", "data.val_max_samples=8"]
    rows = train("guessing", tmp_path, "trainer.total_training_steps=1", *small)
    assert rows[-1]["step"] == 1 and len(validation(rows, "guessing")) == 2
    assert rows[-1]["reward/failed"] == 0
    lines = (tmp_path / "run" / "rollouts" / "1.jsonl").read_text().splitlines()
    turns = [json.loads(line)["turns"] for line in lines]
    assert len(turns) == 32 and min(map(len, turns)) > 1


def test_the_search_agent_is_rewarded_for_the_document_it_finds(monkeypatch):
    from verl.config.load import load_ppo_config

    monkeypatch.chdir(EXAMPLES.parents[1])
    config = load_ppo_config(["--config-path", str(EXAMPLES / "search" / "agent.yaml")])
    assert config.actor_rollout_ref.rollout.multi_turn.enable
    agent, rng = load(EXAMPLES / "search" / "agent.py"), random.Random(0)
    task = agent.task(rng)
    (room,) = re.findall(r"\d+", task["prompt"][0]["content"])
    found = agent.search(f"room {room}")
    assert found.endswith(f"is {task['ground_truth']}") and f"room {room} " in found
    assert agent.search("guest in room") == f"{len(agent.GUESTS)} documents"
    assert agent.compute_score(f"It is {task['ground_truth']}.", task["ground_truth"]) == 1.0
    assert agent.compute_score("It is Ada Nobody.", task["ground_truth"]) == 0.0


@pytest.mark.slow(seconds=180)
@pytest.mark.timeout(3000)
def test_the_calculator_agent_passes_what_the_model_reaches_without_its_tool(prepare, train, tmp_path):
    """The same model, trained as long on the same questions, with and without the tool."""
    prepare.prepare("calculator", tmp_path)
    with_tool = train("calculator", tmp_path, "trainer.total_training_steps=12")
    without = train(
        "calculator",
        tmp_path,
        "trainer.total_training_steps=12",
        "actor_rollout_ref.rollout.multi_turn.enable=false",
        run_folder="without",
    )
    ceiling = max(
        validation(without, "calculator") + [row["reward/mean"] for row in without if "reward/mean" in row]
    )
    assert ceiling < 0.1
    assert validation(with_tool, "calculator")[-1] > ceiling + 0.5
    calls = [row["tools/calls/multiply"] for row in with_tool if "tools/calls/multiply" in row]
    assert calls[-1] > 1.5 * calls[0]
