"""`verl env test`: conversations by hand, by an endpoint and by a model, without training."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents.runs import KEY, TOOLS, Server
from tests.agents.stub_server import Answers, StubServer
from verl.agents.formats import get_format
from verl.agents.stand_ins import turn_text, typed_turn
from verl.config.sections.rollout import MultiTurnConfig
from verl.trainer import env_test

GAME = '''
class Guess:
    def reset(self, secret, **row):
        if secret < 0:
            raise ValueError("no secret")
        self.secret, self.won = secret, False
        return "Guess a number."

    def compare(self, number: int) -> str:
        """Compare a number with the secret."""
        self.won = number == self.secret
        return "correct" if self.won else "too low" if number < self.secret else "too high"

    def turn_reward(self):
        return -0.25

    def reward(self):
        return 2.0 if self.won else 0.0
'''


@pytest.fixture
def game(write: Callable[..., str], tmp_path: Path) -> Callable[..., list[str]]:
    def make(*secrets: int) -> list[str]:
        rows = [{"prompt": [{"role": "user", "content": f"Game {s}."}], "secret": s} for s in secrets]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [f"data.train_files={tmp_path / 'rows.jsonl'}", f"{KEY}.environment={write(GAME)}:Guess"]

    return make


@pytest.fixture
def tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Exit code, what --json printed, and the other output."""

    def run(*arguments: str, typed: str = "") -> tuple[int, dict[str, Any], str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        code = env_test.main([*arguments, "--json"])
        printed = capsys.readouterr()
        return code, json.loads(printed.out) if printed.out else {}, printed.err

    return run


@pytest.fixture
def serve() -> Iterator[Callable[[Answers], StubServer]]:
    started: list[StubServer] = []

    def start(answers: Answers) -> StubServer:
        started.append(StubServer(answers))
        return started[-1]

    yield start
    for server in started:
        server.stop()


# ---- by hand


def test_turns_are_typed_and_rewarded_as_in_training(game, tried):
    typed = '/compare number=50\n/compare oops\n/compare {"number": 42}\nIt is\\\n42.\nI give up.\n'
    code, report, shown = tried("--by-hand", "-n", "2", *game(42, 7), typed=typed)
    first, second = report["conversations"]
    assert code == 0
    assert [turn["role"] for turn in first["turns"]] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert first["turns"][2]["tool_calls"][0]["arguments"] == {"number": 42}
    assert first["turns"][2]["tool_calls"][0]["result"] == "correct"
    assert first["turns"][4]["messages"] == ["It is\n42."]
    assert [turn["reward"] for turn in first["turns"]] == [-0.25, None, -0.25, None, -0.25]
    assert (first["environment_reward"], first["reward"]) == (2.0, 1.25)
    assert (second["reward"], second["finish_reason"], second["error"]) == (-0.25, "stop", None)
    assert report["summary"]["reward/mean"] == 0.5
    assert report["summary"]["tools/calls/compare"] == 2
    assert report["summary"]["finish_reasons"] == {"stop": 2}
    assert first["seconds"] > 0
    assert "Guess a number." in shown and "/compare number=..." in shown and "too high" in shown
    assert "cannot be read: 'oops' is no argument=value" in shown


def test_a_conversation_that_fails_is_exit_code_1(game, tried):
    code, report, _ = tried("--by-hand", "-n", "3", *game(3, -1, 5), typed="/compare number=3\nDone.\n")
    won, broken, ended = report["conversations"]
    assert code == 1 and won["error"] is None
    assert "no secret" in broken["error"] and broken["reward"] is None
    assert ended["error"] == "the input ended"
    assert report["summary"]["failed"] == 2


def test_tools_of_a_file_and_of_a_server_without_data(write, tried, capsys, monkeypatch):
    server = Server()
    try:
        for key in (f"{KEY}.tools={write(TOOLS, 'tools.py')}", f"{KEY}.tool_server={server.address}"):
            typed = "/ask text=abc\n/tell x=1\nDone.\n"
            code, report, _ = tried("--by-hand", "-n", "1", "--prompt", "Reverse abc.", key, typed=typed)
            (talk,) = report["conversations"]
            assert code == 0 and talk["prompt"][-1]["content"] == "Reverse abc."
            assert talk["turns"][0]["tool_calls"][0]["result"] == "heard cba"
            assert talk["turns"][2]["tool_calls"][0]["failure"] == "unknown"
            assert talk["score"] is None and talk["reward"] is None
        # The same without --json: turns, calls and a summary for people.
        monkeypatch.setattr(sys, "stdin", io.StringIO("/ask text=abc\n/tell x=1\nDone.\n"))
        assert env_test.main(["--by-hand", "-n", "1", "--prompt", "Reverse abc.", key]) == 0
    finally:
        server.stop()
    text = capsys.readouterr().out
    assert "conversation 1" in text and "call     ask(text='abc'): ok" in text
    assert "1 conversation, 0 failed" in text and "tool calls  2, 1 unknown" in text


@pytest.mark.slow(seconds=6)
def test_tools_of_an_mcp_server(tried):
    pytest.importorskip("mcp")
    server = f"{sys.executable} {Path(__file__).with_name('mcp_server.py')}"
    arguments = ["--by-hand", "-n", "1", "--prompt", "Add.", f"{KEY}.mcp=['{server}']"]
    code, report, shown = tried(*arguments, typed="/add a=2 b=3\nDone.\n")
    (talk,) = report["conversations"]
    assert code == 0 and "/add a=... b=..." in shown
    assert talk["turns"][0]["tool_calls"][0]["result"] == "5"


# ---- an endpoint


def test_an_endpoint_gets_tools_and_answers_and_its_calls_are_run(game, tried, serve):
    def answers(method: str, path: str, body: Any) -> tuple[int, Any]:
        if method == "GET":
            return 200, {"data": [{"id": "first"}, {"id": "second"}]}
        results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        message: dict[str, Any] = {"role": "assistant", "content": "I know it."}
        if "correct" not in str(results):
            guess = {"name": "compare", "arguments": json.dumps({"number": 4 + len(results)})}
            message = {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": guess}]}
        return 200, {"choices": [{"message": message, "finish_reason": "stop"}]}

    server = serve(answers)
    code, report, _ = tried(
        "--endpoint", f"{server.address}/v1", "-n", "2", *game(5, 4), "data.max_response_length=77"
    )
    assert code == 0 and [talk["reward"] for talk in report["conversations"]] == [1.25, 1.5]
    asked = [body for method, _, body in server.requests if method == "POST"]
    last = max(asked, key=lambda body: len(body["messages"]))
    assert (last["model"], last["max_tokens"], last["temperature"]) == ("first", 77, 1.0)
    assert [tool["function"]["name"] for tool in last["tools"]] == ["compare"]
    roles = [message["role"] for message in last["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]
    call, answer = last["messages"][3:5]
    assert call["tool_calls"][0]["id"] == answer["tool_call_id"]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"number": 5}


def test_an_endpoint_that_fails_fails_the_conversation_only(game, tried, serve, monkeypatch):
    monkeypatch.setattr("verl.observe.console.LINE_S", -1.0)

    def answers(method: str, path: str, body: Any) -> tuple[int, Any]:
        if method == "GET":
            return 200, {"data": [{"id": "m"}]}
        if "Game 1." in body["messages"][0]["content"]:
            return 500, {"error": "broken"}
        return 200, {"choices": [{"message": {"content": "No."}, "finish_reason": "length"}]}

    server = serve(answers)
    code, report, said = tried("--endpoint", server.address, "-n", "2", *game(1, 2))
    assert "conversations 1/2\nconversations 2/2\n" in said
    broken, short = report["conversations"]
    assert code == 1 and "HTTP 500" in broken["error"]
    assert (short["finish_reason"], short["error"]) == ("length", None)


def test_a_limit_that_the_endpoint_knows_under_its_newer_name_is_sent_under_it(game, tried, serve):
    def answers(method: str, path: str, body: Any) -> tuple[int, Any]:
        if method == "GET":
            return 200, {"data": [{"id": "m"}]}
        if "max_tokens" in body:
            return 400, {"error": {"message": "'max_tokens' is not supported. Use 'max_completion_tokens'."}}
        return 200, {"choices": [{"message": {"content": "No."}, "finish_reason": "stop"}]}

    server = serve(answers)
    code, _, _ = tried("--endpoint", server.address, "-n", "1", *game(1), "data.max_response_length=77")
    assert code == 0 and server.requests[-1][2]["max_completion_tokens"] == 77


def test_what_answers_an_unreadable_call_is_said_by_the_user():
    from verl.agents.runner import ConversationRunner
    from verl.agents.stand_ins import EndpointSampler
    from verl.config.schema import DataConfig

    runner = ConversationRunner(
        MultiTurnConfig(enable=True, format="hermes"), DataConfig(), env_test.plain_tokenizer()
    )
    try:
        sampler: Any = EndpointSampler(runner, None, 10)  # type: ignore[arg-type]
        spoken = sampler.spoken(
            [
                {"role": "assistant", "content": "<tool_call>{}</tool_call>"},
                {"role": "tool", "tool_call_id": "call_0", "content": "Error: it has no name"},
                {"role": "assistant", "content": 'So: <tool_call>{"name": "a"}</tool_call>'},
                {"role": "user", "tool_call_id": "call_0", "content": "fine"},
            ]
        )
    finally:
        runner.close()
    assert [message["role"] for message in spoken] == ["assistant", "user", "assistant", "tool"]
    assert spoken[2]["content"] == "So:" and "tool_calls" not in spoken[0]


# ---- a model


@pytest.mark.slow(seconds=6)
def test_a_model_folder_talks_as_in_training(keys, tried, tmp_path):
    scored = f"reward.custom_reward_function.path={tmp_path / 'score.py'}"
    code, three, _ = tried("-n", "3", *keys(scored))
    assert code == 0
    for talk in three["conversations"]:
        turns = [turn["reward"] for turn in talk["turns"] if turn["reward"] is not None]
        assert talk["reward"] == pytest.approx(sum(turns) + talk["environment_reward"] + talk["score"])
        assert talk["score"] >= 10.0 and turns[0] == 0.25
    again, two, _ = tried("-n", "2", *keys(scored))

    def said(report: dict[str, Any]) -> list[Any]:
        return [[turn["messages"] for turn in talk["turns"]] for talk in report["conversations"]]

    assert again == 0 and said(two) == said(three)[:2]


# ---- what cannot be tried


def test_wrong_calls_of_the_command(game, tried, tmp_path, write):
    for arguments, words in (
        (["--by-hand", "--endpoint", "http://x"], "give one of them"),
        (["-n", "0"], "--conversations is 0"),
        (["--by-hand", f"{KEY}.enable=False"], "there is no conversation to try"),
        (["--by-hand"], "'data.train_files' is required"),
        (game(1), "'actor_rollout_ref.model.path' is required"),
        (["--by-hand", *game(1), f"{KEY}.max_turns=0"], "max_turns"),
        ([*game(1), f"actor_rollout_ref.model.path={tmp_path / 'no'}"], "no model folder"),
        (["--endpoint", "localhost", *game(1)], "--endpoint='localhost' is no HTTP address"),
        (["--nothing", "1"], "unknown option '--nothing'"),
    ):
        code, _, error = tried(*arguments)
        assert code == 2 and words in error, error


def test_keys_may_come_from_a_yaml_file(game, tried, tmp_path):
    keys = dict(each.split("=", 1) for each in game(3))
    (tmp_path / "run.yaml").write_text("".join(f"{name}: {value}\n" for name, value in keys.items()))
    shutil.copy(tmp_path / "run.yaml", tmp_path / "other.yaml")
    for named in ([str(tmp_path / "run.yaml")], ["--config-path", str(tmp_path), "--config-name", "other"]):
        code, report, _ = tried("--by-hand", "-n", "1", *named, typed="No.\n")
        assert code == 0 and report["conversations"][0]["reward"] == -0.25


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("4", "4"),
        ("/go", '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'),
        ("/go a=1 b='x y' c=[2]", '{"name": "go", "arguments": {"a": 1, "b": "x y", "c": [2]}}'),
        ('/go {"a": {"b": null}}', '{"name": "go", "arguments": {"a": {"b": null}}}'),
    ],
)
def test_typed_calls(typed: str, text: str) -> None:
    assert text in typed_turn(typed)


def test_calls_of_a_message_follow_its_text() -> None:
    calls = [
        {"function": {"name": "a", "arguments": '{"x": 1}'}},
        {"function": {"name": "b", "arguments": {}}},
    ]
    text = turn_text({"content": "Well.", "tool_calls": calls})
    assert text.startswith("Well.\n<tool_call>") and text.count("<tool_call>") == 2


def test_arguments_that_are_no_json_stay_as_the_endpoint_wrote_them() -> None:
    text = turn_text({"content": None, "tool_calls": [{"function": {"name": "a", "arguments": "{x: 1"}}]})
    assert "{x: 1" in text
    parsed = get_format("hermes").parse(text)
    assert not parsed.calls and len(parsed.problems) == 1
