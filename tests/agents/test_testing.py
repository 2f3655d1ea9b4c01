"""The fixture for agents of users: what can be trained passes, and what cannot is named."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from verl.errors import ConfigError
from verl.testing import AgentReport, train_agent

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")
pytestmark = pytest.mark.slow(seconds=15)

__all__ = ["train_agent"]
ROWS = [{"prompt": [{"role": "user", "content": f"What is {number} and 5?"}]} for number in (1, 2)]
FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {
                "what": {"$ref": "#/$defs/What"},
                "count": {"type": "integer", "minimum": 3},
                "optional": {"type": "string"},
            },
            "required": ["what", "count"],
            "$defs": {"What": {"type": "string", "enum": ["word", "number"]}},
        },
    },
}
GO_ON = {"role": "user", "content": "Go on."}


def say(messages: list[Any], **more: Any) -> dict[str, Any]:
    answer = httpx.post(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json={"model": "any", "messages": messages, **more},
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
        timeout=None,
        trust_env=False,
    )
    if answer.status_code != 200:
        raise RuntimeError(answer.text)
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def calls_tools(row: dict[str, Any]) -> float:
    messages, called = list(row["prompt"]), 0
    for _ in range(3):
        messages.append(said := say(messages, tools=[FIND]))
        for call in said.get("tool_calls") or ():
            assert json.loads(call["function"]["arguments"]) == {"what": "word", "count": 3}
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "found"})
            called += 1
        if not said.get("tool_calls"):
            messages.append(GO_ON)
    return float(called)


def rewrites_its_first_message(row: dict[str, Any]) -> float:
    messages = list(row["prompt"])
    for number in range(2):
        messages[0] = {"role": "user", "content": f"It is {number} o'clock. {row['prompt'][0]['content']}"}
        messages += [say(messages), GO_ON]
    return 1.0


def edits_a_turn(row: dict[str, Any]) -> float:
    say(list(row["prompt"]))
    say([*row["prompt"], {"role": "assistant", "content": "as I like it"}, GO_ON])
    return 1.0


def never_asks(row: dict[str, Any]) -> float:
    return 1.0


def raises(row: dict[str, Any]) -> float:
    say(list(row["prompt"]))
    raise KeyError("price")


def asks_for_too_much(row: dict[str, Any]) -> float:
    say(list(row["prompt"]), top_logprobs=3, logprobs=True)
    return 1.0


def returns_nothing(row: dict[str, Any]) -> None:
    say(list(row["prompt"]))


def length_reward(response: str, **columns: Any) -> float:
    return float(len(response))


def one_of_them(row: dict[str, Any]) -> float | None:
    agent = globals()[row["agent"]]
    return agent(row)  # type: ignore[no-any-return]


def test_an_agent_that_appends_to_its_history_is_trainable(train_agent) -> None:
    report = train_agent(calls_tools, rows=ROWS, steps=2)
    report.check()
    assert len(report.sessions) == 2 * 2 * 2 and {each["step"] for each in report.sessions} == {1, 2}
    assert "8 sessions, 24 requests, of which 0 failed and 0 were retries\ntrained: 24 turns" in str(report)
    called = sum(each["score"] for each in report.sessions)
    assert 0 < called < 24, "some turns call the tool, some do not"
    drawn = sum(each["requests"]["drawn_tokens"] for each in report.sessions)
    assert f"{drawn} of {drawn} drawn tokens" in str(report)
    assert all(each["finish_reason"] == "stop" for each in report.sessions), "turns end"


WRONG: dict[Any, list[str]] = {
    rewrites_its_first_message: [
        "1 of 1 sessions rewrote history: they have more than 1",
        "differs from message 0 on: \"user: It is 0 o'clock. ",
        "became \"user: It is 1 o'clock. ",
    ],
    edits_a_turn: ["1 of 1 sessions dropped a turn of the model", "became 'assistant: as I like it'"],
    never_asks: ["1 of 1 sessions failed", "the agent asked the policy for nothing"],
    raises: ["nothing could be trained", "KeyError: 'price'"],
    asks_for_too_much: [
        "1 of 1 sessions failed",
        "refused: 400: the parameter 'top_logprobs' is not supported",
    ],
    returns_nothing: ["1 of 1 sessions failed", "No scorer for data_source"],
}


def test_the_cause_is_named(train_agent) -> None:
    rows = [{**ROWS[0], "agent": agent.__name__} for agent in WRONG]
    report = train_agent(one_of_them, rows=rows)
    assert report.problems() == [
        "8 of 12 sessions failed and are not trained",
        "2 of 12 sessions dropped a turn of the model",
        "2 of 12 sessions rewrote history: they have more than 1",
    ]
    alone = [AgentReport(report.folder, [session]) for session in report.sessions]
    for agent, texts in WRONG.items():
        first, second = (each for each in alone if any(text in str(each) for text in texts[1:]))
        with pytest.raises(AssertionError) as failure:
            first.check()
        for text in texts:
            assert text in str(failure.value), agent
        assert bool(second.problems(histories=2)) == (agent is not rewrites_its_first_message)


def test_a_run_in_which_nothing_is_trained_ends_with_a_report(train_agent) -> None:
    report = train_agent(never_asks, rows=ROWS[:1])
    assert report.problems()[-1] == "nothing could be trained"


def test_a_program_and_a_reward_function(train_agent, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"import json, sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.agents.test_testing import returns_nothing\nreturns_nothing(json.load(sys.stdin))\n"
    )
    report = train_agent(
        command=f"{sys.executable} {program}", rows=ROWS, reward=length_reward, extra=["trainer.seed=3"]
    )
    report.check()
    for session in report.sessions:
        assert session["score"] == len(session["response"]) > 0


def test_the_example_of_the_page(train_agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    (block,) = (text for text in page.split("```") if text.startswith("python\n# test_mine.py"))
    (tmp_path / "test_mine.py").write_text(block.removeprefix("python\n"))
    (tmp_path / "mine.py").write_text("from tests.agents.test_testing import calls_tools as agent\n")
    monkeypatch.syspath_prepend(tmp_path)
    import test_mine  # type: ignore[import-not-found]

    test_mine.test_my_agent(train_agent)


def test_what_cannot_be_started_is_refused(train_agent) -> None:
    with pytest.raises(ConfigError, match="not both"):
        train_agent(never_asks, command="true", rows=ROWS)
    with pytest.raises(ConfigError, match="at the top of a file"):
        train_agent(lambda row: 1.0, rows=ROWS)
