"""An endpoint that plays the user: what it is asked, what its answers mean, and what its faults cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.agents.stub_server import Answers, Drop, StubServer
from verl.agents import remote
from verl.agents.base import ToolFailed, ToolsLost
from verl.agents.toolset import DEFAULT_PROMPT, STOP_MARK, EndpointUser, swap_roles
from verl.config.sections.rollout import MultiTurnUserConfig
from verl.errors import ConfigError

LONG_S = 120.0
MESSAGES = [
    {"role": "system", "content": "You are helpful."},
    {"role": "user", "content": "A table for two, please."},
    {"role": "assistant", "content": "<think>When?</think>\nFor which day?"},
]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answers], StubServer]]:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    started = []

    def start(answers: Answers) -> StubServer:
        started.append(StubServer(answers))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def says(text: Any) -> Answers:
    return lambda method, path, body: (
        200,
        {"choices": [{"message": {"role": "assistant", "content": text}}]},
    )


def config(server: StubServer, **keys: Any) -> MultiTurnUserConfig:
    return MultiTurnUserConfig(base_url=f"{server.address}/v1", model="person", **keys)


def reply(
    server: StubServer, row: dict[str, Any] | None = None, timeout_s: float = LONG_S, **keys: Any
) -> str | None:
    async def run() -> str | None:
        user = EndpointUser(config(server, **keys))
        try:
            return await user.reply(MESSAGES, row or {}, timeout_s)
        finally:
            await user.close()

    return asyncio.run(run())


def open_user(server: StubServer) -> None:
    async def run() -> None:
        user = EndpointUser(config(server))
        try:
            await user.open(LONG_S)
        finally:
            await user.close()

    asyncio.run(run())


# ---- what is asked


def test_the_model_speaks_as_user_and_the_user_as_assistant(serve):
    server = serve(says("On Friday."))
    assert reply(server) == "On Friday."
    method, path, body = server.requests[0]
    assert (method, path, body["model"]) == ("POST", "/v1/chat/completions", "person")
    system, *others = body["messages"]
    assert system["role"] == "system" and STOP_MARK in system["content"]
    assert others == [
        {"role": "user", "content": "Hello, how can I help?"},
        {"role": "assistant", "content": "A table for two, please."},
        {"role": "user", "content": "For which day?"},
    ]


def test_the_prompt_of_the_row_goes_before_that_of_the_key(serve):
    server = serve(says("x"))
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({}, {"prompt": "You are Ann."}),
        ({"user_prompt": "You are Bob."}, {"prompt": "You are Ann."}),
        ({"extra_info": {"user_prompt": "You are Eve."}}, {"prompt": "You are Ann."}),
        ({"user_prompt": f"Write {STOP_MARK} when bored."}, {}),
    ]
    for row, keys in rows:
        reply(server, row, **keys)
    asked = [body["messages"][0]["content"] for _, _, body in server.requests]
    for text, begin in zip(
        asked, [DEFAULT_PROMPT, "You are Ann.", "You are Bob.", "You are Eve.", "Write"], strict=True
    ):
        assert text.startswith(begin) and text.count(STOP_MARK) == 1


def test_calls_and_results_of_tools_are_not_shown():
    messages = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "<tool_call>{}</tool_call>"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "<tool_call>{}</tool_call>"},
        {"role": "user", "content": "<tool_response>\n4\n</tool_response>"},
        {"role": "assistant", "content": "It is 4."},
    ]
    assert swap_roles(messages) == [
        {"role": "user", "content": "Hello, how can I help?"},
        {"role": "assistant", "content": "What is 2 + 2?"},
        {"role": "user", "content": "It is 4."},
    ]


def test_a_model_that_spoke_first_is_not_greeted_for():
    swapped = swap_roles([{"role": "assistant", "content": "Welcome."}, {"role": "user", "content": "Hi."}])
    assert swapped == [{"role": "user", "content": "Welcome."}, {"role": "assistant", "content": "Hi."}]


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["system", "user", "assistant", "tool"]),
                "content": st.one_of(st.none(), st.text(), st.just([{"type": "text", "text": "part"}])),
            }
        ),
        max_size=8,
    )
)
def test_roles_alternate_and_nothing_the_user_said_is_lost(messages):
    swapped = swap_roles(messages)
    assert [message["role"] for message in swapped] == ["user", "assistant"] * (len(swapped) // 2) + [
        "user"
    ] * (len(swapped) % 2)
    said = "\n\n".join(message["content"] for message in swapped if message["role"] == "assistant")
    for message in messages:
        if message["role"] == "user" and isinstance(message["content"], str):
            assert message["content"] in said or message["content"].lstrip().startswith("<tool_response>")


@pytest.mark.parametrize(("value", "sent"), [("secret", "Bearer secret"), (None, None)])
def test_the_key_comes_from_the_environment(serve, monkeypatch, value, sent):
    monkeypatch.delenv("MY_KEY", raising=False)
    if value:
        monkeypatch.setenv("MY_KEY", value)
    server = serve(says("x"))
    reply(server, api_key_env="MY_KEY")
    assert server.headers[0].get("Authorization") == sent


# ---- what an answer means


@pytest.mark.parametrize(
    ("answer", "meant"),
    [
        (" On Friday. ", "On Friday."),
        (f"Thank you! {STOP_MARK}", None),
        ("", None),
        (None, None),
        (f"<think>Should I write {STOP_MARK}?</think>Not yet.", "Not yet."),
        ("<think>cut off", None),
        ("\ud800?", "??"),
    ],
)
def test_a_reply_or_the_end(serve, answer, meant):
    assert reply(serve(says(answer))) == meant


@pytest.mark.parametrize(
    ("status", "content"),
    [(200, b"garbage"), (200, {"choices": []}), (200, [1]), (400, {"error": "too long"}), (500, b"oops")],
)
def test_no_usable_answer_costs_the_turn_only(serve, status, content):
    with pytest.raises(ToolFailed, match="simulated user"):
        reply(serve(lambda method, path, body: (status, content)))


def test_a_busy_endpoint_is_asked_again(serve):
    def answers(method: str, path: str, body: Any) -> tuple[int, Any]:
        if len(server.requests) == 1:
            raise Drop
        return (429, b"slow down") if len(server.requests) == 2 else says("Friday")(method, path, body)

    server = serve(answers)
    assert reply(server) == "Friday"
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [401, 403, 404])
def test_an_endpoint_that_refuses_stops_the_run(serve, status):
    with pytest.raises(ToolsLost, match="api_key_env"):
        reply(serve(lambda method, path, body: (status, {"error": "no"})))


# ---- the check at the start


@pytest.mark.parametrize(
    "listed", [{"data": [{"id": "person"}, {"id": "other"}]}, b"not a list", {"data": []}]
)
def test_an_endpoint_with_the_model_or_without_a_list_is_accepted(serve, listed):
    open_user(serve(lambda method, path, body: (200, listed)))


def test_an_endpoint_without_a_list_of_models_is_accepted(serve):
    open_user(serve(lambda method, path, body: (404, b"")))


def test_a_model_the_endpoint_does_not_have_is_refused(serve):
    server = serve(lambda method, path, body: (200, {"data": [{"id": "other"}]}))
    with pytest.raises(ConfigError, match="user.model='person'.*it has: other"):
        open_user(server)


def test_a_refused_key_is_an_error_at_the_start(serve):
    with pytest.raises(ConfigError, match="401.*OPENAI_API_KEY"):
        open_user(serve(lambda method, path, body: (401, {"error": "bad key"})))


def test_no_endpoint_is_an_error_at_the_start(monkeypatch):
    monkeypatch.setattr(remote, "LOST_AFTER_S", 0.05)
    server = StubServer(says("x"), listening=False)
    try:
        with pytest.raises(ConfigError, match="base_url=.*ConnectError"):
            open_user(server)
    finally:
        server.server_close()


def test_an_address_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="user.base_url='localhost:8000'"):
        EndpointUser(MultiTurnUserConfig(base_url="localhost:8000", model="x"))
