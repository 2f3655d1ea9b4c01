"""Names below `verl.tools` that tools and agent loops of users import."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from verl.tools.base_tool import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.tools.utils.tool_registry import initialize_tools_from_config


class Echo(SandboxFusionTool):
    """Uses the pool as tools of recipes do."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        code = parameters["code"].strip()
        said = await self.execution_pool.execute.remote(
            self.execute_code, instance_id, code, self.default_timeout, self.default_language
        )
        return said, None, {}

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> Any:
        return ToolResponse(text=f"{language} {timeout} {code}")


def test_tools_of_a_file_are_made_and_run_programs_in_threads(write: Any) -> None:
    parameters: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
    function = {"name": "code", "description": "Run.", "parameters": parameters}
    entry = {
        "class_name": f"{__name__}.Echo",
        "config": {"sandbox_fusion_url": "http://127.0.0.1:1", "default_timeout": 7},
        "tool_schema": {"type": "function", "function": function},
    }
    (tool,) = initialize_tools_from_config(write(json.dumps({"tools": [entry]}), "tools.yaml"))
    assert tool.name == "code" and isinstance(tool.tool_schema, OpenAIFunctionToolSchema)
    said, reward, _ = asyncio.run(tool.execute("one", {"code": " print(1) "}))
    assert said.text == "python 7 print(1)" and reward is None
