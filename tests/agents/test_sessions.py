"""What requests of agents become: histories, rows, rewards and failures, over a real engine and a real server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.agents.chat_tokenizers import FAMILIES
from tests.agents.clients import ASKING, CLIENT
from tests.agents.conversations import TOOLS, Talk, settings_of
from tests.agents.talking import plan_format
from verl.agents.conversation import Conversation
from verl.errors import ConfigError

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

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
