"""What requests of agents become: histories, rows, rewards and failures, over a real engine and a real server."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.agents.chat_tokenizers import FAMILIES
from tests.agents.clients import ASKING, CASES, CLIENT
from tests.agents.conversations import TOOLS, Talk, settings_of
from tests.agents.talking import plan_format
from verl.agents.conversation import Conversation
from verl.agents.sessions import AskedTurns
from verl.data.assemble import assemble_rollouts
from verl.errors import ConfigError, RolloutError
from verl.rollout.base import GenerationSettings, Response, SamplingParams

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
pytestmark = pytest.mark.slow(seconds=8)

plan_format("asking", [[], ["ask"], ["ask", "ask"], ["ask"]])


def tokens(conversation: Conversation) -> dict[str, Any]:
    names = ("prompt_ids", "token_ids", "response_mask", "versions", "log_probs")
    return {name: getattr(conversation, name) for name in names}


def same_tokens(own: list[Conversation], other: list[Conversation]) -> None:
    for ours, theirs in zip(own, other, strict=True):
        assert theirs.error is None, theirs.error
        mine, given = tokens(ours), tokens(theirs)
        assert given.pop("log_probs") == pytest.approx(mine.pop("log_probs"), abs=1e-5)
        assert given == mine
        assert [turn.role for turn in theirs.turns] == [turn.role for turn in ours.turns]


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_give_the_tokens_of_a_conversation_of_ours_in_every_template(
    family: str, tmp_path: Path
) -> None:
    """Half of the agents stream."""
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "agent.py").write_text(ASKING)
    found: dict[str, list[Conversation]] = {}
    history = "append"
    for name, given in (
        ("ours", {"tools": [f"{tmp_path}/tools.py"]}),
        ("theirs", {"agent": f"{tmp_path}/agent.py:agent"}),
    ):
        try:
            talk = Talk(family, settings_of(format="asking", history=history, **given))
        except ConfigError:
            history = "split"
            talk = Talk(family, settings_of(format="asking", history=history, **given))
        with closing(talk.runner):
            found[name] = talk.run(range(3), max_tokens=200)
    same_tokens(found["ours"], found["theirs"])
    turns = [len(each.model_turns) for each in found["ours"]]
    assert max(turns) > 1, "no tool was called"
    assert all(each.scored or each.finish_reason == "length" for each in found["theirs"])


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Conversation]:
    """Conversations of agents that do strange things, all at the same time, by name."""
    path = tmp_path_factory.mktemp("cases") / "agent.py"
    path.write_text(CASES)
    names: dict[str, Any] = {}
    exec(CASES, names)
    cfg = settings_of(format="asking", agent=f"{path}:agent", agent_timeout_s=4.0, max_turns=200)
    talk = Talk("qwen2_5", cfg)
    with closing(talk.runner):
        found = talk.run(range(len(names["NAMES"])), n=1, max_tokens=400)
        assert not talk.runner.door._door.sessions, "every session is closed"
    return dict(zip(names["NAMES"], found, strict=True))


def drawn_once(conversation: Conversation) -> list[tuple[list[int], list[int]]]:
    """Prompt and response of every row; what the policy drew is in one of them only."""
    rows = [(prompt, conversation.token_ids[start:end]) for start, end, prompt in conversation.rows]
    own = sum(turn.end - turn.start for turn in conversation.model_turns)
    assert own == sum(conversation.response_mask)
    return rows


def ends_well(conversation: Conversation, chains: int, turns: int, dropped: int = 0, joined: int = 0) -> None:
    assert conversation.error is None, conversation.error
    counts = {name.removeprefix("agents/"): value for name, value in conversation.metrics.items()}
    assert len(conversation.rows) == chains and len(conversation.model_turns) == turns
    assert (counts["dropped_turns"], counts["joined_requests"]) == (dropped, joined)
    drawn_once(conversation)


def test_what_means_the_same_continues_with_the_ids_that_were_drawn(cases) -> None:
    ends_well(cases["rewriting"], chains=1, turns=3)
    found = cases["calls_as_text"]
    ends_well(found, chains=1, turns=len(found.model_turns))
    assert "Observation" in found.messages[-2]["content"]
    assert cases["rewriting"].metrics["agents/rewritten_histories"] == 0


def test_texts_keep_the_ids_that_were_drawn(cases) -> None:
    """The end of a turn is not part of the text: another row begins after it."""
    found = cases["texts"]
    first = found.model_turns[0]
    ended = len(found.token_ids[: first.end]) < 9
    ends_well(found, chains=1 + ended, turns=2)
    (prompt, drawn), *_ = drawn_once(found)
    second = found.rows[-1][2] if ended else prompt + drawn
    assert second[len(prompt) :][: first.end - ended] == found.token_ids[: first.end - ended]


@pytest.mark.parametrize("name", ["anthropic", "responses"])
def test_every_interface_continues_a_history(cases, name: str) -> None:
    ends_well(cases[name], chains=1, turns=2)


def test_an_edited_turn_is_dropped(cases) -> None:
    found = cases["edited"]
    ends_well(found, chains=1, turns=1, dropped=1)
    assert [message["content"] for message in found.messages[1:3]] == ["changed", "Go on."]
    assert found.turns[-1].note.startswith("the client wrote the last turn anew: 'assistant:")
    assert found.turns[-1].note.endswith("became 'assistant: changed'")
    (dropped,) = found.requests["dropped"]
    assert dropped["reason"] == found.turns[-1].note and dropped["content"]


def test_a_rewritten_history_and_other_tools_begin_another_row(cases) -> None:
    ends_well(cases["compacted"], chains=2, turns=3)
    ends_well(cases["other_tools"], chains=2, turns=2)
    note = cases["compacted"].transcript()[-1]["note"]
    assert "differs from message 0 on: 'user: Question" in note and note.endswith("became 'user: In short.'")
    assert "other tools" in cases["other_tools"].transcript()[-1]["note"]


def test_calls_at_the_same_time_share_what_was_before(cases) -> None:
    found = cases["parallel"]
    ends_well(found, chains=2, turns=3)
    (first, drawn), (second, _) = drawn_once(found)
    turn = found.model_turns[0]
    assert second[: len(first)] == first and second[len(first) :][: turn.end] == drawn[: turn.end]
    ends_well(cases["several"], chains=2, turns=4)


def test_a_retry_joins_the_answer_and_a_repetition_does_not(cases) -> None:
    ends_well(cases["retried"], chains=1, turns=2, joined=1)
    ends_well(cases["left"], chains=1, turns=1, joined=1)
    ends_well(cases["repeated"], chains=2, turns=2)
    first, second = (turn for turn in cases["repeated"].model_turns)
    ids = cases["repeated"].token_ids
    assert ids[first.start : first.end] != ids[second.start : second.end], "they have keys of their own"


def test_agents_that_fail_keep_what_they_have_without_a_score(cases) -> None:
    for name, words in (
        ("dies", "ValueError: no more"),
        ("hangs", "agent_timeout_s"),
        ("is_silent", "nothing"),
    ):
        found = cases[name]
        assert words in str(found.error) and not found.scored and found.finish_reason == "abort"
        assert len(found.model_turns) == (name != "is_silent")


def test_rewards_are_posted_or_returned(cases) -> None:
    assert (cases["posts"].environment_reward, cases["posts"].scored) == (0.75, True)
    assert cases["returns_more"].environment_reward == 2 and cases["returns_more"].reward_extra == {
        "form": 0.5
    }
    assert not cases["edited"].scored, "the reward function scores it"


def test_a_hostile_client_loses_only_its_own_session(cases) -> None:
    found = cases["hostile"]
    assert found.error is None and (found.environment_reward == 1.0 or found.finish_reason == "turns")
    assert 60 <= len(found.model_turns) <= 200


def test_an_agent_that_never_ends_meets_a_limit(cases) -> None:
    found = cases["endless"]
    assert found.error is None and found.finish_reason in ("turns", "length") and not found.scored


def test_a_lost_engine_ends_the_run_and_no_agent_waits(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ASKING)
    talk = Talk("qwen2_5", settings_of(format="asking", agent=f"{tmp_path}/agent.py:agent"))
    poll, polled = talk.engine.poll, itertools.count()

    def lost(timeout_s: float | None = None) -> Any:
        if next(polled) > 3:
            raise RolloutError("the engine is lost")
        return poll(timeout_s)

    talk.engine.poll = lost  # type: ignore[method-assign]
    with closing(talk.runner):
        started = time.monotonic()
        with pytest.raises(RolloutError, match="the engine is lost"):
            talk.run(range(3))
        assert not talk.runner.door._door.sessions
    assert time.monotonic() - started < 20


def test_an_answer_that_one_of_two_clients_has_read_is_kept() -> None:
    async def both() -> AskedTurns:
        async def draw() -> Response:
            await asyncio.sleep(0.01)
            return Response("r", 0, [5], [-1.0], "stop")

        async def read(asked: AskedTurns) -> list[Response]:
            return [response async for response in asked.answers()]

        asked = AskedTurns((), [], [asyncio.ensure_future(draw())])
        first, retry = asyncio.ensure_future(read(asked)), asyncio.ensure_future(read(asked))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        assert asked.unread
        assert [response.token_ids for response in await retry] == [[5]]
        return asked

    assert not asyncio.run(both()).unread


def test_an_agent_that_ends_before_its_answer_leaves_nothing_in_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(
        CLIENT
        + """
def agent(row, base_url, api_key):
    client = Client(base_url, api_key)
    if row["start"] == 0:
        client.http.post("/chat/completions", json={"messages": row["prompt"]}, timeout=0.005)
    client.say(row["prompt"])
    return 1.0
"""
    )
    talk = Talk("qwen2_5", settings_of(agent=f"{path}:agent"))
    with closing(talk.runner):
        (found,) = talk.run([0], n=1)
        assert "ReadTimeout" in str(found.error)
        assert [each.error for each in talk.run([1], n=2)] == [None, None]


def test_agents_that_a_step_does_not_wait_for_are_ended(tmp_path: Path) -> None:
    """`rollout.over_sample_rate`: one sleeps, one is in the middle of its conversation."""
    path = tmp_path / "agent.py"
    path.write_text(
        CLIENT
        + """
def agent(row, base_url, api_key):
    client, messages = Client(base_url, api_key), [{"role": "user", "content": "Go."}]
    if row["start"] == 3:
        time.sleep(100)
    messages.append(client.say(messages))
    if row["start"] == 2:
        time.sleep(100)
    return 1.0
"""
    )
    talk = Talk("qwen2_5", settings_of(agent=f"{path}:agent", agent_timeout_s=200.0))
    with closing(talk.runner):
        asked = GenerationSettings(SamplingParams(max_tokens=60), n=1, over_sample_rate=0.5)
        began = time.monotonic()
        found = talk.sampler().collect(talk.prompts(range(4)), asked)
        assert time.monotonic() - began < 90
        assert not talk.runner.door._door.sessions
    assert [each.finish_reason == "abort" for each in found] == [False, False, True, True]
    assert [each.scored for each in found] == [True, True, False, False]
    batch = assemble_rollouts(talk.prompts(range(4)), found, 0)
    assert batch.batch["response_mask"].any(-1).tolist() == [True, True, False, False]
