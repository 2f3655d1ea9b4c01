"""A conversation with its tools, environment and user: what a fault of each costs."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl.agents.base import Message, ParsedTurn, ToolCall, ToolFailed
from verl.agents.episode import Episode, TurnAnswer
from verl.agents.formats import get_format
from verl.agents.toolset import Agents
from verl.config.sections.rollout import MultiTurnConfig
from verl.observe.live import live

LONG_S = 120.0
SHORT_S = 0.3

FAULTS = """
import os, time

def act(what):
    if what == "raise":
        raise ValueError("no")
    if what == "exit":
        os._exit(7)
    if what == "hang":
        time.sleep(1000)
    return what
"""
FUNCTIONS = """
from verl.agents import tool
from session_faults import act

@tool
def function(what: str) -> str:
    \"\"\"Act.\"\"\"
    return act(what)
"""
ENVIRONMENTS = """
from session_faults import act
from verl.agents import Environment

class World(Environment):
    def reset(self, start="ok", end="ok", **row):
        act(start)
        self.end = end

    def world(self, what: str) -> str:
        \"\"\"Act.\"\"\"
        return act(what)

    def reward(self):
        act(self.end)
        return 1.0

class Asked(Environment):
    def reset(self, what, **row):
        self.what = what

    def user(self, reply):
        return act(self.what)

    def reward(self):
        return 1.0

class Heard(Environment):
    def reset(self, **row):
        pass

    def user(self, reply, messages):
        return " / ".join([reply, *(message["content"] for message in messages)])

class Rewarded(Environment):
    def reset(self, what, **row):
        self.what = what

    def nothing(self) -> str:
        \"\"\"Nothing.\"\"\"
        return ""

    def turn_reward(self):
        act(self.what)
"""
YAML_TOOLS = """
from session_faults import act
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

class Plain(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=act(parameters["what"]) + kwargs.get("unit", "")), 0.5, {}

class Scored(Plain):
    async def calc_reward(self, instance_id, **kwargs):
        return 10.0
"""


def yaml_file(kind: str) -> str:
    schema = {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]}
    function = {"name": kind.lower(), "description": "Act.", "parameters": schema}
    tool = {
        "class_name": f"session_tools.py:{kind}",
        "tool_schema": {"type": "function", "function": function},
    }
    return json.dumps({"tools": [tool]})  # which is YAML


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    folder: Path = tmp_path_factory.mktemp("agents")
    files = {
        "session_faults.py": FAULTS,
        "session_functions.py": FUNCTIONS,
        "session_world.py": ENVIRONMENTS,
        "session_tools.py": YAML_TOOLS,
        "plain.yaml": yaml_file("Plain"),
        "scored.yaml": yaml_file("Scored"),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    tools = [str(folder / name) for name in ("plain.yaml", "scored.yaml", "session_functions.py")]
    config = MultiTurnConfig(enable=True, tools=tools, environment=[str(folder / "session_world.py")])
    agents = Agents(config, get_format("hermes"))
    yield agents
    agents.close()


@pytest.fixture
def begin(agents: Agents) -> Callable[..., Episode]:
    def begin(environment: str = "World", **row: Any) -> Episode:
        session = Episode(agents, "", {"environment": environment, **row})
        session._timeout_s = LONG_S
        agents.wait_for(session.open())
        return session

    return begin


def say(session: Episode, text: str, timeout_s: float = LONG_S) -> TurnAnswer:
    session._timeout_s = timeout_s
    messages: list[Message] = [{"role": "assistant", "content": text}]
    answer: TurnAnswer = session.agents.wait_for(session.respond(text, messages))
    session._timeout_s = LONG_S
    return answer


def counted_calls() -> tuple[float, ...]:
    return tuple(live.values[f"tool_calls_{name}"] for name in ("waiting", "total", "failed_total"))


def call(session: Episode, tool: str, what: str) -> TurnAnswer:
    text = json.dumps({"name": tool, "arguments": {"what": what}})
    return say(session, f"<tool_call>{text}</tool_call>", SHORT_S if what == "hang" else LONG_S)


@pytest.mark.parametrize("tool", ["plain", "scored", "function", "world"])
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("raise", "failed", "ValueError: no"),
        ("exit", "failed", "code 7"),
        ("hang", "timeout", "did not answer within 0.3 s"),
    ],
)
def test_a_fault_in_a_call_costs_the_call(begin, tool, fault, kind, words):
    """And what was kept in the process, where it is gone: an environment, and what calc_reward would have scored."""
    live.begin_run()
    session = begin()
    answer = call(session, tool, fault)
    (record,) = answer.records
    assert (record.failure, answer.error, answer.reward, answer.done) == (kind, None, None, False)
    assert counted_calls() == (0, 1, 1)
    assert words in record.result
    gone = fault != "raise" and tool in ("scored", "world")
    answer = call(session, tool, "ok")
    (record,) = answer.records
    if gone:
        assert "The environment has ended" in record.result
        with pytest.raises(ToolFailed):
            session.agents.wait_for(session.close())
    else:
        assert (record.result, record.failure, answer.error) == ("ok", None, None)
        assert counted_calls() == (0, 2, 1)
        assert answer.reward == (0.5 if tool in ("plain", "scored") else None)
        total = session.agents.wait_for(session.close())
        assert total == 1.0 + (10.0 if tool == "scored" else 0.0)


def test_a_new_process_of_yaml_tools_knows_the_row(begin):
    session = begin(tools_kwargs={"plain": {"execute_kwargs": {"unit": " m"}}})
    call(session, "plain", "exit")
    assert call(session, "plain", "4").records[0].result == "4 m"
    session.agents.wait_for(session.end())


@pytest.mark.parametrize("fault", ["raise", "exit", "hang"])
@pytest.mark.parametrize(
    ("environment", "problem"),
    [("Asked", "the user gave no answer: "), ("Rewarded", "the environment gave no reward for a turn: ")],
)
def test_a_conversation_whose_user_or_turn_reward_fails_ends_with_an_error(
    begin, environment, problem, fault
):
    session = begin(environment, what=fault)
    answer = say(session, "Hello.", SHORT_S if fault == "hang" else LONG_S)
    assert answer.error is not None and answer.error.startswith(problem)
    assert answer.records == [] and answer.reward is None
    session.agents.wait_for(session.end())


def test_the_user_hears_the_content_of_a_turn_that_has_its_thinking_in_channels(begin, agents, monkeypatch):
    monkeypatch.setattr(agents, "format", get_format("gpt-oss"))
    thought = "<|channel|>analysis<|message|>Lie.<|end|><|start|>assistant"
    answer = say(begin("Heard"), f"{thought}<|channel|>final<|message|>Two.")
    assert answer.user == "Two. / Two."


def test_a_record_has_the_id_that_the_model_gave_the_call(begin, agents, monkeypatch):
    form = get_format("kimi_k2")
    monkeypatch.setattr(agents, "format", form)
    (record,) = say(begin(), form.example.replace("functions.tool:0", "functions.nothing:4")).records
    assert (record.name, record.call_id, record.failure) == ("nothing", "functions.nothing:4", "unknown")


@pytest.mark.parametrize("hook", ["start", "end"])
def test_a_reset_or_reward_that_raises_is_said(begin, agents, hook):
    with pytest.raises(ToolFailed, match="failed: ValueError: no"):
        agents.wait_for(begin(**{hook: "raise"}).close())


@pytest.mark.filterwarnings("error")
def test_calls_that_had_not_begun_when_the_run_stops_leave_nothing_behind() -> None:
    """A coroutine that is made and never awaited would be reported by Python."""
    episode = Episode.__new__(Episode)
    calls = tuple(ToolCall("ask", {}) for _ in range(2))
    parse = SimpleNamespace(parse=lambda text: ParsedTurn("", calls))
    episode.agents = SimpleNamespace(format=parse, cfg=SimpleNamespace(max_parallel_calls=2))  # type: ignore[assignment]

    async def stopped() -> None:
        turn = asyncio.create_task(episode._run_tools(""))
        await asyncio.sleep(0)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn

    asyncio.run(stopped())
    gc.collect()
