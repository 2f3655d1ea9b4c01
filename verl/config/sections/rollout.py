"""Generating responses: the engine, its sampling and its memory, tools and several turns."""

# ruff: noqa: RUF009 - `key` and `section` return dataclasses.field

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.capabilities import ENGINES, engine_spec
from verl.config.keys import key, section
from verl.config.sections.actor import MODEL_DTYPES, LogProbConfig

TOOL_FORMATS = (
    "auto", "hermes", "qwen3_coder", "llama3_json", "mistral", "mistral_v11", "deepseek_v3", "deepseek_v31", "kimi_k2",
    "glm45", "minimax_m2", "gemma4", "functiongemma", "gpt-oss",
)  # fmt: skip


@dataclass
class EngineKwargsConfig:
    """Passed to the engine of that name unchanged."""

    vllm: dict[str, Any] = key({}, "extra arguments of vLLM's engine", used_if="..name=vllm")
    sglang: dict[str, Any] = key({}, "extra arguments of SGLang's engine", used_if="..name=sglang")


@dataclass
class ValKwargsConfig:
    """Sampling in validation."""

    do_sample: bool = key(False, "draw tokens; False: greedy")
    temperature: float = key(0.0, "sampling temperature; 0: greedy", ge=0, used_if=".do_sample")
    top_p: float = key(1.0, "nucleus sampling", gt=0, le=1, used_if=".do_sample")
    top_k: int = key(-1, "draw from the k likeliest tokens; -1: all", ge=-1, used_if=".do_sample")
    min_p: float = key(
        0.0,
        "drop tokens below this share of the likeliest",
        ge=0,
        le=1,
        follows="actor_rollout_ref.rollout.min_p",
        used_if=".do_sample",
    )
    n: int = key(1, "responses per prompt", ge=1)


@dataclass
class MultiTurnUserConfig:
    """A simulated user, who answers the model when it calls no tool."""

    path: str | None = key(None, "class with `user(reply)`: file.py:Name or module:Name", path=True)
    base_url: str | None = key(None, "OpenAI-compatible endpoint that plays the user, up to /v1")
    model: str | None = key(None, "model name the endpoint knows", used_if=".base_url")
    prompt: str | None = key(None, "system message of the endpoint: whom it plays", used_if=".base_url")
    api_key_env: str = key(
        "OPENAI_API_KEY", "environment variable that holds the key; may be unset", used_if=".base_url"
    )


VERIFIERS = "verifiers:"
"""What the names of environments, and of data, of the package verifiers begin with."""
_OWN_AGENT = ".agent or .agent_command or .environment"


@dataclass
class MultiTurnConfig:
    """Conversations of several turns: tools, environments, simulated users."""

    enable: bool = key(False, "let the model call tools, and answer it, for several turns")
    max_turns: int = key(5, "turns the model may take in one conversation", ge=1)
    max_user_turns: int | None = key(None, "answers of the user in one conversation; default: no limit", ge=1)
    tools: list[str] = key([], "file.py, file.py:name, module, or a YAML file of tools; or a list", path=True)
    environment: list[str] = key(
        [],
        "class, one instance per sample: file.py:Name or module:Name; gym:ID, openenv:URL or verifiers:NAME; or a "
        "list (column environment)",
        path=True,
    )
    agent: str | None = key(
        None,
        "an agent of your own, FILE.py:function: it talks to the policy over HTTP, as to OpenAI or Anthropic; "
        "endpoint: agents that run elsewhere fetch their samples",
        path=True,
    )
    agent_host: str = key(
        "127.0.0.1", "address that such agents are waited for at", used_if=".agent=endpoint"
    )
    agent_port: int = key(0, "port there; 0: any free one", ge=0, le=65535, used_if=".agent=endpoint")
    agent_command: str | None = key(None, "the same as a program, which gets the row on its stdin")
    agent_timeout_s: float = key(
        300.0, "seconds such an agent may take between two answers of the policy", gt=0, used_if=_OWN_AGENT
    )
    agent_failure: str = key(
        "mask",
        "what such an agent did before it failed: left out of training, or scored like the others",
        known=("mask", "score"),
        used_if=_OWN_AGENT,
    )
    chains: str = key(
        "all",
        "where such an agent has several histories: train them all, each a row, or the longest alone",
        known=("all", "longest"),
        used_if=_OWN_AGENT,
    )
    tool_server: str | None = key(None, "address of an HTTP server that runs the tools")
    mcp: list[str] = key([], "MCP servers: an HTTP address or a command; or a list")
    user: MultiTurnUserConfig = section(MultiTurnUserConfig, "a simulated user")
    format: str = key(
        "auto",
        "how the model writes a call; auto: by its chat template",
        known=TOOL_FORMATS,
        plugin="tool_format",
    )
    max_parallel_calls: int = key(1, "tool calls of one turn that are run, at most", ge=1)
    max_tool_response_length: int = key(256, "longest tool answer, in tokens; longer ones are cut", ge=1)
    tool_response_truncate_side: str = key(
        "middle",
        "what stays of it: left: the beginning, right: the end, middle: both ends",
        known=("left", "middle", "right"),
    )
    tool_timeout_s: float = key(30.0, "seconds a call of a tool, environment or user may take", gt=0)
    max_concurrent_requests: int = key(
        256,
        "requests a tool server or the endpoint of a simulated user gets at a time (MCP: 64 at most); agents that run "
        "elsewhere at a time",
        ge=1,
    )
    history: str = key(
        "append",
        "split: one training row per turn, for templates that rewrite earlier turns",
        known=("append", "split"),
    )

    @property
    def answers(self) -> bool:
        """Whether anything can answer the model."""
        named = self.tools or self.tool_server or self.mcp or self.user.path or self.user.base_url
        return bool(named) or len(self.environment) > self._own_agents.count("environment")

    @property
    def _own_agents(self) -> list[str]:
        """The keys of what runs whole conversations, which come through the endpoint."""
        keys = ["environment" for spec in self.environment if self.enable and spec.startswith(VERIFIERS)]
        return [key for key in ("agent", "agent_command") if getattr(self, key)] + keys

    @property
    def own_agent(self) -> str:
        """The key of the user's agent, or of an environment that runs its conversations as an agent does; or empty."""
        return next(iter(self._own_agents), "")

    @property
    def agents_elsewhere(self) -> bool:
        """Whether agents that nobody here starts fetch the samples."""
        return self.agent == "endpoint"

    @property
    def splits(self) -> str:
        """The setting by which a conversation becomes several rows; empty where it is one."""
        if self.history == "split" and (self.enable or self.own_agent):
            return "history=split"
        return "chains=all" if self.own_agent and self.chains == "all" else ""

    @property
    def one_row(self) -> str:
        """What to set instead, where that is possible."""
        return (
            "history=append (if the chat template allows it)" if self.history == "split" else "chains=longest"
        )

    def errors(self, name: str) -> Iterator[str]:
        """What is wrong within the section called `name`."""
        own = self.own_agent
        if own and (self.answers or len(self._own_agents) > 1):
            every = "agent, agent_command, tools, environment, tool_server, mcp and user"
            yield f"'{name}.{own}' runs whole conversations and cannot be combined with others of {every}; keep one"
        if not self.enable:
            return
        user = self.user
        if user.path and user.base_url:
            yield f"'{name}.user.path' and '{name}.user.base_url' are both given; keep one"
        if user.base_url and not user.model:
            yield f"'{name}.user.base_url' is set; it needs '{name}.user.model'"


@dataclass
class AgentConfig:
    """Agent loops: classes that run a conversation as verl's do."""

    default_agent_loop: str = key(
        "single_turn_agent",
        "agent loop of rows without the column agent_name; single_turn_agent, tool_agent: as multi_turn says",
    )
    agent_loop_config_path: str | None = key(
        None, "YAML list of agent loops: name, _target_ and their arguments", path=True
    )

    @property
    def given(self) -> bool:
        """Whether there are loops besides those named in the data."""
        return self.agent_loop_config_path is not None or self.default_agent_loop not in OWN_AGENTS


OWN_AGENTS = ("single_turn_agent", "tool_agent")
"""Agent loops that are conversations of `multi_turn`, unless a user's has their name."""
DEFAULT_SEQUENCES = 1024
"""`max_num_seqs` where it is not given and does not follow from memory."""


@dataclass
class EngineConfig:
    """The engine that generates, in training and for a file of prompts."""

    name: str = key("native", "rollout engine", known=ENGINES, plugin="rollout")
    mode: str = key(
        "inprocess",
        "in the trainer's process or as a server",
        known=("inprocess", "server"),
        used_if=".name=vllm|sglang",
    )
    n: int = key(1, "responses per prompt", ge=1)
    temperature: float = key(1.0, "sampling temperature", ge=0)
    top_p: float = key(1.0, "nucleus sampling", gt=0, le=1, used_if=".temperature")
    top_k: int = key(-1, "draw from the k likeliest tokens; -1: all", ge=-1, used_if=".temperature")
    min_p: float = key(
        0.0, "drop tokens below this share of the likeliest", ge=0, le=1, used_if=".temperature"
    )
    repetition_penalty: float = key(1.0, "above 1: tokens already there become less likely", gt=0)
    stop: list[str] = key([], "texts that end a response")
    stop_token_ids: list[int] = key([], "token ids that end a response, besides the model's own")
    ignore_eos: bool = key(False, "continue after the end token, up to the longest response")
    raw_log_probs: bool = key(False, "log-probs at temperature 1 instead of those sampled from")
    seed: int = key(1, "seed of every draw", follows="trainer.seed", used_if=".temperature")
    per_request_seed: bool = key(True, "a seed per sample; False: per batch", used_if=".name=vllm|sglang")
    dtype: str = key("auto", "while generating; auto: the trainer's", known=(*MODEL_DTYPES, "fp8"))
    kv_cache_dtype: str = key("auto", "of cached keys and values; auto: the model's", known=("auto", "fp8"))
    tensor_model_parallel_size: int = key(
        1, "GPUs that share one copy of the model", ge=1, used_if=".name=vllm|sglang"
    )
    gpu_memory_utilization: float = key(
        0.5,
        "share of GPU memory while generating (native on a CPU: of the free host memory)",
        gt=0,
        le=1,
        used_if=(".name!=hf", "@gpu or .name!=vllm|sglang"),
    )
    max_num_seqs: int | None = key(
        None,
        "sequences generated at the same time, at most; default: native on a GPU what its memory allows, else "
        f"{DEFAULT_SEQUENCES}",
        ge=1,
    )
    max_num_batched_tokens: int = key(8192, "tokens per forward pass, at most", ge=1, used_if=".name!=hf")
    max_model_len: int | None = key(
        None, "prompt and response; default: from data.*", ge=1, used_if=".name!=hf"
    )
    enforce_eager: bool = key(False, "no CUDA graphs", used_if=(".name!=hf", "@gpu"))
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig, "extra arguments per engine")
    multi_turn: MultiTurnConfig = section(
        MultiTurnConfig,
        "tools and several turns",
        used_if=".multi_turn.enable or .multi_turn.agent or .multi_turn.agent_command or "
        ".agent.default_agent_loop!=single_turn_agent or .agent.agent_loop_config_path",
    )
    agent: AgentConfig = section(AgentConfig, "agent loops")

    @property
    def converses(self) -> bool:
        """Whether responses are conversations."""
        return self.multi_turn.enable or self.runs_agents

    @property
    def runs_agents(self) -> bool:
        """Whether agents of users run the conversations; they may score them, too."""
        return self.agent.given or bool(self.multi_turn.own_agent)

    def agent_errors(self, name: str) -> Iterator[str]:
        """What is wrong with conversations of the section called `name`."""
        own, key = self.multi_turn, f"{name}.multi_turn"
        if own.own_agent and self.agent.given:
            yield f"'{key}.agent' and agent loops ({name}.agent) both run the conversations; keep one"
        if own.enable and not own.answers and not own.own_agent and not self.agent.given:
            yield (
                f"'{key}.enable' is True; it needs one of {key}.tools, environment, tool_server, mcp, user.path or "
                f"user.base_url, {key}.agent, or an agent loop ({name}.agent.default_agent_loop)"
            )
        if self.converses and self.ignore_eos:
            yield f"'{name}.ignore_eos' is True, but turns must end ({key}); set it to False"

    @property
    def most_sequences(self) -> int:
        """Sequences that an engine generates at the same time, at most."""
        return self.max_num_seqs or (
            self.max_num_batched_tokens if self.name == "native" else DEFAULT_SEQUENCES
        )


@dataclass
class RolloutConfig(EngineConfig, LogProbConfig):
    """Generating in training; the log-probs are those the trainer recomputes."""

    over_sample_rate: float = key(
        0.0,
        "share of a step's responses that are not waited for: when the others have ended, these are aborted and not "
        "trained",
        ge=0,
        lt=1,
    )
    calculate_log_probs: bool = key(True, "keep the engine's log-probs and compare the trainer's")
    free_cache_engine: bool = key(
        True, "free the KV cache while training", used_if=(".name!=hf", "@shared_gpus", "@gpu")
    )
    recompute_kv_cache: bool = key(
        False,
        "compute the KV cache of running samples anew when weights arrive; SGLang and LoRA always do",
        used_if="trainer.async_training.mode=fully_async",
    )
    n_gpus_per_node: int = key(0, "GPUs per node for rollout alone; 0: on the trainer's GPUs", ge=0)
    nnodes: int = key(0, "nodes for rollout alone; 0: on the trainer's nodes", ge=0)
    val_kwargs: ValKwargsConfig = section(ValKwargsConfig, "sampling in validation", used_if="data.val_files")

    def errors(self, name: str) -> Iterator[str]:
        """What is wrong within the section called `name`."""
        yield from dedicated_gpu_errors(name, self.n_gpus_per_node, self.nnodes)
        yield from self.agent_errors(name)


def engine_errors(name: str, engine: str, mode: str, kv_cache_dtype: str) -> Iterator[str]:
    if kv_cache_dtype == "fp8" and not engine_spec(engine).fp8_cache:
        yield (
            f"'{name}.kv_cache_dtype' is fp8, which {name}.name={engine} does not support; use native, or auto"
        )
    if mode != "server" and not engine_spec(engine).in_process:
        yield f"{name}.name={engine} in the trainer's process is not available; set {name}.mode=server"


def dedicated_gpu_errors(name: str, n_gpus_per_node: int, nnodes: int) -> Iterator[str]:
    if (n_gpus_per_node == 0) != (nnodes == 0):
        yield (
            f"'{name}.n_gpus_per_node' is {n_gpus_per_node} and '{name}.nnodes' is {nnodes}; set both, or neither to "
            "share the trainer's GPUs"
        )
