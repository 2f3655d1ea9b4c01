"""Tools and interactions that YAML files name by class are created, called, scored and released."""

from __future__ import annotations

import sys
from asyncio import run
from typing import Any

import pytest

from verl.agents.base import ToolFailed
from verl.agents.hosted import HostedInfo
from verl.agents.tools import load_environment, load_tools
from verl.errors import ConfigError
from verl.interactions.base import BaseInteraction
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


def parameters(info: HostedInfo, number: int = 0) -> dict[str, Any]:
    return info.schemas[number]["function"]["parameters"]


CLASSES = """
from verl.interactions.base import BaseInteraction
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

EVENTS = []

class Score(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.state = {}

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        assert kwargs["create_kwargs"]["ground_truth"] == ground_truth
        self.state[instance_id] = [ground_truth]
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, unit="", **kwargs):
        self.state[instance_id].append(parameters["answer"])
        return ToolResponse(text=f"{parameters['answer']}{unit} {self.config['word']}"), -0.25, {"n": 1}

    async def calc_reward(self, instance_id, factor=1, **kwargs):
        truth, *answers = self.state[instance_id]
        return factor * float(answers[-1] == truth)

    async def release(self, instance_id, **kwargs):
        EVENTS.append(("released", self.name, self.state.pop(instance_id)))

class Plain:
    def __init__(self, config, tool_schema):
        pass

    def execute(self, instance_id, parameters, **kwargs):
        return {"text": "plain"}, None, {}

    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {
            "name": "plain", "description": "Plain.",
            "parameters": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}},
                           "required": []}}})

class Needy(BaseTool):
    async def execute(self, instance_id, parameters, agent_data): ...

class OldStyle(BaseTool):
    def create(self, instance_id, create_kwargs): return create_kwargs["id"]
    def execute(self, instance_id, parameters): return instance_id

class HintInteraction(BaseInteraction):
    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.truth = {instance_id: ground_truth}
        EVENTS.append(("start", kwargs["name"]))
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        right = messages[-1]["content"] == self.truth[instance_id]
        return right, self.config["text"], float(right), {}

    async def finalize_interaction(self):
        EVENTS.append(("end", self.name))
"""

SCHEMA = """
    tool_schema:
      type: function
      function:
        name: score
        description: Score an answer.
        parameters:
          type: object
          properties:
            answer: {type: string, description: the answer, minLength: 1}
          required: [answer]
"""


def events(path: str) -> list[Any]:
    (module,) = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == path]
    return module.EVENTS


def test_tools_of_a_yaml_file_live_as_long_as_the_conversation(write, monkeypatch):
    classes = write(CLASSES, "tool_classes.py")
    monkeypatch.setenv("WORD", "done")
    path = write(
        "tools:\n  - class_name: tool_classes.py:Score\n    config: {type: native, word: '${oc.env:WORD}'}\n"
        f"{SCHEMA}"
        "  - class_name: tool_classes.py:Plain\n",
        "tools.yaml",
    )
    factory = load_tools(path)
    assert factory.info.hooks == ("reset", "reward") and factory.info.stateful
    assert [schema["function"]["name"] for schema in factory.info.schemas] == ["score", "plain"]
    assert parameters(factory.info)["properties"]["answer"]["minLength"] == 1
    assert parameters(factory.info, 1)["properties"]["a"] == {"type": "array", "items": {"type": "string"}}
    kwargs = {
        "score": {
            "create_kwargs": {"ground_truth": "4"},
            "execute_kwargs": {"unit": "m"},
            "calc_reward_kwargs": {"factor": 2},
        }
    }

    async def converse(row: dict[str, Any]) -> None:
        tools = factory.create()
        await tools.reset(row)
        assert await tools.reward() == 0.0  # nothing was called
        assert await tools.call("score", {"answer": "3"}) == ("3m done", -0.25)
        assert await tools.call("score", {"answer": "4"}) == ("4m done", -0.25)
        assert await tools.call("plain", {}) == ("plain", None)
        assert await tools.reward() == 2.0
        with pytest.raises(ToolFailed, match="answer: 3 is not of type 'string'"):
            await tools.call("score", {"answer": 3})
        with pytest.raises(ToolFailed, match="no tool 'other'. Tools: score, plain"):
            await tools.call("other", {})
        await tools.close()
        await tools.close()

    run(converse({"tools_kwargs": kwargs}))
    run(converse({"extra_info": {"tools_kwargs": kwargs}}))
    assert events(classes) == [("released", "score", ["4", "3", "4"])] * 2


def test_tools_that_take_all_arguments_of_create_at_once(write):
    write(CLASSES, "old_classes.py")
    schema = SCHEMA.replace("name: score", "name: old").replace("required: [answer]", "required: []")
    path = write(f"tools:\n  - class_name: old_classes.py:OldStyle\n    config: {{}}\n{schema}", "tools.yaml")
    tools = load_tools(path).create()
    run(tools.reset({"tools_kwargs": {"old": {"create_kwargs": {"id": "seven"}}}}))
    assert run(tools.call("old", {})) == ("seven", None)


def test_interactions_of_a_yaml_file_answer_as_the_user(write):
    classes = write(CLASSES, "hint_classes.py")
    path = write(
        "interaction:\n  - {name: kind, class_name: hint_classes.HintInteraction, config: {text: again}}\n"
        "  - {class_name: hint_classes.HintInteraction}\n",
        "interactions.yaml",
    )
    kind, hint = load_environment(path)
    assert kind.info == HostedInfo("kind", [], ("reset", "user", "turn_reward"), True)
    assert hint.info.name == "hint"

    async def converse() -> None:
        user = kind.create()
        await user.reset({"extra_info": {"interaction_kwargs": {"name": "kind", "ground_truth": "4"}}})
        assert await user.user("3", [{"role": "assistant", "content": "3"}]) == "again"
        assert (await user.turn_reward(), await user.turn_reward()) == (0.0, None)
        assert await user.user("4", [{"role": "assistant", "content": "4"}]) is None
        assert await user.turn_reward() == 1.0
        await user.close()

    run(converse())
    assert events(classes) == [("start", "kind"), ("end", "kind")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", ["no list 'tools'"]),
        ("tools: []", ["no list 'tools'", "it has: tools"]),
        ("tols: [{class_name: a}]", ["no list 'tools'", "tols"]),
        ("a: [", ["cannot be read"]),
        ("tools: [{class_name: a.B, mcp: {url: x}}]", ["tools[0]", "multi_turn.mcp"]),
        ("tools: [{class_name: a.B, config: {type: mcp}}]", ["tools[0]", "multi_turn.mcp"]),
        ("tools: [{class_name: a.B, schema: {}}]", ["'schema'", "class_name, config, tool_schema"]),
        ("tools: [{config: {}}]", ["class_name (pkg.module.Class)"]),
        ("tools: [{class_name: no_such_module_z.Tool}]", ["tools[0].class_name", "no_such_module_z.Tool"]),
        ("tools: [{class_name: 'bad.py:None_'}]", ["tools[0].class_name", "no such class"]),
        ("tools: [{class_name: verl.errors.VerlError}]", ["no method execute"]),
        ("tools: [{class_name: 'bad.py:Score'}]", ["no tool_schema", "ValueError", "get_openai_tool_schema"]),
        ("tools: [{class_name: 'bad.py:Score', tool_schema: {name: a}}]", ["tool_schema is not"]),
        ("tools: [{class_name: 'bad.py:Plain'}, {class_name: 'bad.py:Plain'}]", ["tools[1]", "'plain' again"]),
        (f"tools:\n  - class_name: bad.py:Needy\n{SCHEMA}", ["agent_data"]),
        (
            f"tools:\n  - class_name: bad.py:Score\n{SCHEMA}".replace("minLength: 1", "minLength: x"),
            ["tools[0].tool_schema", "score", "no valid JSON schema", "'x'"],
        ),
    ],
)  # fmt: skip
def test_yaml_files_that_cannot_work_are_errors_at_start(write, text, words):
    write(CLASSES, "bad.py")
    with pytest.raises(ConfigError) as caught:
        load_tools(write(text, "tools.yaml"))
    for word in ["multi_turn.tools", "tools.yaml", *words]:
        assert word in str(caught.value)


def test_an_image_is_no_answer(write):
    write(
        "from verl.tools.base_tool import BaseTool\nfrom verl.tools.schemas import ToolResponse\n"
        "class Draw(BaseTool):\n"
        "    async def execute(self, instance_id, parameters, **kwargs):\n"
        "        return ToolResponse(image=['pixels']), 0.0, {}\n",
        "draw.py",
    )
    tools = load_tools(write(f"tools:\n  - class_name: draw.py:Draw\n{SCHEMA}", "tools.yaml")).create()
    with pytest.raises(ToolFailed, match="only texts"):
        run(tools.call("score", {"answer": "a"}))


def test_schemas_of_yaml_tools_are_objects_that_keep_every_key():
    data = {
        "type": "function",
        "function": {
            "name": "f",
            "description": "F.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "array", "items": {"type": "string"}}, "b": True},
                "required": ["a"],
            },
        },
    }
    schema = OpenAIFunctionToolSchema.model_validate(data)
    assert schema.function.parameters.properties["a"].type == "array"
    assert schema.function.strict is False and schema.function.parameters.properties["a"].enum is None
    assert schema.model_dump() == data
    assert schema.model_dump(exclude_unset=False)["function"]["strict"] is False
    assert ToolResponse(text=None, image=[1]).model_dump(exclude_none=True) == {"image": [1]}
    assert OpenAIFunctionToolSchema(type="function", function=schema.function).function is schema.function


def test_the_base_classes_work_as_they_are():
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": "f"}})
    base = BaseTool({"a": 1}, schema)
    assert base.name == "f" and base.get_openai_tool_schema() is schema
    assert run(base.create("x"))[0] == "x" and run(base.calc_reward("x")) == 0.0
    assert run(base.release("x")) is None
    with pytest.raises(NotImplementedError, match="BaseTool has no execute"):
        run(base.execute("x", {}))
    interaction = BaseInteraction({"name": "n"})
    assert interaction.name == "n" and run(interaction.start_interaction("x")) == "x"
    with pytest.raises(NotImplementedError, match="BaseInteraction has no generate_response"):
        run(interaction.generate_response("x", []))
