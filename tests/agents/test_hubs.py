"""Environments of other projects: what needs none of their packages. `tests/components/test_hubs.py` has the rest."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.agents.conversations import Talk, settings_of
from verl.agents import remote
from verl.agents.base import ToolsLost
from verl.agents.hubs import environment_kwargs, group_seed, hub_of, last_integer
from verl.agents.hubs.openenv import action_of, observation_text
from verl.agents.tool_processes import Target, ToolProcesses
from verl.agents.tools import load_environment
from verl.data.files import read_rows
from verl.errors import ConfigError, MissingPackage

REFUSING = """
from verl.agents.base import TryAgain

class Server:
    asked = 0

    def reset(self, full, refusals, **row):
        self.asked += 1
        if self.asked <= refusals:
            raise TryAgain("CAPACITY_REACHED: 1 of 1", full=full)
        return f"asked {self.asked} times"

    def user(self, reply):
        return None
"""
SEEDED = """
class World:
    def reset(self, uid, **row):
        return f"It is {uid}."

    def user(self, reply):
        return None
"""


@pytest.mark.parametrize(
    ("spec", "package", "install"),
    [
        ("gym:Guess-v0", "gymnasium", "gymnasium>="),
        ("openenv:http://127.0.0.1:1", "websockets", "websockets>="),
        ("verifiers:wordle", "verifiers", "verifiers>="),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    spec, package, install, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage) as caught:
        load_environment(spec)
    for words in (f"multi_turn.environment={spec}", f"'{package}'", f"pip install '{install}"):
        assert words in str(caught.value)


def test_a_version_of_verifiers_without_load_environment_is_named(monkeypatch):
    later = ModuleType("verifiers")
    later.__version__ = "0.4.0"
    monkeypatch.setitem(sys.modules, "verifiers", later)
    with pytest.raises(
        ConfigError, match=r"data.train_files=verifiers:wordle: the installed version 0\.4\.0"
    ):
        read_rows("verifiers:wordle")


def test_an_environment_of_verifiers_runs_as_an_agent_does_and_stands_alone():
    one = settings_of(environment=["verifiers:a"])
    assert one.own_agent == "environment" and not one.answers and not list(one.errors("here"))
    assert settings_of(environment=["gym:a"]).own_agent == "" and settings_of(environment=["gym:a"]).answers
    assert settings_of(environment=["verifiers:a"], enable=False).own_agent == ""
    assert settings_of(agent="mine.py:agent").own_agent == "agent"
    for more in ({"environment": ["verifiers:a", "gym:b"]}, {"environment": ["verifiers:a", "verifiers:b"]}):
        (error,) = settings_of(**more).errors("here")
        assert "'here.environment' runs whole conversations" in error
    for more in ({"agent": "mine.py:agent"}, {"tools": ["tools.py"]}):
        (error,) = settings_of(environment=["verifiers:a"], **more).errors("here")
        assert "runs whole conversations" in error


def test_only_the_prefix_of_a_hub_names_a_hub(write):
    assert hub_of("gym:A-v0") == "gym" and hub_of("openenv:http://h") == "openenv"
    assert [hub_of(spec) for spec in ("gym.py:A", "game.py:Guess", "my.gym:A", "gym", "gymnasium:A")] == [
        None
    ] * 5


def test_the_samples_of_a_prompt_get_one_seed_and_arguments_without_nulls():
    seeds = [group_seed({"uid": uid}) for uid in ("0-1", "0-1", "0-2", "1-1")]
    assert seeds[0] == seeds[1] and len(set(seeds)) == 3 and all(0 <= seed < 2**31 for seed in seeds)
    given = {"seed": 3, "size": None}
    assert environment_kwargs({"environment_kwargs": given}) == {"seed": 3}
    assert environment_kwargs({"extra_info": {"environment_kwargs": given}}) == {"seed": 3}
    assert environment_kwargs({}) == {}
    with pytest.raises(TypeError, match="environment_kwargs has 'seed=3'"):
        environment_kwargs({"environment_kwargs": "seed=3"})


def test_the_last_whole_number_of_a_text_is_the_action():
    assert [last_integer(text) for text in ("3, no: 4.", "-2", "none", "x12y")] == [4, -2, None, 12]


def schema(required: list[str], **fields: str) -> dict[str, Any]:
    typed = {name: {"type": kind} for name, kind in fields.items()}
    return {"properties": {"metadata": {"type": "object"}, **typed}, "required": required}


def test_the_only_field_of_an_action_gets_the_turn_and_several_are_written_as_json():
    assert action_of("go north", schema(["text"], text="string", speed="number")) == {"text": "go north"}
    assert action_of("go", schema([], text="string")) == {"text": "go"}
    assert action_of("I take 3.", schema(["move"], move="integer")) == {"move": 3}
    assert "whole number" in action_of("I pass.", schema(["move"], move="integer"))
    two = schema(["x", "y"], x="number", y="number")
    assert action_of('So: {"x": 1, "y": {"z": 2}} it is', two) == {"x": 1, "y": {"z": 2}}
    for text in ("1 and 2", "{x: 1}", "[1]", "} {"):
        assert "JSON object with x, y" in action_of(text, two)
    assert action_of('{"type": "list_tools"}', schema([])) == {"type": "list_tools"}


def test_the_only_field_of_an_observation_is_read_as_it_is():
    assert observation_text({"text": "a\nb", "metadata": {"x": 1}, "note": None}) == "a\nb"
    assert observation_text({"text": "a", "left": 2}) == '{"text": "a", "left": 2}'
    assert observation_text({"board": [1, 2]}) == "[1, 2]"


@pytest.mark.parametrize("full", [True, False])
def test_a_server_that_refuses_is_asked_again_and_one_that_is_gone_stops_the_run(write, monkeypatch, full):
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)

    async def go() -> None:
        tools = ToolProcesses([Target("environment", write(REFUSING))])
        await tools.open()
        try:
            patient = tools.instance(0, "patient")
            assert await patient.reset({"full": full, "refusals": 3}, 240.0) == "asked 4 times"
            monkeypatch.setattr(remote, "BUSY_S" if full else "LOST_AFTER_S", 0.0)
            expected = pytest.raises(Exception) if full else pytest.raises(ToolsLost)
            with expected as caught:
                await tools.instance(0, "lost").reset({"full": full, "refusals": 10**6}, 240.0)
            if full:
                assert "no time for this call" in caught.value.text
            else:
                assert "CAPACITY_REACHED" in str(caught.value) and "max_concurrent_envs" in str(caught.value)
        finally:
            await tools.close()

    asyncio.run(go())


def test_environments_know_the_prompt_whose_samples_they_play(write):
    talk = Talk("qwen2_5", settings_of(environment=[write(SEEDED)]))
    try:
        said = [c.messages[0]["content"] for c in talk.run((3, 4), n=2, max_tokens=40)]
    finally:
        talk.runner.close()
    assert [text.splitlines()[-1] for text in said] == ["It is p3.", "It is p3.", "It is p4.", "It is p4."]
