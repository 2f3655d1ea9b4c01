"""Users' functions become tools, or errors that say what to write; a call's arguments fit the hints or are answered."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from asyncio import run
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from verl.agents.base import ToolFailed
from verl.agents.hosted import HostedInfo, as_text
from verl.agents.schemas import fit_arguments, read_docstring, schema_problem, without_nulls
from verl.agents.tools import load_environment, load_tools, load_user
from verl.errors import ConfigError


def parameters(info: HostedInfo, number: int = 0) -> dict[str, Any]:
    return info.schemas[number]["function"]["parameters"]


# ---- functions

TOOLS = '''
from __future__ import annotations
import enum, functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType, Optional, TypedDict

class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"

@dataclass
class Point:
    x: int
    y: float = 0.5
    unit: Unit = Unit.METRE

class Options(TypedDict, total=False):
    deep: bool

Name = NewType("Name", str)

def everything(
    text: str,
    count: int,
    point: Point,
    share: float = 0.5,
    *,
    way: Literal["up", "down"] = "up",
    unit: Unit = Unit.METRE,
    words: list[str] | None = None,
    table: Optional[dict[str, int]] = None,
    either: int | str = 3,
    maybe: int | None = 1,
    pair: tuple[int, str] = (1, "a"),
    points: Sequence[Point] = (),
    known: Annotated[set[int], "numbers"] = frozenset(),
    options: Options = {},
    name: Name = Name("n"),
    anything: Any = None,
) -> str:
    """Take everything.

    In two
    lines.

    Args:
        text: what
            to say
        count (int): how often: a number
        share: of the whole

    Returns:
        A text.
    """
    return repr((text, count, point, share, way, unit, words, table, either, maybe, pair, list(points), known, options,
                 name, anything))
'''


def test_hints_and_docstring_become_the_schema(write):
    info = load_tools(write(TOOLS)).info
    assert not info.stateful and info.hooks == () and info.columns == ()
    function = info.schemas[0]["function"]
    assert function["name"] == "everything" and function["description"] == "Take everything.\nIn two lines."
    assert function["parameters"]["required"] == ["text", "count", "point"]
    point = {
        "type": "object",
        "properties": {
            "x": {"type": "integer"},
            "y": {"type": "number"},
            "unit": {"type": "string", "enum": ["m", "ft"]},
        },
        "required": ["x"],
    }
    assert function["parameters"]["properties"] == {
        "text": {"type": "string", "description": "what to say"},
        "count": {"type": "integer", "description": "how often: a number"},
        "point": point,
        "share": {"type": "number", "description": "of the whole", "default": 0.5},
        "way": {"type": "string", "enum": ["up", "down"], "default": "up"},
        "unit": {"type": "string", "enum": ["m", "ft"]},
        "words": {"type": "array", "items": {"type": "string"}},
        "table": {"type": "object", "additionalProperties": {"type": "integer"}},
        "either": {"type": ["integer", "string"], "default": 3},
        "maybe": {"type": ["integer", "null"], "default": 1},
        "pair": {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "minItems": 2,
            "maxItems": 2,
        },
        "points": {"type": "array", "items": point},
        "known": {"type": "array", "items": {"type": "integer"}, "description": "numbers"},
        "options": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": []},
        "name": {"type": "string", "default": "n"},
        "anything": {},
    }


def test_json_arguments_become_what_the_hints_name(write):
    hosted = load_tools(write(TOOLS)).create()
    arguments = {
        "text": "t",
        "count": 2.0,
        "point": {"x": 1, "unit": "ft"},
        "share": 1,
        "unit": "ft",
        "words": None,
        "table": {"a": 1},
        "either": "x",
        "maybe": None,
        "pair": [1, "b"],
        "points": [{"x": 2}],
        "known": [1, 1],
        "options": {"deep": True},
        "name": "m",
        "anything": [1],
    }
    foot, metre = "<Unit.FOOT: 'ft'>", "<Unit.METRE: 'm'>"
    assert run(hosted.call("everything", arguments)) == (
        f"('t', 2, Point(x=1, y=0.5, unit={foot}), 1.0, 'up', {foot}, None, {{'a': 1}}, 'x', None, (1, 'b'), "
        f"[Point(x=2, y=0.5, unit={metre})], {{1}}, {{'deep': True}}, 'm', [1])"
    )


def test_texts_are_read_by_the_declared_type_as_xml_formats_have_only_texts(write):
    hosted = load_tools(write(TOOLS)).create()
    arguments = {"text": "3", "count": "3", "point": '{"x": 1}', "options": '{"deep": true}', "share": "1e3"}
    assert run(hosted.call("everything", arguments)).startswith("('3', 3, Point(x=1, ")
    schema = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "boolean"}, "b": {}}}}}
    assert fit_arguments(schema, {"a": "True", "b": "True"}) == {"a": True, "b": "True"}


def test_pydantic_models_are_objects_too(write):
    pytest.importorskip("pydantic")
    path = write(
        "from pydantic import BaseModel, Field\n"
        "class Place(BaseModel):\n    city: str = Field(description='its name')\n    people: int = 0\n"
        "def visit(place: Place):\n    'Go there.'\n    return place\n"
    )
    factory = load_tools(path)
    assert parameters(factory.info)["properties"]["place"] == {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "its name"}, "people": {"type": "integer"}},
        "required": ["city"],
    }
    assert run(factory.create().call("visit", {"place": {"city": "Ulm"}})) == '{"city": "Ulm", "people": 0}'


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"count": 1, "point": {"x": 1}}, "'text' is a required property"),
        ({"text": "a", "count": "many", "point": {"x": 1}}, "count: 'many' is not of type 'integer'"),
        ({"text": "a", "count": True, "point": {"x": 1}}, "count: True is not of type 'integer'"),
        ({"text": "a", "count": 1, "point": {"y": 1}}, "point: 'x' is a required property"),
        ({"text": "a", "count": 1, "point": {"x": 1}, "way": "left"}, "'left' is not one of ['up', 'down']"),
        ({"text": "a", "count": 1, "point": {"x": 1}, "pair": [1]}, "pair: [1] is too short"),
        ({"text": None, "count": 1, "point": {"x": 1}}, "text: None is not of type 'string'"),
        ({"txt": "a"}, "there is no parameter 'txt'"),
    ],
)
def test_arguments_that_do_not_fit_tell_the_model_what_fits(write, arguments, words):
    hosted = load_tools(write(TOOLS)).create()
    with pytest.raises(ToolFailed) as caught:
        run(hosted.call("everything", arguments))
    assert caught.value.kind == "malformed"
    assert (
        words in caught.value.text and "Parameters: text, count, point, share (optional)" in caught.value.text
    )


def test_a_long_argument_is_not_quoted_whole(write):
    hosted = load_tools(write("def f(a: int):\n    'F.'\n")).create()
    with pytest.raises(ToolFailed) as caught:
        run(hosted.call("f", {"a": "x" * 100_000}))
    assert len(caught.value.text) < 500


def test_schemas_of_servers_that_cannot_be_checked_let_the_call_through():
    for bad in (
        {"type": "strange"},
        {"$ref": "#/nowhere"},
        {"type": "string", "pattern": "("},
        True,
    ):
        schema = {"function": {"name": "f", "parameters": {"type": "object", "properties": {"a": bad}}}}
        assert fit_arguments(schema, {"a": "x"}) == {"a": "x"}
    assert fit_arguments({"function": {"name": "f"}}, {"a": 1}) == {"a": 1}
    free = {"properties": {"a": {}}, "additionalProperties": True}
    assert fit_arguments({"function": {"name": "f", "parameters": free}}, {"b": 1}) == {"b": 1}


@pytest.mark.parametrize("value", [3, "abc", [1]])
@pytest.mark.parametrize(
    "body",
    [
        {"properties": {"n": {"type": "integer", "minimum": "1"}}},
        {"properties": ["n"]},
        {"properties": {"n": {"type": "integer"}}, "required": "name"},
        {"properties": {"n": {"enum": 5}}},
        {"properties": {"n": {"type": "array", "items": "string"}}},
        {"properties": {"n": {"type": "string", "maxLength": "5"}}},
        {"properties": {"n": {"type": "string", "pattern": 5}}},
        {"properties": {"n": {"type": "integer", "multipleOf": 0}}},
        {"properties": {"n": {"type": 5}}},
        ["n"],
    ],
)
def test_a_schema_that_is_not_valid_is_recognised_and_never_an_exception(body, value):
    schema = {"function": {"name": "f", "parameters": body}}
    assert schema_problem(schema)
    with suppress(ToolFailed):
        assert fit_arguments(schema, {"n": value}) in ({"n": value}, {"n": 3})


def test_a_schema_that_refers_to_itself_lets_the_call_through():
    schema = {"function": {"name": "f", "parameters": {"properties": {"n": {"$ref": "#/properties/n"}}}}}
    assert schema_problem(schema) is None
    assert fit_arguments(schema, {"n": 3}) == {"n": 3}


def test_nulls_of_left_out_fields_are_no_part_of_a_schema():
    choices = {"type": ["string", "null"], "enum": ["a", None], "default": None, "minimum": None}
    schema = {"function": {"name": "f", "strict": None, "parameters": {"properties": {"a": choices}}}}
    clean = without_nulls(schema)
    assert clean["function"].keys() == {"name", "parameters"}
    assert clean["function"]["parameters"]["properties"]["a"] == {
        "type": ["string", "null"], "enum": ["a", None], "default": None,
    }  # fmt: skip
    assert schema_problem(clean) is None and schema_problem(schema)


def test_patterns_are_matched_only_where_time_is_limited(monkeypatch):
    """The model chooses the text, on which a pattern may take for ever."""
    names = {
        "type": "object",
        "patternProperties": {"^x_": {"type": "integer"}},
        "additionalProperties": False,
    }
    properties = {
        "to": {"type": "string", "pattern": "^(a+)+@$"},
        "more": names,
        "name": {"propertyNames": {"pattern": "^(a+)+@$"}},
    }
    schema = {"function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    arguments = {"to": "b", "more": {"x_1": 1, "y": 2}, "name": {"b": 1}}
    with pytest.raises(ToolFailed, match="does not match"):
        fit_arguments(schema, {"to": "b"}, patterns=True)

    matched: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(re, "search", lambda pattern, text: matched.append(text))
        assert fit_arguments(schema, arguments) == arguments
    assert matched == []
    with pytest.raises(ToolFailed, match="to: 3 is not of type 'string'"):
        fit_arguments(schema, {"to": 3})


def test_a_schema_cannot_make_us_read_an_address(write):
    address = Path(write('{"type": "integer"}', "schema.json")).as_uri()
    body = {"type": "object", "properties": {"a": {"$ref": address}}}
    assert fit_arguments({"function": {"name": "f", "parameters": body}}, {"a": "x"}) == {"a": "x"}


def test_functions_may_be_async_cached_or_raise(write):
    path = write(
        "import asyncio, functools\n"
        "async def later(a: int):\n    'Later.'\n    await asyncio.sleep(0)\n    return {'a': a}\n"
        "@functools.lru_cache\ndef cached(a: int) -> int:\n    'Cached.'\n    return a + 1\n"
        "def fails():\n    'Fails.'\n    raise KeyError('gone')\n"
        "def _helper(a): ...\nfrom json import dumps\n"
    )
    factory = load_tools(path)
    assert [schema["function"]["name"] for schema in factory.info.schemas] == ["later", "cached", "fails"]
    hosted = factory.create()
    assert run(hosted.call("later", {"a": 1})) == '{"a": 1}'
    assert run(hosted.call("cached", {"a": 1})) == "2"
    with pytest.raises(KeyError, match="gone"):
        run(hosted.call("fails", {}))
    with pytest.raises(ToolFailed, match=r"no tool 'nothing'. Tools: later, cached, fails") as caught:
        run(hosted.call("nothing", {}))
    assert caught.value.kind == "unknown"


def test_marked_functions_are_the_only_tools_and_may_be_renamed(write):
    path = write(
        "from verl.agents import tool\n"
        "@tool\ndef one(a: str):\n    'One.'\n"
        "@tool(name='second', description='The second.')\nasync def two(): ...\n"
        "def helper(a): ...\n"
    )
    functions = [schema["function"] for schema in load_tools(path).info.schemas]
    assert [(f["name"], f["description"]) for f in functions] == [("one", "One."), ("second", "The second.")]
    assert load_tools(f"{path}:two").info.schemas[0]["function"]["name"] == "second"


def test_tools_are_found_by_module(write, monkeypatch):
    path = write("def f(a: str):\n    'F.'\n    return a\n", "module_of_tools.py")
    monkeypatch.syspath_prepend(str(Path(path).parent))
    for spec in ("module_of_tools", "module_of_tools:f", "module_of_tools.f", f"{path}:f"):
        assert run(load_tools(spec).create().call("f", {"a": "x"})) == "x"


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("def f(a):\n    'F.'\n", "", ["parameter 'a' of f has no type hint", "a: str", "@tool"]),
        ("def f(a: str): ...\n", "", ["f has no docstring", "@tool"]),
        ("def f(a: object):\n    'F.'\n", "", ["'a' of f", "object cannot be written in JSON", "dataclass"]),
        ("def f(a: 'Nowhere'):\n    'F.'\n", "", ["f cannot be read", "Nowhere"]),
        ("def f(*a: str):\n    'F.'\n", "", ["f has the parameter *a"]),
        ("def f(**a: str):\n    'F.'\n", "", ["f has the parameter **a"]),
        ("class C:\n    a: 'C'\n    model_fields = {}\n", "", ["no public function", "its classes (C)", "environment"]),
        ("x = 1\n", "", ["no public function", "type hints and a docstring"]),
        ("def f():\n    'F.'\n", ":g", ["g is not there", "Functions there: f"]),
        ("class C: ...\n", ":C", ["C is a class", "multi_turn.environment"]),
        ("import no_such_package_y\n", "", ["no_such_package_y"]),
        ("1/0\n", "", ["ZeroDivisionError", "mine.py, line 1"]),
        ("from verl.agents.formats import get_format\nget_format('x')\n", "", ["'x'"]),
        ("from verl.json_input import open_regular\nopen_regular('/dev/null')\n", "", ["mine.py, line 2"]),
        (
            "from verl.agents import tool\n@tool(name='a b')\ndef f():\n    'F.'\n",
            "",
            ["'a b'", "letters, digits"],
        ),
        (
            "from verl.agents import tool\n@tool(name='g')\ndef f():\n    'F.'\n@tool\ndef g():\n    'G.'\n",
            "",
            ["two tools named 'g'"],
        ),
        (
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass Node:\n    next: Node\ndef f(a: Node):\n    'F.'\n",
            "",
            ["'a' of f", "contains itself"],
        ),
    ],
)  # fmt: skip
def test_functions_that_cannot_be_tools_are_errors_at_start(write, text, name, words):
    spec = write(text) + name
    with pytest.raises(ConfigError) as caught:
        load_tools(spec)
    for word in ["multi_turn.tools", spec.removesuffix(name), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("spec", ["/nowhere/tools.py", "no_such_module_y", "", "file.py:", "/nowhere/t.yaml"])
@pytest.mark.parametrize("load", [load_tools, load_environment, load_user])
def test_what_is_not_there_is_named_with_its_key(load, spec):
    with pytest.raises(ConfigError) as caught:
        load(spec)
    assert "multi_turn." in str(caught.value) and spec in str(caught.value)


# ---- docstrings


@pytest.mark.parametrize(
    "text",
    [
        "Do it.\n\nArgs:\n    a (int): first\n        value\n    *rest: others\n\nReturns:\n    c: no parameter\n",
        "Do it.\n\nParameters\n-----\na : int\n    first\n    value\nrest\n    others\n\nReturns\n-----\nint\n    c",
        "Do it.\n\n:param int a: first\n    value\n:type a: int\n:param rest: others\n:returns: c\n",
    ],
)
def test_docstrings_in_three_styles(text):
    assert read_docstring(text) == ("Do it.", {"a": "first value", "rest": "others"})


def test_a_docstring_without_sections_is_the_description():
    assert read_docstring("Say: it.\n\nNote that\nthis is more.") == ("Say: it.\nNote that this is more.", {})
    assert read_docstring("Do it.\n\nArgs:\n    a: x\n\nAfterwards.") == ("Do it.\nAfterwards.", {"a": "x"})
    assert read_docstring("") == ("", {})


# ---- results


def test_results_are_texts():
    import numpy as np

    assert as_text("é") == "é"
    assert as_text({"é": [1, None]}) == '{"é": [1, null]}'
    assert as_text(np.float32(0.5)) == "0.5" and as_text([np.arange(2)]) == "[[0, 1]]"
    assert as_text({1}) == "[1]" and as_text(None) == "null"
    assert as_text(Path("a/b")) == '"a/b"'


# ---- between processes


def test_what_the_trainer_gets_to_know_is_plain_data(write):
    info = load_tools(write(TOOLS)).info
    assert HostedInfo(**json.loads(json.dumps(asdict(info)))).schemas == info.schemas


def test_a_file_of_tools_loads_no_torch(write):
    path = write("from verl.agents import tool, Environment\n@tool\ndef f(a: int):\n    'F.'\n    return a\n")
    script = (
        "import sys, asyncio; from verl.agents.tools import load_tools; import verl.agents.formats\n"
        f"assert asyncio.run(load_tools({path!r}).create().call('f', {{'a': '1'}})) == '1'\n"
        "assert not {'torch', 'transformers', 'omegaconf', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])
