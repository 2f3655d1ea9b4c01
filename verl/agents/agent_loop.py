"""The classes that agent loops of users inherit from or use, under the names and with the arguments that verl has.

An agent loop is a coroutine that runs one conversation: it asks the policy for tokens and returns the row to train on.
`verl.agents.loop_runs` runs it here. Importing this loads no torch: a file of loops is imported to read a config.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

from verl.agents.base import ToolCall
from verl.agents.formats import add_parser_name, detect_format, get_format
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.tools.utils.tool_registry import initialize_tools_from_config

_Loop = TypeVar("_Loop", bound=type)
_loops: dict[str, type] = {}


def register(agent_name: str) -> Callable[[_Loop], _Loop]:
    """Make a class known to `rollout.agent.default_agent_loop` and the column `agent_name`."""

    def add(kind: _Loop) -> _Loop:
        _loops[agent_name] = kind
        return kind

    return add


def registered_loops() -> Mapping[str, type]:
    return _loops


@dataclass
class AgentLoopMetrics:
    """Seconds that a conversation spent, and -1 where a count is not known."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


@dataclass
class AgentLoopOutput:
    """The row of a conversation."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    """What the policy drew (mask 1) and what it read in between (mask 0)."""
    response_mask: Sequence[int]
    response_logprobs: Sequence[float] | None = None
    """Compared with those of the draws, where they are given."""
    reward_score: float | None = None
    """The row's reward; nothing else scores the row then."""
    num_turns: int = 0
    metrics: AgentLoopMetrics | Mapping[str, float] = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Added to the `extra_info` that the row's reward function gets."""
    multi_modal_data: Mapping[str, Any] | None = None
    routed_experts: Any = None


class Generated(list[int]):
    """What the policy drew for one request: the token ids, as a list and as an object that has them."""

    def __init__(self, token_ids: Sequence[int], log_probs: Sequence[float], stop_reason: str) -> None:
        super().__init__(token_ids)
        self.log_probs = list(log_probs)
        self.stop_reason = stop_reason
        """completed or aborted."""
        self.num_preempted = 0
        self.routed_experts = None
        self.extra_fields: dict[str, Any] = {}

    @property
    def token_ids(self) -> list[int]:
        return list(self)


@dataclass
class DictConfigWrap:
    """A config as an argument of a loop's class."""

    config: Any


@dataclass
class ToolListWrap:
    """Tools as an argument of a loop's class."""

    tools: list[Any]


class AgentLoopBase:
    """An agent loop. One is built for each conversation; `run` must be overridden."""

    _class_initialized = False

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        """Called once for each class and run, before its first instance is built."""

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        **kwargs: Any,
    ) -> None:
        self.config = getattr(trainer_config, "config", trainer_config)
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = self.config.data if data_config is None else data_config.config
        self.apply_chat_template_kwargs = dict(self.data_config.get("apply_chat_template_kwargs") or {})
        self.loop = asyncio.get_running_loop()

    async def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """The ids of messages up to the header of the model's next turn; with `remove_system_prompt`, of messages that
        follow a turn of the model."""
        ids: list[int] = self.server_manager.encode(messages, tools, remove_system_prompt)
        return ids

    async def process_vision_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Images and videos of messages; there are none here."""
        return {}

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run the conversation; `kwargs` are the columns of its row."""
        raise NotImplementedError(f"{type(self).__name__} has no run")


class SingleTurnAgentLoop(AgentLoopBase):
    """One answer of the model."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        drawn: Generated = await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        return AgentLoopOutput(prompt_ids, drawn, [1] * len(drawn), drawn.log_probs, num_turns=2)


# ---- tools


@dataclass(frozen=True)
class FunctionCall:
    """A call that the model wrote; `arguments` is JSON."""

    name: str
    arguments: str

    def as_call(self) -> ToolCall:
        return ToolCall(self.name, json.loads(self.arguments))


class ToolParser:
    """Reads calls out of the tokens of a turn, in a format of `multi_turn.format`."""

    _registry: ClassVar[dict[str, type[ToolParser]]] = {}

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.name = "auto"

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """The text outside the calls, and the calls. Those that cannot be read are left out."""
        name = self.name
        if name == "auto":
            name = detect_format(str(self.tokenizer.chat_template or ""))
        ids = list(responses_ids)
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        parsed = get_format(name).parse(self.tokenizer.decode(ids))
        return parsed.content, [
            FunctionCall(call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in parsed.calls
        ]

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        """The parser of a name: one that was registered, or one of ours."""
        if name in cls._registry:
            return cls._registry[name](tokenizer)
        if name != "auto":
            get_format(name)  # ConfigError where there is none
        parser = ToolParser(tokenizer)
        parser.name = name
        return parser

    @classmethod
    def register(cls, name: str) -> Callable[[_Loop], _Loop]:
        def add(kind: _Loop) -> _Loop:
            cls._registry[name] = kind
            add_parser_name(name)
            return kind

        return add


@dataclass
class AgentData:
    """What `_call_tool` may know of the conversation."""

    messages: list[dict[str, Any]]
    tools_kwargs: dict[str, Any]
    request_id: str = field(default_factory=lambda: uuid4().hex)
    metrics: dict[str, Any] = field(default_factory=dict)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    tool_rewards: list[float] = field(default_factory=list)


class ToolAgentLoop(AgentLoopBase):
    """The conversation of `rollout.multi_turn`: turns of the model and answers of its tools, environment and user, with
    all their limits. A subclass may override `_call_tool`, or `run` around that of this class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rollout, multi_turn = self.rollout_config, self.rollout_config.multi_turn
        self.prompt_length, self.response_length = rollout.prompt_length, rollout.response_length
        self.max_user_turns = multi_turn.max_user_turns
        self.max_assistant_turns = multi_turn.max_assistant_turns
        self.max_parallel_calls = multi_turn.max_parallel_calls
        self.max_tool_response_length = multi_turn.max_tool_response_length
        self.tool_response_truncate_side = multi_turn.tool_response_truncate_side
        self.tool_parser_name = multi_turn.format

    @cached_property
    def tools(self) -> dict[str, BaseTool]:
        """Those of the YAML files of `multi_turn.tools`, for a `_call_tool` that uses them itself."""
        paths = self.rollout_config.multi_turn.tools
        made = initialize_tools_from_config([path for path in paths if path.endswith((".yaml", ".yml"))])
        return {tool.name: tool for tool in made}

    @cached_property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Of all tools that the row's conversation has."""
        return [dict(schema) for schema in self.server_manager.schemas]

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        data = AgentData(list(kwargs["raw_prompt"]), dict(kwargs.get("tools_kwargs") or {}))
        output: AgentLoopOutput = await self.server_manager.converse(self, data, sampling_params)
        return output

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: dict[str, Any], agent_data: AgentData | None = None
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """The tool's answer, the reward of the call, and metrics. ToolFailed has a text for the model to read."""
        text, reward = await self.server_manager.call_tool(tool_call.as_call())
        return ToolResponse(text=text), reward, {}


def require_tokens(value: Any, name: str) -> list[int]:
    """A list of token ids; what else `apply_chat_template` may return is refused with its kind."""
    if isinstance(value, Mapping) or hasattr(value, "input_ids"):
        raise TypeError(f"{name} is {type(value).__name__}, not a list of token ids; take its 'input_ids'")
    return [int(token) for token in value]
