"""Environments of gymnasium, OpenEnv and verifiers, with the real packages, train as environments of ours do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agents.runs import KEY
from tests.agents.test_endpoint import PLAIN, same_rows
from verl.agents import remote
from verl.agents.base import ToolFailed, TryAgain
from verl.agents.tools import load_environment
from verl.data.files import read_rows
from verl.errors import ConfigError, TrainingHalted

pytestmark = [pytest.mark.components, pytest.mark.timeout(600)]
for _package in ("gymnasium", "openenv.core", "verifiers"):
    pytest.importorskip(_package, reason="make test-components runs this file in .venv-hubs")

RULES = '''
class _Game:
    """The same for everybody: opening, answer and reward."""

    def begin(self, seed):
        self.letter, self.turns = "abcdefgh"[seed % 8], 0
        return f"now {self.letter}"

    def play(self, reply):
        self.turns += 1
        return "begin with h", 0.25 * self.turns + (self.letter in reply.split()), self.turns == 3
'''
OURS = (
    RULES
    + """
from verl.agents.hubs import group_seed


class World:
    def reset(self, uid, **row):
        self._game = _Game()
        return self._game.begin(group_seed({"uid": uid}))

    def user(self, reply):
        said, self._reward, ended = self._game.play(reply)
        return None if ended else said

    def turn_reward(self):
        return self._reward
"""
)
GYM = (
    RULES
    + """
import gymnasium
from gymnasium.spaces import Discrete, Text


class Words(gymnasium.Env):
    observation_space = action_space = Text(200)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.game = _Game()
        return self.game.begin(seed), {}

    def step(self, action):
        said, reward, ended = self.game.play(action)
        return said, reward, ended, False, {}


class Numbers(gymnasium.Env):
    observation_space = Text(200)

    def __init__(self, most=9):
        self.most, self.action_space = most, Discrete(most, start=1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.secret = int(self.np_random.integers(1, self.most + 1))
        return f"1 to {self.most}, {seed}, {options}", {}

    def step(self, action):
        right = action == self.secret
        return f"{action} is {'it' if right else 'wrong'}", float(right), right, False, {}


class Picture(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(0, 1, (4, 4)), Discrete(2)


class Broken(gymnasium.Env):
    observation_space, action_space = Text(1), Text(1)

    def __init__(self):
        raise RuntimeError("no display")


gymnasium.register("Words-v0", Words)
gymnasium.register("Numbers-v0", Numbers, max_episode_steps=3)
gymnasium.register("Picture-v0", Picture)
gymnasium.register("Broken-v0", Broken)
"""
)
OPENENV = (
    RULES
    + """
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    text: str


class Heard(Observation):
    text: str


class Words(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, letter=None, **kwargs):
        self.game = _Game()
        return Heard(text=self.game.begin(seed if letter is None else ord(letter) - ord("a")))

    def step(self, action, timeout_s=None, **kwargs):
        if "wrong" in action.text:
            raise ValueError("a step went wrong")
        said, reward, ended = self.game.play(action.text)
        return Heard(text=said, reward=reward, done=ended)

    @property
    def state(self):
        return State(step_count=self.game.turns)


app = create_fastapi_app(Words, Say, Heard, max_concurrent_envs=2)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""
)
VERIFIERS = '''
import verifiers as vf
from datasets import Dataset


class Words(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        if state["example_id"] == 7:
            raise RuntimeError(f"no answer to {state['answer']}")
        return [{"role": "user", "content": "begin with h"}]


def half_a_point_a_turn(completion, **kwargs):
    return 0.5 * sum(message["role"] == "assistant" for message in completion)


def ask(text: str) -> str:
    """Answer.

    Args:
        text: anything
    """
    return "heard " + text[::-1]


def load_environment(kind=Words, **more):
    rows = [{"question": f"begin with {letter}", "answer": letter} for letter in "abcdefgh"]
    rubric = vf.Rubric(funcs=[half_a_point_a_turn])
    return kind(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=3, **more)
'''
NONE = f"{KEY}.environment=[]"


def seconds_left(limit: float) -> Iterator[None]:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        yield
        time.sleep(0.1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], tuple[str, Any]]]:
    """Starts OpenEnv's server, with room for two sessions; its address and its process."""
    path, started = tmp_path_factory.mktemp("openenv") / "server.py", []
    path.write_text(OPENENV)

    def start() -> tuple[str, Any]:
        from verl.http_server import free_port

        url = f"http://127.0.0.1:{(port := free_port())}"
        started.append(subprocess.Popen([sys.executable, str(path), str(port)], stdin=subprocess.DEVNULL))
        for _ in seconds_left(240):
            assert started[-1].poll() is None
            try:
                httpx.get(f"{url}/health")
                return url, started[-1]
            except httpx.TransportError:
                pass
        raise AssertionError("the server of OpenEnv does not start")

    yield start
    for process in started:
        process.kill()
        process.wait()


def openings(run: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for batch in run.batches.values():
        for uid, talk in zip(
            batch.non_tensor_batch["uid"], batch.non_tensor_batch["conversation"], strict=True
        ):
            found.setdefault(str(uid), set()).add(talk.messages[0]["content"])
    return found


# ---- gymnasium


def play(spec: str, row: dict[str, Any], *replies: str) -> list[Any]:
    async def played() -> list[Any]:
        (factory,) = load_environment(spec)
        hosted = factory.create()
        texts: list[Any] = [await hosted.reset(row)]
        texts += [(await hosted.user(reply, []), await hosted.turn_reward()) for reply in replies]
        await hosted.close()
        return texts

    return asyncio.run(played())


@pytest.mark.slow(seconds=10)
def test_an_environment_of_gymnasium_gives_the_rows_of_one_of_ours(train, write) -> None:
    ours = train(PLAIN, world=OURS, folder="ours")
    theirs = train(PLAIN, f"{KEY}.environment=gym:{write(GYM, 'words.py')}:Words-v0", folder="gym")
    same_rows(ours, theirs)
    assert openings(ours) == openings(theirs) and all(len(texts) == 1 for texts in openings(theirs).values())
    assert len(set.union(*openings(theirs).values())) > 2
    talks = theirs.batches[2].non_tensor_batch["conversation"]
    assert {len(talk.model_turns) for talk in talks} == {3}


def test_numbers_are_actions_and_an_episode_may_be_cut(write) -> None:
    spec = f"gym:{write(GYM, 'words.py')}:Numbers-v0"
    told = ("Nothing was done: end with the number of an action, from 1 to 2.", None)
    row = {"uid": "0-1", "environment_kwargs": {"most": 2, "seed": 3, "options": {"a": 1}, "other": None}}
    opening, *turns = play(spec, row, "<think>2</think>none", "I take 3", "it is <1>", "<think>7", "2")
    assert opening == "1 to 2, 3, {'a': 1}"
    assert turns[0] == turns[1] == turns[3] == told
    assert [turns[2], turns[4]].count((None, 1.0)) == 1
    cut = play(spec, {"uid": "0-1", "environment_kwargs": {"most": 10**6}}, "1", "2", "3")
    assert cut[1:] == [("1 is wrong", 0.0), ("2 is wrong", 0.0), (None, 0.0)]
    same, other = (play(spec, {"uid": uid})[0] for uid in ("0-1", "0-2"))
    assert same.split(",")[1] == cut[0].split(",")[1] != other.split(",")[1]


def test_what_is_no_text_is_drawn_or_written_as_json() -> None:
    lake = play("gym:FrozenLake-v1", {"uid": "0-1", "environment_kwargs": {"is_slippery": False}}, "2")
    assert "FHFH\nFFFH\nHFFG" in lake[0] and "(Right)" in lake[1][0]
    (hand,) = play("gym:Blackjack-v1", {"uid": "0-1"})
    assert hand.startswith("[") and len(hand.split(",")) == 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Nothing-v0", ["gymnasium.make('Nothing-v0')", "NameNotFound"]),
        ("MountainCarContinuous-v0", ["actions are Box", "neither Text nor Discrete", "ActionWrapper"]),
        ("FILE:Picture-v0", ["the shape (4, 4)", "ObservationWrapper"]),
        ("FILE:Broken-v0", ["RuntimeError: no display", "words.py, line"]),
        ("nothing.py:A-v0", ["nothing.py does not exist"]),
    ],
)
def test_environments_of_gymnasium_that_cannot_be_played_are_errors_at_start(write, name, words) -> None:
    with pytest.raises(ConfigError) as caught:
        load_environment(f"gym:{name.replace('FILE', write(GYM, 'words.py'))}")
    for word in ("multi_turn.environment=", *words):
        assert word in str(caught.value)


# ---- OpenEnv


@pytest.mark.slow(seconds=30)
def test_a_server_of_openenv_gives_the_rows_of_an_environment_of_ours(train, server, monkeypatch) -> None:
    """It has room for two of the twelve conversations of a step."""
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(remote, "_LONGEST_PAUSE_S", 0.1)
    url, process = server()
    ours = train(PLAIN, world=OURS, folder="ours")
    theirs = train(PLAIN, f"{KEY}.environment=openenv:{url}", folder="openenv")
    same_rows(ours, theirs)
    assert openings(ours) == openings(theirs)

    (factory,) = load_environment(f"openenv:{url}/")

    async def sessions() -> None:
        one, other, third = factory.create(), factory.create(), factory.create()
        row = {"uid": "0-1", "environment_kwargs": {"letter": "c"}}
        assert (await one.reset(row), await other.reset({"uid": "0-1"})) != ("now c", "now c")
        assert await one.user("c", []) == "begin with h" and await one.turn_reward() == 1.25
        assert await one.user("a", []) == "begin with h" and await one.turn_reward() == 0.5
        assert await other.user("", []) == "begin with h" and await other.turn_reward() == 0.25
        with pytest.raises(TryAgain) as full:
            await third.reset({"uid": "0-2"})
        assert full.value.full and "2/2" in full.value.text
        with pytest.raises(ToolFailed, match="EXECUTION_ERROR: a step went wrong"):
            await other.user("wrong", [])
        await one.close()
        for _ in seconds_left(60):
            try:
                await third.reset(row)
                break
            except TryAgain:
                pass
        process.kill()
        process.wait()
        with pytest.raises(ToolFailed, match=f"the session at {url} ended"):
            await third.user("c", [])
        with pytest.raises(TryAgain, match="Connect") as away:
            await one.reset(row)
        assert not away.value.full
        for each in (one, other, third):
            await each.close()

    asyncio.run(sessions())
    with pytest.raises(ConfigError) as caught:
        train(PLAIN, f"{KEY}.environment=openenv:{url}", folder="none")
    for words in (f"multi_turn.environment=openenv:{url}", "ConnectError", "Start the server"):
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="expected openenv:http://HOST:PORT"):
        load_environment("openenv:localhost:8000")


@pytest.mark.slow(seconds=15)
def test_a_server_of_openenv_that_goes_away_stops_the_run_with_its_address(
    train, server, monkeypatch
) -> None:
    monkeypatch.setattr(remote, "LOST_AFTER_S", 1.0)
    url, process = server()
    opened = remote.Outage.__init__

    def gone(self: Any, contact: Any) -> None:
        process.kill()
        process.wait()
        opened(self, contact)

    monkeypatch.setattr(remote.Outage, "__init__", gone)
    with pytest.raises(TrainingHalted) as caught:
        train(PLAIN, f"{KEY}.environment=openenv:{url}")
    for words in (url, "ConnectionRefused", "multi_turn.environment"):
        assert words in str(caught.value)


# ---- verifiers


@pytest.fixture
def module(write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an environment that can be imported, as an installed one can."""
    write(VERIFIERS, f"{tmp_path.name.replace('-', '_')}_words.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"{tmp_path.name}_words".replace("_", "-")


@pytest.mark.slow(seconds=20)
def test_an_environment_of_verifiers_gives_the_rows_of_one_of_ours(train, module, tmp_path) -> None:
    world = """
class World:
    def reset(self, **row):
        self.turns = 0

    def user(self, reply):
        self.turns += bool(reply)  # one that says nothing ends a conversation of verifiers
        return "begin with h" if reply and self.turns < 3 else None

    def reward(self):
        return 0.5 * self.turns
"""
    ours = train(PLAIN, world=world, folder="ours")
    theirs = train(PLAIN, f"{KEY}.environment=verifiers:{module}", folder="verifiers")
    same_rows(ours, theirs)
    last = theirs.rows[-1]
    assert last["agents/chains/mean"] == 1 and last["reward/failed"] == last["agents/dropped_turns/mean"] == 0
    # Its own rows, one of which it fails with, and fewer turns than it wants, which is no failure.
    own = train(
        PLAIN,
        f"{KEY}.environment=verifiers:{module}",
        f"{KEY}.max_turns=2",
        f"data.train_files=verifiers:{module}",
        "data.train_batch_size=8",
        "reward.max_failure_ratio=0.5",
        "trainer.total_training_steps=1",
        folder="own",
    )
    batch = own.batches[1].non_tensor_batch
    errors = dict.fromkeys("abcdefgh", "")
    for columns, error in zip(batch["columns"], batch["reward_error"], strict=True):
        errors[columns["answer"]] += error or ""
    assert "no answer to h" in errors.pop("h") and not any(errors.values())
    ends = {
        (talk.finish_reason, talk.environment_reward) for talk in batch["conversation"] if talk.error is None
    }
    assert ("turns", 1.0) in ends and ends <= {("turns", 1.0), ("stop", 0.5), ("stop", 0.0)}


@pytest.mark.slow(seconds=10)
def test_tools_of_verifiers_are_called(train, write, module, tmp_path) -> None:
    name = f"{module.replace('-', '_')}"
    text = f"import verifiers as vf\nfrom {name} import ask, load_environment as made\n"
    text += "def load_environment():\n    return made(vf.ToolEnv, tools=[ask])\n"
    run = train(
        f"{KEY}.environment=verifiers:{write(text, 'tools_env.py')}", "trainer.total_training_steps=1"
    )
    talks = run.batches[1].non_tensor_batch["conversation"]
    heard = [(talk, turn) for talk in talks for turn in talk.turns if turn.role == "tool"]
    assert heard and not any(any(talk.response_mask[turn.start : turn.end]) for talk, turn in heard)
    assert any("heard " in message["content"] for _, turn in heard for message in turn.messages)
    assert run.rows[-1]["reward/failed"] == 0


def test_environments_of_verifiers_that_cannot_be_loaded_are_errors_at_start(train, write, module) -> None:
    broken = write("def load_environment():\n    raise RuntimeError('no key')\n", "broken.py")
    for name, words in (
        ("not-there", ["Could not import 'not-there'"]),
        (broken, ["RuntimeError: no key", "broken.py, line 2"]),
        (write("x = 1\n", "empty.py"), ["has no attribute 'load_environment'"]),
    ):
        with pytest.raises(ConfigError) as caught:
            load_environment(f"verifiers:{name}")
        for word in (f"multi_turn.environment=verifiers:{name}", *words):
            assert word in str(caught.value)
        with pytest.raises(ConfigError, match="data.train_files=verifiers:"):
            read_rows(f"verifiers:{name}")
    for key in (f"{KEY}.agent_command=prog", f"{KEY}.tools=[{broken}]"):
        with pytest.raises(ConfigError, match=r"runs whole conversations"):
            train(PLAIN, f"{KEY}.environment=verifiers:{module}", key)
    with pytest.raises(ConfigError, match=r"multi_turn\.environment' runs whole conversations"):
        train(PLAIN, f"{KEY}.environment=[verifiers:{module},gym:A-v0]")
