"""Users' classes become environments and simulated users, or errors that say what to write."""

from __future__ import annotations

from asyncio import run

import pytest

from verl.agents import Environment, tool
from verl.agents.hosted import HostedInfo
from verl.agents.tools import load_environment, load_user
from verl.errors import ConfigError

GAME = '''
import asyncio

class Game:
    def reset(self, answer, hint="none", **row):
        self.answer, self.guesses = answer, []
        return f"Guess. Hint: {hint}. {sorted(row)}"

    async def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess
        """
        await asyncio.sleep(0)
        self.guesses.append(number)
        return "right" if number == self.answer else "wrong"

    @staticmethod
    def limits() -> list:
        "The limits."
        return [0, 9]

    @classmethod
    def title(cls) -> str:
        "The title."
        return cls.__name__

    @property
    def solved(self):
        return self.answer in self.guesses

    limit = 3

    def user(self, reply):
        return None if self.solved else f"You said {reply}. Go on."

    def turn_reward(self):
        return -0.1

    async def reward(self):
        return self.solved

    def close(self):
        self.guesses.append("closed")
'''


def test_a_class_is_an_environment_with_its_methods_as_tools(write):
    (factory,) = load_environment(write(GAME))
    info = factory.info
    assert (info.name, info.stateful, info.columns) == ("Game", True, ("answer",))
    assert info.hooks == ("reset", "user", "turn_reward", "reward")
    assert [schema["function"]["name"] for schema in info.schemas] == ["guess", "limits", "title"]
    assert info.schemas[0]["function"]["parameters"]["properties"] == {
        "number": {"type": "integer", "description": "the guess"}
    }

    async def play() -> None:
        game, other = factory.create(), factory.create()
        assert await game.reset({"answer": 3, "index": 0}) == "Guess. Hint: none. ['index']"
        assert await other.reset({"answer": 4, "hint": "even"}) == "Guess. Hint: even. []"
        assert await game.call("limits", {}) == "[0, 9]" and await game.call("title", {}) == "Game"
        assert await game.call("guess", {"number": 4}) == "wrong"
        assert await game.user("4?", []) == "You said 4?. Go on."
        assert await game.turn_reward() == -0.1
        assert await other.call("guess", {"number": 4}) == "right"
        assert await other.user("4!", []) is None
        assert (await game.reward(), await other.reward()) == (0.0, 1.0)
        await game.close()
        assert game._object.guesses == [4, "closed"]

    run(play())


def test_an_environment_subclass_has_only_the_hooks_it_defines(write):
    path = write(
        "from verl.agents import Environment\n"
        "class Base(Environment):\n    def look(self) -> str:\n        'Look.'\n        return 'door'\n"
        "class Room(Base):\n    def reset(self, room): self.room = room\n"
        "class _Hidden(Base): ...\nclass Helper: ...\n"
    )
    base, room = load_environment(path)
    assert (base.info.name, base.info.hooks, base.info.columns) == ("Base", (), ())
    assert (room.info.name, room.info.hooks, room.info.columns) == ("Room", ("reset",), ("room",))
    assert [schema["function"]["name"] for schema in room.info.schemas] == ["look"]
    hosted = room.create()
    assert run(hosted.reset({"room": 1, "other": 2})) is None
    assert run(hosted.reward()) is None and run(hosted.user("a", [])) is None
    assert [factory.info.name for factory in load_environment(f"{path}:Room")] == ["Room"]
    run(hosted.close())


def test_marked_methods_are_the_only_tools_of_a_class(write):
    path = write(
        "from verl.agents import tool\nclass A:\n"
        "    @tool(name='go')\n    def a(self, to: str):\n        'Go.'\n        return to\n"
        "    @tool\n    @staticmethod\n    def b():\n        'B.'\n"
        "    def helper(self, x): ...\n"
    )
    (factory,) = load_environment(path)
    assert [schema["function"]["name"] for schema in factory.info.schemas] == ["go", "b"]
    assert run(factory.create().call("go", {"to": "x"})) == "x"


def test_the_public_names_work_without_a_file():
    class Lamp(Environment):
        @tool
        def switch(self) -> str:
            """Switch it."""
            return "on"

    assert Lamp().switch() == "on" and Lamp().reset(a=1) is None and Lamp().user("a") is None


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("class A:\n    limit = 3\n", "", ["A has no public method", "no user(self, reply)"]),
        ("class A:\n    def f(self): ...\n", "", ["f has no docstring", "'_'"]),
        ("class A:\n    def f(self, a):\n        'F.'\n", "", ["'a' of f has no type hint"]),
        ("class A:\n    def __init__(self, size): ...\n", "", ["__init__ asks for size", "reset"]),
        ("class A:\n    def get_reward(self):\n        'R.'\n", "", ["get_reward", "reward"]),
        ("class A: ...\nclass B: ...\n", "", ["several classes", "A, B", ":Name"]),
        ("def f(): ...\n", "", ["no public class", "none"]),
        ("def f(): ...\n", ":f", ["f is a function", "multi_turn.tools"]),
        ("class A: ...\n", ":B", ["B is not a class there", "Classes there: A"]),
    ],
)
def test_classes_that_cannot_be_environments_are_errors_at_start(write, text, name, words):
    with pytest.raises(ConfigError) as caught:
        load_environment(write(text) + name)
    for word in ["multi_turn.environment", "mine.py", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("hook", "value", "words"),
    [
        ("reward", "'high'", "reward returned 'high', not a number"),
        ("reward", "float('nan')", "reward returned nan; a reward must be finite"),
        ("turn_reward", "[1]", r"turn_reward returned \[1\], not a number"),
        ("user", "3", "user returned 3, not a text"),
        ("reset", "{}", "reset returned {}, not a text"),
    ],
)
def test_hooks_that_return_something_else_are_named(write, hook, value, words):
    path = write(f"class A:\n    def f(self):\n        'F.'\n    def {hook}(self, *a, **k): return {value}\n")
    hosted = load_environment(path)[0].create()
    arguments = {"user": ("a", []), "reset": ({},)}.get(hook, ())
    with pytest.raises((TypeError, ValueError), match=words):
        run(getattr(hosted, hook)(*arguments))


# ---- users


def test_a_user_is_a_class_whose_methods_are_no_tools(write):
    path = write(
        "class Student:\n"
        "    def reset(self, question): self.question = question\n"
        "    def helper(self, x): return x\n"
        "    async def user(self, reply, messages): return f'{self.question} {reply} {len(messages)}'\n"
    )
    factory = load_user(f"{path}:Student")
    assert factory.info == HostedInfo("Student", [], ("reset", "user"), True, ("question",))
    user = factory.create()
    run(user.reset({"question": "why?"}))
    assert run(user.user("because", [{}, {}])) == "why? because 2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class A:\n    def reply(self): ...\n", ["A has no method user"]),
        (
            "from verl.agents import Environment\nclass A(Environment): ...\nclass B(Environment): ...\n",
            ["several classes: A, B"],
        ),
    ],
)
def test_what_cannot_be_a_user_is_an_error_at_start(write, text, words):
    with pytest.raises(ConfigError) as caught:
        load_user(write(text))
    for word in ["multi_turn.user.path", *words]:
        assert word in str(caught.value)
