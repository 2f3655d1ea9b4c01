"""Agents over the clients that people have: the tokens are those of a conversation of ours, and rewards rise."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.agents.chat_tokenizers import FAMILIES
from tests.agents.clients import ASK
from tests.agents.conversations import TOOLS, Talk, settings_of
from tests.agents.talking import plan_format
from tests.agents.test_sessions import same_tokens
from tests.examples.running import EXAMPLES, INSTALLED, check_claims, run_script

pytestmark = [pytest.mark.components, pytest.mark.timeout(600)]

OPENAI = (
    ASK
    + '''
import json

import openai



def heard(call):
    return "heard " + json.loads(call.function.arguments)["text"][::-1]


def agent(row):
    """The addresses are in the environment."""
    client, messages = openai.OpenAI(), list(row["prompt"])
    for number in range(4):
        asked = {"model": "gpt-4o", "messages": messages, "tools": [ASK]}
        if row["start"] % 2:
            with client.chat.completions.stream(**asked) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": heard(call)})
'''
)
RESPONSES = (
    ASK
    + """
import json

import openai



async def agent(row):
    client, items = openai.AsyncOpenAI(), [dict(message) for message in row["prompt"]]
    tools = [{"type": "function", **ASK["function"]}]
    for number in range(4):
        answer = await client.responses.create(model="gpt-5", input=items, tools=tools)
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            text = "heard " + json.loads(call.arguments)["text"][::-1]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": text})
"""
)
ANTHROPIC = (
    ASK
    + """
import anthropic



def agent(row):
    client, messages = anthropic.Anthropic(), list(row["prompt"])
    tool = {"name": "ask", "description": "Answer.", "input_schema": ASK["function"]["parameters"]}
    for number in range(4):
        asked = {"model": "claude", "max_tokens": 4096, "messages": messages, "tools": [tool]}
        if row["start"] % 2:
            with client.messages.stream(**asked) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**asked)
        messages.append({"role": "assistant", "content": answer.content or "none"})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "heard " + block.input["text"][::-1]}
            for block in answer.content
            if block.type == "tool_use"
        ]
        if not results:
            break
        messages.append({"role": "user", "content": results})
"""
)
LANGGRAPH = '''
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def ask(text: str) -> str:
    """Answer."""
    return "heard " + text[::-1]


def agent(row):
    graph = create_react_agent(ChatOpenAI(model="gpt-4o"), [ask])
    graph.invoke({"messages": list(row["prompt"])})
'''
SMOLAGENTS = '''
from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def ask(text: str) -> str:
    """Answer.

    Args:
        text: What is asked.
    """
    return "heard " + text[::-1]


def agent(row, base_url, api_key):
    model = OpenAIServerModel("gpt-4o", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(tools=[ask], model=model, max_steps=2, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = "Ask."
    agent.run(row["prompt"][-1]["content"])
'''


def ours(family: str, folder: Path) -> list[Any]:
    (folder / "tools.py").write_text(TOOLS)
    talk = Talk(family, settings_of(format="asking", tools=[f"{folder}/tools.py"]))
    with closing(talk.runner):
        return talk.run(range(4), max_tokens=400)


def through(text: str, folder: Path, family: str = "qwen2_5", form: str = "asking") -> list[Any]:
    (folder / "agent.py").write_text(text)
    talk = Talk(family, settings_of(format=form, agent=f"{folder}/agent.py:agent"))
    with closing(talk.runner):
        return talk.run(range(4), max_tokens=400)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", [OPENAI, RESPONSES, ANTHROPIC], ids=["openai", "responses", "anthropic"])
def test_a_client_gives_the_tokens_of_a_conversation_of_ours(text: str, family: str, tmp_path: Path) -> None:
    """Chat and messages of odd rows are streamed."""
    found = through(text, tmp_path, family)
    same_tokens(ours(family, tmp_path), found)
    assert max(len(talk.model_turns) for talk in found) > 1
    assert {talk.metrics["agents/rewritten_histories"] for talk in found} == {0}


def test_a_graph_continues_its_history(tmp_path: Path) -> None:
    pytest.importorskip("langgraph")
    pytest.importorskip("langchain_openai")
    found = through(LANGGRAPH, tmp_path)
    for talk in found:
        assert talk.error is None, talk.error
        assert len(talk.rows) == 1 and talk.metrics["agents/dropped_turns"] == 0
    assert max(len(talk.model_turns) for talk in found) > 1


def test_an_agent_that_writes_calls_as_text_continues_its_history(tmp_path: Path) -> None:
    """smolagents demands calls, writes them as text, and at its last step asks with a prompt of its own."""
    pytest.importorskip("smolagents")
    plan_format("demanded", [["ask"], ["ask"], ["ask", "ask"]], begins="a b")
    for talk in through(SMOLAGENTS, tmp_path, form="demanded"):
        assert talk.error is None, talk.error
        named = {name.removeprefix("agents/"): value for name, value in talk.metrics.items()}
        assert (named["chains"], named["dropped_turns"], named["rewritten_histories"]) == (2, 0, 1)
        assert len(talk.rows) == 2 and len(talk.model_turns) == 3
        assert [m["role"] for m in talk.messages[:5]] == ["system", "user", "assistant", "user", "assistant"]
        for begun in (talk.messages[2], talk.messages[4]):
            assert begun["content"].startswith("a b"), "the demanded beginning is a part of the turn"
        # The policy did not draw it.
        assert sum(talk.response_mask) == sum(map(len, talk.drawn_ids))


def test_the_example_does_what_its_readme_says(tmp_path: Path) -> None:
    folder = EXAMPLES / "agents" / "own_agent"
    run_script(folder / "run_small.sh", tmp_path / "data", tmp_path, path=INSTALLED)
    check_claims(folder / "README.md", tmp_path / "checkpoints" / "examples" / "own_agent")
