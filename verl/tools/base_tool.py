"""The class that a tool of a YAML file subclasses."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class BaseTool:
    """A tool with state per conversation. Every method may be overridden; only `execute` must be.

    In a conversation, `create` is called before the tool's first call, and `calc_reward` and `release` at the end if
    it was called at all. `tools_kwargs` of the row, {tool: {create_kwargs, execute_kwargs, calc_reward_kwargs,
    release_kwargs}}, are their keyword arguments."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Override it, or give `tool_schema` in the YAML file."""
        schema = getattr(self, "tool_schema", None)
        if schema is None:
            raise ValueError("there is no tool_schema in the YAML file, and no get_openai_tool_schema here")
        return schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin; `kwargs` also holds all of create_kwargs under that name. Returns the id, alone or with a response
        (which is not shown to the model)."""
        return instance_id or uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Run the tool: its response (or a text), the reward of this call, and metrics (which are not recorded)."""
        raise NotImplementedError(f"{type(self).__name__} has no execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of the conversation."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Free what the instance held."""
