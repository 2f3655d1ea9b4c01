"""A tool that runs programs at a Sandbox Fusion service, for classes that inherit from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from verl.config.sections.reward import SandboxConfig
from verl.reward.sandbox.program import Program
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class SandboxFusionTool(BaseTool):
    """Runs the argument `code` at the address `sandbox_fusion_url` of its config. `num_workers` programs run at a time
    in each conversation; `rate_limit` has no effect."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        self.num_workers = config.get("num_workers", 10)
        self.rate_limit = config.get("rate_limit", 10)
        self.default_timeout = config.get("default_timeout", 30)
        self.default_language = config.get("default_language", "python")
        self.memory_limit_mb = config.get("memory_limit_mb", 1024)
        self.sandbox_fusion_url = config.get("sandbox_fusion_url", "")
        if not self.sandbox_fusion_url:
            raise ValueError("sandbox_fusion_url is not set in the tool's config")
        self._free = asyncio.Semaphore(self.num_workers)
        # Called as `execution_pool.execute.remote(function, ...)`.
        self.execution_pool = SimpleNamespace(execute=SimpleNamespace(remote=self._in_thread))

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        async with self._free:
            return await asyncio.to_thread(function, *arguments, **named)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        code = str(parameters.get("code", ""))
        said = await self.execution_pool.execute.remote(
            self.execute_code, instance_id, code, timeout, language
        )
        return said if isinstance(said, ToolResponse) else ToolResponse(text=str(said)), None, {}

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> Any:
        """What the program printed."""
        from verl.reward.sandbox import remote

        if language != "python":
            raise ValueError(f"programs in {language!r} are not run; only python")
        limits = SandboxConfig(timeout_s=float(timeout), memory_limit_mb=self.memory_limit_mb)
        outcome = remote.run(Program(code), limits, self.sandbox_fusion_url)
        if outcome.end == "sandbox":
            raise RuntimeError(outcome.stderr)
        return ToolResponse(text=outcome.stdout + outcome.stderr or "[no output]")
